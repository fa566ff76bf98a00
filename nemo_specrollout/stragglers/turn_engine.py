# SPDX-License-Identifier: Apache-2.0
"""A synchronous engine that works in turns, and its part in a rollout with other engines."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_specrollout.generation.engine.hosted_engine import HostedEngine
from nemo_specrollout.generation.engine.requests import Rollout, ShardRequest
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turns import (
    ExchangeFailed,
    IdleWork,
    Request,
    Starts,
    Tokens,
    TurnOrders,
    TurnResult,
    TurnWork,
)

FEW_ATTEMPTS = 4
"""If an engine has at most this number of attempts, its turn ends as soon as one of them ends. Other engines may be racing for
the same request, and should soon know that they have lost."""
FIRST_STEPS = 2
"""Largest number of engine steps that count as prefill. With asynchronous scheduling a prefill takes two, because the engine
reports the tokens of an engine step only at the end of the next one."""
SLICE_S = 0.05
"""An engine without requests of its own decodes requests of coming steps in slices of this number of seconds. After each slice
it checks whether the exchange has answered."""

LEAST_S = 1e-3
"""If a slice of decoding requests of coming steps was shorter than this number of seconds, it had no engine step. So the
requests that are left cannot be decoded now."""


class Answer(Protocol):
    """The pending answer to a call of the exchange."""

    def is_there(self) -> bool:
        """Returns whether the answer has arrived, so that calling this object returns at once."""

    def __call__(self) -> Any:
        """Waits for the answer and returns it. Raises ExchangeFailed if the exchange is lost."""


Ask = Callable[..., Answer]
"""A function that calls a method of `StragglerExchange` in the name of one engine, without waiting for the answer. Its
arguments are the method, and the method's arguments without the engine's number. It raises ExchangeFailed if the exchange is
lost."""


@dataclass
class _Submitted:
    """A running attempt, which is the engine's work on one request. Its first `num_reported` tokens were reported."""

    name: int
    request: Request
    engine_id: str = ""
    num_reported: int = 0


def num_text_tokens(requests: Iterable[Request]) -> int:
    """Returns the number of tokens that a prefill of the requests computes. A prompt counts once for all of its samples."""
    requests = list(requests)
    prompts = {r.prompt_index: len(r.prompt_token_ids) for r in requests}
    return sum(prompts.values()) + sum(len(r.prefix_token_ids) for r in requests)


