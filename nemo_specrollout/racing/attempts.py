# SPDX-License-Identifier: Apache-2.0
"""Responses as far as they are known, the attempts of engines to make them, and the timeline of these attempts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from nemo_specrollout.generation.requests import Rollout
from nemo_specrollout.racing.turns import Request


class AttemptOutcome(StrEnum):
    """Outcome of an attempt."""

    WON = "won"  # It completed the response.
    MOVED = "moved"  # The request went on with another engine.
    BEATEN = "beaten"  # Another racer completed the response.
    GAVE_UP = "gave up"  # The policy, or new weights, ended the race.
    DIED = "died"  # The engine died.
    DIVERGED = "diverged"  # The engine made another token than is known, because of floating point.
    ABANDONED = "abandoned"  # The request was no longer wanted.


@dataclass
class Attempt:
    """One engine's open attempt at one request."""

    name: int
    """The attempt's name in orders and results."""
    position: int
    """Number of the response's tokens that the engine has reported or was given."""
    start_s: float = 0.0
    first_token: int = 0
    """Response tokens that were known when the attempt began."""


@dataclass(frozen=True)
class AttemptSpan:
    """One attempt of a timeline. Times are seconds since the rollout began."""

    request: int
    """Place of the request among the timeline's requests."""
    engine: int
    start_s: float
    first_token: int
    """Response tokens that were known when the attempt began."""
    end_s: float
    last_token: int
    """Response tokens that the engine had when the attempt ended."""
    outcome: str
    """An `AttemptOutcome`."""


@dataclass
class Response:
    """A response as far as any engine has reported it, with its attempts. Times come from `time.perf_counter`.

    Invariant: the first engine to report a token decides it. An engine that reports another token at its place loses its
    attempt. So the response up to each point is the work of one engine, in whatever order engines report.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    """Version and first token of the response, for each policy that sampled part of it."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Open attempts by engine."""
    ended: list[AttemptSpan] = field(default_factory=list)
    """Attempts that ended. A timeline numbers their request and moves their times."""
    finish_reason: str | None = None
    """`stop` or `length`; None until the response is complete."""

    @property
    def rollout(self) -> Rollout:
        """The complete response."""
        assert self.finish_reason is not None
        return Rollout(self.tokens, self.logprobs, self.finish_reason)

    def open(self, engine: int, name: int) -> None:
        """Opens an attempt, which begins after the known part of the response."""
        num_known = len(self.tokens)
        self.attempts[engine] = Attempt(name, num_known, time.perf_counter(), num_known)

    def close(self, engine: int, outcome: AttemptOutcome, end_s: float) -> int:
        """Closes an attempt and returns its name."""
        attempt = self.attempts.pop(engine)
        self.ended.append(
            AttemptSpan(0, engine, attempt.start_s, attempt.first_token, end_s, attempt.position, outcome)
        )
        return attempt.name

    def begin(self, engine: int) -> Request:
        """Returns the request that the engine gets: its attempt begins after what is known of the response now."""
        self.attempts[engine].position = len(self.tokens)
        return replace(self.request, prefix_token_ids=tuple(self.tokens))

    def extend(
        self, engine: int, tokens: list[int], logprobs: list[float], finish_reason: str | None, policy_version: int
    ) -> bool:
        """Adds what an attempt made. Returns False, and adds nothing, if it contradicts the known part."""
        attempt = self.attempts[engine]
        start, num_known = attempt.position, len(self.tokens)
        overlap = min(len(tokens), num_known - start)
        is_short = finish_reason is not None and start + len(tokens) < num_known
        if is_short or self.tokens[start : start + overlap] != tokens[:overlap]:
            return False
        if len(tokens) > overlap and (not self.policy_spans or self.policy_spans[-1][0] != policy_version):
            self.policy_spans.append((policy_version, num_known))
        self.tokens += tokens[overlap:]
        self.logprobs += logprobs[overlap:]
        attempt.position += len(tokens)
        self.finish_reason = finish_reason
        return True


@dataclass(frozen=True)
class Timeline:
    """All attempts at a rollout's requests, in the order in which they ended."""

    methods: tuple[str, ...]
    """Draft method of each engine."""
    spans: tuple[AttemptSpan, ...] = ()
    saved_s: float | None = None
    """Estimated seconds that moves and races saved; None without any, or with nothing to compare with."""

    @classmethod
    def of(cls, responses: Sequence[Response], methods: tuple[str, ...], saved_s: float | None) -> "Timeline":
        """Returns the timeline of responses without open attempts."""
        spans = [replace(span, request=i) for i, r in enumerate(responses) for span in r.ended]
        first_s = min((s.start_s for s in spans), default=0.0)
        spans = [replace(s, start_s=s.start_s - first_s, end_s=s.end_s - first_s) for s in spans]
        return cls(methods, tuple(sorted(spans, key=lambda s: s.end_s)), saved_s)

    def figures(self) -> dict[str, Any]:
        """Returns the metrics `tail.*` of docs/reference/metrics.md."""
        outcomes = [s.outcome for s in self.spans]
        lost = [s for s in self.spans if s.outcome in (AttemptOutcome.BEATEN, AttemptOutcome.GAVE_UP)]
        won_s = {s.request: s.start_s for s in self.spans if s.outcome == AttemptOutcome.WON}
        return {
            "moves": outcomes.count(AttemptOutcome.MOVED),
            "races": len({s.request for s in lost}),
            "won_by_racer": len({s.request for s in lost if s.start_s < won_s.get(s.request, 0.0)}),
            "idle_share": self._idle_share(),
            "saved_s": self.saved_s,
            "deaths": len({(s.engine, s.end_s) for s in self.spans if s.outcome == AttemptOutcome.DIED}),
            "diverged": outcomes.count(AttemptOutcome.DIVERGED),
        }

    def _idle_share(self) -> float:
        """Returns the share of the engines' seconds in which they had no request."""
        if not self.spans:
            return 0.0
        engines = range(len(self.methods))
        busy_s = sum(covered([(s.start_s, s.end_s) for s in self.spans if s.engine == e]) for e in engines)
        return 1.0 - busy_s / (len(engines) * max(s.end_s for s in self.spans))


def covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, which begin at 0 or later."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
