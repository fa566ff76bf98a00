# SPDX-License-Identifier: Apache-2.0
"""The canary of a draft head, which raises an alarm if acceptance collapses or declines, and names the likely cause.

It is needed because a head that is all zeros or reads the wrong layers causes no error. Its draft tokens are just never
accepted.

Shapes: K draft positions. The rate at position k is the probability that the first k + 1 draft tokens are all accepted.
"""

import math
from dataclasses import dataclass, field

import numpy as np

COLLAPSE_SHARE = 1 / 3
"""Share of the expected acceptance that a head is assumed to have after a collapse."""
STALE_SHARE = 0.75
"""A head counts as stale if its acceptance falls below this share of the acceptance that it had right after the last
publish."""
THRESHOLD = math.log(1e9)
"""Score of the evidence for a collapse at which the canary raises an alarm. If it is log(n), a healthy head causes about one
false alarm in n draft tokens."""
OVERDISPERSION = 2.0
"""Factor by which the variance of the number of accepted draft tokens is larger than by pure chance. It is above 1 because
some requests are harder to draft for than others."""
MEMORY_DRAFTED = 20_000.0
"""Number of draft tokens after which the weight of earlier counts has decayed to 1/e."""
ENOUGH_DRAFTED = 500.0
"""Number of draft tokens after which the normal level of acceptance counts as known."""
GATE_DRAFTED = 4000.0
"""Weight of the publish gate's measurement of acceptance, as a number of draft tokens."""
MIN_REQUESTS = 16
"""Minimum number of requests on which a collapse alarm must be based. Fewer do not suffice, because the last few requests of a
rollout may just be hard to draft for."""
MIN_RATE = 1e-3
MAX_RATE = 0.999
WEIGHT_CAUSES = ("non_finite", "all_zero", "shared", "differs", "layer_ids", "rope")
"""Causes of a collapse that lie in the head's weights or config. If a head has none of them, the tasks may have changed."""


@dataclass(frozen=True)
class HeadHealth:
    """Faults of a head's weights and config, and the head's age. The defaults mean that the head has no fault and is new."""

    non_finite: bool = False
    all_zero: bool = False
    shares_target_tensors: tuple[str, ...] = ()
    """Names of tensors that should be the head's own, but lie in the policy's memory."""
    differs_from_published: bool = False
    layer_ids_wrong: bool = False
    rope_difference: str = ""
    """Description of how the head's RoPE differs from the policy's."""
    age_in_versions: int = 0
    """Number of refits since the head was published."""


def likely_cause(health: HeadHealth, event: str = "running") -> tuple[str, str]:
    """Returns a word and a sentence for the likely cause of a collapse after `event`.

    If several causes are possible, the one with the most certain evidence is returned. A RoPE that differs from the policy's
    is no proof of a fault, because a head may have been trained with it. It is not the cause if the head drafted well until a
    refit.
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
    """An alarm about a head's acceptance."""

    event: str
    """Last event before the alarm, which is `refit`, `publish` or `wake`, or `running` if there was none."""
    seen: float
    """Share of draft tokens that were accepted."""
    expected: float
    """Share of draft tokens that the canary expected to be accepted."""
    num_drafted: int
    health: HeadHealth

    @property
    def cause(self) -> str:
        """Word for the likely cause of the alarm (`likely_cause`)."""
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
    """Evidence that acceptance has collapsed. The sums begin when acceptance last looked healthy."""

    score: float = 0.0
    """Log likelihood ratio of a collapsed head to a healthy head, but at least 0."""
    carried: float = 0.0
    """Score at the last event. This part of the score is kept after the event, even if only a few requests run then."""
    num_requests: int = 0
    """Largest number of requests in an engine step since the last event."""
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_expected: float = 0.0


