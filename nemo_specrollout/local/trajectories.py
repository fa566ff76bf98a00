# SPDX-License-Identifier: Apache-2.0
"""The trajectory collector of asynchronous GRPO: a thread that keeps the engines generating for coming steps.

After NeMo-RL's trajectory collector and replay buffer (nemo_rl/algorithms/async_utils). A target is the training step that a
batch is for. A target is begun as soon as the current policy is at most `max_trajectory_age_steps` steps older than it.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nemo_specrollout.config.run_sections import AsyncGrpoConfig
from nemo_specrollout.local.step_rollout import StepPrompts
from nemo_specrollout.racing.attempts import Response, Timeline
from nemo_specrollout.racing.coordinator import Coordinator

T = TypeVar("T")

_LOOK_S = 0.05
"""Seconds between two looks of a waiting trainer. The idle collector looks ten times as often."""


@dataclass(frozen=True)
class Trajectories:
    """All responses for a target."""

    target: int
    prompts: StepPrompts
    responses: list[Response]
    timeline: Timeline
    first_version: int
    """Version of the policy when the target was begun: the oldest that made a token of it."""
    seconds: float
    """Seconds from the begin of the target to its last response."""

    @property
    def age(self) -> int:
        """Training steps between the oldest policy that made a token of it and the policy that trains on it."""
        return self.target - self.first_version


@dataclass
class _Target:
    """A batch under way."""

    prompts: StepPrompts
    keys: list[int]
    first_version: int
    begun_s: float
    waiting_for: set[int] = field(default_factory=set)


class TrajectoryCollector(Generic[T]):
    """Generates for targets while the trainer trains. Owns the thread that alone uses the coordinator and its engines.

    The thread passes trajectories to `on_ready` as soon as they are complete; the trainer takes the result.

    States: collecting, then closed or failed. After a failure every call raises its error.

    Invariant: a policy of version v begins no target beyond v + max_trajectory_age_steps.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: AsyncGrpoConfig,
        prompts: Callable[[int], StepPrompts],
        on_ready: Callable[[Trajectories], T],
        targets: range,
        task: str,
    ) -> None:
        self._coordinator, self._config, self._prompts, self._task = coordinator, config, prompts, task
        self._on_ready = on_ready
        self._targets, self._next_target, self._version = targets, targets.start, targets.start
        self._under_way: dict[int, _Target] = {}
        self._ready: dict[int, T] = {}
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.idle_s = 0.0
        """Seconds without a request under way, because no target could be begun."""
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def take(self, target: int, on_finished: Callable[[int], None] = lambda done: None) -> T:
        """Returns the result of `on_ready` for a target; waits for it. `on_finished` gets the number of finished responses."""
        with self._changed:
            while target not in self._ready:
                self._raise_failure()
                on_finished(self._num_done(target))
                self._changed.wait(_LOOK_S)
            return self._ready.pop(target)

    def update_weights(
        self, tensors: Iterable[tuple[str, Any]], version: int, before: Callable[[], None] = lambda: None
    ) -> None:
        """Gives the engines the weights of `version`; returns when they have them.

        With `in_flight_weight_updates` this happens while requests are under way, otherwise after they have ended. The
        thread calls `before` just before.
        """
        self.call(lambda: self._update_weights(tensors, version, before))

    def call(self, work: Callable[[], Any]) -> Any:
        """Does `work` in the collector's thread, between two rounds, and returns its result."""
        future: Future[Any] = Future()
        self._calls.put((work, future))
        while not future.done():
            self._raise_failure()
            time.sleep(_LOOK_S / 10)
        return future.result()

    def close(self) -> None:
        """Ends the thread and abandons the requests under way."""
        self._closed.set()
        self._thread.join()

    # In the thread

    def _collect(self) -> None:
        try:
            while not self._closed.is_set():
                self._answer_calls()
                self._begin_targets()
                self._advance()
            self._coordinator.abandon()
        except BaseException as error:
            self._failure = error

    def _answer_calls(self) -> None:
        while not self._calls.empty():
            work, future = self._calls.get()
            future.set_result(work())

    def _begin_targets(self) -> None:
        newest = min(self._version + self._config.max_trajectory_age_steps, self._targets.stop - 1)
        while self._next_target <= newest:
            prompts = self._prompts(self._next_target)
            keys = self._coordinator.add(prompts.requests, self._task)
            self._under_way[self._next_target] = _Target(prompts, keys, self._version, time.perf_counter(), set(keys))
            self._next_target += 1

    def _advance(self) -> None:
        if not self._under_way:
            self._closed.wait(_LOOK_S / 10)
            self.idle_s += _LOOK_S / 10
            return
        finished = self._coordinator.advance()
        for number, target in list(self._under_way.items()):
            target.waiting_for -= set(finished)
            if not target.waiting_for:
                self._finish(number, self._under_way.pop(number))

    def _finish(self, number: int, target: _Target) -> None:
        responses, timeline = self._coordinator.take(target.keys)
        seconds = time.perf_counter() - target.begun_s
        found = Trajectories(number, target.prompts, responses, timeline, target.first_version, seconds)
        assert 0 <= found.age <= self._config.max_trajectory_age_steps, f"a trajectory of age {found.age}"
        ready = self._on_ready(found)
        with self._changed:
            self._ready[number] = ready
            self._changed.notify_all()

    def _update_weights(self, tensors: Iterable[tuple[str, Any]], version: int, before: Callable[[], None]) -> None:
        while self._under_way and not self._config.in_flight_weight_updates:
            self._advance()
        before()
        self._coordinator.load_weights(tensors, version)
        self._version = version

    # In the trainer's thread

    def _num_done(self, target: int) -> int:
        under_way = self._under_way.get(target)
        return 0 if under_way is None else len(under_way.keys) - len(under_way.waiting_for)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
