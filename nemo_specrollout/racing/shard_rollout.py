# SPDX-License-Identifier: Apache-2.0
"""A synchronous engine's part in a rollout: it takes turns with other engines until none has anything left to do.

If the exchange is lost, the engine finishes its own requests alone: the same tokens, later.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nemo_specrollout.generation.requests import Rollout, ShardRequest
from nemo_specrollout.racing.turn_engine import SteppedEngine, TurnEngine
from nemo_specrollout.racing.turns import ExchangeFailed, Orders, Reply, Tokens, TurnResult


class Link(Protocol):
    """An engine's connection to the exchange. Every call but `leave` raises ExchangeFailed if the exchange is lost."""

    def join(self, capacity: int, requests: Sequence[ShardRequest]) -> None: ...

    def exchange(self, result: TurnResult | None) -> Callable[[], Reply]:
        """Sends the result of a turn; the returned function waits for the reply."""

    def leave(self) -> None: ...


@dataclass
class _OwnTexts:
    """The responses to an engine's own requests, as far as its own attempts reach without a gap."""

    engine: int
    texts: dict[int, Tokens] = field(default_factory=dict)
    """Tokens and log-probs by the number of the request."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Finish reason of the requests that ended here."""
    _attempts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of the request and next position, by the name of the attempt."""

    def text(self, number: int) -> Tokens:
        return self.texts.setdefault(number, ([], []))

    @property
    def rollouts(self) -> dict[int, Rollout]:
        return {number: Rollout(*self.text(number), reason) for number, reason in self.reasons.items()}

    def begin(self, orders: Orders) -> None:
        for name, request in orders.starts:
            assert isinstance(request, ShardRequest)
            engine, number = request.home
            if engine == self.engine:
                self._attempts[name] = number, len(request.prefix_token_ids)

    def extend(self, result: TurnResult) -> None:
        for name, part in result.parts.items():
            if name in self._attempts:
                number, start = self._attempts[name]
                self._attempts[name] = number, start + len(part[0])
                self._extend(number, start, part, result.finished.get(name))

    def _extend(self, number: int, start: int, part: Tokens, reason: str | None) -> None:
        tokens, logprobs = self.text(number)
        num_old = len(tokens) - start
        if num_old < 0:
            return  # another engine made the tokens between
        tokens.extend(part[0][num_old:])
        logprobs.extend(part[1][num_old:])
        if reason is not None:
            self.reasons[number] = reason


class ShardRollout:
    """One engine's part in a rollout. Owns the responses to its requests.

    Invariant: at most one exchange is under way; meanwhile the engine takes a turn that it already has.
    """

    def __init__(self, engine: int, stepped: SteppedEngine, link: Link) -> None:
        """`engine` is the number of the engine `stepped`."""
        self._stepped, self._link = stepped, link
        self._rollouts: dict[int, Rollout] = {}
        self._own = _OwnTexts(engine)
        self.failure: str | None = None
        """Reason why the exchange was lost; None if it was not."""

    def run(self, requests: Sequence[ShardRequest]) -> list[Rollout]:
        """Returns the responses to `requests`, which are numbered 0, 1, ... An engine without requests helps others."""
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
            self._finish_alone(requests)
        return [self._rollouts[number] for number in range(len(requests))]

    def _take_turns(self, engine: TurnEngine, requests: Sequence[ShardRequest]) -> None:
        self._link.join(self._stepped.max_num_seqs, requests)
        receive, turns, result = self._link.exchange(None), deque[Orders](), None
        while True:
            if turns:
                orders = turns.popleft()
                self._own.begin(orders)
                result = engine.turn(orders)
                self._own.extend(result)
            reply = receive()
            self._rollouts |= {number: rollout for number, rollout in reply.answers if rollout is not None}
            if reply.is_over:
                return
            turns.extend(reply.orders)
            receive, result = self._link.exchange(result), None

    def _finish_alone(self, requests: Sequence[ShardRequest]) -> None:
        """Goes on from the tokens that the engine made itself."""
        own = self._own
        self._rollouts = {**own.rollouts, **self._rollouts}
        left = [r for r in requests if r.home[1] not in self._rollouts]
        starts = tuple((r.home[1], replace(r, prefix_token_ids=tuple(own.text(r.home[1])[0]))) for r in left)
        engine, orders = TurnEngine(self._stepped), Orders(starts, seconds=math.inf)
        while len(self._rollouts) < len(requests):
            result = engine.turn(orders)
            for number, (tokens, logprobs) in result.parts.items():
                own.text(number)[0].extend(tokens)
                own.text(number)[1].extend(logprobs)
            self._rollouts |= {n: Rollout(*own.text(n), reason) for n, reason in result.finished.items()}
            orders = Orders(seconds=math.inf)
