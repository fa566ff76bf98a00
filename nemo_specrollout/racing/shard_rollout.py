# SPDX-License-Identifier: Apache-2.0
"""A worker's shard of a rollout: takes turns with those of other workers, until nothing is left to do for anybody.

If the exchange is gone the worker finishes its own requests alone: the same tokens, later.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.racing.exchange_messages import ExchangeFailed, Reply
from nemo_specrollout.racing.rollout_worker import RolloutWorker, Steps
from nemo_specrollout.racing.turns import Orders, Report

logger = logging.getLogger(__name__)


class Link(Protocol):
    """A worker's end of the exchange, which is elsewhere. Every call raises ExchangeFailed where that is gone."""

    def join(self, capacity: int, requests: Sequence[ShardRequest]) -> None: ...

    def exchange(self, report: Report | None) -> Callable[[], Reply]:
        """Hands the report in; the answer is waited for when it is asked for."""

    def leave(self) -> None:
        """Raises nothing."""


@dataclass
class _Known:
    """What this worker knows of its own requests, by number: as far as its own runs of them reach without a gap, and why those
    ended that it saw ending."""

    worker: int
    texts: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    _runs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def text(self, number: int) -> tuple[list[int], list[float]]:
        return self.texts.setdefault(number, ([], []))

    @property
    def rollouts(self) -> dict[int, Rollout]:
        return {number: Rollout(*self.text(number), reason) for number, reason in self.reasons.items()}

    def begin(self, orders: Orders) -> None:
        for name, request in orders.starts:
            assert isinstance(request, ShardRequest)
            worker, number = request.home
            if worker == self.worker:
                self._runs[name] = number, len(request.prefix_token_ids)

    def told(self, report: Report) -> None:
        for name, part in report.progress.parts().items():
            if name in self._runs:
                number, start = self._runs[name]
                self._runs[name] = number, start + len(part[0])
                self._extend(number, start, part, report.finished.get(name))

    def _extend(self, number: int, start: int, part: tuple[list[int], list[float]], reason: str | None) -> None:
        tokens, logprobs = self.text(number)
        num_old = len(tokens) - start
        if num_old < 0:
            return  # somebody else made what is between
        tokens.extend(part[0][num_old:])
        logprobs.extend(part[1][num_old:])
        if reason is not None:
            self.reasons[number] = reason


class ShardRollout:
    """One worker's part of a rollout. Owns what its requests came to.

    Invariant: one exchange at most is under way, while the engine takes the turn that it has by then.
    """

    def __init__(self, worker: int, engine: Steps, link: Link) -> None:
        self._engine, self._link = engine, link
        self._rollouts: dict[int, Rollout] = {}
        self._known = _Known(worker)
        self.failure: str | None = None
        """Why the exchange was of no more use, if so."""

    def run(self, requests: Sequence[ShardRequest]) -> list[Rollout]:
        """The responses, in the order of `requests`, whose numbers are 0, 1, ...; for none of its own it helps others."""
        worker = RolloutWorker(self._engine)
        try:
            self._take_turns(worker, requests)
        except ExchangeFailed as error:
            self.failure = str(error)
        except BaseException:
            self._link.leave()
            raise
        finally:
            worker.forget()
        if self.failure is not None:
            self._finish_alone(requests)
        return [self._rollouts[number] for number in range(len(requests))]

    def _take_turns(self, worker: RolloutWorker, requests: Sequence[ShardRequest]) -> None:
        self._link.join(self._engine.max_num_seqs, requests)
        answer, turns, report = self._link.exchange(None), deque[Orders](), None
        while True:
            if turns:
                report = self._turn(worker, turns.popleft())
            reply = answer()
            self._rollouts |= {made.number: made.rollout for made in reply.made if made.rollout is not None}
            if reply.is_over:
                return
            turns.extend(reply.orders)
            answer, report = self._link.exchange(report), None

    def _turn(self, worker: RolloutWorker, orders: Orders) -> Report:
        self._known.begin(orders)
        report = worker.turn(orders)
        self._known.told(report)
        return report

    def _finish_alone(self, requests: Sequence[ShardRequest]) -> None:
        known = self._known
        self._rollouts = {**known.rollouts, **self._rollouts}
        left = [r for r in requests if r.home[1] not in self._rollouts]
        starts = tuple((r.home[1], replace(r, prefix_token_ids=tuple(known.text(r.home[1])[0]))) for r in left)
        worker, orders = RolloutWorker(self._engine), Orders(starts, seconds=math.inf)
        while len(self._rollouts) < len(requests):
            report = worker.turn(orders)
            for number, (tokens, logprobs) in report.progress.parts().items():
                known.text(number)[0].extend(tokens)
                known.text(number)[1].extend(logprobs)
            self._rollouts |= {n: Rollout(*known.text(n), reason) for n, reason in report.finished.items()}
            orders = Orders(seconds=math.inf)
