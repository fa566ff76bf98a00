# SPDX-License-Identifier: Apache-2.0
"""Did the drafter die in silence? Nothing fails when a head is all zeros or sees the wrong layers: it is only never right.

Shapes: K draft positions. A rate at position k is P(the first k + 1 drafts are all accepted), as in `acceptance.py`.
"""

import math
from dataclasses import dataclass, field

import numpy as np

EVENTS = ("refit", "publish", "wake")
COLLAPSE_SHARE = 1 / 3
STALE_SHARE = 0.75
# Content differs from request to request beyond chance: the variance of a step's accepted drafts is taken that much larger.
OVERDISPERSION = 2.0
MEMORY_DRAFTED = 20_000.0
ENOUGH_DRAFTED = 500.0
GATE_DRAFTED = 4000.0  # what the gate's figure weighs against what is seen after
# So many requests, at least, must agree that a drafter is dead: a few alone, the last of a rollout, may be hard to draft for.
MIN_REQUESTS = 16
MIN_RATE, MAX_RATE = 1e-3, 0.999
WEIGHT_CAUSES = ("non_finite", "all_zero", "shared", "differs", "layer_ids", "qkv", "rope")
"""Causes that lie in the head's weights or config. Of the others, a change of tasks may be what is behind them."""


@dataclass(frozen=True)
class HeadHealth:
    """What was found in the head's weights and its drafts, by a caller that can look; the defaults say nothing.

    `shares_target_tensors`: names of the head's own tensors that lie in the policy's memory. `age_in_versions`: refits since
    the head was published. `fails_in_long_contexts`: drafts fare as before in shorter ones (`context_canary.py`).
    `head_context`: the longest context, in tokens, that the head was made for, where the engine's may be longer.
    `rope_difference`: in words, how its RoPE differs from the policy's.
    """

    non_finite: bool = False
    all_zero: bool = False
    shares_target_tensors: tuple[str, ...] = ()
    differs_from_published: bool = False
    layer_ids_wrong: bool = False
    qkv_interleaved: bool = False
    fails_in_long_contexts: bool = False
    head_context: int | None = None
    rope_difference: str = ""
    age_in_versions: int = 0


def likely_cause(health: HeadHealth, event: str = "running") -> tuple[str, str]:
    """A word and a sentence for what most surely explains a collapse after `event`, by the evidence in order of certainty.

    A head may have been trained with a RoPE of its own. If it was right until a refit, its RoPE is not what is wrong.
    """
    made_for = f"; the head was made for {health.head_context} tokens" if health.head_context is not None else ""
    rope = f"; {health.rope_difference}" if health.rope_difference else ""
    is_rope_suspect = bool(rope) and (event != "refit" or health.age_in_versions == 0)
    shared = ", ".join(health.shares_target_tensors[:3])
    table = (
        (health.non_finite, "non_finite", "the head's weights are not all finite; publish an earlier head"),
        (health.all_zero, "all_zero", "tensors of the head are all zero: they were never loaded, or freed in sleep"),
        (bool(shared), "shared", f"the head's {shared} lie in the policy's memory, so that a refit overwrites them"),
        (health.differs_from_published, "differs", "the engine's head is not the one published; publish it again"),
        (
            health.layer_ids_wrong,
            "layer_ids",
            "the head is fed other layers than it was trained on; check its layer ids",
        ),
        (
            health.qkv_interleaved,
            "qkv",
            "the head's query, key and value rows are interleaved as Megatron's, not vLLM's",
        ),
        (
            health.fails_in_long_contexts,
            "context",
            f"context limit or RoPE, for drafts fail in long contexts only{made_for}{rope}",
        ),
        (is_rope_suspect, "rope", f"RoPE{rope}: if it was trained with the policy's, mend its config.json"),
        (health.age_in_versions > 0, "stale", f"the head is {health.age_in_versions} policy versions old; refresh it"),
    )
    for holds, cause, sentence in table:
        if holds:
            return cause, sentence
    return "unknown", (
        "nothing is known to be wrong with the head; if tasks are the same as before, compare its drafts with the trainer's"
    )


@dataclass(frozen=True)
class Alarm:
    """Acceptance is not what it was. `event`: the last of `EVENTS`, or `running` before any. `seen`, `expected`: shares of
    `num_drafted` draft tokens accepted. `cause`: a word of `likely_cause`."""

    event: str
    seen: float
    expected: float
    num_drafted: int
    cause: str
    sentence: str

    def explained_by(self, health: HeadHealth) -> "Alarm":
        """The same alarm in the light of evidence gathered since."""
        return alarm_of(self.event, self.seen, self.expected, self.num_drafted, health)


