# SPDX-License-Identifier: Apache-2.0
"""Asynchronous GRPO, where a thread lets the engines generate for coming training steps while the policy is trained.

This follows NeMo-RL's trajectory collector and replay buffer (nemo_rl/algorithms/async_utils). A target is a training step for
which responses are generated. It is started as soon as its number is at most `max_trajectory_age_steps` above the policy
version.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.local.ahead_fleet import AheadOfFleet
from lab.local.coordinator import DealingCoordinator
from lab.local.fleet import RolloutFleet
from lab.local.run_config import RunConfig
from lab.local.run_sections import AsyncGrpoConfig
from lab.local.statistics import stock_stats
from lab.local.step_rollout import Prompts, StepPrompts, StepRollout
from lab.local.texts_in_flight import TextsInFlight
from lab.local.timeline import Timeline
from nemo_specrollout.stragglers.attempts import Response
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile

_LOOK_S = 0.005
"""Seconds between two checks of a waiting thread."""


@dataclass(frozen=True)
class Trajectories:
    """All responses for one training step, which is called their target, and how they were generated."""

    target: int
    prompts: StepPrompts
    responses: list[Response]
    timeline: Timeline
    first_version: int
    """Policy version when generation for the target began. No token of the responses was sampled by an older version."""
    seconds: float
    """Seconds from the start of generation for the target to the end of its last response."""

    @property
    def age(self) -> int:
        """Policy version that trains on the responses, minus the oldest version that may have sampled a part of them."""
        return self.target - self.first_version


@dataclass(frozen=True)
class _Target:
    """A training step whose responses are being generated."""

    prompts: StepPrompts
    keys: list[int]
    first_version: int
    begun_s: float
    waiting_for: set[int]


@dataclass(frozen=True)
class CollectorEvents:
    """Functions that a `TrajectoryCollector` calls in its thread."""

    on_ready: Callable[[Trajectories], Any]
    """Called with the trajectories of a target as soon as they are complete. `TrajectoryCollector.take` returns its result."""
    on_begun: Callable[[int], None] = lambda target: None
    """Called after one or more targets have been started. The argument is the newest target."""


class TrajectoryCollector:
    """Generates responses for coming training steps (targets) while the policy is trained. Owns the thread that does so.

    While the collector is open, no other thread may use the coordinator and the engines. It collects until it is closed or
    fails. After a failure, each call that waits for the thread raises the thread's error.

    Invariant: while the policy has version v, no target beyond v + max_trajectory_age_steps is started.
    """

    def __init__(
        self,
        coordinator: DealingCoordinator,
        config: AsyncGrpoConfig,
        prompts: Prompts,
        events: CollectorEvents,
        targets: range,
        task: str,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._prompts = prompts
        self._task = task
        self._events = events
        self._targets = targets
        self._next_target = targets.start
        self._version = targets.start
        self._under_way: dict[int, _Target] = {}
        self._ready: dict[int, Any] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self.idle_s = 0.0
        """Seconds in which no request was running, because no target could be started."""
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    # In the trainer's thread

    def take(self, target: int, on_finished: Callable[[int], None] = lambda done: None) -> Any:
        """Waits until all responses for the training step `target` have ended, and returns what `on_ready` returned for them.

        `on_ready` is the function in `CollectorEvents`. While it waits, this method calls `on_finished` with the number of the
        target's finished responses.
        """

        def is_ready() -> bool:
            if (batch := self._under_way.get(target)) is not None:
                on_finished(len(batch.keys) - len(batch.waiting_for))
            return target in self._ready

        self._wait(is_ready)
        return self._ready.pop(target)

    def update_weights(
        self, tensors: Iterable[tuple[str, Any]], version: int, before: Callable[[], None] = lambda: None
    ) -> None:
        """Gives the engines the weights of policy version `version`, and returns when they have loaded them.

        With `in_flight_weight_updates` they load the weights while requests are running, and otherwise after all requests have
        ended. Immediately before the engines load, the collector's thread calls `before`.
        """

        def update() -> None:
            while self._under_way and not self._config.in_flight_weight_updates:
                self._advance()
            before()
            self._coordinator.load_weights(tensors, version)
            self._version = version

        self.call(update)

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in the collector's thread, while that thread does nothing else, and returns its result."""
        future: Future[Any] = Future()
        self._calls.put((work, future))
        self._wait(future.done)
        return future.result()

    def close(self) -> None:
        """Ends the thread and abandons the running requests."""
        self._closed.set()
        self._thread.join()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._failure is not None:
                raise self._failure
            time.sleep(_LOOK_S)

    # In the collector's thread

    def _collect(self) -> None:
        try:
            while not self._closed.is_set():
                while not self._calls.empty():
                    work, future = self._calls.get()
                    future.set_result(work())
                self._begin_targets()
                self._advance()
            self._coordinator.abandon()
        except BaseException as error:
            self._failure = error

    def _begin_targets(self) -> None:
        newest = min(self._version + self._config.max_trajectory_age_steps, self._targets.stop - 1)
        if self._next_target > newest:
            return
        while self._next_target <= newest:
            prompts = self._prompts(self._next_target)
            keys = self._coordinator.deal(prompts.requests, self._task)
            self._under_way[self._next_target] = _Target(prompts, keys, self._version, time.perf_counter(), set(keys))
            self._next_target += 1
        self._events.on_begun(newest)

    def _advance(self) -> None:
        if not self._under_way:
            self._closed.wait(_LOOK_S)
            self.idle_s += _LOOK_S
            return
        finished = self._coordinator.advance()
        for number, batch in list(self._under_way.items()):
            batch.waiting_for.difference_update(finished)
            if not batch.waiting_for:
                responses, timeline = self._coordinator.take_with_timeline(batch.keys)
                seconds = time.perf_counter() - batch.begun_s
                found = Trajectories(number, batch.prompts, responses, timeline, batch.first_version, seconds)
                assert 0 <= found.age <= self._config.max_trajectory_age_steps, f"a trajectory of age {found.age}"
                self._ready[number] = self._events.on_ready(found)
                del self._under_way[number]


