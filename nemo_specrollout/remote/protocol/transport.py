# SPDX-License-Identifier: Apache-2.0
"""Messages over ZeroMQ, with a ROUTER socket in each drafter, and in each verifier a DEALER socket for each drafter.

Each frame carries a keyed hash of its content and direction. No call but `wait` blocks. A drafter answers each message that it
refuses with the reason, so that the verifier can report it.
"""

import hashlib
import hmac
from collections.abc import Hashable, Iterator, Sequence

import zmq

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.protocol.allowed_hosts import AllowedHosts
from nemo_specrollout.remote.protocol.messages import (
    MAX_FRAME_BYTES,
    NO_SESSION,
    FrameError,
    Message,
    Refuse,
    as_line,
    decode,
    encode,
    refusal_of,
)

MAX_FRAMES = 1024
"""Maximum number of frames that one `receive` handles, so that a flooding peer cannot keep its receiver from working."""
_MAC_BYTES = 16
_QUEUED_FRAMES = 4096
_FROM_DRAFTER, _FROM_VERIFIER = b"from drafter", b"from verifier"
_OTHER_SECRET = b"other secret"
"""Frame that a drafter sends to a verifier with another secret, which could not verify a signed answer. It is too short to be
mistaken for a signed frame."""
_SAME_SECRET = "set NEMO_SPECROLLOUT_SECRET to the same value on both ends"


class OtherSecretError(FrameError):
    """Raised for a frame that was signed with another secret than ours, or that is no frame of this protocol at all."""


def _seal(payload: bytes, secret: bytes, sender: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_MAC_BYTES, key=secret, person=sender).digest() + payload


def _unseal(frame: bytes, secret: bytes, sender: bytes) -> bytes:
    mac = frame[:_MAC_BYTES]
    payload = frame[_MAC_BYTES:]
    if not hmac.compare_digest(_seal(payload, secret, sender)[:_MAC_BYTES], mac):
        raise OtherSecretError(f"a frame made with another secret; {_SAME_SECRET}")
    return payload


class _BoundedSocket:
    """Owns a ZeroMQ socket with limits on what it queues."""

    def __init__(self, kind: int, secret: bytes, address: str) -> None:
        self._secret = secret
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _MAC_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        # With IPv6, ZeroMQ would also look up the IPv6 address of a name, where a drafter need not listen. So names
        # are looked up as IPv4.
        self._socket.setsockopt(zmq.IPV6, int("[" in address))

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a frame, and returns whether one has arrived."""
        return bool(self._socket.poll(max(0, int(seconds * 1000))))

    def close(self) -> None:
        self._socket.close()


class DrafterSocket(_BoundedSocket):
    """The drafter's end, which identifies each verifier by its routing id."""

    def __init__(self, address: str, secret: bytes, allowed: Sequence[str] = ()) -> None:
        """Binds to `address`, where port 0 means any free port. Raises ConfigError if that fails.

        Only messages of `allowed` hosts are read, or of all hosts if it is empty.
        """
        self._allowed = AllowedHosts(allowed)
        super().__init__(zmq.ROUTER, secret, address)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that cannot be sent is an error
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{address}: cannot listen there: {error}; name a free port of this machine") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_refused = 0
        """Number of messages that were refused, plus answers that did not reach their verifier."""
        self.refusal = ""
        """Reason of the latest of these refusals."""

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yields the messages that have arrived, each with its sender, and answers those that it refuses."""
        for _ in range(MAX_FRAMES):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender = parts[0].bytes
            host = str(parts[-1].get("Peer-Address"))
            try:
                message = self._message(parts)
            except OtherSecretError as error:
                self._note(f"{error} (from {host})")
                self._send_frame(sender, _OTHER_SECRET)
                continue
            except FrameError as error:
                self._note(f"{error} (from {host})")
                self.send(sender, Refuse(NO_SESSION, as_line(f"the drafter cannot read a message: {error}")))
                continue
            if host not in self._allowed:
                self._note(f"allowed_hosts does not have {host}")
                self.send(
                    sender, refusal_of(message, f"the drafter's allowed_hosts does not have {host}; add it there")
                )
                continue
            yield sender, message

    def send(self, peer: Hashable, message: Message) -> None:
        """Sends a message, or drops it if the peer does not accept it."""
        assert isinstance(peer, bytes)
        payload = encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            self._note(_too_large(payload))
            return
        self._send_frame(peer, _seal(payload, self._secret, _FROM_DRAFTER))

    def _message(self, parts: Sequence[zmq.Frame]) -> Message:
        if len(parts) != 2:
            raise OtherSecretError(f"a message of {len(parts) - 1} frames, which no verifier sends")
        return decode(_unseal(parts[1].bytes, self._secret, _FROM_VERIFIER))

    def _send_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # a verifier that has hung up misses nothing
                self._note("a verifier does not read its answers")

    def _note(self, reason: str) -> None:
        self.num_refused += 1
        self.refusal = reason


class VerifierSocket(_BoundedSocket):
    """A verifier's end of the connection to one drafter."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Connects in the background. Raises ConfigError if there can be no connection to `address`."""
        super().__init__(zmq.DEALER, secret, address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{address}: cannot be connected to: {error}; name the address of a drafter") from None

    def receive(self) -> Iterator[Message]:
        """Yields the messages that have arrived. Raises FrameError for a frame that no drafter with our secret sends."""
        for _ in range(MAX_FRAMES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frame == _OTHER_SECRET:
                raise OtherSecretError(f"the drafter has another secret; {_SAME_SECRET}")
            yield decode(_unseal(frame, self._secret, _FROM_DRAFTER))

    def send(self, message: Message) -> str:
        """Sends a message. Returns why it was dropped, or "" if it will be sent."""
        payload = encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            return _too_large(payload)
        try:
            self._socket.send(_seal(payload, self._secret, _FROM_VERIFIER), zmq.NOBLOCK)
        except zmq.Again:
            return "takes no messages"
        return ""


def _too_large(payload: bytes) -> str:
    return f"a message of {len(payload)} bytes was not sent, because a frame holds {MAX_FRAME_BYTES}"
