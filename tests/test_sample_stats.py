# SPDX-License-Identifier: Apache-2.0
"""Statistics of samples: policies that made them, heads that drafted for them, and the outcome of their drafts."""

from dataclasses import asdict

import pytest
import torch
from torch import Tensor, tensor

from nemo_specrollout.telemetry import sample_stats as module
from nemo_specrollout.telemetry.sample_stats import SampleStats, SampleStatsLog

pytestmark = pytest.mark.unit

NUM_SLOTS = 4
SEED, OTHER = 77, 78


@pytest.fixture
def counts_S2() -> Tensor:
    """Counts of the draft board."""
    return torch.zeros(NUM_SLOTS, 2, dtype=torch.int32)


@pytest.fixture
def sample_stats(counts_S2: Tensor) -> SampleStatsLog:
    return SampleStatsLog(counts_S2)


def lengths(**of_slots: int) -> list[int]:
    return [of_slots.get(f"slot_{slot}", 0) for slot in range(NUM_SLOTS)]


def test_sample_stats_name_policy_head_and_drafts(sample_stats: SampleStatsLog, counts_S2: Tensor) -> None:
    sample_stats.policy_version, sample_stats.head_version = 5, 3
    sample_stats.open(2, SEED, prompt_length=10, num_tokens=10)
    counts_S2[2] = tensor([8, 6])
    sample_stats.close([2])
    counts_S2[2] = 0  # another request takes the slot
    sample = SampleStats(((5, 10),), (3, 3), 8, 6)
    assert sample_stats.take([SEED]) == {SEED: sample}
    figures = {"head_versions": (3, 3), "num_drafted": 8, "num_accepted": 6}
    assert asdict(sample) == {"policy_spans": ((5, 10),), "read_again": (), **figures}
    assert sample_stats.take([SEED]) == {}, "it was taken"


def test_a_running_request_has_stats_that_can_be_taken_again(sample_stats: SampleStatsLog, counts_S2: Tensor) -> None:
    sample_stats.open(1, SEED, prompt_length=4, num_tokens=4)
    for num_drafted in (3, 5):
        counts_S2[1] = tensor([num_drafted, 2])
        assert sample_stats.take([OTHER, SEED]) == {SEED: SampleStats(((0, 4),), (0, 0), num_drafted, 2)}
    assert sample_stats.take(None) == {}


def test_each_policy_that_sampled_has_its_span(sample_stats: SampleStatsLog) -> None:
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    sample_stats.policy_updated(1, lengths(slot_0=9))
    sample_stats.open(1, OTHER, prompt_length=6, num_tokens=6)
    sample_stats.policy_updated(4, lengths(slot_0=15, slot_1=8))
    found = sample_stats.take([OTHER, SEED])
    assert found[SEED].policy_spans == ((0, 4), (1, 9), (4, 15)) and found[OTHER].policy_spans == ((1, 6), (4, 8))


def test_the_head_is_that_of_the_beginning_and_that_of_the_end(sample_stats: SampleStatsLog) -> None:
    sample_stats.head_version = 2
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    sample_stats.head_version = 6
    assert sample_stats.take([SEED])[SEED].head_versions == (2, 6)


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_preempted_request_continues_its_record(
    sample_stats: SampleStatsLog, counts_S2: Tensor, is_updated: bool
) -> None:
    sample_stats.head_version = 2
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    counts_S2[0] = tensor([8, 6])
    sample_stats.close([0])
    sample_stats.head_version = 5
    if is_updated:
        sample_stats.policy_updated(1, lengths(slot_0=99))
    counts_S2[3] = 0
    sample_stats.open(3, SEED, prompt_length=4, num_tokens=12)
    counts_S2[3] += tensor([10, 1])
    assert sample_stats.take(None) == {}, "it goes on"
    sample_stats.close([3])
    spans = ((0, 4), (1, 12)) if is_updated else ((0, 4),)
    read_again = (12,) if is_updated else ()
    assert sample_stats.take(None) == {SEED: SampleStats(spans, (2, 5), 18, 7, read_again)}


