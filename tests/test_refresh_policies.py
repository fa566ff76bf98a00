# SPDX-License-Identifier: Apache-2.0
"""Policies of a draft head: refresh triggers, the publish gate, and the canary."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.config.block import DraftRefreshConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.heads.decisions.canary import (
    Alarm,
    Canary,
    HeadHealth,
    geometric_rates,
    likely_cause,
)
from nemo_specrollout.heads.decisions.publish_gate import PublishGate
from nemo_specrollout.heads.decisions.refresh_schedule import (
    MIN_SHARE,
    DecodeCosts,
    RefreshDecision,
    RefreshOutlook,
    RefreshRate,
    RefreshSchedule,
    StepFacts,
    head_use,
)

pytestmark = pytest.mark.unit

COSTS = DecodeCosts(1.2e-3, 2e-3)
AT_STEP_12 = {
    "length": 2.62, "published_length": 2.91, "steps_since": 12, "run_s": 400.0,
    "outlook": RefreshOutlook(6.0, surplus=0.0),
}  # fmt: skip
"""State of a schedule."""


def auto(max_time_share: float, margin: float = 0.25, min_gap: int = 2, in_background: bool = False) -> RefreshSchedule:
    config = DraftRefreshConfig(max_time_share=max_time_share, margin=margin, min_gap=min_gap)
    return RefreshSchedule(config, in_background)


def every(interval: int, max_time_share: float = 1.0) -> RefreshSchedule:
    return RefreshSchedule(DraftRefreshConfig("interval", interval, max_time_share=max_time_share))


def decided(
    schedule: RefreshSchedule, steps_to_come: int = 40, costs: DecodeCosts = COSTS, **state: Any
) -> RefreshDecision:
    """Returns the decision in the state `AT_STEP_12`, with changes."""
    vars(schedule).update(AT_STEP_12 | state)
    return schedule.decide(14_000, steps_to_come, costs)


def decide_for(schedule: RefreshSchedule, num_steps: int, **changes: Any) -> list[bool]:
    return [decided(schedule, steps_since=i + 1, **changes).refresh for i in range(num_steps)]


def run_seconds(schedule: RefreshSchedule, fall: float, refresh_s: float, num_steps: int = 200) -> float:
    """Returns the seconds of a run whose acceptance length is 3.0 after a refresh and falls by `fall` in each step."""
    length, since, seconds, waited = 3.0, 0, 0.0, 0.0
    for step in range(num_steps):
        seconds, since = seconds + 14_000 * COSTS.token_s(length), since + 1
        length -= fall
        state = {"length": length, "published_length": 3.0, "steps_since": since, "run_s": seconds, "waited_s": waited}
        outlook = RefreshOutlook(refresh_s, surplus=0.0)
        if decided(schedule, num_steps - step - 1, outlook=outlook, **state).refresh:
            seconds, waited, length, since = seconds + refresh_s, waited + refresh_s, 3.0, 0
    return seconds


@pytest.mark.parametrize("fall", [0.0, 0.002, 0.01, 0.05])
@pytest.mark.parametrize("refresh_s", [0.2, 2.0, 40.0])
def test_the_auto_trigger_is_near_the_best_interval(fall: float, refresh_s: float) -> None:
    best = min(run_seconds(every(n), fall, refresh_s) for n in (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 999))
    assert run_seconds(auto(1.0, 0.25, 1), fall, refresh_s) <= 1.03 * best


def test_the_reason_states_gain_and_cost() -> None:
    schedule = auto(1.0)
    decisions = [decided(schedule, steps_since=i) for i in range(2, 12)]
    assert not decisions[0].refresh and "too early" in decisions[0].reason
    (first,) = [d for d in decisions if d.refresh][:1]
    assert first.reason.startswith(
        "refreshed: acceptance length fell from 2.91 to 2.62; at 14,000 tokens per step the 40 "
    )
    assert first.reason.endswith("s for 6 s of training") and first.gain_s > 6.0


def test_a_head_is_judged_by_its_own_steps_and_its_share() -> None:
    assert head_use({}, {}, 9) == head_use({"eagle3": [0, 0]}, {"eagle3": [0, 0]}, 9) == (None, 0.0)
    beside_text = {"suffix": [20, 9], "eagle3": [10, 6]}, {"suffix": [5, 0], "eagle3": [8, 3]}
    assert head_use(*beside_text, 40) == (2.1, 0.25)

    schedule, costs = RefreshSchedule(DraftRefreshConfig(trigger="auto")), DecodeCosts(1.2e-3, 2e-3)

    def gain_s(length: float | None, share: float) -> float:
        return schedule.after_step(StepFacts(length, 10_000, 10.0, 50, costs, share)).gain_s

    hoped_for = gain_s(3.0, 0.01)
    assert gain_s(None, 0.0) == hoped_for > 0.0, "a step without drafts changed the outlook"
    schedule.refreshed(2.0, 1.1)
    assert gain_s(3.2, 0.2) > 0.0
    usual = gain_s(3.2, 0.1)
    assert 0.0 < usual < 0.3 * hoped_for
    assert gain_s(2.8, 0.02) > usual, "a worse head drafts less, which must not lower the gain"


def test_no_refresh_happens_without_a_gain() -> None:
    assert not any(decide_for(auto(1.0), 50, length=2.91))
    assert not any(decide_for(auto(1.0), 50, steps_to_come=2))
    assert not any(decide_for(auto(1.0), 50, costs=DecodeCosts(1e-4, 2e-3)))
    assert any(decide_for(auto(1.0), 50))


def test_training_in_idle_time_is_free_but_keeps_the_gap() -> None:
    decisions = decide_for(auto(1.0, min_gap=4, in_background=True), 6, steps_to_come=1)
    assert decisions == [False, False, False, True, True, True]


def test_refused_heads_make_refreshes_rarer() -> None:
    outlook, firsts = RefreshOutlook(0.01, surplus=0.0), []
    for _ in range(4):
        firsts.append(decide_for(auto(1.0), 200, outlook=outlook).index(True))
        outlook = outlook.after_rejection(0.01)
    assert firsts == sorted(set(firsts)) and firsts[3] >= 15
    assert outlook.after_publish(2.5, 3.0, 3.0, 0.01).num_rejected == 0


def test_the_outlook_learns_the_recovery_of_refreshes() -> None:
    outlook = RefreshOutlook(1.0)
    for _ in range(12):
        outlook = outlook.after_publish(2.5, 3.0, 2.7, seconds=5.0)
    assert outlook.recovery == pytest.approx(0.4, abs=0.01) and outlook.refresh_s == pytest.approx(5.0, abs=0.01)
    assert outlook.surplus == 0.0
    hopeful = RefreshOutlook(1.0).after_publish(2.0, 2.0, 2.6, 1.0)
    assert hopeful.surplus == pytest.approx(0.35) and hopeful.recovery == 1.0


def test_all_triggers_respect_the_time_share() -> None:
    late = {"run_s": 100.0, "waited_s": 18.0}
    for schedule in (every(1, 0.2), every(2, 0.2), auto(0.2)):
        assert not any(decide_for(schedule, 20, **late))
        assert any(decide_for(schedule, 20, run_s=1000.0, waited_s=0.0))
    assert "more than the share 0.2" in decided(every(1, 0.2), **late).reason


@given(best=st.floats(0.003, 3.0), noise=st.floats(0.0, 0.02), seed=st.integers(0, 1000))
def test_refreshes_find_a_rate_that_does_not_harm_the_head(best: float, noise: float, seed: int) -> None:
    """Candidates are worse if the rate is above the share `best` of the usual one."""
    rate, rng, late = RefreshRate(), np.random.default_rng(seed), []
    for n in range(60):
        difference = 0.1 * (1.0 - rate.share / best) + noise * rng.standard_normal()
        rate.judged(difference, published=difference > 0.04)
        late += [rate.share] if n >= 20 else []
    assert np.median(late) <= min(1.0, 2.0 * best)
    assert max(late) >= min(1.0, best / 10), "the rate stays too low"


def test_only_a_worse_candidate_lowers_the_learning_rate() -> None:
    rate = RefreshRate()
    rate.judged(math.nan, published=False)
    rate.judged(0.01, published=False)
    assert rate.share == 1.0
    rate.judged(-math.inf, published=False)
    assert rate.share == pytest.approx(1 / 3)
    for _ in range(100):
        rate.judged(-1.0, published=False)
    assert rate.share == MIN_SHARE
    for _ in range(100):
        rate.judged(1.0, published=True)
    assert rate.share == 1.0


def test_fixed_intervals() -> None:
    assert decide_for(every(3), 4) == [False, False, True, True]
    assert all(decide_for(every(1), 4)) and not any(decide_for(every(1), 4, steps_to_come=0))


@pytest.mark.parametrize(
    ("trigger", "instead"),
    [("every_step", "write trigger: interval, with interval: 1"), ("never", "remove draft_refresh")],
)
def test_a_trigger_of_earlier_versions_is_refused_with_what_to_use_instead(trigger: str, instead: str) -> None:
    sentence = f"^draft_refresh.trigger: '{trigger}' is no longer available; {instead}"
    with pytest.raises(ConfigError, match=sentence):
        build(DraftRefreshConfig, {"trigger": trigger}, "draft_refresh")


def test_the_config_block_is_strict() -> None:
    assert build(DraftRefreshConfig, {}, "draft_refresh") == DraftRefreshConfig()
    for wrong in ({"triger": "auto"}, {"trigger": "often"}, {"confidence": 1.0}, {"rollout_capture_share": 0.0}):
        with pytest.raises(ConfigError, match="draft_refresh"):
            build(DraftRefreshConfig, wrong, "draft_refresh")


def publish_rate(shift: float, num_pairs: int, num_sequences: int, confidence: float = 0.95, seed: int = 0) -> float:
    """Returns the share of published heads that are better by `shift`, on sequences of 100 to 2000 tokens."""
    rng, gate, num_published = np.random.default_rng(seed), PublishGate(confidence), 0
    for _ in range(num_pairs):
        tokens_N = rng.integers(100, 2000, num_sequences).astype(float)
        level_N = rng.uniform(1.8, 3.4, num_sequences)
        noise_N = rng.normal(size=(2, num_sequences)) * 0.6 * level_N / np.sqrt(tokens_N / level_N)
        candidate_N = level_N + shift + noise_N[0] + 0.05 * rng.normal(size=num_sequences)
        num_published += gate.decide(candidate_N, level_N + noise_N[1], tokens_N).published
    return num_published / num_pairs


@pytest.mark.parametrize("num_sequences", [8, 40])
def test_false_publishes_stay_within_the_confidence(num_sequences: int) -> None:
    assert publish_rate(0.0, 5_000, num_sequences) < 0.057  # 0.05 plus sampling error
    assert publish_rate(-0.05, 1_000, num_sequences) < 0.03
    assert publish_rate(0.0, 1_000, num_sequences, confidence=0.8) < 0.24


def test_a_better_head_passes() -> None:
    assert publish_rate(0.2, 500, 40) > 0.99
    assert publish_rate(0.5, 500, 8) > 0.95


def test_samples_of_one_prompt_count_as_one() -> None:
    rng, gate, num_published = np.random.default_rng(1), PublishGate(), 0
    groups_N = np.repeat(np.arange(20), 8)
    for _ in range(2000):
        differences_N = rng.normal(size=20)[groups_N] * 0.2 + 0.02 * rng.normal(size=160)
        num_published += gate.decide(2.5 + differences_N, np.full(160, 2.5), np.ones(160), groups_N).published
    assert num_published / 2000 < 0.06
    assert not gate.decide(np.full(160, 3.0), np.full(160, 2.5), np.ones(160), groups_N % 7).published


def test_the_gate_refuses_bad_input() -> None:
    gate, good, weights = PublishGate(), np.linspace(2.0, 3.0, 10), np.ones(10)
    for bad in (np.nan, np.inf):
        broken = np.where(np.arange(10) == 3, bad, good)
        assert "not numbers" in gate.decide(broken, good, weights).reason
        assert not gate.decide(good + 1, broken, weights).published
    assert "too few" in gate.decide(good[:7] + 1, good[:7], weights[:7]).reason
    with pytest.raises(ValueError, match="weights"):
        gate.decide(good, good, 0 * weights)
    with pytest.raises(ValueError, match="same sequences"):
        gate.decide(good, good, weights[:5])


def test_a_first_head_must_gain_and_tolerance_is_respected() -> None:
    gate, weights = PublishGate(), np.ones(20)
    spread = np.linspace(-0.05, 0.05, 20)
    assert gate.decide(1.5 + spread, None, weights).published
    assert not gate.decide(1.05 + spread, None, weights).published
    assert not gate.decide(2.45 + spread, np.full(20, 2.5), weights).published
    tolerant = PublishGate(tolerance=0.1).decide(2.45 + spread, np.full(20, 2.5), weights)
    assert tolerant.published and tolerant.bound < tolerant.difference < 0.0 and "published" in tolerant.reason


def rollout(
    rng: np.random.Generator, canary: Canary, right: float, drafted: int, health: HeadHealth, spread: float = 30.0
) -> tuple[Alarm | None, int]:
    """Runs a rollout of 64 requests with different acceptance, fewer and fewer. Returns the alarm and the draft tokens."""
    chances, seen = rng.beta(right * spread, (1 - right) * spread, 64), 0
    while seen < drafted:
        alive = max(4, int(64 * (1 - seen / drafted)))
        accepted_BK = np.cumprod(rng.random((alive, 3)) < chances[:alive, None], axis=1)
        alarm = canary.observe(np.full(3, alive), accepted_BK.sum(axis=0), health)
        seen += 3 * alive
        if alarm is not None:
            return alarm, seen
    return None, seen


def test_a_healthy_drafter_raises_no_alarm() -> None:
    rng, canary, right = np.random.default_rng(0), Canary(), 0.7
    for _ in range(200):
        canary.begin("refit")
        right = float(np.clip(right * (1 + 0.04 * rng.normal()), 0.3, 0.9))
        assert rollout(rng, canary, right, 10_000, HeadHealth())[0] is None


@pytest.mark.parametrize("right", [0.8, 0.6, 0.45])
@pytest.mark.parametrize("is_zero", [True, False])
def test_a_collapse_is_detected_within_hundreds_of_drafts(right: float, is_zero: bool) -> None:
    # The acceptance at which a geometric chain has a third of the accepted drafts.
    third = geometric_rates(1.0 + geometric_sum(right) / 3.0, 3)[0]
    needed = []
    for seed in range(10):
        rng, canary = np.random.default_rng(seed), Canary()
        assert rollout(rng, canary, right, 8000, HeadHealth())[0] is None
        canary.begin("wake")
        alarm, seen = rollout(rng, canary, 1e-6 if is_zero else third, 8000, HeadHealth(all_zero=is_zero), 1e3)
        assert alarm is not None and alarm.event == "wake" and alarm.seen < 0.5 * alarm.expected
        assert alarm.cause == ("all_zero" if is_zero else "unknown") and "after a wake" in alarm.sentence
        needed.append(seen)
    print(f"right {right}, zero {is_zero}: {np.median(needed):.0f} drafts, at most {max(needed)}")
    assert np.median(needed) <= (600 if is_zero or right > 0.5 else 1200)


def geometric_sum(right: float) -> float:
    return right + right**2 + right**3


def test_few_requests_raise_an_alarm_only_over_several_rollouts() -> None:
    canary = Canary()
    canary.observe(np.full(3, 4000), np.array([2800, 1960, 1372]))
    alarms = []
    for _ in range(12):
        canary.begin("refit")
        alarms.append(next(filter(None, (canary.observe(np.full(3, 2), np.zeros(3)) for _ in range(40))), None))
    assert not any(alarms[:6]) and any(alarms)


def test_a_published_head_must_reach_the_gate_s_figure() -> None:
    canary = Canary()
    canary.begin("publish", expected_length=2.5, num_positions=3)
    alarm = next(filter(None, (canary.observe(np.full(3, 32), np.array([2, 0, 0])) for _ in range(20))))
    assert alarm.event == "publish" and alarm.expected == pytest.approx(0.5, abs=0.04)
    assert canary.observe(np.full(3, 3200), np.zeros(3)) is None  # The alarm comes once.


def test_a_slow_decline_of_an_old_head_raises_one_stale_alarm() -> None:
    for age in (0, 5):
        canary, alarms, rng = Canary(), [], np.random.default_rng(0)
        for step in range(30):
            canary.begin("refit")
            right = 0.75 - 0.012 * step
            alarms.append(rollout(rng, canary, right, 10_000, HeadHealth(age_in_versions=age))[0])
        causes = [a.cause for a in alarms if a is not None]
        assert causes == (["stale"] if age else [])


def test_age_alone_raises_an_alarm_if_configured() -> None:
    rng = np.random.default_rng(0)
    for max_age, expected in ((None, 0), (10, 1)):
        canary = Canary(max_age=max_age)
        alarms = [rollout(rng, canary, 0.7, 6000, HeadHealth(age_in_versions=age))[0] for age in range(20)]
        assert sum(a is not None for a in alarms) == expected


def test_causes_are_named_in_order_of_certainty() -> None:
    everything = HeadHealth(True, True, ("lm_head.weight",), True, True, "its rope_theta is 5, not 7", 3)
    blank = HeadHealth()
    order = []
    for change in (
        {}, {"non_finite": False}, {"all_zero": False}, {"shares_target_tensors": ()}, {"differs_from_published": False},
        {"layer_ids_wrong": False}, {"rope_difference": ""}, {"age_in_versions": 0},
    ):  # fmt: skip
        everything = dataclasses.replace(everything, **change)
        order.append(likely_cause(everything)[0])
    names = ["non_finite", "all_zero", "shared", "differs", "layer_ids", "rope", "stale", "unknown"]
    assert order == names and likely_cause(blank)[0] == "unknown"
    assert Alarm("wake", 0.1, 0.6, 300, HeadHealth(all_zero=True)).cause == "all_zero"
    own_rope = HeadHealth(rope_difference="its rope_theta is 5, not 7", age_in_versions=3)
    assert [likely_cause(own_rope, event)[0] for event in ("publish", "refit")] == ["rope", "stale"]
    assert "RoPE; its rope_theta is 5, not 7" in likely_cause(own_rope, "publish")[1]
