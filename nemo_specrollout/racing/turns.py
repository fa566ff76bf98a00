# SPDX-License-Identifier: Apache-2.0
"""Messages between a coordinator and its engines: orders, turn results, replies of an exchange; and the engines' interface.

Shapes: K attempts that made tokens, N tokens of a message.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nemo_specrollout.generation.requests import Rollout, RolloutRequest, ShardRequest

Request = RolloutRequest | ShardRequest
"""A sample that its indices identify, or a request that came with parameters of its own."""

Starts = tuple[tuple[int, Request], ...]
"""Attempts to begin: the name of each, and its request. The request's prefix is the known part of the response."""


@dataclass(frozen=True)
class Orders:
    """An engine's orders for one turn."""

    starts: Starts = ()
    """Attempts to begin."""
    stops: tuple[int, ...] = ()
    """Names of the attempts to stop."""
    seconds: float = 0.0
    """Length of the turn. It ends earlier if the engine has no attempt left."""


@dataclass(frozen=True)
class Progress:
    """New tokens of several attempts, one attempt after the other."""

    names_K: np.ndarray
    """Name of each attempt, int64 [K]."""
    counts_K: np.ndarray
    """Number of new tokens of each attempt, int64 [K]."""
    tokens_N: np.ndarray
    """Token ids, int32 [N]."""
    logprobs_N: np.ndarray
    """Log-probs of the tokens, float32 [N]."""

    @classmethod
    def of(cls, parts: dict[int, tuple[list[int], list[float]]]) -> "Progress":
        """Packs tokens and log-probs by attempt."""
        return cls(
            np.array(list(parts), np.int64),
            np.array([len(tokens) for tokens, _ in parts.values()], np.int64),
            np.array([t for tokens, _ in parts.values() for t in tokens], np.int32),
            np.array([x for _, logprobs in parts.values() for x in logprobs], np.float32),
        )

    def parts(self) -> dict[int, tuple[list[int], list[float]]]:
        """Unpacks what `of` has packed."""
        ends_K = np.cumsum(self.counts_K)
        tokens, logprobs = self.tokens_N.tolist(), self.logprobs_N.tolist()
        rows = zip(self.names_K.tolist(), (ends_K - self.counts_K).tolist(), ends_K.tolist(), strict=True)
        return {name: (tokens[start:end], logprobs[start:end]) for name, start, end in rows}


@dataclass(frozen=True)
class Work:
    """Time and tokens of a turn's decode steps and of its prefills."""

    decode_s: float = 0.0
    """Seconds of the decode steps."""
    request_s: float = 0.0
    """The same seconds, each step's multiplied by its number of requests."""
    num_tokens: int = 0
    """Tokens that the decode steps made."""
    prefill_s: float = 0.0
    """Seconds that prefills took beyond a decode step."""
    num_prefilled: int = 0
    """Tokens of the prefilled texts."""

    @property
    def mean_batch(self) -> float:
        """Mean number of requests in a decode step."""
        return self.request_s / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TurnResult:
    """An engine's account of one turn."""

    progress: Progress
    finished: dict[int, str] = field(default_factory=dict)
    """Finish reason (`stop` or `length`) of each attempt that ended. All of them are in `progress`, even without tokens."""
    work: Work = Work()
    policy_version: int = 0
    """Version of the weights that made the tokens."""
    steady: tuple[int, ...] = ()
    """Attempts that had made tokens before this turn and took part in all of its decode steps."""
    refused: tuple[int, ...] = ()
    """Attempts that the engine does not accept because their request is invalid."""


@dataclass(frozen=True)
class Answer:
    """The response to one of an engine's own requests, as an exchange sends it."""

    number: int
    """The engine's number for the request."""
    tokens_N: np.ndarray
    """Token ids, int32 [N]."""
    logprobs_N: np.ndarray
    """Log-probs, float32 [N]."""
    finish_reason: str | None
    """None if an engine refused the request. The engine that asked then refuses it natively, too."""

    @classmethod
    def of(cls, number: int, rollout: Rollout | None) -> "Answer":
        """Packs a response, or a refusal if `rollout` is None."""
        if rollout is None:
            return cls(number, np.zeros(0, np.int32), np.zeros(0, np.float32), None)
        tokens_N, logprobs_N = np.array(rollout.token_ids, np.int32), np.array(rollout.logprobs, np.float32)
        return cls(number, tokens_N, logprobs_N, rollout.finish_reason)

    @property
    def rollout(self) -> Rollout | None:
        """The response, or None after a refusal."""
        if self.finish_reason is None:
            return None
        return Rollout(self.tokens_N.tolist(), self.logprobs_N.tolist(), self.finish_reason)


@dataclass(frozen=True)
class Reply:
    """An exchange's reply to an engine that hands in a turn's result."""

    orders: tuple[Orders, ...]
    """Further turns."""
    answers: tuple[Answer, ...]
    """Responses to the engine's own requests."""
    is_over: bool
    """Whether no engine of the rollout has anything left to do."""


class Engines(Protocol):
    """The engines that a coordinator drives, numbered from 0."""

    methods: list[int]
    """Draft method of each engine, as the ladder numbers methods."""
    capacity: int
    """Requests that an engine can decode at a time."""

    def send(self, engine: int, orders: Orders) -> None:
        """Queues a turn. An engine takes its turns and new weights in order."""

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Waits until a turn ends or a revived engine is alive; returns the results since the last call.

        None replaces the results of all turns that a dead engine still had. It comes once for each death.
        """

    def num_turns(self, engine: int) -> int:
        """Returns the number of turns that were sent and whose results are missing."""

    def is_alive(self, engine: int) -> bool:
        """Returns whether the engine takes orders."""

    def revive(self) -> None:
        """Begins to restart dead engines with the current weights. Raises RuntimeError if no engine is left."""

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Gives every engine new weights, after the turns that it has queued."""


class ExchangeFailed(Exception):
    """The exchange is lost: each engine finishes its own requests alone."""
