# SPDX-License-Identifier: Apache-2.0
"""Transport of messages over ZeroMQ. A drafter has one ROUTER socket, and a verifier has a DEALER socket for each drafter.

Each frame carries a keyed hash of its content and its direction, so that only processes with the same secret can talk. No call
except `wait` blocks. If a drafter refuses a message, it answers with the reason, so that the verifier can report it.
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
"""Frame that a drafter sends to a verifier with another secret. Such a verifier could not verify a signed answer. The frame is
too short to be mistaken for a signed one."""
_SAME_SECRET = "set NEMO_SPECROLLOUT_SECRET to the same value on both ends"


class OtherSecretError(FrameError):
    """Raised for a frame that was signed with another secret than ours, or that is not a frame of this protocol."""


def _seal(payload: bytes, secret: bytes, sender: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_MAC_BYTES, key=secret, person=sender).digest() + payload


def _unseal(frame: bytes, secret: bytes, sender: bytes) -> bytes:
    mac = frame[:_MAC_BYTES]
    payload = frame[_MAC_BYTES:]
    if not hmac.compare_digest(_seal(payload, secret, sender)[:_MAC_BYTES], mac):
        raise OtherSecretError(f"a frame made with another secret; {_SAME_SECRET}")
    return payload


class _BoundedSocket:
    """Owns a ZeroMQ socket with limits on the number and the size of queued frames."""

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
    """The socket of a drafter, to which all verifiers connect. A verifier is identified by its ZeroMQ routing id."""

    def __init__(self, address: str, secret: bytes, allowed: Sequence[str] = ()) -> None:
        """Binds to `address`, where port 0 means any free port. Raises ConfigError if that fails.

        Only messages from the hosts in `allowed` are accepted, or from all hosts if `allowed` is empty.
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
        """Number of refused messages, plus the number of answers that did not reach their verifier."""
        self.refusal = ""
        """Why the latest message was refused, or why the latest lost answer did not reach its verifier."""

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Yields the messages that have arrived, each with its sender's routing id, without waiting.

        Messages that are refused are answered with the reason and not yielded.
        """
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
        """Sends a message to the verifier with the routing id `peer`, or drops it if the verifier does not take it."""
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
        """Starts to connect to `address` in the background. Raises ConfigError if `address` is not valid."""
        super().__init__(zmq.DEALER, secret, address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"{address}: cannot be connected to: {error}; name the address of a drafter") from None

    def receive(self) -> Iterator[Message]:
        """Yields the messages that have arrived, without waiting.

        Raises FrameError for a frame that has another secret or is not of this protocol.
        """
        for _ in range(MAX_FRAMES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frame == _OTHER_SECRET:
                raise OtherSecretError(f"the drafter has another secret; {_SAME_SECRET}")
            yield decode(_unseal(frame, self._secret, _FROM_DRAFTER))

    def send(self, message: Message) -> str:
        """Sends a message to the drafter without waiting. Returns "" if it will be sent, or else why it was dropped."""
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
