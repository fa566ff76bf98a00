# SPDX-License-Identifier: Apache-2.0
"""Frames over ZeroMQ: one ROUTER socket a drafter, one DEALER socket a verifier and drafter. Nothing here waits, unless asked.

Each frame carries a keyed hash of its content and direction; one that was not made with the shared secret is dropped.
"""

import hashlib
import hmac
from collections.abc import Hashable, Iterator, Sequence

import zmq

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.protocol.messages import MAX_FRAME_BYTES, FrameError, Message, decode, encode

_MAC_BYTES = 16
_FROM_DRAFTER, _FROM_VERIFIER = b"from drafter", b"from verifier"
MOST_FRAMES = 1024
"""Taken from a socket at a time: a peer that floods cannot keep its receiver from working."""
_QUEUED_FRAMES = 4096


def _seal(payload: bytes, secret: bytes, sender: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_MAC_BYTES, key=secret, person=sender).digest() + payload


def _unseal(frame: bytes, secret: bytes, sender: bytes) -> bytes:
    mac, payload = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
    if not hmac.compare_digest(_seal(payload, secret, sender)[:_MAC_BYTES], mac):
        raise FrameError("a frame made with another secret")
    return payload


class DrafterSocket:
    """A drafter's end. Owns the socket; a peer is known by its routing id. `num_refused` counts frames that were dropped."""

    def __init__(self, address: str, secret: bytes, allowed: Sequence[str] = ()) -> None:
        """Binds to `address`; port 0 takes a free one. `allowed` are the hosts that may speak, all if empty.

        Raises ConfigError if the address cannot be had.
        """
        self._secret, self._allowed = secret, frozenset(allowed)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _MAC_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{address}: cannot listen there: {error}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_refused = 0

    def wait(self, seconds: float) -> bool:
        """Whether something has come, after `seconds` at most."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """The messages that have come, and from whom."""
        for _ in range(MOST_FRAMES):
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
        """Sends, or drops what a peer does not take."""
        assert isinstance(peer, bytes)
        try:
            self._socket.send_multipart([peer, _seal(encode(message), self._secret, _FROM_DRAFTER)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.num_refused += 1

    def close(self) -> None:
        self._socket.close()


class VerifierSocket:
    """A verifier's end towards one drafter. Owns the socket."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _MAC_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        self._socket.connect(address)

    def wait(self, seconds: float) -> bool:
        """Whether something has come, after `seconds` at most."""
        return bool(self._socket.poll(max(0, int(seconds * 1000))))

    def receive(self) -> Iterator[Message]:
        """The messages that have come. Raises FrameError at one that no drafter with our secret sends."""
        for _ in range(MOST_FRAMES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode(_unseal(frame, self._secret, _FROM_DRAFTER))

    def send(self, message: Message) -> bool:
        """Sends; returns false, and drops it, if the drafter does not take it."""
        try:
            self._socket.send(_seal(encode(message), self._secret, _FROM_VERIFIER), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
