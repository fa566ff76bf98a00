# SPDX-License-Identifier: Apache-2.0
"""The canary of a draft head, which raises an alarm if acceptance collapses or declines, and names the likely cause.

It is needed because a head that is all zeros or reads the wrong layers causes no error. Its drafts are just never accepted.

Shapes: K draft positions. A rate at position k is P(the first k + 1 drafts are all accepted).
"""

import math
from dataclasses import dataclass, field

import numpy as np

COLLAPSE_SHARE = 1 / 3
"""Acceptance that is assumed after a collapse, as a share of the expected acceptance."""
STALE_SHARE = 0.75
"""Share of the acceptance after the last publish below which a head is stale."""
THRESHOLD = math.log(1e9)
"""Score at which an alarm is raised. It is the logarithm of the number of draft tokens per false alarm."""
OVERDISPERSION = 2.0
"""Factor on the variance of the accepted drafts of an engine step, because requests differ by more than chance."""
MEMORY_DRAFTED = 20_000.0
"""Number of draft tokens after which earlier counts decay to 1/e."""
ENOUGH_DRAFTED = 500.0
"""Number of draft tokens after which the normal level of acceptance counts as known."""
GATE_DRAFTED = 4000.0
"""Number of draft tokens as which the publish gate's measurement of acceptance counts."""
MIN_REQUESTS = 16
"""Minimum number of requests behind a collapse alarm, because the last few requests of a rollout may just be hard to draft
for."""
MIN_RATE = 1e-3
MAX_RATE = 0.999
WEIGHT_CAUSES = ("non_finite", "all_zero", "shared", "differs", "layer_ids", "rope")
"""Causes of a collapse that lie in the head's weights or config. If it has none of them, the tasks may have changed."""


@dataclass(frozen=True)
class HeadHealth:
    """Findings about a head's weights and drafts. The defaults mean that nothing was found."""

    non_finite: bool = False
    all_zero: bool = False
    shares_target_tensors: tuple[str, ...] = ()
    """Names of the head's own tensors that share the policy's memory."""
    differs_from_published: bool = False
    layer_ids_wrong: bool = False
    rope_difference: str = ""
    """Description of how the head's RoPE differs from the policy's."""
    age_in_versions: int = 0
    """Number of refits since the head was published."""


def likely_cause(health: HeadHealth, event: str = "running") -> tuple[str, str]:
    """Returns a word and a sentence for the likely cause of a collapse after `event`.

    If several causes are possible, the one with the most certain evidence is returned. A head may have been trained with its
    own RoPE, so if its drafts were right until a refit, its RoPE is not the cause.
    """
    rope = health.rope_difference
    is_rope_suspect = bool(rope) and (event != "refit" or health.age_in_versions == 0)
    shared = ", ".join(health.shares_target_tensors[:3])
    causes = (
        (health.non_finite, "non_finite", "the head's weights are not all finite; publish an earlier head"),
        (health.all_zero, "all_zero", "tensors of the head are all zero: they were never loaded, or freed in sleep"),
        (bool(shared), "shared", f"the head's {shared} lie in the policy's memory, so a refit overwrites them"),
        (health.differs_from_published, "differs", "the engine's head is not the published one; publish it again"),
        (health.layer_ids_wrong, "layer_ids", "the head gets other layers than in training; check its layer ids"),
        (is_rope_suspect, "rope", f"RoPE; {rope}: if it was trained with the policy's, correct its config.json"),
        (health.age_in_versions > 0, "stale", f"the head is {health.age_in_versions} policy versions old; refresh it"),
        (
            True,
            "unknown",
            "no fault of the head is known; if the tasks are unchanged, compare its drafts with the trainer's",
        ),
    )
    return next((word, sentence) for is_found, word, sentence in causes if is_found)


@dataclass(frozen=True)
class Alarm:
    """Alarm about a head's acceptance."""

    event: str
    """Last event before the alarm, or `running` before any."""
    seen: float
    """Share of draft tokens that were accepted."""
    expected: float
    num_drafted: int
    health: HeadHealth

    @property
    def cause(self) -> str:
        """Word for the likely cause (`likely_cause`)."""
        return likely_cause(self.health, self.event)[0]

    @property
    def sentence(self) -> str:
        after = "while running" if self.event == "running" else f"after a {self.event}"
        return (
            f"{after} {self.seen:.1%} of {self.num_drafted:,} draft tokens were accepted, {self.expected:.1%} expected: "
            f"{likely_cause(self.health, self.event)[1]}"
        )