@dataclass
class Level:
    """The normal acceptance of a head, as counts of draft tokens by position and the rates that follow from them.

    The counts decay, so that the rates follow slow changes.
    """

    drafted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))
    accepted_K: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def is_known(self) -> bool:
        return float(self.drafted_K.sum()) >= ENOUGH_DRAFTED

    def rates(self, num_positions: int) -> np.ndarray:
        """Returns the rates at the first `num_positions` positions, float64 [num_positions].

        A rate is the probability that all draft tokens up to a position are accepted. Positions without draft tokens so far
        get rates that fall from one position to the next as they do on average at the other positions.
        """
        rates_K = np.clip(self.accepted_K / np.maximum(self.drafted_K, 1.0), MIN_RATE, MAX_RATE)[self.drafted_K >= 1.0]
        step = float(rates_K[-1] ** (1 / len(rates_K))) if len(rates_K) else MIN_RATE
        missing = num_positions - len(rates_K)
        last = rates_K[-1] if len(rates_K) else 1.0
        return np.concatenate([rates_K, last * step ** np.arange(1, missing + 1)])[:num_positions]

    def expected(self, drafted_K: np.ndarray) -> float:
        return float((drafted_K * self.rates(len(drafted_K))).sum())

    def assume(self, rates_K: np.ndarray) -> None:
        """Learns these rates as if they had been measured with `GATE_DRAFTED` draft tokens."""
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
    """Watches the acceptance of a drafter with weights. Owns the expected rates and the evidence that acceptance collapsed.

    The collapse alarm is a CUSUM test (Page, Biometrika 1954). It compares the hypothesis that acceptance has fallen to a
    third with the hypothesis that it has not changed. With independent requests, a healthy head causes less than one false
    alarm in 10^9 draft tokens. The expected rates follow the observed ones, so slow changes cause no collapse alarm. After a
    collapse alarm the canary is silent until the next event (`begin`).

    The staleness alarm is raised once after each publish, when acceptance falls below the share `STALE_SHARE` of its value
    right after the publish.
    """

    def __init__(self, max_age: int | None = None) -> None:
        self.max_age = max_age
        self._event = "running"
        self._told_stale = self._told_old = False
        self.begin_again()

    def begin(self, event: str, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Notes an event, which is a `refit`, a `publish` or a `wake` from sleep.

        After a publish, `expected_length` is the acceptance length that the publish gate has measured with `num_positions`
        draft tokens, or None if it is not known.
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
        """Forgets the expected rates. They are learned again before there can be another alarm."""
        self.level = Level()
        self._reference = Level()
        self._evidence = _Evidence()
        self.is_silent = False

    def observe(
        self, drafted_K: np.ndarray, accepted_K: np.ndarray, health: HeadHealth = HeadHealth(), num_steps: int = 1
    ) -> Alarm | None:
        """Adds counts of verified and accepted draft tokens by position, and returns an alarm or None.

        The counts are sums over `num_steps` engine steps. `health` is what is known about faults of the head.
        """
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
        """Adds counts to the evidence for a collapse, and returns an alarm if there is enough evidence.

        The score's growth since the last event is limited. The limit is `THRESHOLD / MIN_REQUESTS` times the number of
        requests in the largest engine step since then. So the score can rise from 0 to the threshold only if an engine step
        has had at least `MIN_REQUESTS` requests. The limit is needed because the last few requests of a rollout may just be
        hard to draft for.
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
        """Returns an alarm if the head has become stale or too old. Each of these is reported only once after a publish."""
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
    """Returns the log likelihood ratio of a collapsed head to a healthy head whose rates are `rates_K`.

    The ratio is first computed as if all draft tokens were independent. In fact a draft token can be accepted only if all
    before it are accepted, and requests differ. Both facts make the variance of the number of accepted tokens larger. So the
    ratio is divided by the factor by which the variance grows.
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

    A rate is the probability that all draft tokens up to a position are accepted. Each draft token is assumed to be accepted
    with the same probability p if all before it are. So the rate at position k is p ** (k + 1), where p solves this equation:
    1 + p + p ** 2 + ... + p ** num_positions = acceptance_length.
    """
    roots = np.roots([*np.ones(num_positions), 1.0 - acceptance_length])
    rate = max(0.0, *roots[np.isreal(roots)].real)
    return np.clip(rate ** np.arange(1, num_positions + 1), MIN_RATE, MAX_RATE)
