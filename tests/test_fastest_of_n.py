# SPDX-License-Identifier: Apache-2.0
"""Policies of a rollout's tail: moves, races, the draft ladder, request speeds, lengths and dispatch. No engine."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.dealing import in_shards, longest_first
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.generation.engine.requests import ShardRequest
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth, IdleTime
from nemo_specrollout.stragglers.decisions.request_estimates import HALF_TOKENS, SPREAD, LengthEstimator, RequestSpeeds
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN, TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation, expected_first
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turns import TurnResult, TurnWork

pytestmark = pytest.mark.unit


class EvenSpeeds:
    """A speed model of 100 tokens a second alone, over 1 + `falls` for each further request; method 1 is `ratio` as fast."""

    def __init__(self, falls: float = 0.0, ratio: float = 1.0, prefill_s: float = 0.0) -> None:
        self.falls, self.ratio, self.prefill_per_token_s = falls, ratio, prefill_s

    def tokens_per_s(self, method: int, batch: int) -> float:
        return 100.0 * self.ratio**method / (1.0 + self.falls * (batch - 1))

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * self.prefill_per_token_s


def seen(
    remaining: list[float],
    attempts: list[tuple[int, int]],
    methods: list[int],
    *,
    doubt: float = 0.3,
    capacity: int = 8,
    lags: list[int] | None = None,
    handover_s: float = 0.0,
    speeds: list[list[float]] | None = None,
) -> TailObservation:
    """Returns requests that have 100 tokens so far; `attempts` are pairs of a request and an engine."""
    shape = len(remaining), max(methods) + 1
    attempts_A2 = np.array(attempts, np.int64).reshape(-1, 2)
    return TailObservation(
        num_tokens_R=np.full(len(remaining), 100),
        remaining_R=np.array(remaining, float),
        speed_RM=np.ones(shape) if speeds is None else np.array(speeds),
        doubt_RM=np.full(shape, doubt),
        request_A=attempts_A2[:, 0],
        engine_A=attempts_A2[:, 1],
        lag_A=np.array(lags or [0] * len(attempts)),
        method_E=np.array(methods),
        capacity_E=np.full(len(methods), capacity),
        handover_s=handover_s,
    )


def decide(observed: TailObservation, speeds: EvenSpeeds, **config: object) -> TailDecision:
    return FastestOfN(build(FastestOfNConfig, config, ""), speeds).decide(observed)


SHARED = seen([600, 500], [(0, 0), (1, 0)], [0, 0])
"""Two requests on engine 0; engine 1 is idle."""

# Moves


def test_a_straggler_moves_from_a_shared_engine_to_an_idle_one() -> None:
    assert decide(SHARED, EvenSpeeds(falls=1.0)) == TailDecision(starts=((0, 1),), stops=((0, 0),))


@pytest.mark.parametrize(
    ("observed", "speeds"),
    [
        (seen([600], [(0, 0)], [0, 0]), EvenSpeeds(falls=1.0)),
        (SHARED, EvenSpeeds(falls=0.0)),
        (seen([60, 50], [(0, 0), (1, 0)], [0, 0]), EvenSpeeds(falls=1.0, prefill_s=0.02)),
        (seen([6, 5], [(0, 0), (1, 0)], [0, 0], handover_s=0.1), EvenSpeeds(falls=1.0)),
        (seen([600, 500, 10], [(0, 0), (1, 0), (2, 1)], [0, 0], capacity=1), EvenSpeeds(falls=1.0)),
    ],
    ids=[
        "alone already",
        "batches cost nothing",
        "long prefill",
        "ends before the handover",
        "the other engine is full",
    ],
)
def test_a_request_stays_if_a_move_gains_nothing(observed: TailObservation, speeds: EvenSpeeds) -> None:
    assert decide(observed, speeds) == TailDecision()


def test_a_short_prefill_does_not_prevent_a_move() -> None:
    assert decide(seen([60, 50], [(0, 0), (1, 0)], [0, 0]), EvenSpeeds(falls=1.0)).starts


def test_no_request_moves_to_a_dead_engine() -> None:
    dead = replace(SHARED, capacity_E=np.array([8, 0]))
    assert decide(dead, EvenSpeeds(falls=1.0)) == TailDecision()


def test_moves_equalise_the_ends_of_engines() -> None:
    attempts = [(r, 0) for r in range(8)]
    decision = decide(seen([400.0] * 8, attempts, [0, 0]), EvenSpeeds(falls=1.0))
    assert 3 <= len(decision.starts) <= 5 and len(decision.stops) == len(decision.starts)


def test_many_requests_that_end_together_move_together() -> None:
    """A single move brings the end forward by 1/32, several moves by much more."""
    attempts = [(r, 0) for r in range(32)]
    equal = seen([400.0] * 32, attempts, [0, 0], capacity=64)
    decision = decide(equal, EvenSpeeds(falls=1.0), max_racers=1)
    assert {e for _, e in decision.starts} == {1} and 12 <= len(decision.starts) <= 20
    assert {r for r, _ in decision.stops} == {r for r, _ in decision.starts}
    tight = seen([400.0] * 32 + [100.0], [*attempts, (32, 1)], [0, 0], capacity=5)
    assert len(decide(tight, EvenSpeeds(falls=1.0), max_racers=1).starts) == 4, "more moves than free capacity"


def test_moving_can_be_disabled() -> None:
    assert decide(SHARED, EvenSpeeds(falls=1.0), moving=False) == TailDecision()


# Early work: what an idle engine could do for coming steps instead


def with_early_work(observed: TailObservation, *rates_E: tuple[float, ...], left_s: float = 1e9) -> TailObservation:
    return replace(observed, idle=IdleTime(tuple(EarlyWorth(rates, left_s) for rates in rates_E)))


def test_a_straggler_moves_if_that_spares_more_than_the_early_work_it_displaces() -> None:
    """The move ends the rollout after 6 s instead of 11 s. Engine 1 would do less early work in these 6 s, and none after."""
    for worth in (0.1, 0.05), (0.9, 0.0), (1.0, 1.0):
        decision = decide(with_early_work(SHARED, (0.0,), worth), EvenSpeeds(falls=1.0))
        assert [engine for _, engine in decision.starts] == [1] and decision.num_declined == 0
    declined = decide(with_early_work(SHARED, (0.0,), (1.5, 0.0)), EvenSpeeds(falls=1.0))
    assert declined == TailDecision(num_declined=1)


def test_the_worth_of_one_engine_counts_less_among_many() -> None:
    of_eight = seen([600, 500], [(0, 0), (1, 0)], [0] * 8)
    worth_E = ((0.0,), (1.5, 0.0), *[(0.0,)] * 6)
    assert decide(with_early_work(of_eight, *worth_E), EvenSpeeds(falls=1.0)).starts
    assert not decide(with_early_work(of_eight, *[(1.5, 0.0)] * 8), EvenSpeeds(falls=1.0)).starts


def test_a_race_costs_early_work_as_well() -> None:
    observed = seen([600], [(0, 0)], [0, 1], doubt=1.0)
    assert decide(observed, EvenSpeeds(), moving=False).starts
    assert not decide(with_early_work(observed, (0.0,), (9.0, 0.0)), EvenSpeeds(), moving=False).starts


def test_what_an_engine_spares_depends_on_the_requests_that_it_still_has() -> None:
    idle = IdleTime((EarlyWorth((1.0, 0.5, 0.25), 1e9),))
    assert idle.spared_s(0, [2.0, 4.0], 10.0) == pytest.approx(2 * 0.25 + 2 * 0.5 + 6 * 1.0)
    assert idle.spared_s(0, [2.0, 4.0], 3.0) == pytest.approx(2 * 0.25 + 1 * 0.5)
    assert idle.rate(0, 7) == 0.25 and idle.rate(1, 0) == 0.0


def test_work_that_can_be_done_after_the_stragglers_costs_nothing() -> None:
    """Engine 1 would end its early work in a second. It has a second left when it has decoded the straggler."""
    worth_E = (0.0,), (1.5, 0.0)
    assert not decide(with_early_work(SHARED, *worth_E), EvenSpeeds(falls=1.0)).starts
    assert decide(with_early_work(SHARED, *worth_E, left_s=0.5), EvenSpeeds(falls=1.0)).starts


def test_an_engine_that_gets_rid_of_a_request_does_more_early_work() -> None:
    """Engine 0 gains by the move what engine 1 loses, and the rollout ends earlier."""
    both = with_early_work(SHARED, (1.5, 1.4, 0.0), (1.5, 1.4, 0.0))
    assert decide(both, EvenSpeeds(falls=1.0)).starts


# Races


def test_an_idle_engine_with_another_method_races_a_straggler() -> None:
    decision = decide(seen([600], [(0, 0)], [0, 1], doubt=0.5), EvenSpeeds())
    assert decision == TailDecision(starts=((0, 1),))


def test_an_engine_with_the_same_method_does_not_race() -> None:
    assert decide(seen([600], [(0, 0)], [0, 0], doubt=0.5), EvenSpeeds()) == TailDecision()


def test_a_method_that_is_surely_slower_does_not_race() -> None:
    assert decide(seen([600], [(0, 0)], [0, 1], doubt=0.1), EvenSpeeds(ratio=0.5)) == TailDecision()


def test_no_race_delays_the_requests_of_a_busy_engine() -> None:
    busy = seen([600, 550, 540, 530], [(0, 0), (1, 1), (2, 1), (3, 1)], [0, 1], doubt=0.5)
    assert all(engine != 1 for _, engine in decide(busy, EvenSpeeds(falls=1.0)).starts)


def test_racing_can_be_disabled_and_has_a_limit() -> None:
    lone = seen([600], [(0, 0)], [0, 1, 2], doubt=0.5)
    assert decide(lone, EvenSpeeds(), max_racers=1, min_gain=0.1).starts == ()
    assert len(decide(lone, EvenSpeeds(), max_racers=2).starts) == 1
    assert len(decide(lone, EvenSpeeds(), max_racers=3, min_gain=0.02).starts) == 2


def test_a_racer_without_a_chance_gives_up() -> None:
    raced = seen([600], [(0, 0), (0, 1)], [0, 1], doubt=0.1, lags=[0, 400])
    assert decide(raced, EvenSpeeds()).stops == ((0, 1),)
    assert decide(seen([600], [(0, 0), (0, 1)], [0, 1], doubt=0.1, lags=[0, 10]), EvenSpeeds()).stops == ()


def test_a_request_that_is_slow_under_its_method_goes_to_another() -> None:
    hard = seen([600], [(0, 0)], [0, 1], doubt=0.05, speeds=[[0.5, 1.0]])
    assert decide(hard, EvenSpeeds()).starts == ((0, 1),)


# Waiting requests


def test_waiting_requests_start_at_once() -> None:
    decision = decide(seen([300, 600], [], [0, 0], handover_s=0.05), EvenSpeeds(falls=1.0), max_racers=1)
    assert sorted(decision.starts) == [(0, 1), (1, 0)] and decision.stops == ()


def test_a_waiting_request_gets_the_faster_of_two_methods() -> None:
    assert decide(seen([300], [], [0, 1]), EvenSpeeds(ratio=2.0), max_racers=1).starts == ((0, 1),)


def test_without_engines_nothing_is_decided() -> None:
    assert decide(seen([300], [], [0], capacity=0), EvenSpeeds()) == TailDecision()


@st.composite
def observations(draw: st.DrawFn) -> TailObservation:
    num_requests, num_engines = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    num_methods = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    attempts = [(r, e) for r in range(num_requests) for e in range(num_engines) if rng.random() < 0.3]
    observed = seen(
        rng.exponential(300, num_requests).tolist(), attempts, rng.integers(0, num_methods, num_engines).tolist(),
        doubt=draw(st.sampled_from([0.0, 0.1, 0.5])), lags=rng.integers(0, 50, len(attempts)).tolist(),
        handover_s=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip
    is_dead_E = (rng.random(num_engines) < 0.2) & ~np.isin(np.arange(num_engines), observed.engine_A)
    observed.capacity_E[is_dead_E] = 0
    return observed


@given(
    observed=observations(),
    falls=st.sampled_from([0.0, 0.2, 1.0]),
    max_racers=st.integers(1, 3),
    min_gain=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_any_decision_can_be_carried_out(
    observed: TailObservation, falls: float, max_racers: int, min_gain: float
) -> None:
    speeds = EvenSpeeds(falls, ratio=1.3, prefill_s=1e-4)
    decision = decide(observed, speeds, max_racers=max_racers, min_gain=min_gain)
    before = set(zip(observed.request_A.tolist(), observed.engine_A.tolist(), strict=True))
    starts, stops = set(decision.starts), set(decision.stops)
    assert len(starts) == len(decision.starts) and len(stops) == len(decision.stops)
    assert not starts & before and stops <= before
    assert all(observed.capacity_E[e] > 0 for _, e in starts)
    after = (before - stops) | starts
    can_run = (observed.capacity_E > 0).any()
    for request in range(len(observed.remaining_R)):
        num_before, num_after = (sum(r == request for r, _ in pairs) for pairs in (before, after))
        assert num_after >= 1 or not can_run
        assert num_after <= max(num_before, max_racers, 1)
    assert decide(observed, speeds, max_racers=max_racers, min_gain=min_gain) == decision


def test_the_expected_end_of_a_race_matches_simulated_races() -> None:
    rng = np.random.default_rng(0)
    for mean_1, doubt_1, mean_2, doubt_2 in ((5.0, 0.3, 6.0, 0.5), (5.0, 0.0, 5.0, 0.4), (2.0, 0.2, 9.0, 0.2)):
        draws = [
            m * np.exp(s * rng.standard_normal(400_000) - s * s / 2) for m, s in ((mean_1, doubt_1), (mean_2, doubt_2))
        ]
        simulated = np.minimum(*draws).mean()
        assert expected_first(mean_1, doubt_1, mean_2, doubt_2) == pytest.approx(simulated, rel=5e-3)
    assert expected_first(5.0, 0.0, 6.0, 0.0) == 5.0


# The draft ladder


def test_the_ladder_keeps_measurements_and_guesses_the_rest() -> None:
    ladder = DecodeSpeedTable(["plain", "suffix"])
    assert ladder.tokens_per_s(0, 4) / ladder.tokens_per_s(0, 1) == 0.5 and ladder.prefill_s(1000) == 0.0
    ladder.observe(ANY_TASK, 0, 1, 300, 2.0)
    ladder.observe(ANY_TASK, 0, 16, 500, 10.0)
    assert ladder.tokens_per_s(0, 1) == pytest.approx(150) and ladder.tokens_per_s(0, 16) == pytest.approx(50)
    assert 50 < ladder.tokens_per_s(0, 4) < 150 and ladder.tokens_per_s(0, 64) == pytest.approx(25)
    assert ladder.tokens_per_s(1, 1) == pytest.approx(150), "a method without measurements differs from the others"
    ladder.observe(ANY_TASK, 1, 1, 900, 3.0)
    assert ladder.tokens_per_s(1, 1) == pytest.approx(300)
    ladder.observe_prefill(1000, 1.0)
    file = table_file(ladder, "a machine", "a policy", (0.0, 0.4))
    assert file is not None and [(rung.method, rung.acceptance) for rung in file.rungs] == [
        ("suffix", 0.4),
        ("plain", 0.0),
    ]


def test_ladder_speeds_never_rise_with_the_batch_size() -> None:
    ladder = DecodeSpeedTable(["plain"])
    ladder.observe(ANY_TASK, 0, 1, 100, 1.0)
    ladder.observe(ANY_TASK, 0, 8, 1360, 8.0)
    both = ladder.tokens_per_s(0, 1), ladder.tokens_per_s(0, 8)
    assert both == pytest.approx((135, 135)), "equal seconds of the engine have different weights"


def test_one_stall_does_not_make_a_method_slow() -> None:
    """While a kernel compiles or another process has the core, the whole batch waits, but only once."""
    ladder = DecodeSpeedTable(["suffix"])
    ladder.observe(ANY_TASK, 0, 64, 64, 64.0)
    for _ in range(30):
        ladder.observe(ANY_TASK, 0, 64, 64 * 10, 64 * 0.1)
        ladder.observe(ANY_TASK, 0, 16, 16 * 20, 16 * 0.1)
    assert 70 < ladder.tokens_per_s(0, 64) < 100 < ladder.tokens_per_s(0, 16)
    ladder.observe(ANY_TASK, 0, 24, 24, 24.0)
    assert ladder.tokens_per_s(0, 64) > 40 and ladder.tokens_per_s(0, 24) > 40, "a stall spread to other batch sizes"


def test_the_ladder_follows_new_measurements() -> None:
    ladder = DecodeSpeedTable(["plain"])
    for _ in range(50):
        ladder.observe(ANY_TASK, 0, 1, 100, 1.0)
    for _ in range(50):
        ladder.observe(ANY_TASK, 0, 1, 200, 1.0)
    assert 190 < ladder.tokens_per_s(0, 1) <= 200


def test_each_task_has_its_own_speed() -> None:
    ladder = DecodeSpeedTable(["plain", "suffix"])
    ladder.observe("code", 1, 1, 400, 1.0)
    ladder.observe("chat", 1, 1, 100, 1.0)
    assert ladder.task_speed("code", 1) == pytest.approx(1.6) and ladder.task_speed("chat", 1) == pytest.approx(0.4)
    assert ladder.task_speed("maths", 1) == ladder.task_speed("code", 0) == 1.0


def test_a_ladder_file_round_trips(tmp_path: Path) -> None:
    rung = SpeedRow(ANY_TASK, "suffix", (1, 4), (200.0, 90.0), (5.0, 5.0), 0.6)
    path = tmp_path / "ladder.json"
    path.write_text(SpeedTableFile("a CPU", "a policy", 1e-4, (rung,)).to_json())
    ladder = started_table(["plain", "suffix"], SpeedTableFile.read(path, "ladder"))
    assert ladder.tokens_per_s(1, 4) == pytest.approx(90) and ladder.prefill_s(1000) == pytest.approx(0.1)


def test_an_exchange_starts_from_a_ladder_and_hands_out_what_it_learns() -> None:
    """So a run in NeMo-RL goes on where an earlier one has stopped."""
    rung = SpeedRow(ANY_TASK, "suffix", (1, 4), (200.0, 90.0), (5.0, 5.0))
    ladder = SpeedTableFile("H200", "a policy", 1e-4, (rung,))
    exchange = StragglerExchange(["suffix", "plain"], FastestOfNConfig(), 64, ladder)
    assert exchange.speed_table("H200", "a policy") == ladder
    exchange.join(0, 4)
    prompt = tuple(range(10))
    ((name, _),) = exchange.add(0, [ShardRequest(prompt, 0, (0, 0), b"")])
    for _ in range(2):
        made = TurnResult({name: ([7] * 100, [-1.0] * 100)}, work=TurnWork(1.0, 1.0, 100), steady=(name,))
        exchange.exchange(0, made)
    learned = exchange.speed_table("H200", "a policy")
    assert learned is not None and 100 < learned.rungs[0].tokens_per_s[0] < 200 and learned.rungs[0].method == "suffix"
    again = StragglerExchange(["suffix", "plain"], FastestOfNConfig(), 64, learned)
    assert again.speed_table("H200", "a policy") == learned
    assert StragglerExchange(["suffix"], FastestOfNConfig(), 64).speed_table("H200", "a policy") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format: 2 is out of range"),
        ({"rungs": [{"task": "any", "method": "x", "batches": [], "tokens_per_s": [], "weights_s": []}]}, "0 batches"),
        ({"rungs": [{"task": "any", "method": "x", "batches": [4, 1], "tokens_per_s": [1, 1], "weights_s": [1, 1]}]},
         "from small to large"),
    ],
)  # fmt: skip
def test_a_bad_ladder_file_is_refused_with_a_reason(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"device": "d", "policy": "p", "prefill_s_per_token": 1e-4, "rungs": [], **change}))
    with pytest.raises(ConfigError, match=f"fastest_of_n.ladder: .*{words}.*specrollout-lab ladder"):
        SpeedTableFile.read(path, "fastest_of_n.ladder")
    with pytest.raises(ConfigError, match="No such file"):
        SpeedTableFile.read(tmp_path / "none.json", "fastest_of_n.ladder")


# Request speeds


def test_a_request_s_speed_counts_more_with_more_tokens() -> None:
    speeds = RequestSpeeds(np.ones((2, 2)))
    assert (speeds.speeds() == 1.0).all() and (speeds.doubts() == SPREAD).all()
    speeds.observe(np.array([0]), 0, np.array([2 * HALF_TOKENS]), HALF_TOKENS)
    assert 1.3 < speeds.speeds()[0, 0] < 2.0 and speeds.doubts()[0, 0] < SPREAD
    assert 1.0 < speeds.speeds()[0, 1] < speeds.speeds()[0, 0], "another method does not learn from it"
    assert (speeds.speeds()[1] == 1.0).all()


def test_rows_of_ended_requests_are_reused() -> None:
    speeds = RequestSpeeds(np.ones((0, 1)))
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
    assert len(speeds.speeds()) <= 16, "ended requests keep their rows"


def test_a_request_begins_with_the_speed_of_its_task() -> None:
    assert RequestSpeeds(np.full((1, 1), 2.0)).speeds()[0, 0] == pytest.approx(2.0)


# Response lengths


def test_lengths_are_learned_from_all_and_from_siblings() -> None:
    lengths = LengthEstimator(max_length=1000)
    assert lengths.remaining([7], np.array([10])).tolist() == [10.0], "without data, a length does not double"
    for n in (100, 200, 300):
        lengths.finished(1, n)
    assert lengths.remaining([2], np.array([0])) == pytest.approx([200])
    assert lengths.remaining([2], np.array([250])) == pytest.approx([50])
    lengths.finished(2, 800)
    assert lengths.remaining([2], np.array([0]))[0] > lengths.remaining([3], np.array([0]))[0]


def test_a_text_that_was_made_ahead_tells_that_its_response_is_long() -> None:
    """So the straggler policy knows its candidates before the rollout begins."""
    lengths = LengthEstimator(max_length=1000)
    for n in (100, 200, 300):
        lengths.finished(1, n)
    begun, known = np.zeros(3, np.int64), np.array([0, 250, 990])
    assert lengths.remaining([2, 2, 2], begun, known) == pytest.approx([200, 300, 1000])
    assert lengths.remaining([2, 2, 2], np.array([0, 260, 995]), known) == pytest.approx([200, 40, 5])


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(0, 999))
def test_expected_remaining_tokens_stay_within_bounds(finished: list[int], so_far: int) -> None:
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


def test_the_longest_start_first_and_siblings_stay_together() -> None:
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    engines = longest_first(groups, np.array([9, 9, 5, 5, 4, 4, 1, 1.0]), np.zeros(2))
    assert all(engines[i] == engines[i + 1] for i in range(0, 8, 2))
    assert engines.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    one_group = longest_first([0] * 4, np.array([8.0, 1, 1, 6]), np.zeros(2))
    assert one_group.tolist() == [0, 1, 1, 1], "with too few prompts for the engines, siblings must part"
    assert longest_first([0, 1], np.array([1.0, 1.0]), np.array([9.0, 0.0, np.inf])).tolist() == [1, 1]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_loads_are_within_grahams_bound(lengths: list[float], num_engines: int) -> None:
    engines = longest_first(list(range(len(lengths))), np.array(lengths), np.zeros(num_engines))
    loads = np.bincount(engines, weights=lengths, minlength=num_engines)
    assert loads.max() <= sum(lengths) / num_engines + max(lengths) * (1 - 1 / num_engines) + 1e-6


# Configuration


def test_a_config_with_nothing_to_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="moving false and max_racers 1 leave nothing to do"):
        build(FastestOfNConfig, {"moving": False, "max_racers": 1}, "fastest_of_n")