@dataclass
class _Evidence:
    """Evidence for a collapse, summed since the drafts last looked healthy."""

    score: float = 0.0
    """Log likelihood ratio of a collapse to a healthy head, at least 0."""
    carried: float = 0.0
    """Score at the last event. It counts in full afterwards, however few requests there are then."""
    num_requests: int = 0
    """Largest number of requests in an engine step since the last event."""
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_expected: float = 0.0


@dataclass
class Level:
    """The normal level of acceptance, as decayed counts by position and the rates that follow from them."""

    drafted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))
    accepted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def is_known(self) -> bool:
        return float(self.drafted_K.sum()) >= ENOUGH_DRAFTED

    def rates(self, num_positions: int) -> np.ndarray:
        """Returns the rates at the first positions, float64 [num_positions].

        Positions without drafts so far get rates that continue the mean decline over the positions with drafts.
        """
        rates_K = np.clip(self.accepted_K / np.maximum(self.drafted_K, 1.0), MIN_RATE, MAX_RATE)[self.drafted_K >= 1.0]
        step = float(rates_K[-1] ** (1 / len(rates_K))) if len(rates_K) else MIN_RATE
        missing = num_positions - len(rates_K)
        last = rates_K[-1] if len(rates_K) else 1.0
        return np.concatenate([rates_K, last * step ** np.arange(1, missing + 1)])[:num_positions]

    def expected(self, drafted_K: np.ndarray) -> float:
        return float((drafted_K * self.rates(len(drafted_K))).sum())

    def assume(self, rates_K: np.ndarray) -> None:
        """Assumes these rates until there is more data."""
        drafted_K = np.full(len(rates_K), GATE_DRAFTED / len(rates_K))
        self.learn(drafted_K, drafted_K * rates_K)

    def learn(self, drafted_K: np.ndarray, accepted_K: np.ndarray) -> None:
        num_positions = max(len(drafted_K), len(self.drafted_K))
        decay = math.exp(-float(drafted_K.sum()) / MEMORY_DRAFTED)
        before = num_positions - len(self.drafted_K)
        latest = num_positions - len(drafted_K)
        self.drafted_K = decay * np.pad(self.drafted_K, (0, before)) + np.pad(drafted_K, (0, latest))
        self.accepted_K = decay * np.pad(self.accepted_K, (0, before)) + np.pad(accepted_K, (0, latest))


