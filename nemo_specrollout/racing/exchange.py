# SPDX-License-Identifier: Apache-2.0
"""Where engines that are served by somebody else meet: each brings its requests, reports its turns and fetches orders.

No process of its own: a worker that reports does the coordinator's work, for all whose reports wait by then.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.racing.coordinator import Coordinator
from nemo_specrollout.racing.exchange_messages import ExchangeFailed, Made, Reply, Starts
from nemo_specrollout.racing.exchange_totals import TailTotals
from nemo_specrollout.racing.mailboxes import Mailboxes
from nemo_specrollout.racing.turns import Report
from nemo_specrollout.scheduling.racing.draft_ladder import Ladder, LadderFile
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import FastestOfN

# Who has nothing to do asks again after so long. Who reports nothing of the turns that it has for so long is given up.
POLL_S, SILENCE_S = 1.0, 300.0


class TailExchange:
    """Owns the coordinator of one fleet of engines, what is known of their paces and of lengths, and figures until they are
    taken. Called by several threads; a call that has to wait gives way to others.

    Two ways to use it. *A rollout*: `begin`; every worker joins with its shard, or leaves; all go on until everything is done;
    `end`. *Requests at any time*: every worker joins once, and adds requests as they come; `settle` and `resume` enclose
    an update of weights.
    """

    def __init__(
        self, methods: Sequence[str], config: FastestOfNConfig, max_new_tokens: int, ladder: LadderFile | None = None
    ) -> None:
        """`methods`: how each worker drafts."""
        names = list(dict.fromkeys(methods))
        known = Ladder(names, ladder)
        self._boxes = Mailboxes([names.index(name) for name in methods])
        self._coordinator = Coordinator(self._boxes, FastestOfN(config, known), known, LengthEstimator(max_new_tokens))
        self._changed = threading.Condition()
        self._heard_s = [0.0] * len(methods)
        self._keys: dict[tuple[int, int], int] = {}
        self._homes: dict[int, tuple[int, int]] = {}
        self._made: list[list[Made]] = [[] for _ in methods]
        self._awaited: set[int] | None = None
        self._ended: list[int] = []
        self._is_settled = False
        self._totals = TailTotals()
        self._failure: str | None = None

    # A rollout

    def begin(self) -> None:
        """A rollout of all workers begins."""
        with self._guarded():
            self._drop()
            self._awaited = set(range(len(self._made)))

    def end(self) -> None:
        """It has ended, well or badly: no worker waits for another any more."""
        with self._guarded():
            self._drop()
            self._awaited = set()

    def _drop(self) -> None:
        self._coordinator.abandon()
        self._boxes.close()
        self._take_ended()
        self._keys, self._homes = {}, {}
        self._made = [[] for _ in self._made]

    # Workers

    def join(self, worker: int, capacity: int, requests: Sequence[ShardRequest] = ()) -> None:
        """The worker is there, with room for `capacity` requests, and brings some."""
        with self._guarded():
            self._boxes.join(worker, capacity)
            self._heard_s[worker] = time.monotonic()
            if self._awaited is not None:
                self._awaited.discard(worker)
            self._add(worker, requests)
            self._advance()

    def add(self, worker: int, requests: Sequence[ShardRequest]) -> Starts:
        """The worker, who has joined, brings more; what it is to begin with at once, unless weights are on their way."""
        with self._guarded():
            self._check(worker)
            keys = self._add(worker, requests)
            starts = () if self._is_settled else self._coordinator.begin_now(worker, keys)
            self._advance()
            return starts

    def cancel(self, worker: int, numbers: Sequence[int]) -> None:
        """The responses to its requests of these numbers are no longer wanted."""
        with self._guarded():
            self._forget([self._keys[worker, n] for n in numbers if (worker, n) in self._keys])

    def leave(self, worker: int) -> None:
        """The worker comes no more. What it has for others goes on elsewhere; what it brought is dropped."""
        with self._guarded():
            if self._awaited is not None:
                self._awaited.discard(worker)
            self._boxes.leave(worker)
            self._forget([key for (home, _), key in self._keys.items() if home == worker])
            self._advance()

    def exchange(self, worker: int, report: Report | None = None) -> Reply:
        """What the worker's last turn brought, for what it is to do next. Who has nothing to do waits, a second at most."""
        with self._guarded():
            self._check(worker)
            self._heard_s[worker] = time.monotonic()
            if report is not None:
                self._boxes.report(worker, report)
                self._refuse(report.refused)
            self._advance()
            self._changed.wait_for(lambda: self._has_word_for(worker), POLL_S)
            self._check(worker)
            made, self._made[worker] = tuple(self._made[worker]), []
            return Reply(self._boxes.fetch(worker), made, self._is_over)

    # Weights

    def settle(self, patience_s: float = 30.0) -> bool:
        """New weights are to come: races end, and nothing begins until `resume`. Returns whether every worker has carried that
        out, for which it waits so long at most."""
        with self._guarded():
            self._coordinator.settle()
            self._is_settled = True
            self._changed.notify_all()
            workers = range(len(self._made))
            return self._changed.wait_for(lambda: all(self._boxes.num_turns(w) == 0 for w in workers), patience_s)

    def resume(self) -> None:
        """They are there."""
        with self._guarded():
            self._is_settled = False
            self._advance()
            self._coordinator.resumed()

    # Figures

    def take_figures(self) -> dict[str, float]:
        """Of what ended since last asked, by the names of docs/reference/metrics.md."""
        with self._guarded():
            totals, self._totals = self._totals, TailTotals()
            return totals.figures()

    # Inside

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One at a time. What goes wrong once is told to everybody."""
        with self._changed:
            self._check()
            try:
                yield
            except ExchangeFailed:
                raise
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
                raise ExchangeFailed(self._failure) from error

    def _check(self, worker: int | None = None) -> None:
        if self._failure is not None:
            raise ExchangeFailed(self._failure)
        if worker is not None and not self._boxes.is_alive(worker):
            raise ExchangeFailed(
                f"worker {worker} is none of the rollout: it was silent for long, or the rollout was ended"
            )

    @property
    def _is_over(self) -> bool:
        return self._awaited is not None and not self._awaited and not self._coordinator.is_busy

    def _has_word_for(self, worker: int) -> bool:
        is_needed = self._boxes.num_turns(worker) > 0 or bool(self._made[worker])
        return is_needed or self._is_over or self._failure is not None or not self._boxes.is_alive(worker)

    def _add(self, worker: int, requests: Sequence[ShardRequest]) -> list[int]:
        keys = self._coordinator.add(requests, worker=worker) if requests else []
        self._homes |= {key: r.home for key, r in zip(keys, requests, strict=True)}
        self._keys |= {r.home: key for key, r in zip(keys, requests, strict=True)}
        return keys

    def _refuse(self, names: Sequence[int]) -> None:
        """Who asked for them is told."""
        keys = [key for name in names if (key := self._coordinator.request_of(name)) is not None]
        for worker, number in [self._homes[key] for key in keys]:
            self._made[worker].append(Made.of(number, None))
        self._forget(keys)

    def _forget(self, keys: Sequence[int]) -> None:
        """The responses to these go to no worker."""
        self._coordinator.abandon(keys)
        for key in keys:
            del self._keys[self._homes.pop(key)]

    def _advance(self) -> None:
        if not self._is_settled:
            self._lose_silent()
            for key in self._coordinator.advance():
                self._finish(key)
            if self._awaited is None or self._is_over:
                self._take_ended()
            self._coordinator.send_turns()
            if not self._coordinator.is_busy:
                self._boxes.reports()  # of those that were beaten
        self._changed.notify_all()

    def _lose_silent(self) -> None:
        now = time.monotonic()
        for worker, heard_s in enumerate(self._heard_s):
            if self._boxes.num_turns(worker) and now - heard_s > SILENCE_S:
                self._boxes.leave(worker)

    def _finish(self, key: int) -> None:
        worker, number = self._homes.pop(key)
        del self._keys[worker, number]
        self._made[worker].append(Made.of(number, self._coordinator.response(key).rollout))
        self._ended.append(key)

    def _take_ended(self) -> None:
        """Of a rollout all at once: so it is known what moving has saved."""
        if self._ended:
            _, timeline = self._coordinator.take(self._ended)
            self._totals.add(timeline)
            self._ended = []
