# SPDX-License-Identifier: Apache-2.0
"""The sockets of drafters and verifiers: which addresses and hosts work, and what is said of a message that is refused."""

import socket as sockets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.protocol import publishing
from nemo_specrollout.remote.protocol.allowed_hosts import AllowedHosts
from nemo_specrollout.remote.protocol.messages import (
    MAX_FRAME_BYTES,
    NO_SESSION,
    PROTOCOL,
    FrameError,
    Hello,
    Message,
    Published,
    Refuse,
    Step,
    as_line,
    encode,
)
from nemo_specrollout.remote.protocol.peer import PeerState
from nemo_specrollout.remote.protocol.transport import DrafterSocket, VerifierSocket
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest
from nemo_specrollout.remote.verifier.draft_stream import DraftStream, RemoteDrafter

pytestmark = pytest.mark.unit

SECRET = b"sixteen letters."
HELLO = Hello(PROTOCOL, 3, 96, "", [2])
PATIENT_S = 60.0


def has_ipv6() -> bool:
    try:
        with sockets.socket(sockets.AF_INET6) as found:
            found.bind(("::1", 0))
        return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@contextmanager
def ends(
    address: str = "tcp://127.0.0.1:0",
    *,
    allowed: tuple[str, ...] = (),
    secret: bytes = SECRET,
    to: Callable[[str], str] = str,
) -> Iterator[tuple[DrafterSocket, VerifierSocket]]:
    """Opens a drafter's socket, and one of a verifier with `secret`, which connects to `to` of the drafter's address."""
    drafter = DrafterSocket(address, SECRET, allowed)
    verifier = VerifierSocket(to(drafter.address), secret)
    try:
        yield drafter, verifier
    finally:
        verifier.close()
        drafter.close()


def heard(drafter: DrafterSocket) -> list[Message]:
    """Waits for a frame; returns the messages that the drafter takes."""
    assert drafter.wait(PATIENT_S)
    return [message for _, message in drafter.receive()]


def answers(verifier: VerifierSocket) -> list[Message]:
    assert verifier.wait(PATIENT_S)
    return list(verifier.receive())


@pytest.mark.parametrize(
    ("address", "to"),
    [
        ("tcp://127.0.0.1:0", str),
        ("tcp://localhost:0", str),
        ("tcp://0.0.0.0:0", lambda bound: bound.replace("0.0.0.0", "127.0.0.1")),
        ("tcp://127.0.0.1:0", lambda bound: bound.replace("127.0.0.1", "localhost")),
        pytest.param("tcp://[::1]:0", str, marks=needs_ipv6),
        pytest.param("tcp://[::]:0", lambda bound: bound.replace("[::]", "[::1]"), marks=needs_ipv6),
        pytest.param("tcp://[::]:0", lambda bound: bound.replace("[::]", "127.0.0.1"), marks=needs_ipv6),
    ],
)
def test_messages_arrive_at_every_kind_of_address(address: str, to: Callable[[str], str]) -> None:
    with ends(address, to=to) as (drafter, verifier):
        assert verifier.send(HELLO) == ""
        assert heard(drafter) == [HELLO]
        assert drafter.num_refused == 0


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        DrafterSocket("tcp://192.0.2.7:0", b"")


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("tcp://127.0.0.1:0", ("127.0.0.1",)),
        ("tcp://127.0.0.1:0", ("10.0.0.7", "127.0.0.0/8")),
        ("tcp://127.0.0.1:0", ("localhost",)),
        ("tcp://127.0.0.1:0", ("::ffff:127.0.0.1",)),
        pytest.param("tcp://[::1]:0", ("::1",), marks=needs_ipv6),
        pytest.param("tcp://[::1]:0", ("::/64",), marks=needs_ipv6),
        pytest.param("tcp://[::1]:0", ("0:0::1",), marks=needs_ipv6),
    ],
)
def test_allowed_hosts_are_heard(address: str, allowed: tuple[str, ...]) -> None:
    with ends(address, allowed=allowed) as (drafter, verifier):
        verifier.send(HELLO)
        assert heard(drafter) == [HELLO]


@needs_ipv6
def test_an_ipv4_host_that_comes_over_an_ipv6_socket_is_known_by_its_own_address() -> None:
    def to(bound: str) -> str:
        return bound.replace("[::]", "127.0.0.1")

    with ends("tcp://[::]:0", allowed=("127.0.0.0/8",), to=to) as (drafter, verifier):
        verifier.send(HELLO)
        assert heard(drafter) == [HELLO]


def test_zones_are_left_out_of_the_comparison() -> None:
    assert "fe80::1%eth1" in AllowedHosts(["fe80::1%eth0"])
    assert "fe80::2%eth0" not in AllowedHosts(["fe80::1%eth0"])
    assert "None" not in AllowedHosts(["10.0.0.7"])
    assert "192.0.2.7" in AllowedHosts([])


