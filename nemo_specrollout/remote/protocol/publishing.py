# SPDX-License-Identifier: Apache-2.0
"""New weights for drafters: each is told the folder and the version, loads them between two of its steps, and answers."""

import time
from collections.abc import Sequence

from nemo_specrollout.remote.protocol.messages import FrameError, Publish, Published
from nemo_specrollout.remote.protocol.transport import VerifierSocket

ANSWER_S = 120.0


def publish(addresses: Sequence[str], secret: bytes, folder: str, draft_version: int) -> dict[str, str]:
    """Tells the drafters at `addresses` to draft with the weights in `folder`, a path of their machines. Returns, by address,
    why one did not; empty if all do. A drafter that did not goes on with the weights that it has."""
    sockets = {address: VerifierSocket(address, secret) for address in addresses}
    for socket in sockets.values():
        socket.send(Publish(folder, draft_version))
    deadline = time.monotonic() + ANSWER_S
    errors = {a: _answer(socket, draft_version, deadline) for a, socket in sockets.items()}
    for socket in sockets.values():
        socket.close()
    return {address: error for address, error in errors.items() if error}


def _answer(socket: VerifierSocket, draft_version: int, deadline: float) -> str:
    """What a drafter says to a publication; empty if it took it."""
    while (left_s := deadline - time.monotonic()) > 0:
        socket.wait(left_s)
        try:
            for message in socket.receive():
                if isinstance(message, Published) and message.draft_version == draft_version:
                    return message.error
        except FrameError as error:
            return str(error)
    return f"no answer within {ANSWER_S:.0f} s"