@dataclass
class _Evidence:
    """Drafts seen since they last looked healthy. `score`: log likelihood of collapse over health, at least 0."""

    score: float = 0.0
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_expected: float = 0.0


@dataclass
class _Level:
    """Decayed counts by position, and what they say of the rates."""

    drafted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))
    accepted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def is_known(self) -> bool:
        return float(self.drafted_K.sum()) >= ENOUGH_DRAFTED

    def rates(self, num_positions: int) -> np.ndarray:
        """Rates at the first positions, float64 [num_positions]; beyond those seen they fall as before."""
        rates_K = np.clip(self.accepted_K / np.maximum(self.drafted_K, 1.0), MIN_RATE, MAX_RATE)[self.drafted_K >= 1.0]
        step = float(rates_K[-1] ** (1 / len(rates_K))) if len(rates_K) else MIN_RATE
        missing = num_positions - len(rates_K)
        last = rates_K[-1] if len(rates_K) else 1.0
        return np.concatenate([rates_K, last * step ** np.arange(1, missing + 1)])[:num_positions]

    def learn(self, drafted_K: np.ndarray, accepted_K: np.ndarray) -> None:
        num_positions = max(len(drafted_K), len(self.drafted_K))
        decay = math.exp(-float(drafted_K.sum()) / MEMORY_DRAFTED)
        self.drafted_K = decay * _padded(self.drafted_K, num_positions) + _padded(drafted_K, num_positions)
        self.accepted_K = decay * _padded(self.accepted_K, num_positions) + _padded(accepted_K, num_positions)