class TurnEngine:
    """Steps an engine through turns and reports the tokens of each turn. Owns the running attempts.

    An attempt is the engine's work on one request. Orders say which attempts to start and to stop.

    Invariant: each token of an attempt is reported once and in order. The result of a turn has all tokens of the turn.
    """

    def __init__(self, engine: HostedEngine, **sampling: Any) -> None:
        """`sampling` has values that replace sampling parameters of the config."""
        self.engine = engine
        self._sampling = sampling
        self.policy_version = 0
        self._attempts: dict[int, _Submitted] = {}
        self._by_engine_id: dict[str, _Submitted] = {}
        self._step_s = 0.0  # seconds of a recent decode step
        self._parts: dict[int, Tokens] = {}  # of this turn
        self._finished: dict[int, str] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._attempts)

    def turn(self, orders: TurnOrders) -> TurnResult:
        """Stops and starts attempts as ordered, and then steps the engine. Returns the report on the turn.

        The turn ends when its time is over, when no attempt is left, or when one of few attempts ends (`FEW_ATTEMPTS`).
        """
        self._parts = {}
        self._finished = {}
        old = [attempt.name for attempt in self._attempts.values() if attempt.num_reported]
        until = time.perf_counter() + orders.seconds
        self._stop(orders.stops)
        first_s, num_first_steps, num_prefilled = self._begin(orders.starts)
        num_first = self._num_tokens
        decode_s, request_s, num_steps = self._decode(until)
        self._report_all()
        prefill_s = max(first_s - num_first_steps * self._step_s, 0.0) if num_prefilled else 0.0
        work = TurnWork(decode_s, request_s, self._num_tokens - num_first, prefill_s, num_prefilled)
        self._step_s = decode_s / num_steps if num_steps else self._step_s
        steady = tuple(name for name in old if name in self._attempts)
        return TurnResult(self._parts, self._finished, work, self.policy_version, steady)

    def stop_all(self) -> None:
        self._stop(list(self._attempts))

    def _stop(self, names: Sequence[int]) -> None:
        """Stops attempts. Their unreported tokens are lost."""
        self._abort([self._attempts.pop(name) for name in names if name in self._attempts])

    def _begin(self, starts: Starts) -> tuple[float, int, int]:
        """Starts attempts and runs the engine steps of their prefill.

        Returns the seconds of these engine steps, their number, and the number of tokens whose prefill they have completed.
        """
        if not starts:
            return 0.0, 0, 0
        started = time.perf_counter()
        num_steps = 0
        begun = set[int]()
        attempts = [_Submitted(name, request) for name, request in starts]
        self._attempts |= {attempt.name: attempt for attempt in attempts}
        self._submit(attempts)
        while not begun and num_steps < FIRST_STEPS:
            self._step()
            self._report_all()
            num_steps += 1
            begun = {name for name, _ in starts if name in self._parts}
        num_prefilled = num_text_tokens(request for name, request in starts if name in begun)
        return time.perf_counter() - started, num_steps, num_prefilled

    def _submit(self, attempts: Sequence[_Submitted]) -> None:
        ids = self.engine.submit([a.request for a in attempts], self._sampling)
        for attempt, engine_id in zip(attempts, ids, strict=True):
            attempt.engine_id = engine_id
            self._by_engine_id[engine_id] = attempt

    def _abort(self, attempts: Sequence[_Submitted]) -> None:
        self.engine.abort([attempt.engine_id for attempt in attempts])
        for attempt in attempts:
            del self._by_engine_id[attempt.engine_id]

    def _decode(self, until: float) -> tuple[float, float, int]:
        """Steps the engine until the time `until`.

        Returns `TurnWork.decode_s`, `TurnWork.request_s` and the number of engine steps.
        """
        decode_s, request_s, num_steps = 0.0, 0.0, 0
        now = time.perf_counter()
        while self._attempts and now < until:
            num_attempts = len(self._attempts)
            self._step()
            before = now
            now = time.perf_counter()
            num_steps += 1
            decode_s += now - before
            request_s += (now - before) * min(num_attempts, self.engine.max_num_seqs)
            if len(self._attempts) < num_attempts <= FEW_ATTEMPTS:
                break
        return decode_s, request_s, num_steps

    def _step(self) -> None:
        for engine_id, rollout in self.engine.step().items():
            attempt = self._by_engine_id.pop(engine_id)
            del self._attempts[attempt.name]
            start = attempt.num_reported
            self._report(attempt, rollout.token_ids[start:], rollout.logprobs[start:])
            self._finished[attempt.name] = rollout.finish_reason

    def _report_all(self) -> None:
        for attempt in self._attempts.values():
            tokens, logprobs = self.engine.progress(attempt.engine_id, attempt.num_reported)
            if tokens:
                self._report(attempt, tokens, logprobs)

    def _report(self, attempt: _Submitted, tokens: list[int], logprobs: list[float]) -> None:
        attempt.num_reported += len(tokens)
        known = self._parts.setdefault(attempt.name, ([], []))
        known[0].extend(tokens)
        known[1].extend(logprobs)

    @property
    def _num_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self._parts.values())


def roll_out_shard(
    stepped: HostedEngine, ask: Ask, requests: Sequence[ShardRequest], idle: IdleWork | None = None
) -> list[Rollout]:
    """Rolls out an engine's own `requests` together with other engines, which may take over requests from each other.

    Returns the responses to `requests`, in the same order. The `home` of each request must be the pair of the engine's number
    and the request's index in `requests`. The engine takes turns until all requests of all engines have ended.

    At most one call of the exchange is pending at a time. Meanwhile the engine works on the next turn, if the exchange has
    already ordered one. Otherwise, if it has nothing to decode, it decodes requests of coming steps (`idle`). Raises
    ExchangeFailed if the exchange is lost.
    """
    engine = TurnEngine(stepped)
    rollouts = dict[int, Rollout]()
    turns = deque[TurnOrders]()
    result = None
    try:
        ask(StragglerExchange.join, stepped.max_num_seqs, requests)()
        receive = ask(StragglerExchange.exchange, None)
        while True:
            if turns:
                result = engine.turn(turns.popleft())
            elif idle is not None and not engine.is_busy:
                _work_until(receive, idle)
            reply = receive()
            rollouts |= {number: rollout for number, rollout in reply.answers if rollout is not None}
            if reply.is_over:
                return [rollouts[number] for number in range(len(requests))]
            turns.extend(reply.orders)
            receive = ask(StragglerExchange.exchange, result, EarlyWorth() if idle is None else idle.worth())
            result = None
    except ExchangeFailed:
        raise
    except BaseException:
        with suppress(ExchangeFailed):
            ask(StragglerExchange.leave)()
        raise
    finally:
        engine.stop_all()


def _work_until(answer: Answer, idle: IdleWork) -> None:
    """Decodes requests of coming steps until the exchange's answer has arrived, or until none can be decoded now."""
    has_more = True
    while has_more and not answer.is_there():
        started = time.perf_counter()
        has_more = idle.slice(SLICE_S) and time.perf_counter() - started > LEAST_S