def test_a_host_that_is_not_allowed_hears_so() -> None:
    with ends(allowed=("10.0.0.7",)) as (drafter, verifier):
        verifier.send(HELLO)
        assert heard(drafter) == []
        (refusal,) = answers(verifier)
        assert refusal == Refuse(HELLO.session, "the drafter's allowed_hosts does not have 127.0.0.1; add it there")
        assert (drafter.num_refused, drafter.refusal) == (1, "allowed_hosts does not have 127.0.0.1")


def test_a_name_that_nobody_knows_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"allowed_hosts: 'no-such-host\.invalid' is unknown to the drafter's machine"
    ):
        DrafterSocket("tcp://127.0.0.1:0", b"", ["no-such-host.invalid"])


@pytest.mark.parametrize("secret", [b"", b"another secret .."])
def test_a_verifier_with_another_secret_hears_so(secret: bytes) -> None:
    with ends(secret=secret) as (drafter, verifier):
        verifier.send(HELLO)
        assert heard(drafter) == []
        assert verifier.wait(PATIENT_S)
        with pytest.raises(FrameError, match="the drafter has another secret; set NEMO_SPECROLLOUT_SECRET"):
            list(verifier.receive())
        assert (drafter.num_refused, "another secret" in drafter.refusal) == (1, True)
        assert "from 127.0.0.1" in drafter.refusal


def test_a_message_that_cannot_be_read_is_answered_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of another release."""
    with ends() as (drafter, verifier):
        monkeypatch.setattr("nemo_specrollout.remote.protocol.transport.encode", lambda _: b"\x81\xa1x\x01")
        verifier.send(HELLO)
        monkeypatch.setattr("nemo_specrollout.remote.protocol.transport.encode", encode)
        assert heard(drafter) == []
        (refusal,) = answers(verifier)
        assert isinstance(refusal, Refuse) and refusal.session == NO_SESSION
        assert "cannot read a message" in refusal.reason
        assert drafter.num_refused == 1


def test_a_message_that_no_frame_holds_is_not_sent() -> None:
    """ZeroMQ would close the connection without a word."""
    huge = Step(3, 1, [], b"", b"", bytes(MAX_FRAME_BYTES))
    with ends() as (drafter, verifier):
        assert "was not sent" in verifier.send(huge)
        verifier.send(HELLO)
        assert drafter.wait(PATIENT_S)
        ((peer, _),) = drafter.receive()
        drafter.send(peer, huge)
        assert (drafter.num_refused, "was not sent" in drafter.refusal) == (1, True)


def test_verifiers_that_do_not_read_are_counted() -> None:
    drafter = zmq.Context.instance().socket(zmq.DEALER)
    drafter.setsockopt(zmq.LINGER, 0)
    verifier = VerifierSocket(f"tcp://127.0.0.1:{drafter.bind_to_random_port('tcp://127.0.0.1')}", SECRET)
    large = Step(3, 1, [], b"", b"", bytes(1 << 16))
    reason = ""
    while not reason:
        reason = verifier.send(large)
    assert reason == "takes no messages"
    verifier.close()
    drafter.close()


def test_publishers_hear_why_they_are_refused() -> None:
    for secret, allowed, reason in (
        (b"another secret ..", (), "another secret"),
        (SECRET, ("10.0.0.7",), "allowed_hosts does not have 127.0.0.1"),
    ):
        with ends(secret=secret, allowed=allowed) as (drafter, verifier):
            verifier.send(publishing.Publish("/weights", 4))
            assert heard(drafter) == []
            error = publishing._error_of(verifier, 4, PATIENT_S + time.monotonic())
            assert reason in error


def test_a_reason_of_any_text_fits_into_a_message() -> None:
    reason = as_line("a\nb \udcff " + 10_000 * "x")
    assert len(encode(Published(1, reason))) < 5000
    assert reason.startswith("a b ? xxx")


def remote_drafter(address: str) -> RemoteDrafter:
    table_SX = np.zeros((1, DraftStream.columns(4)), np.int32)
    stream = DraftStream(table_SX, lambda: torch.from_numpy(table_SX))
    remote = RemoteDrafter([address], b"", 64, PolicyModel(96), stream)
    remote.open([StreamRequest(0, 1, 1.0, 0, 1.0, 64, [1, 2])])
    return remote


def test_an_address_that_no_socket_takes_costs_the_engine_nothing() -> None:
    remote = remote_drafter("tcp://127.0.0.1")
    peer = remote.side.peers[0]
    assert peer.state is PeerState.AWAY
    assert "cannot be connected to" in remote.stats().problem


def test_a_new_secret_is_used_at_once() -> None:
    drafter = DrafterSocket("tcp://127.0.0.1:0", SECRET)
    remote = remote_drafter(drafter.address)
    while "another secret" not in remote.stats().problem:
        list(drafter.receive())
        remote.token_callback(np.arange(1))([[]])
    remote.set_addresses([drafter.address], SECRET)
    remote.token_callback(np.arange(1))([[]])
    found: list[Message] = []
    while not found:
        found = [message for _, message in drafter.receive()]
    assert isinstance(found[0], Hello)
    assert "another secret" in remote.stats().last_problem
    remote.set_addresses([""], b"")
    drafter.close()
