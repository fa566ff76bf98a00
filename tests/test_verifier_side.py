# SPDX-License-Identifier: Apache-2.0
"""Which requests a verifier opens at its drafters, and in how many steps it does so."""

import logging
from typing import Any

import numpy as np
import pytest

from nemo_specrollout.remote.protocol.draft_buffers import SLOT_MASK
from nemo_specrollout.remote.protocol.messages import (
    LONGEST_TEXT_BYTES,
    MAX_FRAME_BYTES,
    OPENED_BYTES,
    Drafts,
    Hello,
    Step,
    Welcome,
    column,
    decode,
    encode,
)
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest, VerifierSide

pytestmark = pytest.mark.unit

SESSION, DRAFTER = 1, 7
NOTHING = {"drafts": b"", "lacking": b"", "refused": b"", "reason": ""}


class Verifier:
    """A verifier with drafters that have greeted it, one unless told, and texts of zeros."""

    def __init__(self, num_slots: int, longest: int, max_model_len: int, num_drafters: int = 1) -> None:
        self.side = VerifierSide(SESSION, num_slots, num_drafters, 8, PolicyModel(100))
        self.token_ids_SL = np.zeros((num_slots, longest), np.int32)
        self.lengths_S = np.zeros(num_slots, np.int64)
        self.now_s = 0.0
        self.num_sent = 0
        self.steps()
        for drafter in range(num_drafters):
            self.side.receive(drafter, Welcome(SESSION, DRAFTER + drafter, max_model_len, num_slots), self.now_s)

    def open(self, slot: int, length: int) -> None:
        self.lengths_S[slot] = length
        self.side.open(StreamRequest(slot, slot, 1.0, 0, 1.0, self.token_ids_SL.shape[1]))

    def steps(self) -> list[Step]:
        """Takes a step of the engine; returns the steps that the drafter is sent, as it reads them."""
        self.now_s += 0.1
        messages = self.side.follow(self.token_ids_SL, self.lengths_S, self.now_s)
        steps = [step for _, message in messages if isinstance(step := decode(encode(message)), Step)]
        self.num_sent += len(steps)
        return steps

    def answer(self, **parts: Any) -> None:
        """Lets the drafter answer all steps."""
        number = self.side.peers[0].last_number + 1
        self.hear(number=number, step=self.num_sent, **parts)

    def hear(self, **parts: Any) -> None:
        """Takes an answer of the drafter, with what is named in `parts`."""
        told = {"session": SESSION, "drafter": DRAFTER, "token_s": 0.001, "num_shadows": 0, **NOTHING, **parts}
        self.side.receive(0, decode(encode(Drafts(**told))), self.now_s)

    def opened(self) -> list[int]:
        """Returns the slots of the requests that the next steps open."""
        return [SLOT_MASK & opening.request for step in self.steps() for opening in step.opens]


@pytest.mark.parametrize("long_slot", [0, 3, 5])
def test_a_request_too_long_for_the_drafters_leaves_the_others_theirs(long_slot: int) -> None:
    verifier = Verifier(8, 5000, max_model_len=2048)
    for slot in range(6):
        verifier.open(slot, 3000 if slot == long_slot else 100)
    assert verifier.opened() == [slot for slot in range(6) if slot != long_slot]


def test_many_long_texts_are_opened_by_several_steps_that_each_fit_into_a_frame() -> None:
    verifier = Verifier(256, 16384, max_model_len=20_000)
    for slot in range(256):
        verifier.open(slot, 16384)
    opened: list[int] = []
    while len(opened) < 256:
        (step,) = verifier.steps()
        assert len(encode(step)) < MAX_FRAME_BYTES
        assert step.opens
        assert sum(len(opening.tokens) for opening in step.opens) <= OPENED_BYTES
        opened += [SLOT_MASK & opening.request for opening in step.opens]
        verifier.answer()
    assert opened == list(range(256))
    assert verifier.opened() == []


def test_nothing_more_is_opened_until_the_drafter_has_read_the_last_texts() -> None:
    verifier = Verifier(64, 32768, max_model_len=40_000)
    for slot in range(64):
        verifier.open(slot, 32768)
    assert verifier.opened() == list(range(8))
    assert verifier.opened() == []
    verifier.hear(number=1, step=0)  # It has drafted, and has read no step yet.
    assert verifier.opened() == []
    verifier.answer()
    assert verifier.opened() == list(range(8, 16))


def test_a_short_request_is_opened_at_once_beside_texts_that_are_not_read_yet() -> None:
    verifier = Verifier(4, 32768, max_model_len=40_000)
    verifier.open(0, 32768)
    assert verifier.opened() == [0]
    verifier.open(1, 100)
    assert verifier.opened() == [1]


