# SPDX-License-Identifier: Apache-2.0
"""Supervises the engines of a run, with their metrics, draft heads, remote drafters and the exchange of their requests."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import add
from typing import Any, Concatenate

import ray

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls, WorkerCalls
from nemo_specrollout.installed.versions import this_machine, vllm_version
from nemo_specrollout.nemo_rl.head_refresh import HeadRefresh, start_head_refresh
from nemo_specrollout.nemo_rl.metrics import (
    acceptance_counts,
    head_metrics,
    history_facts,
    metrics_below,
    sample_lines,
    step_facts,
    step_metrics,
    weight_updates,
)
from nemo_specrollout.nemo_rl.ray_calls import PATIENCE_S, EngineClient, answer_of, engine_environment
from nemo_specrollout.nemo_rl.remote_drafters import RemoteDrafters, start_drafters, stats_between
from nemo_specrollout.nemo_rl.run_facts import RunFacts
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.reports.records import BEGAN, HISTORY, PREFIX
from nemo_specrollout.stragglers.decisions.speed_table import draft_method
from nemo_specrollout.stragglers.decisions.speed_table_file import LADDER, SpeedTableFile, ladder_of
from nemo_specrollout.stragglers.exchange import PAUSE_PATIENCE_S, SILENCE_S, StragglerExchange
from nemo_specrollout.stragglers.kept_speeds import KeptSpeeds, with_kept
from nemo_specrollout.stragglers.turns import ExchangeFailed
from nemo_specrollout.telemetry.engine_stats import EngineTotals
from nemo_specrollout.telemetry.sample_stats import StepEnd

logger = logging.getLogger(__name__)

_SPEED_KEYS = (
    "precision",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "enforce_eager",
    "async_engine",
)
"""Keys of NeMo-RL's `vllm_cfg` on which decode speeds depend."""
THREADS_OF_ENGINE = 4
"""Number of threads that the exchange's actor has for each engine. One waits for orders, and the others deliver requests."""


@ray.remote(num_cpus=0)
class SpecrolloutExchange(StragglerExchange):
    """The exchange of requests as a Ray actor. It ends with the driver that made it. Engines can continue without it."""


class EngineStillDecodes(RuntimeError):
    """Raised if an engine does not stop its requests, so that it must not get new weights. The message is one sentence."""