def test_kv_that_is_computed_again_after_an_update_is_noted(sample_stats: SampleStatsLog) -> None:
    """Once at the update, before any token of the new policy, and once after some tokens of it."""
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    sample_stats.policy_updated(1, lengths(slot_0=9))
    for num_tokens in (9, 12):
        sample_stats.close([0])
        sample_stats.open(0, SEED, prompt_length=4, num_tokens=num_tokens)
    found = sample_stats.take([SEED])[SEED]
    assert (found.policy_spans, found.read_again) == (((0, 4), (1, 9), (1, 12)), (9, 12))


def test_a_token_that_a_preemption_loses_is_the_newer_policys(sample_stats: SampleStatsLog) -> None:
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    sample_stats.policy_updated(1, lengths(slot_0=9))
    sample_stats.close([0])
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=8)
    found = sample_stats.take([SEED])[SEED]
    assert (found.policy_spans, found.read_again) == (((0, 4), (1, 8)), (8,))


def test_a_request_that_comes_back_continues_its_record(sample_stats: SampleStatsLog, counts_S2: Tensor) -> None:
    sample_stats.open(0, SEED, prompt_length=4, num_tokens=4)
    counts_S2[0] = tensor([3, 1])
    sample_stats.close([0])
    sample_stats.policy_updated(1, lengths())
    counts_S2[1] = 0
    sample_stats.open(1, SEED, prompt_length=12, num_tokens=12)
    sample = SampleStats(((0, 4), (1, 12)), (0, 0), 3, 1, read_again=(12,))
    assert sample_stats.take([SEED]) == {SEED: sample}
    sample_stats.close([1])
    sample_stats.open(2, SEED, prompt_length=4, num_tokens=4)
    assert sample_stats.take([SEED])[SEED].policy_spans == ((1, 4),), "it begins again"


def test_a_request_that_moved_after_an_update_was_read_again() -> None:
    first = SampleStats(((0, 4), (1, 9)), (0, 0), 0, 0)
    second = SampleStats(((1, 12), (2, 20)), (0, 0), 0, 0)
    merged = second.merged(first)
    assert merged.policy_spans == ((0, 4), (1, 9), (1, 12), (2, 20)) and merged.read_again == (12,)
    of_one_policy = SampleStats(((1, 4),), (0, 0), 0, 0).merged(SampleStats(((1, 12),), (0, 0), 0, 0))
    assert of_one_policy.policy_spans == ((1, 4),) and of_one_policy.read_again == ()


def test_ended_requests_are_returned_once_and_in_order(sample_stats: SampleStatsLog, counts_S2: Tensor) -> None:
    for slot, seed in ((2, 30), (0, 10), (1, 20)):
        sample_stats.open(slot, seed, prompt_length=4, num_tokens=4)
        counts_S2[slot] = seed
    sample_stats.close([1, 2])
    assert [(seed, sample.num_drafted) for seed, sample in sample_stats.take(None).items()] == [(20, 20), (30, 30)]
    assert sample_stats.take(None) == {}
    sample_stats.close([0, 3])  # slot 3 had no request
    assert [seed for seed, _ in sample_stats.take(None).items()] == [10]


def test_untaken_sequences_are_dropped_oldest_first(counts_S2: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    sample_stats = SampleStatsLog(counts_S2)
    for seed in range(8):
        sample_stats.open(0, seed, prompt_length=4, num_tokens=4)
        counts_S2[0] = seed
        sample_stats.close([0])
    assert [(seed, sample.num_accepted) for seed, sample in sample_stats.take(None).items()] == [(5, 5), (6, 6), (7, 7)]


def test_stats_that_were_taken_are_not_kept_for_the_freed_slot() -> None:
    sample_stats = SampleStatsLog(torch.zeros(2, 2, dtype=torch.int32))
    for seed in range(1000):
        sample_stats.open(0, seed, 4, 4)
        assert list(sample_stats.take([seed])) == [seed]
        sample_stats.close([0])
    assert sample_stats.take(None) == {}