def test_the_oldest_requests_are_told_first() -> None:
    verifier = Verifier(4, 32768, max_model_len=40_000)
    for slot in (2, 0, 3, 1):
        verifier.open(slot, 100)
    assert verifier.opened() == [2, 0, 3, 1]


def test_several_drafters_share_the_text_that_is_told_at_a_time() -> None:
    verifier = Verifier(64, 32768, max_model_len=40_000, num_drafters=3)
    for slot in range(64):
        verifier.open(slot, 32768)
    first_told = []
    for _ in range(12):
        messages = verifier.side.follow(verifier.token_ids_SL, verifier.lengths_S, verifier.now_s)
        told = {drafter: step.opens for drafter, step in messages if isinstance(step, Step) and step.opens}
        assert sum(len(opening.tokens) for opens in told.values() for opening in opens) <= OPENED_BYTES
        first_told += list(told)
        for drafter, peer in enumerate(verifier.side.peers):
            answer = Drafts(SESSION, DRAFTER + drafter, peer.last_number + 1, 999, 0.001, 0, *NOTHING.values())
            verifier.side.receive(drafter, answer, verifier.now_s)
    assert first_told[:3] in ([0, 1, 2], [1, 2, 0], [2, 0, 1])


def test_a_refused_request_is_told_to_that_drafter_once() -> None:
    verifier = Verifier(2, 100, max_model_len=200)
    verifier.open(0, 50)
    verifier.open(1, 50)
    assert verifier.opened() == [0, 1]
    number = int(verifier.side._requests[0])
    verifier.answer(refused=np.array([number]).tobytes(), reason="temperature must be non-negative")
    assert [verifier.opened() for _ in range(5)] == [[]] * 5
    assert verifier.side.slots_of(0).tolist() == [1]
    assert (verifier.side.num_refused, verifier.side.refusal) == (1, "temperature must be non-negative")
    verifier.side.close(0)
    verifier.open(0, 60)  # another request
    assert verifier.opened() == [0]


def test_answers_from_before_an_opening_do_not_repeat_it() -> None:
    """A request is lacking in several answers until the drafter has read its new opening."""
    verifier = Verifier(1, 100, max_model_len=200)
    verifier.open(0, 50)
    assert verifier.opened() == [0]
    lacking = np.array([verifier.side._requests[0]]).tobytes()
    for _ in range(3):
        assert verifier.opened() == []
    verifier.hear(number=1, step=2, lacking=lacking)
    assert verifier.opened() == [0]
    for number in (2, 3):
        verifier.hear(number=number, step=number + 1, lacking=lacking)
        assert verifier.opened() == []
    verifier.hear(number=4, step=5, lacking=lacking)
    assert verifier.opened() == [0]


def test_stop_tokens_that_no_hello_can_carry_are_left_out() -> None:
    side = VerifierSide(SESSION, 1, 1, 8, PolicyModel(2000, "", (-1, 5, 2001, *range(10, 1900))))
    ((_, hello),) = side.follow(np.zeros((1, 9), np.int32), np.zeros(1, np.int64), 0.0)
    assert isinstance(hello, Hello)
    assert decode(encode(hello)) == hello
    assert hello.stop_token_ids[:2] == [5, 10]


def test_a_text_that_no_message_holds_is_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    longest = LONGEST_TEXT_BYTES // 4
    verifier = Verifier(4, longest + 1, max_model_len=2 * longest)
    with caplog.at_level(logging.WARNING):
        verifier.open(0, longest + 1)
        verifier.open(1, longest + 1)
        verifier.open(2, longest)
        verifier.open(3, 10)
        assert verifier.opened() == [2]
        verifier.answer()
        assert verifier.opened() == [3]
    assert len(caplog.records) == 1
    assert "gets no remote drafts" in caplog.text


def test_a_request_that_grew_too_long_to_be_opened_again_is_closed_and_left_alone() -> None:
    verifier = Verifier(2, 100, max_model_len=50)
    verifier.open(0, 40)
    verifier.open(1, 40)
    assert verifier.opened() == [0, 1]
    verifier.lengths_S[0] = 60
    verifier.hear(number=9, step=1)  # earlier messages of the drafter were lost
    (step,) = verifier.steps()
    assert [SLOT_MASK & opening.request for opening in step.opens] == [1]
    assert (column(step.closes, np.int64) & SLOT_MASK).tolist() == [0]
    assert verifier.side.slots_of(0).tolist() == [1]
    (step,) = verifier.steps()
    assert not step.opens and not step.closes
