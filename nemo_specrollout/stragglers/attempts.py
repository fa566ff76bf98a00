# SPDX-License-Identifier: Apache-2.0
"""Attempts, which are the work of one engine on one request, and the part of each response that is known so far."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nemo_specrollout.generation.engine.ahead_branches import begun_again
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.stragglers.turns import Request


class AttemptOutcome(StrEnum):
    """How an attempt, which is the work of one engine on one request, has ended."""

    WON = "won"  # It completed the response.
    MOVED = "moved"  # The request went on with another engine.
    BEATEN = "beaten"  # Another racer completed the response.
    GAVE_UP = "gave up"  # The tail policy stopped this racer, or new weights ended the race.
    DIED = "died"  # The engine died.
    DIVERGED = "diverged"  # The engine sampled another token than is known, because of floating-point differences.
    ABANDONED = "abandoned"  # The request was no longer wanted.


@dataclass
class Attempt:
    """The work of one engine on one request. Times are those of `time.perf_counter`."""

    engine: int
    name: int
    """Number that identifies the attempt in the orders to its engine and in the engine's results."""
    position: int
    """Number of tokens of the response that the engine has reported or has been given."""
    start_s: float = 0.0
    first_token: int = 0
    """Number of tokens of the response that were known when the attempt began."""
    end_s: float = 0.0
    outcome: AttemptOutcome | None = None
    """How the attempt has ended, or None while it is open."""


@dataclass
class Response:
    """The tokens of a response that engines have reported so far, with the attempts of engines to generate it.

    Invariant: the engine that reports a token first decides this token. An engine that reports another token at the same
    position loses its attempt. So the known tokens are always those that a single engine would have generated, in whatever
    order the engines report.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a policy version and the index of the first response token that it sampled, in ascending order."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Open attempts, by the number of the engine."""
    ended: list[Attempt] = field(default_factory=list)
    finish_reason: str | None = None
    """`stop` or `length`, or None while the response is incomplete."""

    @property
    def rollout(self) -> Rollout:
        assert self.finish_reason is not None
        return Rollout(self.tokens, self.logprobs, self.finish_reason)

    def begin_again(self) -> None:
        """Lets the response begin again under new weights. Its tokens so far become the request's text made ahead.

        If the request already has a longer text made ahead, the rest of this text or of one of its branches is put behind
        these tokens (`begun_again`). Open attempts then generate the response from its beginning.
        """
        assert isinstance(self.request, RolloutRequest)
        ahead, branches = begun_again(self.tokens, self.request.ahead, self.request.branches)
        self.request = replace(self.request, ahead=ahead, branches=branches)
        self.tokens = []
        self.logprobs = []
        self.policy_spans = []
        for attempt in self.attempts.values():
            attempt.position = 0

    def open(self, engine: int, name: int) -> None:
        """Opens an attempt of `engine`, which continues the response after its known tokens."""
        num_known = len(self.tokens)
        self.attempts[engine] = Attempt(engine, name, num_known, time.perf_counter(), num_known)

    def close(self, engine: int, outcome: AttemptOutcome, end_s: float) -> int:
        attempt = self.attempts.pop(engine)
        attempt.end_s = end_s
        attempt.outcome = outcome
        self.ended.append(attempt)
        return attempt.name

    def begin(self, engine: int) -> Request:
        """Returns the request to send to the engine, with the tokens that are known now as its prefix.

        These may be more than when the attempt was opened, because another engine may have continued the response in the
        meantime.
        """
        self.attempts[engine].position = len(self.tokens)
        return replace(self.request, prefix_token_ids=tuple(self.tokens))

    def extend(
        self, engine: int, tokens: list[int], logprobs: list[float], finish_reason: str | None, policy_version: int
    ) -> bool:
        """Adds new tokens of the engine's attempt, if they agree with the known tokens of the response.

        Returns whether they agree. If not, nothing is added. A response that ends before the last known token does not agree.
        """
        attempt = self.attempts[engine]
        start = attempt.position
        num_known = len(self.tokens)
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


def tail_counts(ended: Iterable[Sequence[tuple[str, float]]]) -> dict[str, int]:
    """Returns `moves`, `races`, `won_by_racer` and `diverged`, the metrics `tail.*` of docs/reference/metrics.md.

    `ended` has a sequence for each request that has ended. Its items are the attempts of engines at this request, each as a
    pair of the outcome and the start in seconds.
    """
    outcomes = Counter[str]()
    num_races = 0
    num_won = 0
    for attempts in ended:
        outcomes.update(outcome for outcome, _ in attempts)
        lost_s = [s for outcome, s in attempts if outcome in (AttemptOutcome.BEATEN, AttemptOutcome.GAVE_UP)]
        won_s = next((s for outcome, s in attempts if outcome == AttemptOutcome.WON), 0.0)
        num_races += bool(lost_s)
        num_won += any(s < won_s for s in lost_s)
    moves = outcomes[AttemptOutcome.MOVED]
    diverged = outcomes[AttemptOutcome.DIVERGED]
    return {"moves": moves, "races": num_races, "won_by_racer": num_won, "diverged": diverged}


def covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the total time that is covered by at least one of the intervals (start, end). No interval may start before 0."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
