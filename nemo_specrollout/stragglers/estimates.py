# SPDX-License-Identifier: Apache-2.0
"""Estimates of a coordinator, which are decode speeds and the seconds that moves and races have saved.

Shapes: K requests that made tokens in a turn, R running requests, M draft methods, E engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.stragglers.attempts import Response
from nemo_specrollout.stragglers.decisions.idle_time import IdleTime
from nemo_specrollout.stragglers.decisions.request_estimates import RequestSpeeds
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import Assignment, undisturbed_end_s
from nemo_specrollout.stragglers.turns import TurnWork


class DecodeSpeeds:
    """Learns from turns how fast each draft method decodes, and how fast each request decodes compared with a typical one.

    Owns the estimates of the running requests. The decode-speed table belongs to the caller, and remains when requests end.
    """

    def __init__(self, table: DecodeSpeedTable) -> None:
        self.table = table
        self._speeds = RequestSpeeds(np.ones((0, len(table.methods))))
        self._rows: dict[int, int] = {}
        self._tasks: dict[int, str] = {}

    def begin(self, keys: Sequence[int], task: str) -> None:
        """Adds requests of one task. Their estimates start from the speeds that the decode-speed table has for this task."""
        task_speed_M = np.array([self.table.task_speed(task, m) for m in range(len(self.table.methods))])
        self._rows |= zip(keys, self._speeds.begin(len(keys), task_speed_M), strict=True)
        self._tasks |= dict.fromkeys(keys, task)

    def forget(self, keys: Sequence[int]) -> None:
        self._speeds.forget([self._rows.pop(key) for key in keys])
        for key in keys:
            del self._tasks[key]

    def learn(self, method: int, work: TurnWork, num_made: Mapping[int, int], steady: Sequence[int]) -> None:
        """Learns from a turn of an engine with the draft method `method`.

        `num_made` has the number of new tokens of each request. `steady` are the requests that were decoded during the whole
        turn. The relative speed of a request is learned only for these.
        """
        if work.num_prefilled:
            self.table.observe_prefill(work.num_prefilled, work.prefill_s)
        if not (work.num_tokens and work.decode_s and num_made):
            return
        batch = max(1, round(work.request_s / work.decode_s))
        typical = self.table.tokens_per_s(method, batch) * work.decode_s
        tasks = {self._tasks[key] for key in num_made}
        task = tasks.pop() if len(tasks) == 1 else ANY_TASK
        self.table.observe(task, method, batch, work.num_tokens, work.request_s)
        made_K = np.array([num_made.get(key, 0) for key in steady], float)
        self._speeds.observe(self._rows_of(steady), method, made_K, typical)

    def of(self, keys: Sequence[int]) -> np.ndarray:
        """Returns the decode speed of each request under each draft method, relative to a typical request, float64 [R, M]."""
        return self._speeds.speeds(self._rows_of(keys))

    def doubts(self, keys: Sequence[int]) -> np.ndarray:
        """Returns the standard deviation of the logarithm of each relative decode speed that `of` returns, float64 [R, M]."""
        return self._speeds.doubts(self._rows_of(keys))

    def _rows_of(self, keys: Sequence[int]) -> np.ndarray:
        return np.array([self._rows[key] for key in keys], np.int64)


class Savings:
    """Estimates how much later a rollout would have ended if none of its requests had moved or been raced."""

    def __init__(self, num_engines: int, now_s: float) -> None:
        self.heard_s_E = np.full(num_engines, now_s)
        """Time of each engine's latest result, by `time.perf_counter`."""
        self.is_unknown = False
        """Whether the savings cannot be estimated, for example because an engine has died or new weights have arrived."""
        self.keys: list[int] = []
        """Keys of the requests that were running just before the first move or race."""
        self.before: Assignment | None = None
        """Which engine had each of the requests `keys` just before the first move or race, or None if there was none yet."""

    def note(self, decision: TailDecision, keys: Sequence[int], responses: Mapping[int, Response]) -> None:
        """Notes which engine has which request, if `decision` is the first one that moves or races a request.

        The decision names a request by its index in `keys`. A request that waits counts for the engine on which the decision
        starts it.
        """
        engines = {key: list(responses[key].attempts) for key in keys}
        if self.before is not None or not any(engines[keys[request]] for request, _ in decision.starts):
            return
        begun = {keys[request]: engine for request, engine in decision.starts}
        holders = {**begun, **{key: has[0] for key, has in engines.items() if has}}
        num_tokens_R = np.array([len(responses[key].tokens) for key in holders])
        self.keys = list(holders)
        self.before = Assignment(np.array(list(holders.values())), num_tokens_R, self.heard_s_E.copy())

    def saved_s(
        self, ended_s: float, responses: Mapping[int, Response], speeds: DecodeSpeeds, methods: Sequence[int]
    ) -> float | None:
        """Returns how many seconds later a rollout that ended at `ended_s` would have ended without moves and races.

        Returns None if there were no moves and races, or if the savings are unknown. `methods` has the draft method of each
        engine.
        """
        if self.before is None or self.is_unknown:
            return None
        lengths_R = np.array([len(responses[key].tokens) for key in self.keys])
        end_s = undisturbed_end_s(self.before, lengths_R, speeds.of(self.keys), np.array(methods), speeds.table)
        return end_s - ended_s


@dataclass
class IdleLooks:
    """Sums over decisions of the tail policy. A decision counts only if some engine could decode requests of coming steps."""

    num_looks: int = 0
    """Number of decisions that count."""
    num_declined: int = 0
    """Number of moves and races that the decisions would have made if no engine could decode requests of coming steps."""
    worth: float = 0.0
    """Sum over the decisions of this value: the seconds that an engine saves later with each second in which it decodes only
    requests of coming steps, as the mean over the engines."""

    def note(self, idle: IdleTime, decision: TailDecision) -> None:
        if idle.has_worth:
            self.num_looks += 1
            self.num_declined += decision.num_declined
            self.worth += float(np.mean([idle.rate(engine, 0) for engine in range(len(idle.worth_E))]))

    def figures(self) -> dict[str, float]:
        """Returns the metrics `tail.early_worth` and `tail.declined`, or nothing if no decisions were counted."""
        if not self.num_looks:
            return {}
        return {"early_worth": self.worth / self.num_looks, "declined": self.num_declined}