class AsyncFleet(RolloutFleet):
    """Rolls out the steps of asynchronous GRPO (`RolloutSource`). Owns its engines and the `TrajectoryCollector`.

    After `begin`, only the collector's thread uses the engines.

    Invariant: step s trains on samples whose generation began with policy version s - max_trajectory_age_steps or a newer one,
    and no sample is used twice.
    """

    def __init__(self, config: RunConfig, prompts: Prompts, known: SpeedTableFile | None = None) -> None:
        """Starts the engines, as `RolloutFleet` does."""
        runs_ahead = config.policy.generation.specrollout.runs_ahead
        self._ahead = AheadOfFleet(TextsInFlight(config, prompts)) if runs_ahead else None
        super().__init__(config, prompts if self._ahead is None else self._ahead.texts.with_texts, known)
        self._collector: TrajectoryCollector | None = None
        self._idle_s = 0.0

    def begin(self, steps: range) -> None:
        self.begin_counting()
        if self._ahead is not None:
            self._ahead.texts.begin(steps)
        config = self._config.grpo.async_grpo
        events = CollectorEvents(self._step_rollout, self._plan_ahead)
        self._collector = TrajectoryCollector(self.coordinator, config, self._prompts, events, steps, self.task)

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Waits until all responses on which a step trains have ended, and returns them."""
        assert self._collector is not None
        started = time.perf_counter()
        rollout: StepRollout = self._collector.take(step, on_finished)
        waited_s = time.perf_counter() - started
        return replace(rollout, figures={**rollout.figures, "generation_s": waited_s})

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces the weights of all engines. With `in_flight_weight_updates` this may happen while requests are running."""
        if self._collector is None:
            super().load_weights(tensors, policy_version)
        else:
            self._collector.update_weights(tensors, policy_version, before=self._before_weights)

    def complete(self, rollout: StepRollout) -> StepRollout:
        """Returns the rollout with statistics of all that the engines did between the last two weight updates.

        The engines may have worked for other steps than the rollout's.
        """
        return replace(rollout, stats=replace(self._worked, tail=rollout.stats.tail))

    def take_alarms(self) -> list[dict[str, Any]]:
        return super().take_alarms() + ([] if self._ahead is None else self._ahead.texts.take_alarms())

    def take_deaths(self) -> list[str]:
        return self._call(super().take_deaths)

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()
        super().close()

    def _ask_each(self, *question: Any, drafting_by: str | None = None) -> dict[int, Any]:
        ask = super()._ask_each
        return self._call(lambda: ask(*question, drafting_by=drafting_by))

    def _call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in the thread that may use the engines, and returns its result."""
        return work() if self._collector is None else self._collector.call(work)

    # In the collector's thread

    def _plan_ahead(self, target: int) -> None:
        """Lets engines start requests of the targets after `target`, which is the newest target that has been started."""
        if self._ahead is not None:
            self._ahead.plan(self.pool, target)

    def _before_weights(self) -> None:
        if self._ahead is not None:
            self._ahead.end(self.pool, keeps_cache=True)  # requests are running
        self._worked = self.worked()
        self.begin_counting()

    def _step_rollout(self, found: Trajectories) -> StepRollout:
        assert self._collector is not None
        rollouts = [r.rollout for r in found.responses]
        timeline = replace(found.timeline, saved_s=None)  # beside a trainer, decode speeds are not comparable
        sample_stats = self.take_sample_stats(found.prompts.requests, found.timeline)
        before = self._idle_s
        self._idle_s = self._collector.idle_s
        ahead = {} if self._ahead is None else self._ahead.texts.compare(found.prompts.requests, rollouts)
        return StepRollout(
            found.prompts,
            rollouts,
            replace(stock_stats(rollouts, found.seconds, 0), tail=timeline.figures()),
            [
                {**(stats or {}), "policy_spans": _policy_spans(response)}
                for stats, response in zip(sample_stats, found.responses, strict=True)
            ],
            figures={
                "rollout_wall_s": found.seconds,
                "collector_idle_s": self._idle_s - before,
                **ahead,
            },
            num_older_B=[_num_older(r, found.target) for r in found.responses],
            timeline=timeline.record(),
        )


def _policy_spans(response: Response) -> list[tuple[int, int]]:
    """Returns the policy versions that sampled a response, each with the position of its first token.

    Positions are counted from the beginning of the prompt, as in sample stats.
    """
    return [(version, len(response.request.prompt_token_ids) + first) for version, first in response.policy_spans]


def _num_older(response: Response, version: int) -> int:
    """Returns how many tokens of a response were sampled by policies older than `version`."""
    return next((first for v, first in response.policy_spans if v == version), len(response.tokens))