class Canary:
    """Watches the acceptance of one draft model. Owns the expected rates and the evidence against them.

    The collapse alarm is a CUSUM test (Page, Biometrika 1954) of the log likelihood ratio of "a third of the acceptance" to
    "as before". With independent requests, a healthy head causes a false alarm less than once in 10^9 draft tokens. The
    expected rates follow the observed ones, so slow changes cause no collapse alarm. A staleness alarm is raised once after
    each publish if acceptance has fallen to `STALE_SHARE`. After a collapse alarm the canary is silent until the next event
    (`begin`).
    """

    def __init__(self, max_age: int | None = None) -> None:
        self.max_age = max_age
        self._event = "running"
        self._told_stale = self._told_old = False
        self.begin_again()

    def begin(self, event: str, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Notes an event, which is a `refit`, a `publish` or a `wake` from sleep.

        `expected_length` is the publish gate's acceptance length of a head that drafts `num_positions` tokens, if known.
        """
        self._event = event
        self.is_silent = False
        if event == "publish":
            self._evidence = _Evidence()
            self._reference = Level()
            self._told_stale = self._told_old = False
            if expected_length is not None:
                self.level = Level()
                self.level.assume(geometric_rates(expected_length, num_positions))
        self._evidence.carried = self._evidence.score
        self._evidence.num_requests = 0

    def begin_again(self) -> None:
        """Forgets the expected rates, and learns them again before the next alarm."""
        self.level = Level()
        self._reference = Level()
        self._evidence = _Evidence()
        self.is_silent = False

    def observe(
        self, drafted_K: np.ndarray, accepted_K: np.ndarray, health: HeadHealth = HeadHealth(), num_steps: int = 1
    ) -> Alarm | None:
        """Adds the verified and accepted draft tokens of `num_steps` engine steps, by position. Returns an alarm or None."""
        if self.is_silent or not drafted_K.any():
            return None
        if self.level.is_known:
            self._evidence.num_requests = max(self._evidence.num_requests, int(drafted_K[0]) // num_steps)
            alarm = self._collapse(drafted_K, accepted_K, health)
            if alarm is not None:
                return alarm
        self.level.learn(drafted_K, accepted_K)
        if float(self._reference.drafted_K.sum()) < MEMORY_DRAFTED / 2:
            self._reference.learn(drafted_K, accepted_K)
        return self._decline(health)

    def _collapse(self, drafted_K: np.ndarray, accepted_K: np.ndarray, health: HeadHealth) -> Alarm | None:
        """Adds an engine step to the evidence for a collapse, and returns an alarm if there is enough of it.

        Since the last event, the score grows by at most `THRESHOLD / MIN_REQUESTS` for each request of the largest engine
        step. So it can only rise from zero to the threshold if an engine step has `MIN_REQUESTS` requests. This is wanted
        because the last few requests of a rollout may just be hard to draft for.
        """
        evidence = self._evidence
        rates_K = self.level.rates(len(drafted_K))
        most = evidence.carried + THRESHOLD / MIN_REQUESTS * evidence.num_requests
        evidence.score = min(evidence.score + log_likelihood_ratio(drafted_K, accepted_K, rates_K), most)
        if evidence.score <= 0.0:
            self._evidence = _Evidence()
            return None
        evidence.num_drafted += float(drafted_K.sum())
        evidence.num_accepted += float(accepted_K.sum())
        evidence.num_expected += self.level.expected(drafted_K)
        if evidence.score < THRESHOLD:
            return None
        self.is_silent = True
        self._evidence = _Evidence()
        seen = evidence.num_accepted / evidence.num_drafted
        expected = evidence.num_expected / evidence.num_drafted
        return Alarm(self._event, seen, expected, int(evidence.num_drafted), health)

    def _decline(self, health: HeadHealth) -> Alarm | None:
        """Returns an alarm once after each publish if the head is stale, and once if it is too old."""
        if health.age_in_versions == 0 or float(self._reference.drafted_K.sum()) < MEMORY_DRAFTED / 2:
            return None
        num_drafted = float(self.level.drafted_K.sum())
        seen = float(self.level.accepted_K.sum()) / num_drafted
        expected = self._reference.expected(self.level.drafted_K) / num_drafted
        is_old = self.max_age is not None and health.age_in_versions > self.max_age and not self._told_old
        is_stale = seen < STALE_SHARE * expected and not self._told_stale
        if not (is_old or is_stale):
            return None
        self._told_old = self._told_old or is_old
        self._told_stale = self._told_stale or is_stale
        return Alarm(self._event, seen, expected, int(num_drafted), health)


def log_likelihood_ratio(drafted_K: np.ndarray, accepted_K: np.ndarray, rates_K: np.ndarray) -> float:
    """Returns the log likelihood ratio of a collapse to the rates `rates_K`, in units of independent draft tokens.

    Draft tokens are not independent, because each is accepted only with those before it, and because requests differ. So the
    sum over all tokens is divided by the factor by which this increases the variance of the number of accepted tokens.
    """
    dead_K = COLLAPSE_SHARE * rates_K
    missed_K = drafted_K - accepted_K
    total = (accepted_K * np.log(dead_K / rates_K) + missed_K * np.log((1.0 - dead_K) / (1.0 - rates_K))).sum()
    independent = float((drafted_K * rates_K * (1.0 - rates_K)).sum())
    before_K = np.concatenate([[0.0], np.cumsum(1.0 - rates_K)[:-1]])
    together = 2.0 * float((drafted_K * rates_K * before_K).sum())
    return float(total) / (OVERDISPERSION * (1.0 + together / independent))


def geometric_rates(acceptance_length: float, num_positions: int) -> np.ndarray:
    """Returns the rates by position of a drafter with this acceptance length, float64 [num_positions].

    Each draft is assumed to be accepted with the same probability p if all drafts before it are. So the rate at position k is
    p ** (k + 1), and p solves 1 + p + p ** 2 + ... + p ** num_positions = acceptance_length.
    """
    roots = np.roots([*np.ones(num_positions), 1.0 - acceptance_length])
    rate = max(0.0, *roots[np.isreal(roots)].real)
    return np.clip(rate ** np.arange(1, num_positions + 1), MIN_RATE, MAX_RATE)
