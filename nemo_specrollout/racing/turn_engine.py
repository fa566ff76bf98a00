# SPDX-License-Identifier: Apache-2.0
"""A synchronous engine that works in turns, and its part in a rollout with other engines."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from nemo_specrollout.generation.requests import Rollout, ShardRequest
from nemo_specrollout.racing.attempts import Attempt, Response
from nemo_specrollout.racing.turns import ExchangeFailed, Orders, Reply, Request, Starts, Tokens, TurnResult, Work

FEW_ATTEMPTS = 4
"""With at most this number of attempts, a turn ends as soon as one of them does: others may be racing for it."""
FIRST_STEPS = 2
"""Steps until an engine that schedules asynchronously reports its first step."""


class SteppedEngine(Protocol):
    """An engine that is driven one step at a time: `RolloutEngine`, `HostedEngine`."""

    max_num_seqs: int

    def submit(self, requests: Sequence[Any], sampling: Mapping[str, Any]) -> list[str]: ...

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]: ...

    def step(self) -> dict[str, Rollout]: ...

    def abort(self, ids: list[str]) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...


@dataclass
class _Submitted:
    """An attempt under way in the engine."""

    name: int
    request: Request
    engine_id: str = ""
    num_reported: int = 0
    """Number of the engine's tokens that were reported."""


@dataclass
class _Turn:
    """Tokens and finish reasons that a turn has collected so far."""

    parts: dict[int, Tokens] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, name: int, tokens: list[int], logprobs: list[float]) -> None:
        known = self.parts.setdefault(name, ([], []))
        known[0].extend(tokens)
        known[1].extend(logprobs)
        self.num_tokens += len(tokens)


def num_text_tokens(requests: Iterable[Request]) -> int:
    """Returns the number of tokens that a prefill of the requests computes. Samples of one prompt share its computation."""
    requests = list(requests)
    prompts = {r.prompt_index: len(r.prompt_token_ids) for r in requests}
    return sum(prompts.values()) + sum(len(r.prefix_token_ids) for r in requests)


class TurnEngine:
    """Takes orders, steps a `SteppedEngine` for a while, and reports what its attempts made.

    Owns the attempts under way, and how much of each was reported.

    Invariant: each token of an attempt is reported once and in order. A turn's result holds all tokens made in the turn.
    """

    def __init__(self, engine: SteppedEngine, **sampling: Any) -> None:
        """`sampling` overrides the config's sampling parameters."""
        self.engine, self._sampling = engine, sampling
        self.policy_version = 0
        self._attempts: dict[int, _Submitted] = {}
        self._by_engine_id: dict[str, _Submitted] = {}
        self._step_s = 0.0  # seconds of a recent decode step

    def turn(self, orders: Orders) -> TurnResult:
        """Stops and begins attempts as ordered, then steps until the turn's time is over or no attempt is left."""
        turn, old = _Turn(), [attempt.name for attempt in self._attempts.values() if attempt.num_reported]
        until = time.perf_counter() + orders.seconds
        self._stop(orders.stops)
        first_s, num_first_steps, num_prefilled = self._begin(orders.starts, turn)
        num_first = turn.num_tokens
        decode_s, request_s, num_steps = self._decode(until, turn)
        self._report_all(turn)
        prefill_s = max(first_s - num_first_steps * self._step_s, 0.0) if num_prefilled else 0.0
        work = Work(decode_s, request_s, turn.num_tokens - num_first, prefill_s, num_prefilled)
        self._step_s = decode_s / num_steps if num_steps else self._step_s
        steady = tuple(name for name in old if name in self._attempts)
        return TurnResult(turn.parts, turn.finished, work, self.policy_version, steady)

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, recompute_kv_cache: bool
    ) -> None:
        """Replaces the weights between two turns; attempts go on.

        With `recompute_kv_cache`, the new policy reads the text of each attempt again, so its tokens are exact samples of
        the new policy. Without it, attempts go on from the old policy's KV cache, as NeMo-RL does by default.
        """
        attempts = list(self._attempts.values()) if recompute_kv_cache else []
        for attempt in attempts:
            tokens, _ = self.engine.progress(attempt.engine_id)
            prefix = (*attempt.request.prefix_token_ids, *tokens)
            attempt.request = replace(attempt.request, prefix_token_ids=prefix)
            attempt.num_reported = 0
        self._abort(attempts)
        self.engine.load_weights(tensors)
        self.policy_version = policy_version
        self._submit(attempts)

    def stop_all(self) -> None:
        """Stops all attempts."""
        self._stop(list(self._attempts))

    def _stop(self, names: Sequence[int]) -> None:
        """Stops attempts. Their unreported tokens are lost."""
        self._abort([self._attempts.pop(name) for name in names if name in self._attempts])

    def _begin(self, starts: Starts, turn: _Turn) -> tuple[float, int, int]:
        """Begins attempts and takes the steps of their prefill.

        Returns the seconds of these steps, their number, and the number of tokens that they computed completely.
        """
        if not starts:
            return 0.0, 0, 0
        started, num_steps, begun = time.perf_counter(), 0, set[int]()
        attempts = [_Submitted(name, request) for name, request in starts]
        self._attempts |= {attempt.name: attempt for attempt in attempts}
        self._submit(attempts)
        while not begun and num_steps < FIRST_STEPS:
            self._step(turn)
            self._report_all(turn)
            num_steps += 1
            begun = {name for name, _ in starts if name in turn.parts}
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

    def _decode(self, until: float, turn: _Turn) -> tuple[float, float, int]:
        """Steps until the clock shows `until`. Returns `Work.decode_s`, `Work.request_s` and the number of steps."""
        decode_s, request_s, num_steps = 0.0, 0.0, 0
        now = time.perf_counter()
        while self._attempts and now < until:
            num_attempts = len(self._attempts)
            self._step(turn)
            before, now = now, time.perf_counter()
            num_steps += 1
            decode_s += now - before
            request_s += (now - before) * min(num_attempts, self.engine.max_num_seqs)
            if len(self._attempts) < num_attempts <= FEW_ATTEMPTS:
                break
        return decode_s, request_s, num_steps

    def _step(self, turn: _Turn) -> None:
        for engine_id, rollout in self.engine.step().items():
            attempt = self._by_engine_id.pop(engine_id)
            del self._attempts[attempt.name]
            start = attempt.num_reported
            turn.add(attempt.name, rollout.token_ids[start:], rollout.logprobs[start:])
            turn.finished[attempt.name] = rollout.finish_reason

    def _report_all(self, turn: _Turn) -> None:
        """Adds the new tokens of all attempts to the turn."""
        for attempt in self._attempts.values():
            tokens, logprobs = self.engine.progress(attempt.engine_id, attempt.num_reported)
            if tokens:
                attempt.num_reported += len(tokens)
                turn.add(attempt.name, tokens, logprobs)


