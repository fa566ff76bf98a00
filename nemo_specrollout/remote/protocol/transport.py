# SPDX-License-Identifier: Apache-2.0
"""Messages over ZeroMQ: a ROUTER socket of each drafter, a DEALER socket for each drafter of a verifier.

Each frame carries a keyed hash of its content and direction. Only `wait` blocks.
"""

import hashlib
import hmac
from collections.abc import Hashable, Iterator, Sequence

import zmq

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.protocol.messages import MAX_FRAME_BYTES, FrameError, Message, decode, encode

MAX_FRAMES = 1024
"""Most frames that one `receive` takes, so that a peer that floods cannot keep its receiver from working."""
_MAC_BYTES = 16
_QUEUED_FRAMES = 4096
_FROM_DRAFTER, _FROM_VERIFIER = b"from drafter", b"from verifier"


def _seal(payload: bytes, secret: bytes, sender: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_MAC_BYTES, key=secret, person=sender).digest() + payload


def _unseal(frame: bytes, secret: bytes, sender: bytes) -> bytes:
    mac = frame[:_MAC_BYTES]
    payload = frame[_MAC_BYTES:]
    if not hmac.compare_digest(_seal(payload, secret, sender)[:_MAC_BYTES], mac):
        raise FrameError("a frame made with another secret")
    return payload


class _BoundedSocket:
    """A ZeroMQ socket with limits on what it queues. Owns the socket."""

    def __init__(self, kind: int, secret: bytes) -> None:
        self._secret = secret
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _MAC_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a frame; returns whether one has arrived."""
        return bool(self._socket.poll(max(0, int(seconds * 1000))))

    def close(self) -> None:
        self._socket.close()


class DrafterSocket(_BoundedSocket):
    """The drafter's end, which knows each verifier by its routing id."""

    def __init__(self, address: str, secret: bytes, allowed: Sequence[str] = ()) -> None:
        """Binds to `address`, or raises ConfigError; port 0 takes any free one. Only `allowed` hosts are heard; empty: all."""
        super().__init__(zmq.ROUTER, secret)
        self._allowed = frozenset(allowed)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{address}: cannot listen there: {error}; name a free port of this machine") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_refused = 0

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yields the messages that have arrived, each with its sender."""
        for _ in range(MAX_FRAMES):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if len(parts) != 2 or (self._allowed and parts[1].get("Peer-Address") not in self._allowed):
                    raise FrameError("from a host that is not allowed")
                yield parts[0].bytes, decode(_unseal(parts[1].bytes, self._secret, _FROM_VERIFIER))
            except FrameError:
                self.num_refused += 1

    def send(self, peer: Hashable, message: Message) -> None:
        """Sends a message, or drops it if the peer does not take it."""
        assert isinstance(peer, bytes)
        try:
            self._socket.send_multipart([peer, _seal(encode(message), self._secret, _FROM_DRAFTER)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.num_refused += 1


class VerifierSocket(_BoundedSocket):
    """A verifier's end of the connection to one drafter."""

    def __init__(self, address: str, secret: bytes) -> None:
        super().__init__(zmq.DEALER, secret)
        self._socket.connect(address)

    def receive(self) -> Iterator[Message]:
        """Yields the messages that have arrived. Raises FrameError for a frame that no drafter with our secret sends."""
        for _ in range(MAX_FRAMES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode(_unseal(frame, self._secret, _FROM_DRAFTER))

    def send(self, message: Message) -> bool:
        """Sends a message; returns False, and drops it, if the drafter does not take it."""
        try:
            self._socket.send(_seal(encode(message), self._secret, _FROM_VERIFIER), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
