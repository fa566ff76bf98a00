# SPDX-License-Identifier: Apache-2.0
"""Supervises the engines of a run: their metrics, draft heads, remote drafters, and the requests that they exchange."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.nemo_rl.engine_racing import ExchangeDriver
from nemo_specrollout.nemo_rl.head_refresh import HeadRefresh, start_head_refresh
from nemo_specrollout.nemo_rl.metrics import (
    acceptance_counts,
    head_metrics,
    sample_lines,
    step_facts,
    step_metrics,
    weight_updates,
)
from nemo_specrollout.nemo_rl.ray_calls import worker_client
from nemo_specrollout.nemo_rl.remote_drafters import (
    RemoteDrafters,
    drafter_metrics,
    start_drafters,
    stats_between,
)
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.reports.nemo_rl_run import PREFIX
from nemo_specrollout.telemetry.engine_totals import EngineTotals


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that NeMo-RL does not tell its generation."""

    block: SpecrolloutConfig

    seed: int
    """`grpo.seed`, or the seed of another algorithm."""

    first_version: int = 0
    """Training steps behind the weights at the start."""

    last_version: int = 0
    """Training steps behind the weights at the end."""

    heads: str = ""
    """Path of the folder with the run's draft heads."""


@dataclass(frozen=True)
class _Reading:
    """Counters of all engines at one moment."""

    totals: list[EngineTotals]
    drafter_stats: list[DrafterStats]


class Supervisor:
    """Owns the draft head's refresh, the remote drafters and the exchange of requests, each if the block has it.

    One process of a run has a supervisor: the driver, or the actor of NeMo-RL's SingleController. Remote drafters start
    with the supervisor, while the engines load. Then come `attach`, when the engines have processes; `open_exchange`,
    when they have models; `begin_step` and `end_step` for each step; `close`; and `close_exchange`.
    """

    def __init__(self, generation_config: Any, facts: RunFacts, log: StepLog) -> None:
        """`generation_config` is NeMo-RL's. Raises ConfigError if the remote drafters cannot start."""
        self._config, self._facts, self._block, self._log = generation_config, facts, facts.block, log
        self._engines: Any = None
        self._refresh: HeadRefresh | None = None
        self._exchange: ExchangeDriver | None = None
        self._drafters: RemoteDrafters | None = None
        if self._block.remote is not None and self._block.remote.workers:  # drafters at `addresses` are the user's
            self._drafters = start_drafters(self._block.remote, generation_config["vllm_cfg"], log)
        self._requested: list[int] = []
        self._before: _Reading | None = None
        self._last: _Reading | None = None
        self._facts_at = time.perf_counter()

    def attach(self, worker_group: Any) -> None:
        """Takes NeMo-RL's group of the engines' actors, and starts the refresh of the draft head for them."""
        self._engines, self._workers = worker_group, worker_client(worker_group)
        if self._block.draft_refresh is not None:
            self._refresh = start_head_refresh(self._block, self._config, self._facts.heads, self._workers, self._log)

    def open_exchange(self) -> None:
        """Lets the engines exchange requests, if the block allows it and there are several engines."""
        num_engines, racing = self._engines.dp_size, self._block.fastest_of_n
        if racing is None or not racing.enabled or num_engines < 2:
            return
        self._exchange = ExchangeDriver(self._block, num_engines, self._config["max_new_tokens"], self._log)
        call, leader = self._engines.run_single_worker_single_data, self._engines.get_dp_leader_worker_idx
        ray.get(
            [
                call("specrollout_join_exchange", leader(engine), actor=self._exchange.actor, engine=engine)
                for engine in range(num_engines)
            ]
        )

    def close(self) -> None:
        """Ends the refresh and the drafters. The engines may still run."""
        for owned in (self._refresh, self._drafters):
            if owned is not None:
                owned.close()

    def close_exchange(self) -> None:
        """Ends the exchange. Call it after the engines have ended, because they use it."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def rollout(self) -> AbstractContextManager[None]:
        """Encloses the rollout of one batch by all engines."""
        return nullcontext() if self._exchange is None else self._exchange.rollout()

    def new_weights(self) -> AbstractContextManager[None]:
        """Encloses a refit. Synchronous engines need nothing: they have no requests outside of a rollout."""
        is_async = self._config["vllm_cfg"]["async_engine"]
        return self._exchange.new_weights() if self._exchange is not None and is_async else nullcontext()

    def policy_updated(self, version: int) -> None:
        """Tells the engines, the trainer and the drafters that the engines have the weights of `version`."""
        self._workers.set_policy_version(version)
        if self._refresh is not None:
            self._refresh.policy_updated(version)
        if self._drafters is not None:
            self._drafters.update(self._workers)
        if self._before is None:  # some loops of NeMo-RL do not say when a step's generation begins
            self.begin_step()

    def begin_step(self) -> None:
        """Begins the window of the next step's metrics."""
        self._before = self._read()

    def note_requested(self, seeds: list[int]) -> None:
        """Notes the seeds of rollouts that this process requests, so that their samples are kept in that order."""
        self._requested += seeds

    def end_step(self, version: int) -> dict[str, float]:
        """Ends the step of the policy `version`: logs its samples and alarms, and refreshes the head if that is due.

        Returns the metrics since `begin_step` by name, or none if there was no `begin_step`.
        """
        before, self._before = self._before, None
        if before is None:
            return {}
        after = self._read()
        metrics = step_metrics(before.totals, after.totals)
        metrics |= weight_updates(None if self._last is None else self._last.totals, after.totals)
        if counts := acceptance_counts(before.totals, after.totals):
            self._log.entries["acceptance"] = counts
        metrics |= self._log_samples()
        metrics |= self._heads_after_step(version, before, after)
        metrics |= self._drafters_after_step(before, after)
        if self._exchange is not None:
            metrics |= {f"{PREFIX}tail/{name}": value for name, value in self._exchange.figures().items()}
        self._last = after
        return metrics

    def _log_samples(self) -> dict[str, float]:
        requested, self._requested = self._requested, []
        seeds = requested or None
        ends = self._workers.end_step(seeds)
        self._log.samples += sample_lines(ends, seeds)
        self._log.alarms += [alarm["sentence"] for end in ends for alarm in end.alarms]
        return head_metrics(ends)

    def _heads_after_step(self, version: int, before: _Reading, after: _Reading) -> dict[str, float]:
        if self._refresh is None:
            return {}
        now = time.perf_counter()
        steps_to_come = max(0, self._facts.last_version - version - 1)
        facts = step_facts(before.totals, after.totals, now - self._facts_at, steps_to_come)
        self._facts_at = self._facts_at if facts is None else now
        return {PREFIX + name: value for name, value in self._refresh.after_step(version, facts).items()}

    def _drafters_after_step(self, before: _Reading, after: _Reading) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._block.remote is not None:
            stats = stats_between(before.drafter_stats, after.drafter_stats)
            self._log.entries["draft_supply"] = stats
            metrics |= drafter_metrics(stats)
        if self._drafters is not None:
            self._drafters.update(self._workers)
            metrics |= {PREFIX + name: value for name, value in self._drafters.figures().items()}
        return metrics

    def _read(self) -> _Reading:
        futures = self._engines.run_all_workers_single_data(
            "specrollout_totals", run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"]
        )
        totals = [EngineTotals.from_wire(reply) for reply in ray.get(futures)]
        return _Reading(totals, [] if self._block.remote is None else self._workers.drafter_stats())
