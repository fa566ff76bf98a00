# SPDX-License-Identifier: Apache-2.0
"""Gives new weights to running drafters.

It is the only part of the protocol that waits for answers, because a user's command waits for its result.
"""

import time
from collections.abc import Sequence

from nemo_specrollout.remote.protocol.messages import FrameError, Publish, Published, Refuse
from nemo_specrollout.remote.protocol.transport import VerifierSocket

ANSWERS_WITHIN_S = 120.0
"""Maximum time in seconds until all drafters must have answered. They read the new weights from disk before they answer."""


def publish(addresses: Sequence[str], secret: bytes, folder: str, version: int) -> dict[str, str]:
    """Asks the drafters at `addresses` to load the weights in `folder`, and waits for their answers.

    Args:
        addresses: ZeroMQ addresses of the drafters, each once.
        secret: The key that the drafters were started with.
        folder: Absolute path of a checkpoint, which each drafter opens on its own machine.
        version: Number of the weights, at least 0 and below 2^63.

    Returns the address of each drafter that keeps its old weights, with the reason. The result is empty if all drafters use
    the new weights.
    """
    sockets = {address: VerifierSocket(address, secret) for address in addresses}
    try:
        for socket in sockets.values():
            socket.send(Publish(folder, version))  # a new socket always has room for a short message
        deadline_s = time.monotonic() + ANSWERS_WITHIN_S
        errors = {address: _error_of(socket, version, deadline_s) for address, socket in sockets.items()}
    finally:
        for socket in sockets.values():
            socket.close()
    return {address: error for address, error in errors.items() if error}


def _error_of(socket: VerifierSocket, version: int, deadline_s: float) -> str:
    """Waits for the answer of one drafter. Returns why it keeps its old weights, or "" if it uses the new ones."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        socket.wait(left_s)
        try:
            for message in socket.receive():
                if isinstance(message, Published) and message.version == version:
                    return message.error
                if isinstance(message, Refuse):
                    return message.reason
        except FrameError as error:
            return f"the answer is no drafter's: {error}"
    return f"no answer within {ANSWERS_WITHIN_S:.0f} s; check the address, unless the drafter still loads the weights"
