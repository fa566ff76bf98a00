# SPDX-License-Identifier: Apache-2.0
"""A drafter with the secret that lies about its figures, or floods between good frames, costs speed for a while, no more."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from nemo_specrollout.remote.protocol.messages import PROTOCOL, Drafts, FrameError, Hello, Step, Welcome, decode, encode
from nemo_specrollout.remote.protocol.peers import FIRST_PAUSE_S, PeerState, PolicyModel, Sampling
from nemo_specrollout.remote.protocol.verifier_side import ANSWER_DEADLINE_S, LONGEST_PAUSE_S, VerifierSide

pytestmark = pytest.mark.unit

SESSION, DRAFTER = 11, 7


def drafts(number: int, step: Step | None = None, num_rows: int = 0, **more: Any) -> Drafts:
    """What a drafter answers to `step`, with rows for a request that is not there."""
    zeros = {name: np.zeros(num_rows, dtype).tobytes() for name, dtype in (
        ("requests", np.int64), ("positions", np.int64), ("hashes", np.uint64), ("tokens", np.int32), ("levels", np.int8)
    )}  # fmt: skip
    known = {
        "session": SESSION, "drafter": DRAFTER, "number": number, "answers": 0 if step is None else step.number,
        "echo_ns": 0 if step is None else step.sent_ns, "held_ns": 0, "draft_version": 0, "token_s": 0.01, "num_shadows": 1,
        "lacking": b"", **zeros,
    }  # fmt: skip
    return Drafts(**{**known, **more})


@pytest.mark.parametrize("token_s", [math.nan, math.inf, -1.0, 3359.0])
def test_a_figure_out_of_range_is_no_valid_frame(token_s: float) -> None:
    with pytest.raises(FrameError, match="token_s out of range"):
        decode(msgspec.msgpack.encode(drafts(1, token_s=token_s)))
    assert decode(encode(drafts(1, token_s=59.0))) == drafts(1, token_s=59.0)


class Verifier:
    """A verifier with one drafter and one request, on a clock of its own."""

    def __init__(self) -> None:
        self.side = VerifierSide(SESSION, 1, 1, 4, PolicyModel(41), 1)
        self.side.open(0, seed=3, sampling=Sampling(1.0, 0, 1.0), limit=50)
        self.peer, self.now_s, self.steps = self.side.peers[0], 100.0, list[Step]()

    def follow(self, seconds: float = 0.1) -> bool:
        """A step of the engine; whether the drafter is greeted in it, which it answers at once."""
        self.now_s += seconds
        self.side.follow(np.zeros((1, 64), np.int32), np.array([5]), self.now_s)
        greeted = False
        for _, message in self.side.outgoing():
            if isinstance(message, Hello):
                self.hear(Welcome(SESSION, DRAFTER, 0, 64, 4))
                greeted = True
            elif isinstance(message, Step):
                self.steps.append(message)
        return greeted

    def hear(self, message: Any) -> None:
        self.side.receive(0, decode(encode(message)), self.now_s)


def flood(verifier: Verifier, number: int) -> None:
    """Some good frames, and then far more rows than were asked for, in valid frames."""
    for i in range(3):
        verifier.follow()
        verifier.hear(drafts(number + i, verifier.steps[-1]))
    assert verifier.peer.state is PeerState.READY
    verifier.hear(drafts(number + 3, num_rows=60_000))
    assert verifier.peer.state is PeerState.AWAY


def test_the_pause_of_a_drafter_that_floods_grows_though_it_sends_good_frames_between() -> None:
    verifier, pauses = Verifier(), []
    assert PROTOCOL and verifier.follow()
    for turn in range(9):
        flood(verifier, 10 * turn)
        dropped_s = verifier.now_s
        while not verifier.follow():
            pass
        pauses.append(verifier.now_s - dropped_s)
    wanted = [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(9)]
    assert pauses == pytest.approx(wanted, abs=0.11)
    assert verifier.peer.num_failures == 9


def test_a_drafter_that_did_well_for_long_is_forgiven() -> None:
    verifier = Verifier()
    verifier.follow()
    flood(verifier, 0)
    flood_again = 10
    while not verifier.follow():
        pass
    for i in range(int(LONGEST_PAUSE_S / 0.1) + 2):
        verifier.follow()
        verifier.hear(drafts(flood_again + i, verifier.steps[-1]))
    flood(verifier, 1000)
    dropped_s = verifier.now_s
    while not verifier.follow():
        pass
    assert verifier.now_s - dropped_s == pytest.approx(FIRST_PAUSE_S, abs=0.11)


@pytest.mark.parametrize("lie", [{"held_ns": 2**62}, {"echo_ns": 1}, {"echo_ns": 2**62}])
def test_a_time_that_cannot_be_is_not_recorded(lie: dict[str, int]) -> None:
    verifier = Verifier()
    verifier.follow()
    verifier.follow()
    verifier.now_s += 0.05
    verifier.hear(drafts(1, verifier.steps[-1]))
    assert verifier.peer.answer_s == pytest.approx(0.05, abs=1e-6)
    verifier.follow()
    verifier.hear(drafts(2, verifier.steps[-1], **lie))
    assert verifier.peer.answer_s == pytest.approx(0.05, abs=1e-6)
    assert 0.0 <= verifier.peer.answer_s <= ANSWER_DEADLINE_S
