# SPDX-License-Identifier: Apache-2.0
"""The policies of a rollout's tail: ladder, lengths, dispatch, and who moves, races and gives up. No engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.scheduling.racing.dispatch import in_shards, longest_first
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, Ladder, LadderFile, Rung
from nemo_specrollout.scheduling.racing.request_speeds import HALF_TOKENS, SPREAD, RunSpeeds
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import (
    FastestOfN,
    TailDecision,
    TailObservation,
    expected_first,
)

pytestmark = pytest.mark.unit


class EvenPaces:
    """100 tokens a second alone, `falls` of it lost for each further request; method 1 is `ratio` times as fast."""

    def __init__(self, falls: float = 0.0, ratio: float = 1.0, prefill_s: float = 0.0) -> None:
        self.falls, self.ratio, self.prefill_per_token_s = falls, ratio, prefill_s

    def tokens_per_s(self, method: int, batch: int) -> float:
        return 100.0 * self.ratio**method / (1.0 + self.falls * (batch - 1))

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * self.prefill_per_token_s


def seen(
    remaining: list[float],
    runs: list[tuple[int, int]],
    methods: list[int],
    *,
    doubt: float = 0.3,
    capacity: int = 8,
    lags: list[int] | None = None,
    hop_s: float = 0.0,
    speeds: list[list[float]] | None = None,
) -> TailObservation:
    """Requests of 100 tokens by now."""
    shape = len(remaining), max(methods) + 1
    runs_U2 = np.array(runs, np.int64).reshape(-1, 2)
    return TailObservation(
        num_tokens_R=np.full(len(remaining), 100),
        remaining_R=np.array(remaining, float),
        speed_RM=np.ones(shape) if speeds is None else np.array(speeds),
        doubt_RM=np.full(shape, doubt),
        request_U=runs_U2[:, 0],
        worker_U=runs_U2[:, 1],
        lag_U=np.array(lags or [0] * len(runs)),
        method_W=np.array(methods),
        capacity_W=np.full(len(methods), capacity),
        hop_s=hop_s,
    )


def decide(observed: TailObservation, paces: EvenPaces, **config: object) -> TailDecision:
    return FastestOfN(build(FastestOfNConfig, config, ""), paces).decide(observed)


# Who moves


def test_a_straggler_that_shares_its_worker_moves_to_an_empty_one() -> None:
    crowded = seen([600, 500], [(0, 0), (1, 0)], [0, 0])
    moved = decide(crowded, EvenPaces(falls=1.0))
    assert len(moved.starts) == 1 and moved.stops == ((moved.starts[0][0], 0),) and moved.starts[0][1] == 1


def test_alone_on_its_worker_it_gains_nothing_by_moving_to_one_like_it() -> None:
    assert decide(seen([600], [(0, 0)], [0, 0]), EvenPaces(falls=1.0)) == TailDecision()


def test_it_stays_where_batches_cost_nothing() -> None:
    assert decide(seen([600, 500], [(0, 0), (1, 0)], [0, 0]), EvenPaces(falls=0.0)) == TailDecision()


def test_it_stays_where_its_prefill_costs_more_than_it_gains() -> None:
    crowded = seen([60, 50], [(0, 0), (1, 0)], [0, 0])
    assert decide(crowded, EvenPaces(falls=1.0)).starts
    assert decide(crowded, EvenPaces(falls=1.0, prefill_s=0.02)) == TailDecision()


def test_it_stays_where_it_would_be_over_before_it_has_moved() -> None:
    assert decide(seen([6, 5], [(0, 0), (1, 0)], [0, 0], hop_s=0.1), EvenPaces(falls=1.0)) == TailDecision()


def test_nobody_moves_onto_a_worker_that_is_full_or_gone() -> None:
    full = seen([600, 500, 10], [(0, 0), (1, 0), (2, 1)], [0, 0], capacity=1)
    assert decide(full, EvenPaces(falls=1.0)) == TailDecision()
    gone = seen([600, 500], [(0, 0), (1, 0)], [0, 0])
    gone.capacity_W[1] = 0
    assert decide(gone, EvenPaces(falls=1.0)) == TailDecision()


def test_moves_even_the_ends_of_workers_out() -> None:
    runs = [(r, 0) for r in range(8)]
    decision = decide(seen([400.0] * 8, runs, [0, 0]), EvenPaces(falls=1.0))
    assert 3 <= len(decision.starts) <= 5 and len(decision.stops) == len(decision.starts)


def test_many_that_end_alike_go_together() -> None:
    """One that goes alone brings an end forward by 1/32, several by much more."""
    runs = [(r, 0) for r in range(32)]
    alike = seen([400.0] * 32, runs, [0, 0], capacity=64)
    decision = decide(alike, EvenPaces(falls=1.0), max_racers=1)
    assert {w for _, w in decision.starts} == {1} and 12 <= len(decision.starts) <= 20
    assert {r for r, _ in decision.stops} == {r for r, _ in decision.starts}
    tight = seen([400.0] * 32 + [100.0], [*runs, (32, 1)], [0, 0], capacity=5)
    assert len(decide(tight, EvenPaces(falls=1.0), max_racers=1).starts) == 4, "what there is room for"


def test_moving_can_be_switched_off() -> None:
    crowded = seen([600, 500], [(0, 0), (1, 0)], [0, 0])
    assert decide(crowded, EvenPaces(falls=1.0), moving=False) == TailDecision()


# Who races


def test_a_lone_straggler_is_raced_by_an_idle_worker_with_another_method() -> None:
    decision = decide(seen([600], [(0, 0)], [0, 1], doubt=0.5), EvenPaces())
    assert decision == TailDecision(starts=((0, 1),))


def test_the_same_method_is_no_racer() -> None:
    assert decide(seen([600], [(0, 0)], [0, 0], doubt=0.5), EvenPaces()) == TailDecision()


def test_a_method_that_is_surely_slower_is_no_racer() -> None:
    assert decide(seen([600], [(0, 0)], [0, 1], doubt=0.1), EvenPaces(ratio=0.5)) == TailDecision()


def test_no_race_on_a_worker_whose_own_requests_would_suffer() -> None:
    busy = seen([600, 550, 540, 530], [(0, 0), (1, 1), (2, 1), (3, 1)], [0, 1], doubt=0.5)
    assert all(worker != 1 for _, worker in decide(busy, EvenPaces(falls=1.0)).starts)


def test_racing_can_be_switched_off_and_has_a_limit() -> None:
    lone = seen([600], [(0, 0)], [0, 1, 2], doubt=0.5)
    assert decide(lone, EvenPaces(), max_racers=1, min_gain=0.1).starts == ()
    assert len(decide(lone, EvenPaces(), max_racers=2).starts) == 1
    assert len(decide(lone, EvenPaces(), max_racers=3, min_gain=0.02).starts) == 2


def test_a_racer_without_a_chance_gives_up() -> None:
    raced = seen([600], [(0, 0), (0, 1)], [0, 1], doubt=0.1, lags=[0, 400])
    assert decide(raced, EvenPaces()).stops == ((0, 1),)
    assert decide(seen([600], [(0, 0), (0, 1)], [0, 1], doubt=0.1, lags=[0, 10]), EvenPaces()).stops == ()


def test_a_request_known_to_be_hard_for_its_method_goes_to_another() -> None:
    hard = seen([600], [(0, 0)], [0, 1], doubt=0.05, speeds=[[0.5, 1.0]])
    assert decide(hard, EvenPaces()).starts == ((0, 1),)


# Who waits


def test_requests_without_a_worker_get_one_at_once() -> None:
    decision = decide(seen([300, 600], [], [0, 0], hop_s=0.05), EvenPaces(falls=1.0), max_racers=1)
    assert sorted(decision.starts) == [(0, 1), (1, 0)] and decision.stops == ()


def test_of_two_methods_the_faster_is_chosen() -> None:
    assert decide(seen([300], [], [0, 1]), EvenPaces(ratio=2.0), max_racers=1).starts == ((0, 1),)


def test_without_workers_nothing_is_decided() -> None:
    observed = seen([300], [], [0])
    observed.capacity_W[0] = 0
    assert decide(observed, EvenPaces()) == TailDecision()


@st.composite
def observations(draw: st.DrawFn) -> TailObservation:
    num_requests, num_workers = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    num_methods = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    runs = [(r, w) for r in range(num_requests) for w in range(num_workers) if rng.random() < 0.3]
    observed = seen(
        rng.exponential(300, num_requests).tolist(), runs, rng.integers(0, num_methods, num_workers).tolist(),
        doubt=draw(st.sampled_from([0.0, 0.1, 0.5])), lags=rng.integers(0, 50, len(runs)).tolist(),
        hop_s=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip
    is_dead_W = (rng.random(num_workers) < 0.2) & ~np.isin(np.arange(num_workers), observed.worker_U)
    observed.capacity_W[is_dead_W] = 0
    return observed


@given(
    observed=observations(),
    falls=st.sampled_from([0.0, 0.2, 1.0]),
    max_racers=st.integers(1, 3),
    min_gain=st.sampled_from([0.0, 0.1, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_any_decision_can_be_carried_out(
    observed: TailObservation, falls: float, max_racers: int, min_gain: float
) -> None:
    paces = EvenPaces(falls, ratio=1.3, prefill_s=1e-4)
    decision = decide(observed, paces, max_racers=max_racers, min_gain=min_gain)
    before = set(zip(observed.request_U.tolist(), observed.worker_U.tolist(), strict=True))
    starts, stops = set(decision.starts), set(decision.stops)
    assert len(starts) == len(decision.starts) and len(stops) == len(decision.stops)
    assert not starts & before and stops <= before
    assert all(observed.capacity_W[w] > 0 for _, w in starts)
    after = (before - stops) | starts
    can_run = (observed.capacity_W > 0).any()
    for request in range(len(observed.remaining_R)):
        num_before, num_after = (sum(r == request for r, _ in runs) for runs in (before, after))
        assert num_after >= 1 or not can_run
        assert num_after <= max(num_before, max_racers, 1)
    assert decide(observed, paces, max_racers=max_racers, min_gain=min_gain) == decision


def test_the_expected_end_of_a_race_is_that_of_simulated_ones() -> None:
    rng = np.random.default_rng(0)
    for mean_1, doubt_1, mean_2, doubt_2 in ((5.0, 0.3, 6.0, 0.5), (5.0, 0.0, 5.0, 0.4), (2.0, 0.2, 9.0, 0.2)):
        draws = [
            m * np.exp(s * rng.standard_normal(400_000) - s * s / 2) for m, s in ((mean_1, doubt_1), (mean_2, doubt_2))
        ]
        simulated = np.minimum(*draws).mean()
        assert expected_first(mean_1, doubt_1, mean_2, doubt_2) == pytest.approx(simulated, rel=5e-3)
    assert expected_first(5.0, 0.0, 6.0, 0.0) == 5.0


# Ladder


def test_the_ladder_knows_what_it_was_told_and_guesses_the_rest() -> None:
    ladder = Ladder(["plain", "suffix"])
    assert ladder.tokens_per_s(0, 4) / ladder.tokens_per_s(0, 1) == 0.5 and ladder.prefill_s(1000) == 0.0
    ladder.observe(ANY_TASK, 0, 1, 300, 2.0)
    ladder.observe(ANY_TASK, 0, 16, 500, 10.0)
    assert ladder.tokens_per_s(0, 1) == pytest.approx(150) and ladder.tokens_per_s(0, 16) == pytest.approx(50)
    assert 50 < ladder.tokens_per_s(0, 4) < 150 and ladder.tokens_per_s(0, 64) == pytest.approx(25)
    assert ladder.tokens_per_s(1, 1) == pytest.approx(150), "a method never seen is like the others"
    ladder.observe(ANY_TASK, 1, 1, 900, 3.0)
    assert ladder.tokens_per_s(1, 1) == pytest.approx(300)
    assert [rung.method for rung in ladder.rungs()] == ["suffix", "plain"]


def test_the_ladder_never_believes_that_more_requests_make_each_faster() -> None:
    ladder = Ladder(["plain"])
    ladder.observe(ANY_TASK, 0, 1, 100, 1.0)
    ladder.observe(ANY_TASK, 0, 8, 1360, 8.0)
    both = ladder.tokens_per_s(0, 1), ladder.tokens_per_s(0, 8)
    assert both == pytest.approx((135, 135)), "seconds of the engine weigh alike"


def test_one_stall_does_not_make_a_method_slow() -> None:
    """A kernel that compiles, a core that somebody else has: all of a batch wait for it, but only once."""
    ladder = Ladder(["suffix"])
    ladder.observe(ANY_TASK, 0, 64, 64, 64.0)
    for _ in range(30):
        ladder.observe(ANY_TASK, 0, 64, 64 * 10, 64 * 0.1)
        ladder.observe(ANY_TASK, 0, 16, 16 * 20, 16 * 0.1)
    assert 70 < ladder.tokens_per_s(0, 64) < 100 < ladder.tokens_per_s(0, 16)
    ladder.observe(ANY_TASK, 0, 24, 24, 24.0)
    assert ladder.tokens_per_s(0, 64) > 40 and ladder.tokens_per_s(0, 24) > 40, "nor those of other sizes"


def test_the_ladder_follows_what_is_new() -> None:
    ladder = Ladder(["plain"])
    for _ in range(50):
        ladder.observe(ANY_TASK, 0, 1, 100, 1.0)
    for _ in range(50):
        ladder.observe(ANY_TASK, 0, 1, 200, 1.0)
    assert 190 < ladder.tokens_per_s(0, 1) <= 200


def test_tasks_have_paces_of_their_own() -> None:
    ladder = Ladder(["plain", "suffix"])
    ladder.observe("code", 1, 1, 400, 1.0)
    ladder.observe("chat", 1, 1, 100, 1.0)
    assert ladder.ease("code", 1) == pytest.approx(1.6) and ladder.ease("chat", 1) == pytest.approx(0.4)
    assert ladder.ease("maths", 1) == ladder.ease("code", 0) == 1.0


def test_a_ladder_is_written_and_read_again(tmp_path: Path) -> None:
    rung = Rung(ANY_TASK, "suffix", (1, 4), (200.0, 90.0), (5.0, 5.0), 0.6)
    path = tmp_path / "ladder.json"
    path.write_text(LadderFile("a CPU", "a policy", 1e-4, (rung,)).to_json())
    ladder = Ladder(["plain", "suffix"], LadderFile.read(path, "ladder"))
    assert ladder.tokens_per_s(1, 4) == pytest.approx(90) and ladder.prefill_s(1000) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format: 2 is out of range"),
        ({"rungs": [{"task": "any", "method": "x", "batches": [], "tokens_per_s": [], "weights_s": []}]}, "0 batches"),
        ({"rungs": [{"task": "any", "method": "x", "batches": [4, 1], "tokens_per_s": [1, 1], "weights_s": [1, 1]}]},
         "from small to large"),
    ],
)  # fmt: skip
def test_a_bad_ladder_is_refused_in_words(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"device": "d", "policy": "p", "prefill_s_per_token": 1e-4, "rungs": [], **change}))
    with pytest.raises(ConfigError, match=f"fastest_of_n.ladder: .*{words}.*nemo-specrollout ladder"):
        LadderFile.read(path, "fastest_of_n.ladder")
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        LadderFile.read(tmp_path / "none.json", "fastest_of_n.ladder")


# Speeds of requests


def test_a_request_is_believed_as_it_makes_tokens() -> None:
    speeds = RunSpeeds(np.ones((2, 2)))
    assert (speeds.speeds() == 1.0).all() and (speeds.doubts() == SPREAD).all()
    speeds.observe(np.array([0]), 0, np.array([2 * HALF_TOKENS]), HALF_TOKENS)
    assert 1.3 < speeds.speeds()[0, 0] < 2.0 and speeds.doubts()[0, 0] < SPREAD
    assert 1.0 < speeds.speeds()[0, 1] < speeds.speeds()[0, 0], "and somewhat under methods that have not seen it"
    assert (speeds.speeds()[1] == 1.0).all()


def test_rows_of_what_is_over_are_given_to_what_begins() -> None:
    speeds = RunSpeeds(np.ones((0, 1)))
    first = speeds.begin(3, np.array([2.0]))
    speeds.observe(np.array(first), 0, np.array([900.0, 400.0, 100.0]), 100.0)
    before = speeds.speeds(np.array(first))
    speeds.forget([first[1]])
    later = speeds.begin(5, np.array([0.5]))
    assert first[1] in later and len({*first, *later}) == 7
    assert speeds.speeds(np.array(later)) == pytest.approx(np.full((5, 1), 0.5))
    assert (speeds.speeds(np.array([first[0], first[2]])) == before[[0, 2]]).all()
    for _ in range(1000):
        speeds.forget(later)
        later = speeds.begin(5, np.array([1.0]))
    assert len(speeds.speeds()) <= 16, "what is over takes no room"


def test_a_task_is_where_its_requests_begin() -> None:
    assert RunSpeeds(np.full((1, 1), 2.0)).speeds()[0, 0] == pytest.approx(2.0)


# Lengths


def test_lengths_are_learned_from_all_and_from_siblings() -> None:
    lengths = LengthEstimator(max_length=1000)
    assert lengths.remaining([7], np.array([10])).tolist() == [10.0], "of nothing known, as long again"
    for n in (100, 200, 300):
        lengths.finished(1, n)
    assert lengths.remaining([2], np.array([0])) == pytest.approx([200])
    assert lengths.remaining([2], np.array([250])) == pytest.approx([50])
    lengths.finished(2, 800)
    assert lengths.remaining([2], np.array([0]))[0] > lengths.remaining([3], np.array([0]))[0]


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(0, 999))
@settings(max_examples=100, deadline=None)
def test_what_remains_is_within_bounds(finished: list[int], so_far: int) -> None:
    lengths = LengthEstimator(max_length=1000)
    for n in finished:
        lengths.finished(n % 3, n)
    (remaining,) = lengths.remaining([0], np.array([so_far]))
    assert 1 <= remaining <= max(1000 - so_far, 1)
    longer = [n for n in finished if n > so_far]
    assert not longer or remaining <= max(longer) - so_far + 1e-9


# Dispatch


def test_shards_are_contiguous_and_even() -> None:
    assert in_shards(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2] and in_shards(0, 3).tolist() == []


def test_the_longest_go_first_and_siblings_stay_together() -> None:
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    workers = longest_first(groups, np.array([9, 9, 5, 5, 4, 4, 1, 1.0]), np.zeros(2))
    assert all(workers[i] == workers[i + 1] for i in range(0, 8, 2))
    assert workers.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    one_group = longest_first([0] * 4, np.array([8.0, 1, 1, 6]), np.zeros(2))
    assert one_group.tolist() == [0, 1, 1, 1], "with too few prompts for the workers, siblings part"
    assert longest_first([0, 1], np.array([1.0, 1.0]), np.array([9.0, 0.0, np.inf])).tolist() == [1, 1]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_loads_are_within_grahams_bound(lengths: list[float], num_workers: int) -> None:
    workers = longest_first(list(range(len(lengths))), np.array(lengths), np.zeros(num_workers))
    loads = np.bincount(workers, weights=lengths, minlength=num_workers)
    assert loads.max() <= sum(lengths) / num_workers + max(lengths) * (1 - 1 / num_workers) + 1e-6


# Configuration


def test_a_block_that_leaves_nothing_to_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="moving false and max_racers 1 leave nothing to do"):
        build(FastestOfNConfig, {"moving": False, "max_racers": 1}, "fastest_of_n")
