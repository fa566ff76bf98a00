# SPDX-License-Identifier: Apache-2.0
"""Looks after the engines of a run: their figures, draft heads, remote drafters, and the requests that they share.

One process of a run does so: the driver, or the actor of NeMo-RL's SingleController.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray

from nemo_specrollout.config.addresses import secret_of_run
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.totals import EngineTotals
from nemo_specrollout.nemo_rl.drafter_stats_window import DrafterStatsWindow, logged
from nemo_specrollout.nemo_rl.head_refresh import HeadRefresh
from nemo_specrollout.nemo_rl.metrics import (
    acceptance_counts,
    head_figures,
    sample_lines,
    step_facts,
    step_metrics,
    weight_updates,
)
from nemo_specrollout.nemo_rl.remote_drafters import RemoteDrafters
from nemo_specrollout.nemo_rl.run_facts import RunFacts
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.racing.engine_blocks import blocks_of_engines
from nemo_specrollout.reports.nemo_rl_run import PREFIX
from nemo_specrollout.training.head.head_folder import HeadFolder


class Supervisor:
    """Owns the trainer of draft heads, the remote drafters and the exchange of requests, where the block asks for them.

    Remote drafters start with the supervisor, while the engines load. `attach` follows when the engines have processes,
    `meet` when they have models. `begin_step` and `end_step` frame what the figures of a step are about.
    """

    def __init__(self, generation_config: Any, facts: RunFacts, notes: StepNotes) -> None:
        self._config, self._facts, self._notes = generation_config, facts, notes
        self._block = build(SpecrolloutConfig, generation_config["specrollout"], BLOCK_PATH)
        self._engines: Any = None
        self._refresh: HeadRefresh | None = None
        self._tail: Any = None
        self._drafter_stats = None if self._block.remote is None else DrafterStatsWindow()
        self._drafters = _start_drafters(self._block, generation_config, notes)
        self._asked: list[int] = []
        self._totals_before: list[EngineTotals] | None = None
        self._totals_after: list[EngineTotals] | None = None  # at the end of the step before
        self._facts_at = time.perf_counter()

    def attach(self, worker_group: Any) -> None:
        """`worker_group` is NeMo-RL's group of the engines' actors; heads are trained for them from now on."""
        self._engines = worker_group
        self._refresh = self._start_refresh()

    def meet(self) -> None:
        """Engines share requests from now on, where there are several and the block allows it."""
        num_engines, racing = self._engines.dp_size, self._block.fastest_of_n
        if racing is None or not racing.enabled or num_engines < 2:
            return
        from nemo_specrollout.nemo_rl.tail_driver import TailDriver

        self._tail = tail = TailDriver(self._block, num_engines, self._config["max_new_tokens"], self._notes)
        leaders = map(self._engines.get_dp_leader_worker_idx, range(num_engines))
        call = self._engines.run_single_worker_single_data
        ray.get([call("specrollout_meet", leader, actor=tail.actor, engine=e) for e, leader in enumerate(leaders)])

    def close(self) -> None:
        """Ends the trainer of heads and the drafters. The engines may still run."""
        for ours in (self._refresh, self._drafters):
            if ours is not None:
                ours.close()

    def close_exchange(self) -> None:
        """Ends the exchange. Call it after the engines have ended: they would miss it."""
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.close()

    def rollout(self) -> AbstractContextManager[None]:
        """Wraps a rollout of one batch by all engines."""
        return nullcontext() if self._tail is None else self._tail.rollout()

    def new_weights(self) -> AbstractContextManager[None]:
        """Wraps a refit. A synchronous engine has nothing to do outside of a rollout."""
        is_async = self._tail is not None and self._config["vllm_cfg"]["async_engine"]
        return self._tail.new_weights() if is_async else nullcontext()

    def policy_is(self, version: int) -> None:
        """The engines have the weights of `version`, the number of training steps behind them."""
        self._call_all_engines("specrollout_policy_is", [version])
        if self._refresh is not None:
            self._refresh.policy_updated(version)
        if self._drafters is not None:
            self._drafters.look(self._call_all_engines)
        if self._totals_before is None:  # not every loop of NeMo-RL's says when a step's generation begins
            self.begin_step()

    def begin_step(self) -> None:
        """Figures of the step start here."""
        self._totals_before = self._engine_totals()
        if self._drafter_stats is not None:
            self._drafter_stats.begin(self._call_all_engines)

    def note_asked(self, seeds: list[int]) -> None:
        """Rollouts with these seeds are asked for; nothing is noted of rows that get theirs in another process."""
        self._asked += seeds

    def end_step(self, version: int) -> dict[str, float]:
        """Returns the figures since `begin_step`, by name; none without one.

        Notes samples and alarms, and tells the trainer of heads that a step under policy `version` is over.
        """
        before, self._totals_before = self._totals_before, None
        if before is None:
            return {}
        after = self._engine_totals()
        if counts := acceptance_counts(before, after):
            self._notes.words["acceptance"] = counts
        figures = step_metrics(before, after) | self._notes_of_engines()
        figures |= self._heads_after_step(version, before, after) | self._supply_of_step()
        figures |= weight_updates(self._totals_after, after) | self._tail_of_step()
        self._totals_after = after
        return figures

    def _notes_of_engines(self) -> dict[str, float]:
        asked, self._asked = self._asked, []
        seeds = asked or None
        ends = self._call_all_engines("specrollout_end_step", [seeds])
        self._notes.samples += sample_lines(ends, seeds)
        self._notes.alarms += [alarm["sentence"] for end in ends for alarm in end["alarms"]]
        return head_figures(ends)

    def _heads_after_step(
        self, version: int, before: list[EngineTotals], after: list[EngineTotals]
    ) -> dict[str, float]:
        if self._refresh is None:
            return {}
        now = time.perf_counter()
        to_come = max(0, self._facts.last_version - version - 1)
        facts = step_facts(before, after, now - self._facts_at, to_come)
        self._facts_at = self._facts_at if facts is None else now
        return {PREFIX + name: value for name, value in self._refresh.after_step(version, facts).items()}

    def _supply_of_step(self) -> dict[str, float]:
        """Notes how well remote drafters kept up and restarts lost ones. Returns the figures of both."""
        figures: dict[str, float] = {}
        if self._drafter_stats is not None:
            self._notes.words["draft_supply"] = supply = self._drafter_stats.end(self._call_all_engines)
            figures |= logged(supply)
        if self._drafters is not None:
            self._drafters.look(self._call_all_engines)
            figures |= {PREFIX + name: value for name, value in self._drafters.figures().items()}
        return figures

    def _tail_of_step(self) -> dict[str, float]:
        return {} if self._tail is None else {f"{PREFIX}tail/{name}": x for name, x in self._tail.figures().items()}

    def _start_refresh(self) -> HeadRefresh | None:
        block, config = self._block, self._config
        if block.draft_refresh is None:
            return None
        from nemo_specrollout.nemo_rl.head_trainer import TrainerLink, TrainerOrder

        order = TrainerOrder(config["specrollout"], config["model_name"], self._facts.heads, config["temperature"])
        call = partial(_call_engines, self._engines)
        blocks = blocks_of_engines(block, self._engines.dp_size)
        has_head = [of_engine.head is not None for of_engine in blocks]
        folder = HeadFolder(Path(self._facts.heads))
        return HeadRefresh(block, folder, partial(TrainerLink, order), call, has_head, self._notes)

    def _call_all_engines(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return call_all_engines(self._engines, method, arguments)

    def _engine_totals(self) -> list[EngineTotals]:
        futures = self._engines.run_all_workers_single_data(
            "specrollout_totals", run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"]
        )
        return [EngineTotals.from_wire(reply) for reply in ray.get(futures)]


def _start_drafters(block: SpecrolloutConfig, config: Any, notes: StepNotes) -> RemoteDrafters | None:
    """Starts the drafters of `workers`, if the block has any. A run does not look after drafters at `addresses`."""
    if block.remote is None or not block.remote.workers:
        return None
    from nemo_specrollout.nemo_rl.drafter_actors import start_links

    secret = secret_of_run()
    start = partial(start_links, block.remote, config["vllm_cfg"], secret)
    return RemoteDrafters(start, secret, notes, starts_later=bool(block.remote.gpus))


def call_all_engines(worker_group: Any, method: str, arguments: Sequence[Any]) -> list[Any]:
    """Calls `method` of every engine of NeMo-RL's `worker_group`. Returns the replies."""
    return _call_engines(worker_group, method, [arguments] * worker_group.dp_size)


def _call_engines(worker_group: Any, method: str, arguments: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Calls `method` of each engine that has a list of arguments; an engine with None is left out. Returns the replies."""
    call, leader = worker_group.run_single_worker_single_data, worker_group.get_dp_leader_worker_idx
    asked = [(leader(engine), list(args)) for engine, args in enumerate(arguments) if args is not None]
    return ray.get([call("specrollout_call", worker, method=method, arguments=args) for worker, args in asked])
