# SPDX-License-Identifier: Apache-2.0
"""Which requests a verifier opens at its drafters, and in how many steps it does so."""

import logging

import numpy as np
import pytest

from nemo_specrollout.remote.protocol import verifier_side
from nemo_specrollout.remote.protocol.messages import (
    LONGEST_TEXT_BYTES,
    MAX_FRAME_BYTES,
    OPENED_BYTES,
    Drafts,
    Step,
    Welcome,
    column,
    decode,
    encode,
)
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest, VerifierSide

pytestmark = pytest.mark.unit

SESSION, DRAFTER = 1, 7


class Verifier:
    """A verifier with one drafter that has greeted it, and texts of zeros."""

    def __init__(self, num_slots: int, longest: int, max_model_len: int) -> None:
        self.side = VerifierSide(SESSION, num_slots, 1, 8, PolicyModel(100))
        self.token_ids_SL = np.zeros((num_slots, longest), np.int32)
        self.lengths_S = np.zeros(num_slots, np.int64)
        self.now_s = 0.0
        self.steps()
        self.side.receive(0, Welcome(SESSION, DRAFTER, max_model_len, num_slots), self.now_s)

    def open(self, slot: int, length: int) -> None:
        self.lengths_S[slot] = length
        self.side.open(StreamRequest(slot, slot, 1.0, 0, 1.0, self.token_ids_SL.shape[1]))

    def steps(self) -> list[Step]:
        """Takes a step of the engine; returns the steps that the drafter is sent, as it reads them."""
        self.now_s += 0.1
        messages = self.side.follow(self.token_ids_SL, self.lengths_S, self.now_s)
        return [step for _, message in messages if isinstance(step := decode(encode(message)), Step)]

    def opened(self) -> list[int]:
        """Returns the slots of the requests that the next steps open."""
        return [verifier_side.SLOT_MASK & opening.request for step in self.steps() for opening in step.opens]


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
        opened += [verifier_side.SLOT_MASK & opening.request for opening in step.opens]
        answer = Drafts(SESSION, DRAFTER, verifier.side.peers[0].last_number + 1, 0.001, len(opened), b"", b"")
        verifier.side.receive(0, answer, verifier.now_s)
    assert opened == list(range(256))
    assert verifier.opened() == []


def test_a_text_that_no_message_holds_is_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    longest = LONGEST_TEXT_BYTES // 4
    verifier = Verifier(4, longest + 1, max_model_len=2 * longest)
    with caplog.at_level(logging.WARNING):
        verifier.open(0, longest + 1)
        verifier.open(1, longest + 1)
        verifier.open(2, longest)
        verifier.open(3, 10)
        assert verifier.opened() == [2]
        assert verifier.opened() == [3]
    assert len(caplog.records) == 1
    assert "gets no remote drafts" in caplog.text


def test_a_request_that_grew_too_long_to_be_opened_again_is_closed_and_left_alone() -> None:
    verifier = Verifier(2, 100, max_model_len=50)
    verifier.open(0, 40)
    verifier.open(1, 40)
    assert verifier.opened() == [0, 1]
    verifier.lengths_S[0] = 60
    lost = Drafts(SESSION, DRAFTER, 9, 0.001, 2, b"", b"")  # earlier messages of the drafter were lost
    verifier.side.receive(0, lost, verifier.now_s)
    (step,) = verifier.steps()
    assert [verifier_side.SLOT_MASK & opening.request for opening in step.opens] == [1]
    assert (column(step.closes, np.int64) & verifier_side.SLOT_MASK).tolist() == [0]
    assert verifier.side.slots_of(0).tolist() == [1]
    (step,) = verifier.steps()
    assert not step.opens and not step.closes