class ExchangeDriver:
    """The driver's part of the exchange of requests, which owns the exchange's actor.

    If the actor is lost, the run goes on without moves and races.
    """

    def __init__(self, actor: Any, engines: EngineClient, log: StepLog) -> None:
        """`actor` is the exchange that `start_exchange` has started, and `engines` are the engines that share it."""
        self.actor = actor
        self._engines = engines
        self._log = log
        self._is_lost = False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Context of a rollout in which synchronous engines share their requests."""
        self._call(StragglerExchange.begin)
        try:
            yield
        finally:
            self._call(StragglerExchange.end)

    @contextmanager
    def paused(
        self, patience_s: float = PAUSE_PATIENCE_S, silence_s: float = SILENCE_S, leave_s: float = PATIENCE_S
    ) -> Iterator[None]:
        """Context of a refit of asynchronous engines.

        On entry it waits until all turns have ended, so that no engine decodes requests of other engines. Every `patience_s`
        seconds it reports which engines it waits for. An engine that ends no turn within `silence_s` seconds leaves the
        exchange for good. Raises EngineStillDecodes if this engine does not stop its requests within another `leave_s`
        seconds.
        """
        try:
            for engine, waited_s in self._silent_engines(patience_s, silence_s):
                self._remove(engine, waited_s, leave_s)
            yield
        finally:
            self._call(StragglerExchange.resume)

    def _silent_engines(self, patience_s: float, silence_s: float) -> Iterator[tuple[int, float]]:
        """Pauses the exchange, and waits until no engine has a turn.

        If the turn of an engine has not ended after `silence_s` seconds, it yields the engine and the seconds. The caller must
        then remove the engine.
        """
        started_s = time.monotonic()
        while busy := self._call(StragglerExchange.pause, patience_s):
            waited_s = time.monotonic() - started_s
            logger.warning(
                "specrollout: new weights wait for engines that still take turns for others, for %.0f s by now: %s",
                waited_s,
                ", ".join(map(str, busy)),
            )
            if waited_s >= silence_s:
                yield from ((engine, waited_s) for engine in busy)

    def _remove(self, engine: int, waited_s: float, leave_s: float) -> None:
        """Makes an engine stop the requests of the exchange and decode only its own, unless the engine has died.

        Raises EngineStillDecodes if it does not do so within `leave_s` seconds.
        """
        self._call(StragglerExchange.leave, engine)
        try:
            ray.get(self._engines.start(engine, EngineActorCalls.specrollout_leave_exchange), timeout=leave_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineStillDecodes(
                f"engine {engine} has not ended its turn of decoding for {waited_s:.0f} s and does not stop its requests, so "
                "it cannot get new weights: look for its last lines in Ray's logs, and start the run again, which resumes"
            ) from error
        except ray.exceptions.RayActorError:
            pass  # NeMo-RL's own calls notice that the engine has died
        self._log.alarms.append(
            f"engine {engine} ended no turn for {waited_s:.0f} s, so its requests no longer move or race"
        )

    def figures(self) -> Mapping[str, float]:
        """Returns metrics of moves and races since the last call, by name, or nothing if the exchange is lost."""
        return self._call(StragglerExchange.take_figures) or {}

    def speed_table(self, policy: str) -> SpeedTableFile | None:
        """Returns the decode speeds that this run has measured so far, or None if there are none or the exchange is lost."""
        table: SpeedTableFile | None = self._call(StragglerExchange.speed_table, _device(), policy)
        return table

    def close(self) -> None:
        ray.kill(self.actor)

    def _call(self, method: Callable[Concatenate[StragglerExchange, ...], object], *arguments: Any) -> Any:
        """Calls a method of the exchange. Returns its answer, or None if the exchange is lost."""
        if self._is_lost:
            return None
        try:
            return answer_of(getattr(self.actor, method.__name__).remote(*arguments))
        except ExchangeFailed as error:
            self._is_lost = True
            self._log.alarms.append(f"the exchange of requests failed, so no request moves or races any more: {error}")
            return None


def start_exchange(
    block: SpecrolloutConfig, num_engines: int, max_new_tokens: int, ladder: SpeedTableFile | None
) -> Any:
    """Starts the exchange's actor, whose decode speeds start from those of `ladder`. Returns the actor's handle."""
    config = block.fastest_of_n
    assert config is not None
    methods = [draft_method(block.of_engine(engine)) for engine in range(num_engines)]
    actor: Any = SpecrolloutExchange
    actor = actor.options(max_concurrency=THREADS_OF_ENGINE * (num_engines + 1), runtime_env=engine_environment())
    return actor.remote(methods, config, max_new_tokens, ladder)


def kept_speeds(block: SpecrolloutConfig, generation_config: Any, num_engines: int) -> KeptSpeeds:
    """Returns the object that keeps this run's decode speeds in a file. It reads those of an earlier start with equal engines.

    `generation_config` is NeMo-RL's `policy.generation`.
    """
    about = {
        "vllm": vllm_version(),
        "device": _device(),
        "vllm_cfg": {name: generation_config["vllm_cfg"].get(name) for name in _SPEED_KEYS},
        "vllm_kwargs": generation_config.get("vllm_kwargs") or {},
    }
    return KeptSpeeds(block, str(generation_config["model_name"]), num_engines, about)


def _device() -> str:
    """Returns the kinds of GPU in Ray's cluster, or a description of this machine if there are none."""
    kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
    return ", ".join(sorted(kinds)) or this_machine()