class Link(Protocol):
    """An engine's connection to the exchange. Every call but `leave` raises ExchangeFailed if the exchange is lost."""

    def join(self, capacity: int, requests: Sequence[ShardRequest]) -> None: ...

    def exchange(self, result: TurnResult | None) -> Callable[[], Reply]:
        """Sends the result of a turn; the returned function waits for the reply."""

    def leave(self) -> None: ...


class ShardRollout:
    """A synchronous engine's part in a rollout: it takes turns until no engine has anything left to do.

    Owns the responses to the engine's own requests. If the exchange is lost, the engine goes on alone from the tokens that it
    has made itself: the same tokens, later.

    Invariant: at most one exchange is under way; meanwhile the engine takes a turn that it already has.
    """

    def __init__(self, engine: int, stepped: SteppedEngine, link: Link) -> None:
        """`engine` is the number of the engine `stepped`."""
        self._number, self._stepped, self._link = engine, stepped, link
        self._rollouts: dict[int, Rollout] = {}
        self._own: list[Response] = []
        """The responses to our requests, as far as attempts here reach without a gap."""
        self._own_of_attempt: dict[int, Response] = {}
        self.failure: str | None = None
        """Reason why the exchange was lost; None if it was not."""

    def run(self, requests: Sequence[ShardRequest]) -> list[Rollout]:
        """Returns the responses to `requests`, which are numbered 0, 1, ... An engine without requests helps others."""
        self._own = [Response(request) for request in requests]
        engine = TurnEngine(self._stepped)
        try:
            self._take_turns(engine, requests)
        except ExchangeFailed as error:
            self.failure = str(error)
        except BaseException:
            self._link.leave()
            raise
        finally:
            engine.stop_all()
        if self.failure is not None:
            self._finish_alone()
        return [self._rollouts[number] for number in range(len(requests))]

    def _take_turns(self, engine: TurnEngine, requests: Sequence[ShardRequest]) -> None:
        self._link.join(self._stepped.max_num_seqs, requests)
        receive, turns, result = self._link.exchange(None), deque[Orders](), None
        while True:
            if turns:
                orders = turns.popleft()
                result = engine.turn(orders)
                self._keep(orders.starts, result)
            reply = receive()
            self._rollouts |= {number: rollout for number, rollout in reply.answers if rollout is not None}
            if reply.is_over:
                return
            turns.extend(reply.orders)
            receive, result = self._link.exchange(result), None

    def _keep(self, starts: Starts, result: TurnResult) -> None:
        """Keeps what attempts made of our requests, unless another engine made the tokens before."""
        for name, request in starts:
            assert isinstance(request, ShardRequest)
            engine, number = request.home
            if engine == self._number and len(request.prefix_token_ids) <= len(self._own[number].tokens):
                self._own_of_attempt[name] = self._own[number]
                self._own[number].attempts[name] = Attempt(name, len(request.prefix_token_ids))
        for name, part in result.parts.items():
            own = self._own_of_attempt.get(name)
            if own is not None and not own.extend(name, *part, result.finished.get(name), 0):
                del self._own_of_attempt[name]  # it diverged

    def _finish_alone(self) -> None:
        left = {n: r for n, r in enumerate(self._own) if n not in self._rollouts and r.finish_reason is None}
        for number, response in left.items():
            response.open(number, number)
        orders = Orders(tuple((n, r.begin(n)) for n, r in left.items()), seconds=math.inf)
        engine = TurnEngine(self._stepped)
        while any(r.finish_reason is None for r in left.values()):
            result = engine.turn(orders)
            for number, part in result.parts.items():
                left[number].extend(number, *part, result.finished.get(number), 0)
            orders = Orders(seconds=math.inf)
        done = {n: r.rollout for n, r in enumerate(self._own) if r.finish_reason is not None}
        self._rollouts = {**done, **self._rollouts}
