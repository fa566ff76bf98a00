# SPDX-License-Identifier: Apache-2.0
"""Messages between a coordinator and its engines, and the interfaces that both sides use.

A turn is the time between two reports of an engine to the coordinator. An attempt is the work of one engine on one request.
"""

from dataclasses import dataclass, field
from typing import Protocol

from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

Request = RolloutRequest | ShardRequest
"""A request that is identified by the indices of its prompt and its sample, or one that came with its own sampling
parameters."""
Starts = tuple[tuple[int, Request], ...]
"""Attempts to start, as pairs of the attempt's name and its request. The prefix of a request has the known tokens of the
response."""
Tokens = tuple[list[int], list[float]]
"""Token ids and their log-probs."""


@dataclass(frozen=True)
class TurnOrders:
    """Says which attempts an engine starts and stops, and how long its next turn is. An attempt is its work on one request."""

    starts: Starts = ()
    stops: tuple[int, ...] = ()
    """Names of the attempts to stop."""
    seconds: float = 0.0
    """Length of the turn in seconds. The turn ends earlier if the engine has no attempt left."""


@dataclass(frozen=True)
class TurnWork:
    """Time and tokens of a turn. A decode step is an engine step that is not part of a prefill."""

    decode_s: float = 0.0
    """Seconds of all decode steps."""
    request_s: float = 0.0
    """Seconds of each decode step multiplied by its number of requests, summed over the decode steps."""
    num_tokens: int = 0
    """Number of tokens that the decode steps have generated."""
    prefill_s: float = 0.0
    """Seconds of the turn's prefills. If a synchronous engine also decodes in the engine steps of a prefill, it subtracts the
    time that decoding alone would take."""
    num_prefilled: int = 0
    """Number of tokens that were prefilled."""


@dataclass(frozen=True)
class TurnResult:
    """An engine's report on one turn, which identifies attempts by their names. An attempt is its work on one request."""

    parts: dict[int, Tokens]
    """New tokens of each attempt, by the attempt's name."""
    finished: dict[int, str] = field(default_factory=dict)
    """Finish reason (`stop` or `length`) of each attempt that has ended. All of these attempts are also in `parts`, even those
    without new tokens."""
    work: TurnWork = TurnWork()
    policy_version: int = 0
    steady: tuple[int, ...] = ()
    """Names of the attempts that already had tokens before this turn and were decoded during all of it."""
    refused: tuple[int, ...] = ()
    """Names of the attempts that the engine has refused because their requests are invalid."""


@dataclass(frozen=True)
class ExchangeReply:
    """The exchange's reply to an engine that calls `exchange`."""

    orders: tuple[TurnOrders, ...]
    answers: tuple[tuple[int, Rollout | None], ...]
    """Responses to requests that came from this engine. Each is a pair of the engine's number for the request and the
    response.

    The response is None if an engine has refused the request. The engine from which the request came then passes it to its own
    vLLM, so that the caller gets vLLM's error."""
    is_over: bool
    """Whether all requests of all engines have ended."""


class EngineFleet(Protocol):
    """The engines that a coordinator drives, numbered from 0."""

    methods: list[int]
    """Draft method of each engine, as an index into `DecodeSpeedTable.methods`."""
    capacity: int
    """Number of requests that an engine can decode at a time."""

    def send(self, engine: int, orders: TurnOrders) -> None:
        """Queues a turn for an engine. An engine gets turns and new weights in the order in which they were sent."""

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Waits until a turn ends or a revived engine is alive. Returns the results that have arrived since the last call.

        Each result comes with its engine. If an engine has died, a single None replaces the results of all turns that it still
        had.
        """

    def num_turns(self, engine: int) -> int:
        """Returns the number of turns that were sent to an engine and whose results have not arrived."""

    def is_alive(self, engine: int) -> bool: ...

    def early_worth(self, engine: int) -> EarlyWorth:
        """Returns how much time the engine can save by decoding requests of coming steps, as the engine has last reported."""


class IdleWork(Protocol):
    """Decodes requests of coming steps in slots of an engine that its own requests leave empty (`run_ahead`)."""

    def slice(self, seconds: float) -> bool:
        """Decodes requests of coming steps for about `seconds` seconds. Returns whether there are more to decode.

        Nothing else may use the engine during this time.
        """

    def worth(self) -> EarlyWorth:
        """Returns how much time the engine can save later by decoding these requests now.

        Returns `NOTHING_EARLY` if no such request is left, or if nothing was measured yet.
        """


class ExchangeFailed(Exception):
    """Raised if the exchange is lost. Each engine then finishes its own requests alone."""