class Supervisor:
    """Owns the refresh of the draft head, the remote drafters and the exchange of requests, if the block has them.

    One process of a run has a supervisor. It is the driver or the actor of NeMo-RL's SingleController. Remote drafters start
    with the supervisor, while the engines load. Call `attach` when the engines have processes, and `open_exchange` when they
    have models. Call `begin_step` and `end_step` in each step, and finally `close` and `close_exchange`.
    """

    def __init__(self, block: SpecrolloutConfig, generation_config: Any, log: StepLog) -> None:
        """`generation_config` is NeMo-RL's `policy.generation`.

        Raises ConfigError if the file of decode speeds is not valid, or if the remote drafters cannot start.
        """
        self._ladder = ladder_of(block)
        self._block = block
        self._config = generation_config
        self._log = log
        self._facts = RunFacts.of(generation_config)
        self._refresh: HeadRefresh | None = None
        self._exchange: ExchangeDriver | None = None
        self._kept: KeptSpeeds | None = None
        """Decode speeds that are kept for the next start of the run, or None without an exchange."""
        self._drafters: RemoteDrafters | None = None
        if self._block.remote is not None and self._block.remote.workers:  # the user starts drafters at `addresses`
            self._drafters = start_drafters(self._block.remote, generation_config["vllm_cfg"], log)
        self._requested: list[int] = []
        self._before: tuple[list[EngineTotals], list[DrafterStats]] | None = None
        self._last = EngineTotals()
        self._facts_at = time.perf_counter()

    def attach(self, worker_group: Any) -> None:
        """Connects to NeMo-RL's group of engine actors, and starts the refresh of the draft head for them."""
        self._engines = EngineClient(worker_group)
        if self._block.draft_refresh is not None:
            self._refresh = start_head_refresh(self._block, self._config, self._facts.heads, self._engines, self._log)

    def open_exchange(self) -> None:
        """Lets the engines exchange requests, if the block allows it and there are several engines."""
        num_engines = self._engines.num_engines
        racing = self._block.fastest_of_n
        if racing is None or not racing.enabled or num_engines < 2:
            return
        self._kept = kept_speeds(self._block, self._config, num_engines)
        speeds = with_kept(self._ladder, self._kept)
        actor = start_exchange(self._block, num_engines, self._config["max_new_tokens"], speeds)
        self._exchange = ExchangeDriver(actor, self._engines, self._log)
        start = self._engines.start
        engines = range(num_engines)
        join = EngineActorCalls.specrollout_join_exchange
        ray.get([start(engine, join, actor=actor, engine=engine) for engine in engines])

    def close(self) -> None:
        """Ends the refresh of the draft head and the remote drafters. The engines may still be running."""
        for owned in (self._refresh, self._drafters):
            if owned is not None:
                owned.close()

    def close_exchange(self) -> None:
        """Ends the exchange of requests. Call it after the engines have ended, because they use it."""
        exchange, kept = self._exchange, self._kept
        self._exchange = self._kept = None
        if exchange is not None:
            exchange.close()
        if kept is not None:
            kept.settle()

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext() if self._exchange is None else self._exchange.rollout()

    def new_weights(self) -> AbstractContextManager[None]:
        """Context of a refit. It pauses the exchange of asynchronous engines.

        Synchronous engines need no pause, because they have no requests outside a rollout.
        """
        is_async = self._config["vllm_cfg"]["async_engine"]
        return self._exchange.paused() if self._exchange is not None and is_async else nullcontext()

    def policy_updated(self, version: int) -> None:
        """Tells the engines, the head trainer and the drafters that the engines have policy version `version`."""
        self._engines.call(WorkerCalls.specrollout_policy_is, version)
        if self._refresh is not None:
            self._refresh.policy_updated(version)
        if self._drafters is not None:
            self._drafters.update(self._engines)
        if self._before is None:  # some loops of NeMo-RL do not say when a step's generation begins
            self.begin_step()

    def begin_step(self) -> None:
        self._before = self._read()

    def note_requested(self, seeds: list[int]) -> None:
        """Notes the seeds of samples that this process requests, so that their statistics are logged in this order."""
        self._requested += seeds

    def end_step(self, version: int) -> dict[str, float]:
        """Ends a step and returns its metrics by name, counted since `begin_step`. They are empty if that was not called.

        `version` is the policy version that has sampled the rows of the step. Logs the samples and alarms of the step. Reports
        the step to the head trainer, which refreshes the head if that is due.
        """
        before = self._before
        self._before = None
        if before is None:
            return {}
        totals_E, stats = self._read()
        totals = reduce(add, totals_E)
        done = totals - reduce(add, before[0])
        log = self._log
        of_engines = [after - first for first, after in zip(before[0], totals_E, strict=True)]
        metrics = step_metrics(of_engines) | weight_updates(self._last, totals, len(totals_E))
        self._last = totals
        if counts := acceptance_counts(done):
            log.entries["acceptance"] = counts
        seeds = self._requested or None
        self._requested = []
        ends = [StepEnd.from_wire(reply) for reply in self._engines.call(WorkerCalls.specrollout_end_step, seeds)]
        log.samples += sample_lines(ends, seeds)
        # Engines that share a folder report the same problems with it, so duplicates are dropped.
        log.alarms += dict.fromkeys(alarm["sentence"] for end in ends for alarm in end.alarms)
        if began := Counter(sentence for end in ends for sentence in end.began):
            log.entries[BEGAN] = [f"{count} engine{'s' * (count > 1)} {what}" for what, count in began.items()]
        metrics |= head_metrics(ends)
        if facts := history_facts(ends):
            log.entries[HISTORY] = facts
            metrics |= metrics_below("history", facts)
        if self._refresh is not None:
            metrics |= self._refreshed(self._refresh, version, done)
        if self._block.remote is not None:
            log.entries["draft_supply"] = stats_between(before[1], stats)
            metrics |= metrics_below("draft_supply", log.entries["draft_supply"])
        if self._drafters is not None:
            self._drafters.update(self._engines)
            metrics[PREFIX + "drafter_restarts"] = self._drafters.num_restarts
        if self._exchange is not None:
            metrics |= self._exchanged(self._exchange)
        return metrics

    def _exchanged(self, exchange: ExchangeDriver) -> dict[str, float]:
        """Logs which requests moved and raced in the step, and keeps the decode speeds. Returns the metrics `tail/*`."""
        log = self._log
        log.entries["tail"] = exchange.figures()
        table = exchange.speed_table(self._config["model_name"])
        if table is not None:
            log.files[LADDER] = table.to_json()
        if self._kept is not None:
            self._kept.keep(table)
            log.alarms += self._kept.take_alarms()
            if (sentence := self._kept.take_sentence()) is not None:
                log.entries[BEGAN] = [*log.entries.get(BEGAN, ()), f"the exchange of requests {sentence}"]
        return metrics_below("tail", log.entries["tail"])

    def _refreshed(self, refresh: HeadRefresh, version: int, done: EngineTotals) -> dict[str, float]:
        """Reports the step to the head trainer. Returns metrics of the draft heads."""
        now = time.perf_counter()
        steps_to_come = max(0, self._facts.last_version - version - 1)
        facts = step_facts(done, self._engines.num_engines, now - self._facts_at, steps_to_come)
        if facts is not None:
            self._facts_at = now
        return {PREFIX + name: value for name, value in refresh.after_step(version, facts).items()}

    def _read(self) -> tuple[list[EngineTotals], list[DrafterStats]]:
        """Returns the totals of each engine, and the statistics of remote drafters in each engine if there are any."""
        totals_E = list(map(EngineTotals.from_wire, self._engines.call(WorkerCalls.specrollout_totals)))
        return totals_E, ([] if self._block.remote is None else self._engines.drafter_stats())
