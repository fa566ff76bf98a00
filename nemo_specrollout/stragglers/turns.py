# SPDX-License-Identifier: Apache-2.0
"""Messages between a coordinator and its engines, and the engines' interface."""

from dataclasses import dataclass, field
from typing import Protocol

from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

Request = RolloutRequest | ShardRequest
"""A sample that its indices identify, or a request that came with parameters of its own."""
Starts = tuple[tuple[int, Request], ...]
"""Attempts to begin: the name of each, and its request. The request's prefix is the known part of the response."""
Tokens = tuple[list[int], list[float]]
"""Token ids and their log-probs."""


@dataclass(frozen=True)
class TurnOrders:
    """An engine's orders for one turn."""

    starts: Starts = ()
    stops: tuple[int, ...] = ()
    """Names of the attempts to stop."""
    seconds: float = 0.0
    """Length of the turn. It ends earlier if the engine has no attempt left."""


@dataclass(frozen=True)
class TurnWork:
    """Time and tokens of a turn's decode steps and of its prefills."""

    decode_s: float = 0.0
    request_s: float = 0.0
    """Seconds of the decode steps, each multiplied by the step's number of requests."""
    num_tokens: int = 0
    """Tokens that the decode steps made."""
    prefill_s: float = 0.0
    """Seconds that prefills took beyond a decode step."""
    num_prefilled: int = 0
    """Tokens of the prefilled texts."""


@dataclass(frozen=True)
class TurnResult:
    """An engine's account of one turn. Attempts are called by their names."""

    parts: dict[int, Tokens]
    """New tokens by attempt."""
    finished: dict[int, str] = field(default_factory=dict)
    """Finish reason (`stop` or `length`) of each attempt that ended. All of them are in `parts`, even without tokens."""
    work: TurnWork = TurnWork()
    policy_version: int = 0
    steady: tuple[int, ...] = ()
    """Attempts that had made tokens before this turn and took part in all of its decode steps."""
    refused: tuple[int, ...] = ()
    """Attempts that the engine does not accept because their request is invalid."""


@dataclass(frozen=True)
class ExchangeReply:
    """An exchange's reply to an engine that hands in a turn's result."""

    orders: tuple[TurnOrders, ...]
    answers: tuple[tuple[int, Rollout | None], ...]
    """Responses to the engine's own requests, each with the engine's number for the request.

    None if an engine refused the request. The engine that asked then refuses it natively, too."""
    is_over: bool
    """Whether no engine of the rollout has anything left to do."""


class EngineFleet(Protocol):
    """The engines that a coordinator drives, numbered from 0."""

    methods: list[int]
    """Draft method of each engine, as the speed table numbers methods."""
    capacity: int
    """Requests that an engine can decode at a time."""

    def send(self, engine: int, orders: TurnOrders) -> None:
        """Queues a turn. An engine takes its turns and new weights in order."""

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Waits until a turn ends or a revived engine is alive; returns the results since the last call.

        None replaces the results of all turns that a dead engine still had. It comes once for each death.
        """

    def num_turns(self, engine: int) -> int:
        """Returns the number of turns that were sent and whose results are missing."""

    def is_alive(self, engine: int) -> bool: ...

    def early_worth(self, engine: int) -> EarlyWorth:
        """Returns what the engine's work for coming steps is worth, as it was last known."""


class IdleWork(Protocol):
    """What an engine does for coming steps in slots that its requests leave empty (`run_ahead`)."""

    def slice(self, seconds: float) -> bool:
        """Works for about `seconds`, in which nobody else uses the engine. Returns whether more is left to do."""

    def worth(self) -> EarlyWorth:
        """Returns what this is worth; nothing if nothing is there to do, or nothing has been measured."""


class ExchangeFailed(Exception):
    """The exchange is lost: each engine finishes its own requests alone."""
