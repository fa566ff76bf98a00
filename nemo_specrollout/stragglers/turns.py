# SPDX-License-Identifier: Apache-2.0
"""Messages between a coordinator and its engines, and the interfaces that both sides use.

A turn is the time between two reports of an engine to the coordinator. An attempt is the work of one engine on one request.
"""

from dataclasses import dataclass, field
from typing import Protocol

from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

Request = RolloutRequest | ShardRequest
"""A request that is identified by the indices of its prompt and sample, or one that came with parameters of its own."""
Starts = tuple[tuple[int, Request], ...]
"""Names and requests of attempts to start. The prefix of a request is the known part of the response."""
Tokens = tuple[list[int], list[float]]
"""Token ids and their log-probs."""


@dataclass(frozen=True)
class TurnOrders:
    """An engine's orders for one turn."""

    starts: Starts = ()
    stops: tuple[int, ...] = ()
    """Names of the attempts to stop."""
    seconds: float = 0.0
    """Length of the turn in seconds. It ends earlier if the engine has no attempt left."""


@dataclass(frozen=True)
class TurnWork:
    """Time and tokens of a turn's decode steps, which are its engine steps after prefill, and of its prefills."""

    decode_s: float = 0.0
    """Seconds of the decode steps."""
    request_s: float = 0.0
    """Sum over the decode steps of their seconds multiplied by their number of requests."""
    num_tokens: int = 0
    """Number of tokens that the decode steps made."""
    prefill_s: float = 0.0
    """Seconds of the turn's prefills. A synchronous engine subtracts what their engine steps would take for decoding alone,
    because these steps also decode."""
    num_prefilled: int = 0
    """Number of tokens of the prefilled texts."""


@dataclass(frozen=True)
class TurnResult:
    """An engine's report on one turn, which refers to attempts by their names."""

    parts: dict[int, Tokens]
    """New tokens by attempt."""
    finished: dict[int, str] = field(default_factory=dict)
    """Finish reason (`stop` or `length`) of each attempt that ended. Each of these attempts is also in `parts`, even if it has
    no new tokens."""
    work: TurnWork = TurnWork()
    policy_version: int = 0
    steady: tuple[int, ...] = ()
    """Attempts that had made tokens before this turn and took part in all of its decode steps."""
    refused: tuple[int, ...] = ()
    """Attempts that the engine does not accept because their requests are invalid."""


@dataclass(frozen=True)
class ExchangeReply:
    """The exchange's reply to an engine that calls `exchange`."""

    orders: tuple[TurnOrders, ...]
    answers: tuple[tuple[int, Rollout | None], ...]
    """Responses to requests that came from this engine, each with the engine's number for the request.

    A response is None if an engine refused the request. This engine then passes the request to its own vLLM, which refuses it
    too, with vLLM's error."""
    is_over: bool
    """Whether no engine of the rollout has anything left to do."""


class EngineFleet(Protocol):
    """The engines that a coordinator drives, numbered from 0."""

    methods: list[int]
    """Draft method of each engine, as the speed table numbers methods."""
    capacity: int
    """Requests that an engine can decode at a time."""

    def send(self, engine: int, orders: TurnOrders) -> None:
        """Queues a turn. An engine takes turns and new weights in the order in which they were sent to it."""

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Waits until a turn ends or a revived engine is alive, and returns the results since the last call.

        A single None replaces the results of all turns that an engine still had when it died.
        """

    def num_turns(self, engine: int) -> int:
        """Returns the number of turns that were sent and whose results are missing."""

    def is_alive(self, engine: int) -> bool: ...

    def early_worth(self, engine: int) -> EarlyWorth:
        """Returns the latest known worth of the engine's work for coming steps."""


class IdleWork(Protocol):
    """An engine's work for coming steps in slots that its requests leave empty (`run_ahead`)."""

    def slice(self, seconds: float) -> bool:
        """Works for about `seconds`. Nothing else may use the engine in this time. Returns whether more is left to do."""

    def worth(self) -> EarlyWorth:
        """Returns the current worth of this work, which is `NOTHING_EARLY` if nothing is left to do or was measured."""


class ExchangeFailed(Exception):
    """Raised if the exchange is lost. Each engine then finishes its own requests alone."""
