# SPDX-License-Identifier: Apache-2.0
"""What synchronous and asynchronous engines do alike while they decode early requests (`run_ahead`).

A plan says which early requests an engine may decode. Synchronous engines (`rolling_engine.py`) and asynchronous ones
(`rolling_stream.py`) differ in how they step, how questions to them are asked and answered, and how their requests are started
and stopped.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.early_requests import (
    EarlyFigures,
    EarlyMade,
    EarlyRequests,
    EngineSize,
    OwnLoad,
    engine_id,
    longest_of,
)
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart, EarlyTexts
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

logger = logging.getLogger(__name__)

MAX_TRIES = 50
"""Largest number of attempts to make vLLM drop its cached prefixes, which vLLM refuses while an engine step is under way."""
RETRY_S = 0.02
"""Seconds between two attempts to make vLLM drop its cached prefixes."""
_TIME_SHARE = 0.01
"""Largest share of the time that questions of one kind to the vLLM workers may take."""

RequestOf = Callable[[EarlyStart], tuple[Any, Any]]
"""A function that returns vLLM's prompt and sampling parameters for an early request. The parameters are None if there is
nothing to decode.

`early_requests.early_params` derives them from the parameters that the request will have in its own step."""


class StaleCache(RuntimeError):
    """Raised if vLLM does not drop prefixes that older weights have cached. The run must not go on then."""


class Seldom:
    """Tells when the vLLM workers may be asked a question again, so that the answers take at most a hundredth of the time.

    Ask the question in a `with` statement of this object, which measures how long the answer takes.
    """

    def __init__(self) -> None:
        self._due_s = self._began_s = 0.0

    def is_due(self) -> bool:
        """Returns whether the question may be asked now."""
        return time.perf_counter() >= self._due_s

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self._due_s = now + (now - self._began_s) / _TIME_SHARE


@dataclass(frozen=True)
class Question:
    """A question to the vLLM workers. It is asked within the context `pace`, and all replies are passed to `answered`."""

    method: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    take: Callable[[Any], None] | None = None
    """Function that gets the reply, or None if the reply does not matter."""
    pace: Seldom = field(default_factory=Seldom)

    def answered(self, replies: Sequence[Any]) -> None:
        """Passes the reply of a worker to `take`.

        It is the first reply that is not None, because only one worker gives such a reply.
        """
        if self.take is not None:
            self.take(next((reply for reply in replies if reply is not None), None))


class Rolling:
    """Owns the early requests of an engine, which are those of coming steps and branches. Never waits.

    A plan says which early requests the engine may decode. It lasts from the call of `plan` until that of `end`, which are
    methods of the subclasses. Without a plan this object is idle, but it keeps what was learned in earlier plans.
    """

    def __init__(self, request_of: RequestOf, most_branches: int) -> None:
        """`most_branches` is the largest number of branches of a request, or 0 for none."""
        self._request_of = request_of
        self._most_branches = most_branches
        self._names = itertools.count()
        self._early: EarlyRequests | None = None
        self._known_lengths: list[int] = []
        """Lengths of the responses of the last rollout during which the engine had a plan."""
        self._lengths: list[int] = []
        """Lengths of the responses that have ended since the plan began."""
        self._asks_prices = Seldom()
        self._asks_ties = Seldom()
        self._has_warned = False

    @property
    def has_plan(self) -> bool:
        """Whether the engine has a plan, which says which early requests it may decode."""
        return self._early is not None

    def worth(self) -> EarlyWorth:
        """Returns how much time the engine's early requests, which are those of coming steps, can save later."""
        return EarlyWorth() if self._early is None else self._early.worth()

    def follow(self, row: EarlyRow) -> int:
        """Registers one of the engine's own requests, so that branches of it are started. Returns the name of the request.

        Call this method before the request starts, and only if newer weights may have to decode the request again. The caller
        must put the name into the request's sampling parameters, as `ties` in this package's entry (`EXTRA_ARGS_KEY`).
        """
        assert self._early is not None, "there is no plan"
        return self._early.follow(row)

    def called(self, name: int, request_id: str) -> None:
        """Notes the id in vLLM of a request that was registered by `follow`, which is needed to read its tokens."""
        if self._early is not None:
            self._early.called(name, request_id)

    def forget(self, name: int) -> None:
        """Forgets a request that was registered by `follow` and has ended, and stops its branches.

        Does nothing if the plan in which it was registered has ended.
        """
        early = self._early
        if early is not None:
            self._stop(early, early.branches_of(name))
            early.forget(name)

    def take_figures(self) -> EarlyFigures:
        """Returns what the engine has done in its plan since the last call, or since the plan began."""
        return EarlyFigures() if self._early is None else self._early.take_figures()

    def _stop(self, early: EarlyRequests, names: Sequence[int]) -> None:
        """Stops early requests. Their tokens must have been read."""
        raise NotImplementedError

    def _open(self, engine: Any, rows: Sequence[EarlyRow], scale: float, kept: float) -> EarlyRequests:
        """Returns the early requests of a new plan. `engine` is vLLM's object that knows its config and its requests.

        `scale` is how far the next weight update is expected to move the difference between the scores of two tokens, in nats
        (`FlipModel`). `kept` is the share of the tokens made ahead that earlier updates have left unchanged.
        """
        assert self._early is None, "the plan before has not ended"
        texts = EarlyTexts(rows, FlipModel(scale), self._most_branches, kept, self._names)
        size = EngineSize.of(engine.vllm_config)
        self._early = EarlyRequests(engine.output_processor, size, texts, longest_of(rows))
        self._lengths = []
        return self._early

    def _questions(self, early: EarlyRequests, load: OwnLoad) -> list[Question]:
        """Returns the questions to the vLLM workers that must be answered before early requests start, or an empty list.

        One asks for the times of engine steps, once in each plan. The other asks for near-ties, at which branches may start. A
        question is not repeated too soon (`Seldom`). While there is no free slot for an early request, nothing is asked. The
        exception is that a vLLM worker keeps near-ties of too many ended requests.
        """
        if not early.has_slot(load):
            return self._asks_for_ties(early, self._asks_ties) if early.has_leftovers else []
        questions = []
        if early.prices is None and self._asks_prices.is_due():
            take = partial(early.set_prices, lengths=self._known_lengths or [*self._lengths, *load.lengths])
            questions.append(Question(WorkerCalls.specrollout_step_seconds, take=take, pace=self._asks_prices))
        if not early.num_running or self._asks_ties.is_due():  # if none is running, only branches are left to start
            questions += self._asks_for_ties(early, self._asks_ties)
        return questions

    def _last_questions(self, early: EarlyRequests) -> list[Question]:
        """Returns the questions to ask when a plan has ended and none of its early requests is left in the engine."""
        return [*self._asks_for_ties(early, Seldom()), Question(WorkerCalls.specrollout_forget_ties)]

    def _asks_for_ties(self, early: EarlyRequests, pace: Seldom) -> list[Question]:
        if not self._most_branches or not early.untold:
            return []
        return [Question(WorkerCalls.specrollout_take_ties, (early.untold,), early.take_ties, pace)]

    def _made(self, early: EarlyRequests | None) -> EarlyMade:
        """Returns what was made in a plan that has ended, or nothing if there was no plan."""
        if early is None:
            return EarlyMade({}, EarlyFigures())
        self._known_lengths = self._lengths or self._known_lengths
        return early.made()

    def _refused(self, early: EarlyRequests, name: int, error: BaseException) -> None:
        """Gives up an early request that vLLM refuses, and warns of the first one.

        Its own step will decode the request anyway.
        """
        self._leave(early, name)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "specrollout: vLLM refuses a request of a coming step, which is left for its step: %s", error
            )

    def _leave(self, early: EarlyRequests, name: int) -> None:
        """Notes that nothing of an early request can be decoded, neither now nor later."""
        early.finished(engine_id(name), (), "stop")
