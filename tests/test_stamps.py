# SPDX-License-Identifier: Apache-2.0
"""What is written on each sample: which weights made it, which head drafted for it, and how its drafts fared."""

import pytest
import torch
from torch import Tensor, tensor

from nemo_specrollout.generation import sample_stats as module
from nemo_specrollout.generation.sample_stats import Stamp, Stamps

pytestmark = pytest.mark.unit

NUM_SLOTS = 4
SEED, OTHER = 77, 78


@pytest.fixture
def counts_S2() -> Tensor:
    """What the draft board counts."""
    return torch.zeros(NUM_SLOTS, 2, dtype=torch.int32)


@pytest.fixture
def stamps(counts_S2: Tensor) -> Stamps:
    return Stamps(counts_S2)


def lengths(**of_slots: int) -> Tensor:
    return tensor([of_slots.get(f"slot_{slot}", 0) for slot in range(NUM_SLOTS)], dtype=torch.int32)


def test_a_stamp_tells_of_the_policy_the_head_and_the_drafts(stamps: Stamps, counts_S2: Tensor) -> None:
    stamps.policy_version, stamps.head_version = 5, 3
    stamps.open(2, SEED, prompt_length=10, num_tokens=10)
    counts_S2[2] = tensor([8, 6])
    stamps.close([2])
    counts_S2[2] = 0  # another request takes the slot
    stamp = Stamp(((5, 10),), (3, 3), 8, 6)
    assert stamps.take([SEED]) == [stamp]
    assert stamp.wire() == {"policy_spans": ((5, 10),), "head_versions": (3, 3), "num_drafted": 8, "num_accepted": 6}
    assert stamps.take([SEED]) == [None], "it was taken"


def test_a_request_under_way_has_a_stamp_too_and_keeps_it(stamps: Stamps, counts_S2: Tensor) -> None:
    stamps.open(1, SEED, prompt_length=4, num_tokens=4)
    for num_drafted in (3, 5):
        counts_S2[1] = tensor([num_drafted, 2])
        assert stamps.take([OTHER, SEED]) == [None, Stamp(((0, 4),), (0, 0), num_drafted, 2)]
    assert stamps.take_ended() == []


def test_each_policy_that_sampled_has_its_span(stamps: Stamps) -> None:
    stamps.open(0, SEED, prompt_length=4, num_tokens=4)
    stamps.policy_updated(1, lengths(slot_0=9))
    stamps.open(1, OTHER, prompt_length=6, num_tokens=6)
    stamps.policy_updated(4, lengths(slot_0=15, slot_1=8))
    first, second = stamps.take([SEED, OTHER])
    assert first is not None and first.policy_spans == ((0, 4), (1, 9), (4, 15))
    assert second is not None and second.policy_spans == ((1, 6), (4, 8))


def test_the_head_is_that_of_the_beginning_and_that_of_the_end(stamps: Stamps) -> None:
    stamps.head_version = 2
    stamps.open(0, SEED, prompt_length=4, num_tokens=4)
    stamps.head_version = 6
    (stamp,) = stamps.take([SEED])
    assert stamp is not None and stamp.head_versions == (2, 6)


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_request_that_was_put_aside_goes_on_where_it_was(stamps: Stamps, counts_S2: Tensor, is_updated: bool) -> None:
    stamps.head_version = 2
    stamps.open(0, SEED, prompt_length=4, num_tokens=4)
    counts_S2[0] = tensor([8, 6])
    stamps.close([0])
    stamps.head_version = 5
    if is_updated:
        stamps.policy_updated(1, lengths(slot_0=99))
    counts_S2[3] = 0
    stamps.open(3, SEED, prompt_length=4, num_tokens=12)
    counts_S2[3] += tensor([10, 1])
    assert stamps.take_ended() == [], "it goes on"
    stamps.close([3])
    spans = ((0, 4), (1, 12)) if is_updated else ((0, 4),)
    assert stamps.take_ended() == [(SEED, Stamp(spans, (2, 5), 18, 7))]


def test_all_that_ended_are_told_once_and_in_order(stamps: Stamps, counts_S2: Tensor) -> None:
    for slot, seed in ((2, 30), (0, 10), (1, 20)):
        stamps.open(slot, seed, prompt_length=4, num_tokens=4)
        counts_S2[slot] = seed
    stamps.close([1, 2])
    assert [(seed, stamp.num_drafted) for seed, stamp in stamps.take_ended()] == [(20, 20), (30, 30)]
    assert stamps.take_ended() == []
    stamps.close([0, 3])  # of slot 3 nobody knew
    assert [seed for seed, _ in stamps.take_ended()] == [10]


def test_what_nobody_takes_is_forgotten_oldest_first(counts_S2: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    stamps = Stamps(counts_S2)
    for seed in range(8):
        stamps.open(0, seed, prompt_length=4, num_tokens=4)
        counts_S2[0] = seed
        stamps.close([0])
    assert [(seed, stamp.num_accepted) for seed, stamp in stamps.take_ended()] == [(5, 5), (6, 6), (7, 7)]


def test_a_stamp_that_was_taken_is_not_kept_when_the_slot_is_freed() -> None:
    stamps = Stamps(torch.zeros(2, 2, dtype=torch.int32))
    for seed in range(1000):
        stamps.open(0, seed, 4, 4)
        assert stamps.take([seed]) != [None]
        stamps.close([0])
    assert stamps.take_ended() == []