class Canary:
    """Watches one model drafter; raises an alarm when its drafts fare as if at most a third as many were accepted.

    It sums up the log likelihood ratio of "a third" to "as before", never below zero (Page's CUSUM, Biometrika 1954). The
    variance of nested positions is exact, that of content an allowance (`OVERDISPERSION`). With independent requests a healthy
    drafter is accused less than once in `drafts_per_false_alarm` draft tokens; as requests differ, no fewer than 16 of them,
    over one event or several, make an alarm. The level follows what is seen, so that slow changes raise no alarm of a
    collapse; one of a stale head is raised once after each publish, when acceptance has fallen to 3/4 of what it was. After
    an alarm it is silent, and learns nothing, until the next event.

    Example: `canary.begin("refit")`, then after each engine step `alarm = canary.observe(drafted_K, accepted_K)`.
    """

    def __init__(self, drafts_per_false_alarm: float = 1e9, max_age: int | None = None) -> None:
        self.threshold = math.log(drafts_per_false_alarm)
        self.max_age = max_age
        self._event = "running"
        self._told_stale = self._told_old = False
        self.begin_again()

    @property
    def knows(self) -> bool:
        """Whether enough was seen, or told, to say what is as before."""
        return self._level.is_known

    def expected(self, drafted_K: np.ndarray) -> float:
        """How many of these drafts would be accepted if all were as before."""
        return float((drafted_K * self._level.rates(len(drafted_K))).sum())

    def begin_like(self, other: "Canary", num_positions: int) -> None:
        """Expects what `other` does, until more is seen."""
        drafted_K = np.full(num_positions, GATE_DRAFTED / num_positions)
        self._level.learn(drafted_K, drafted_K * other._level.rates(num_positions))

    def begin(self, event: str, expected_length: float | None = None, num_positions: int = 3) -> None:
        """What follows comes after `event`. The level stays what it was, unless `expected_length`, the gate's held-out figure
        for a head that drafts `num_positions` tokens, says what it will be.

        Raises ValueError for another event than those of `EVENTS`.
        """
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; known: {', '.join(EVENTS)}")
        self._event, self.is_silent, self._num_requests = event, False, 0
        if event == "publish":
            self._evidence, self._reference = _Evidence(), _Level()
            self._told_stale = self._told_old = False
            if expected_length is not None:
                rates_K = geometric_rates(expected_length, num_positions)
                drafted_K = np.full(num_positions, GATE_DRAFTED / num_positions)
                self._level = _Level(drafted_K, drafted_K * rates_K)
        self._carried = self._evidence.score

    def begin_again(self) -> None:
        """Forgets what is usual, and learns it again before the next alarm."""
        self._level, self._reference, self._evidence = _Level(), _Level(), _Evidence()
        self._carried, self._num_requests, self.is_silent = 0.0, 0, False

    def observe(
        self, drafted_K: np.ndarray, accepted_K: np.ndarray, health: HeadHealth = HeadHealth(), num_steps: int = 1
    ) -> Alarm | None:
        """Learns of the draft tokens of `num_steps` engine steps, verified and accepted, by position: counts [K],
        non-increasing."""
        num_drafted = float(drafted_K.sum())
        if num_drafted == 0 or self.is_silent:
            return None
        if self._level.is_known:
            self._num_requests = max(self._num_requests, int(drafted_K[0]) // num_steps)
            alarm = self._collapse(drafted_K, accepted_K, health)
            if alarm is not None:
                return alarm
        self._level.learn(drafted_K, accepted_K)
        if float(self._reference.drafted_K.sum()) < MEMORY_DRAFTED / 2:
            self._reference.learn(drafted_K, accepted_K)
        return self._decline(health)

    def _collapse(self, drafted_K: np.ndarray, accepted_K: np.ndarray, health: HeadHealth) -> Alarm | None:
        evidence, rates_K = self._evidence, self._level.rates(len(drafted_K))
        most = self._carried + self.threshold / MIN_REQUESTS * self._num_requests
        evidence.score = min(evidence.score + log_likelihood_ratio(drafted_K, accepted_K, rates_K), most)
        if evidence.score <= 0.0:
            self._evidence, self._carried, self._num_requests = _Evidence(), 0.0, 0
            return None
        evidence.num_drafted += float(drafted_K.sum())
        evidence.num_accepted += float(accepted_K.sum())
        evidence.num_expected += float((drafted_K * rates_K).sum())
        if evidence.score < self.threshold:
            return None
        self.is_silent, self._evidence = True, _Evidence()
        seen, expected = evidence.num_accepted / evidence.num_drafted, evidence.num_expected / evidence.num_drafted
        return alarm_of(self._event, seen, expected, int(evidence.num_drafted), health)

    def _decline(self, health: HeadHealth) -> Alarm | None:
        """An alarm of a head that no longer suits the policy, once after each publish; and one of its mere age."""
        if health.age_in_versions == 0 or float(self._reference.drafted_K.sum()) < MEMORY_DRAFTED / 2:
            return None
        drafted_K = self._level.drafted_K
        num_drafted = float(drafted_K.sum())
        seen = float(self._level.accepted_K.sum()) / num_drafted
        expected = float((drafted_K * self._reference.rates(len(drafted_K))).sum()) / num_drafted
        is_old = self.max_age is not None and health.age_in_versions > self.max_age and not self._told_old
        is_stale = seen < STALE_SHARE * expected and not self._told_stale
        if not (is_old or is_stale):
            return None
        self._told_old, self._told_stale = self._told_old or is_old, self._told_stale or is_stale
        return alarm_of(self._event, seen, expected, int(num_drafted), health)


def log_likelihood_ratio(drafted_K: np.ndarray, accepted_K: np.ndarray, rates_K: np.ndarray) -> float:
    """Of "a third of that" to "`rates_K` as before", in units of independent draft tokens.

    A draft is accepted only if those before it are, so that outcomes of a request's positions go together; the sum is
    divided by how much larger that, and content, make the variance of the number accepted.
    """
    dead_K = COLLAPSE_SHARE * rates_K
    missed_K = drafted_K - accepted_K
    total = (accepted_K * np.log(dead_K / rates_K) + missed_K * np.log((1.0 - dead_K) / (1.0 - rates_K))).sum()
    independent = float((drafted_K * rates_K * (1.0 - rates_K)).sum())
    before_K = np.concatenate([[0.0], np.cumsum(1.0 - rates_K)[:-1]])
    together = 2.0 * float((drafted_K * rates_K * before_K).sum())
    return float(total) / (OVERDISPERSION * (1.0 + together / independent))


def geometric_rates(acceptance_length: float, num_positions: int) -> np.ndarray:
    """Rates by position of a drafter that is right equally often everywhere and yields `acceptance_length` tokens a step."""
    low, high = 0.0, 1.0
    positions_K = np.arange(1, num_positions + 1)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle**positions_K).sum() < acceptance_length - 1.0 else (low, middle)
    return np.clip(low**positions_K, MIN_RATE, MAX_RATE)


def alarm_of(event: str, seen: float, expected: float, num_drafted: int, health: HeadHealth) -> Alarm:
    """The alarm, with what `health` makes the likely cause."""
    cause, why = likely_cause(health, event)
    after = "while running" if event == "running" else f"after a {event}"
    sentence = f"{after} {seen:.1%} of {num_drafted:,} draft tokens were accepted, {expected:.1%} expected: {why}"
    return Alarm(event, seen, expected, num_drafted, cause, sentence)


def _padded(values_K: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values_K, np.zeros(length - len(values_K))])
