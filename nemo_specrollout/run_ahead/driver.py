# SPDX-License-Identifier: Apache-2.0
"""The driver's part of `run_ahead`, which plans what engines may decode early and brings the texts to their requests later.

An engine decodes a request of a coming step with the weights that it has, which are older than those of the coming step. But
the request already has its seed, and so its noise. So when its step has come, most of the text is what the new weights sample
too. The text then serves as drafts for the request, and is used for nothing else.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol

import ray

from nemo_specrollout.config.block import LearnedConfig, RunAheadConfig
from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls, WorkerCalls
from nemo_specrollout.reports.records import PREFIX
from nemo_specrollout.run_ahead.coming_texts import ComingTexts
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.kept_updates import KeptUpdates
from nemo_specrollout.run_ahead.texts import KeptCounts

Parameters = ParamSpec("Parameters")
SLICE_S = 0.1
"""Seconds for which a synchronous engine decodes requests of coming steps at a time. Other calls of the engine wait until such
a slice ends."""


class Engines(Protocol):
    """The driver's interface to the engines of a run. For NeMo-RL it is an `EngineClient` (`nemo_rl/ray_calls.py`)."""

    num_engines: int

    def start(
        self,
        engine: int,
        method: Callable[Concatenate[EngineActorCalls, Parameters], object],
        /,
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Any:
        """Calls a method of an engine actor without waiting. Returns Ray's reference to the reply."""


def ask_all(
    engines: Engines,
    method: Callable[Concatenate[EngineActorCalls, Parameters], object],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> list[Any]:
    """Calls a method of every engine actor, waits until each of them has replied or failed, and returns the replies.

    Raises the error of the first engine that has failed.
    """
    calls = [engines.start(engine, method, *arguments, **named) for engine in range(engines.num_engines)]
    ray.wait(calls, num_returns=len(calls))
    return list(ray.get(calls))


def replies_of(calls: Sequence[Any]) -> Iterator[Any]:
    """Yields the reply to each call of an engine actor, except those of engines that have died.

    Only the texts that a dead engine has made ahead are lost. They would have been used as drafts only, so the samples do not
    change. NeMo-RL notices the death by its own calls.
    """
    for call in calls:
        try:
            yield ray.get(call)
        except ray.exceptions.RayActorError:
            continue


class RunAhead:
    """Lets engines decode requests of coming steps, and brings the texts to these requests later.

    When the weights of a policy version have arrived, `plan` tells the engines which requests of coming steps they may decode
    in slots that the rollout leaves empty. `work` lets engines that have nothing else to do continue with these requests, in
    slices. `end` stops these requests before the weights change or the engines sleep, and collects their texts. The next
    `plan` gives the texts to the engines again.

    Owns the texts (`ComingTexts`), and the thread that keeps idle engines at work.

    Invariant: after `end` no engine has a request of a coming step, and none starts before the next `plan`.
    """

    def __init__(self, engines: Engines, config: RunAheadConfig, *, begins_again: bool = False) -> None:
        """`begins_again` says whether requests start over if the weights change while they run, as in an asynchronous run.

        If so, the engines get no requests of coming steps, because they are never idle. A plan only tells them how far the
        next weight update will probably move scores, so that they can decode branches of their own requests.
        """
        self._engines = engines
        self._begins_again = begins_again
        self._coming = ComingTexts(config, begins_again=begins_again)
        self._kept: KeptUpdates | None = None
        self._version = 0
        """Policy version that the engines had in the latest plan."""
        self.num_texts = 0
        """Number of texts that were available for the requests of all steps so far."""
        self.num_brought = 0
        """Number of requests that have used a text that was made ahead."""
        self._is_planned = False
        self._alarms: list[str] = []
        self._stop = threading.Event()
        self._after = 0
        self._thread: threading.Thread | None = None

    def keep(self, config: LearnedConfig, model: str, *, resumes: bool) -> None:
        """Keeps a file of what is learned from weight updates. A run that resumes begins with the content of the file."""
        self._kept = KeptUpdates(self._coming, config, model, begins_again=self._begins_again)
        self._kept.begin(resumes=resumes)

    @property
    def steps(self) -> int:
        """Number of coming steps for which the next plan should have requests."""
        return self._coming.steps

    def plan(self, version: int, steps: Sequence[Sequence[EarlyRow]]) -> None:
        """Gives the engines the texts of the current step, and tells them which requests of coming steps they may decode.

        Args:
            version: Policy version of the weights that the engines have.
            steps: Requests of each coming step. The first step is that of `version` + 1.
        """
        self.end(keeps_cache=True, is_interrupted=True)
        self._version = version
        self._coming.forget_before(version)
        texts_once: Any = ray.put(self._coming.of(version))  # stored once for all engines
        num_engines = self._engines.num_engines
        start = self._engines.start
        take = EngineActorCalls.specrollout_texts_ahead
        calls = [start(engine, take, texts=texts_once) for engine in range(num_engines)]
        plans = self._coming.plans(version, steps, num_engines)
        self._is_planned = any(steps) or self._begins_again
        if self._is_planned:
            begin = EngineActorCalls.specrollout_plan_ahead
            for engine, plan in enumerate(plans):
                calls.append(start(engine, begin, rows=plan.rows, scale=plan.scale, kept=plan.kept))
        list(replies_of(calls))

    def work(self, after: int) -> None:
        """Lets engines that have nothing else to do decode requests of coming steps, in slices, until `end`.

        A synchronous engine waits until it has answered `after` calls of `generate` since the start of the run. The last of
        these calls is for the current rollout, so the engine does its part of this rollout first.
        """
        self._after = after
        if self._thread is None and self._is_planned and not self._begins_again:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def end(self, *, keeps_cache: bool = False, is_interrupted: bool = False) -> None:
        """Stops all requests of coming steps and stores their texts. Does nothing without a plan.

        Args:
            keeps_cache: Whether the engines keep their cached prefixes. Requests under new weights must not read prefixes of
                old weights, so this may be true if the weights stay the same. It may also be true for asynchronous engines, on
                which later requests do not find old prefixes (generation/engine/fresh_prefixes.py).
            is_interrupted: Whether the plan ends before the weights change. If so, nothing is learned from the number of
                requests that the engines have started.
        """
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._stop.set()
            thread.join()
        if not self._is_planned:
            return
        self._is_planned = False
        every = range(self._engines.num_engines)
        end = EngineActorCalls.specrollout_end_ahead
        calls = [self._engines.start(engine, end, keeps_cache=keeps_cache) for engine in every]
        self._coming.keep(replies_of(calls), is_interrupted=is_interrupted)

    def figures(self, token_s: float | None = None) -> tuple[dict[str, float], list[str]]:
        """Returns the metrics and alarms of the step of the latest plan, whose responses must all be complete.

        Asks the engines how much of the texts made ahead agreed with the responses. From this it learns how far the weight
        update has moved scores. `token_s` is the number of seconds that an engine would take for a token of the step without
        drafts, or None if it is not known.
        """
        take = EngineActorCalls.specrollout_take_kept
        calls = [self._engines.start(engine, take) for engine in range(self._engines.num_engines)]
        kept = KeptCounts()
        for counts in replies_of(calls):
            kept = kept.plus(counts)
        metrics = self._coming.learn(self._version, kept)
        if token_s is not None and self._coming.chooses_steps:
            self._observe_price(token_s)
        self.num_texts += self._coming.num_texts(self._version)
        self.num_brought += kept.num_brought
        alarms = self._alarms + self._coming.take_alarms()
        if self._kept is not None:
            self._kept.keep()
            alarms += self._kept.take_alarms()
        self._alarms = []
        return {PREFIX + name: value for name, value in metrics.items()}, alarms

    def _observe_price(self, token_s: float) -> None:
        """Asks an engine how much time a verified row takes, which decides how many coming steps are planned."""
        method = WorkerCalls.specrollout_step_seconds.__name__
        call = self._engines.start(0, EngineActorCalls.specrollout_call, method=method, arguments=[])
        for prices in replies_of([call]):
            if prices is not None:
                self._coming.observe_price(prices[1], token_s)

    def _run(self) -> None:
        """Lets each engine decode requests of coming steps, slice after slice. This is what the thread runs.

        An engine stops when it has no more of these requests, and all stop when `end` is called.
        """
        calls = {self._advance(engine): engine for engine in range(self._engines.num_engines)}
        while calls and not self._stop.is_set():
            for call in ray.wait(list(calls), timeout=SLICE_S)[0]:
                engine = calls.pop(call)
                try:
                    is_busy = ray.get(call)
                except ray.exceptions.RayActorError:
                    continue  # the engine's next call fails too, and NeMo-RL reports it
                except ray.exceptions.RayTaskError as error:
                    self._alarms.append(f"engine {engine} does not decode ahead any more: {error.cause}")
                    continue
                if is_busy is not False:
                    calls[self._advance(engine)] = engine

    def _advance(self, engine: int) -> Any:
        """Lets an engine decode requests of coming steps for one slice. Returns Ray's reference to the reply."""
        run_ahead = EngineActorCalls.specrollout_run_ahead
        return self._engines.start(engine, run_ahead, seconds=SLICE_S, after=self._after)
