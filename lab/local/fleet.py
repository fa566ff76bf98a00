# SPDX-License-Identifier: Apache-2.0
"""The `RolloutSource` of a run with several engines, which gives the same tokens as a single engine."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lab.local.coordinator import DealingCoordinator
from lab.local.engine_stats import EngineStats
from lab.local.rollout_pool import DEAD, RolloutPool
from lab.local.run_config import RunConfig
from lab.local.statistics import RolloutStats, draft_counts, fleet_stats, work_stats
from lab.local.step_rollout import Prompts, RolloutSource, StepRollout, check_tokens
from lab.local.timeline import Timeline
from lab.simulation.dealing import in_shards
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.installed.versions import this_machine, vllm_version
from nemo_specrollout.stragglers.attempts import AttemptOutcome
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import FIELD, SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN
from nemo_specrollout.stragglers.kept_speeds import KeptSpeeds, with_kept

if TYPE_CHECKING:
    from nemo_specrollout.heads.features.features import SequenceFeatures


class RolloutFleet(RolloutSource):
    """Rolls out the steps of a run with several engines (`RolloutSource`).

    Owns the pool of engines, the decode-speed table, the length estimates and two coordinators. The first coordinator serves
    the rollouts of a run. The second serves `generate`, so that requests there stay in their engines and no decode speeds are
    learned.
    """

    def __init__(self, config: RunConfig, prompts: Prompts, known: SpeedTableFile | None = None) -> None:
        """Starts the engines. Raises ConfigError for what vLLM refuses.

        The decode-speed table begins with the speeds of `known`. If that is None, it begins with the file that the config
        names, and without such a file with what an earlier start has kept.
        """
        generation = config.policy.generation
        model = Path(config.policy.model_name)
        racing = generation.specrollout.fastest_of_n or FastestOfNConfig(enabled=False)
        file = known
        if file is None and racing.ladder is not None:
            file = SpeedTableFile.read(Path(racing.ladder), FIELD)
        asynchronous = config.grpo.async_grpo
        recomputes = asynchronous.recompute_kv_cache_after_weight_updates or not asynchronous.in_flight_weight_updates
        self.pool = RolloutPool(
            model,
            generation,
            config.grpo.seed,
            config.cluster.rollout_workers,
            recompute_kv_cache=recomputes,
            weights_by_handle=config.cluster.weights_by_handle,
        )
        self._kept = _kept_speeds(config)
        file = with_kept(file, self._kept)
        self.ladder = started_table(self.pool.method_names, file)
        self.task = config.data.dataset_name
        self._config = config
        self._prompts = prompts
        self._acceptance = {} if file is None else {rung.method: rung.acceptance for rung in file.rungs}
        self._drafts = {method: (0, 0) for method in self.pool.method_names}
        """Verified and accepted draft tokens by draft method."""
        lengths = LengthEstimator(generation.max_new_tokens)
        policy = FastestOfN(racing, self.ladder) if racing.enabled else None
        begins_again = generation.specrollout.runs_ahead
        self.coordinator = DealingCoordinator(self.pool, policy, self.ladder, lengths, begins_again=begins_again)
        self._plain = DealingCoordinator(self.pool, None, DecodeSpeedTable(self.pool.method_names), LengthEstimator(1))

    # Rollouts

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        return check_tokens(self._rolled_out(step, on_finished), self.generate, self._config)

    def _rolled_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Rolls out a step and returns its responses, without a check of their tokens."""
        prompts = self._prompts(step)
        self.begin_counting()
        started = time.perf_counter()
        rollouts, timeline = self.coordinator.roll_out(prompts.requests, on_finished, self.task)
        seconds = time.perf_counter() - started
        self.pool.finish_turns()
        before, after = self._stats_since()
        shards = in_shards(len(rollouts), len(self.pool.methods))
        stats = fleet_stats(before, after, rollouts, shards, seconds, self.pool.capacity)
        stats = replace(stats, tail={**timeline.figures(), **self.coordinator.take_idle_figures()})
        sample_stats = self.take_sample_stats(prompts.requests, timeline)
        return StepRollout(prompts, rollouts, stats, sample_stats, timeline=timeline.record())

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Returns the responses to `requests`, in their order. No request moves to another engine."""
        return self._plain.roll_out(requests)[0]

    # Statistics

    def begin_counting(self) -> None:
        """Begins the interval for which `worked` and `_stats_since` return statistics."""
        self._restarts = list(self.pool.num_restarts)
        self._before = self.pool.ask_each("counters")

    def worked(self) -> RolloutStats:
        """Returns statistics of all that the engines did since `begin_counting`, for a run whose rollouts overlap."""
        before, after = self._stats_since()
        return work_stats(before, after, self.pool.capacity)

    def _stats_since(self) -> tuple[dict[int, EngineStats], dict[int, EngineStats]]:
        """Returns the engine stats at `begin_counting` and now, for the engines that have not died in between."""
        alive = [e for e in self._before if self.pool.is_alive(e) and self.pool.num_restarts[e] == self._restarts[e]]
        asked = {e: self.pool.ask(e, "stats", self._before[e].num_steps) for e in alive}
        after = {e: stats for e, stats in asked.items() if stats is not DEAD}
        before = {e: self._before[e] for e in after}
        for engine, stats in after.items():
            method = self.pool.method_name(engine)
            counts = draft_counts(before[engine], stats)
            self._drafts[method] = self._drafts[method][0] + counts[0], self._drafts[method][1] + counts[1]
        return before, after

    def take_sample_stats(self, requests: Sequence[RolloutRequest], timeline: Timeline) -> list[dict[str, Any] | None]:
        """Returns facts about each sample of a rollout. They come from the engine that won, which means that it ended first.

        Only the counts of draft tokens are sums over all engines that decoded the sample.
        """
        by_engine = self.pool.ask_each("take_sample_stats", list(requests))
        found: list[dict[str, Any] | None] = []
        for i in range(len(requests)):
            spans = sorted((s for s in timeline.spans if s.request == i), key=lambda s: s.start_s)
            winner = next(s.engine for s in spans if s.outcome == AttemptOutcome.WON)
            stats = {e: of_engine[i] for e, of_engine in by_engine.items() if of_engine[i] is not None}
            counts = {key: sum(s[key] for s in stats.values()) for key in ("num_drafted", "num_accepted") if stats}
            workers = list(dict.fromkeys(s.engine for s in spans))
            found.append({**stats.get(winner, {}), **counts, "won_by": winner, "workers": workers})
        return found

    def ladder_file(self) -> SpeedTableFile | None:
        """Returns the current decode-speed table as the content of a file, or None before the first rollout.

        Asks no engine.
        """
        shares = [
            accepted / verified if verified else self._acceptance.get(method, 0.0)
            for method, (verified, accepted) in self._drafts.items()
        ]
        return table_file(self.ladder, this_machine(), self._config.policy.model_name, shares)

    # See `RolloutSource`

    def _ask_each(self, *question: Any, drafting_by: str | None = None) -> dict[int, Any]:
        return self.pool.ask_each(*question, drafting_by=drafting_by)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self.coordinator.load_weights(tensors, policy_version)

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        self._ask_each("load_head", folder, expected_length, num_positions, drafting_by="eagle3")

    def take_features(self) -> list["SequenceFeatures"]:
        return [f for features in self._ask_each("take_features", drafting_by="eagle3").values() for f in features]

    def capture_seconds(self) -> float:
        """Returns how many seconds of engine time capturing features has taken, in the engine where it took longest.

        Engines work at the same time, so their seconds are not added.
        """
        return max(self._ask_each("capture_seconds", drafting_by="eagle3").values(), default=0.0)

    def facts(self) -> dict[str, str | bool]:
        facts: dict[str, str | bool] = next((facts for facts in self._ask_each("facts").values() if facts), {})
        began = [str(of_engine) for of_engine in (facts.get("began"), self._kept.sentence) if of_engine]
        return {**facts, "began": ", and ".join(began) or False} if facts else facts

    def take_alarms(self) -> list[dict[str, Any]]:
        of_speeds = [{"sentence": sentence} for sentence in self._kept.take_alarms()]
        return [a for alarms in self._ask_each("take_alarms").values() for a in alarms] + of_speeds

    def keep_learned(self) -> None:
        self._ask_each("keep_learned")
        self._kept.keep(self.ladder_file())

    def take_deaths(self) -> list[str]:
        return self.pool.take_deaths()

    def close(self) -> None:
        self.pool.close()
        self._kept.settle()


def _kept_speeds(config: RunConfig) -> KeptSpeeds:
    """Returns the decode speeds that earlier starts have kept for engines like this run's.

    Only starts with the same number of engines count, because the engines of a local run share the machine's cores.
    """
    generation = config.policy.generation
    num_engines = config.cluster.rollout_workers
    about = {
        "vllm": vllm_version(),
        "device": this_machine(),
        "num_engines": num_engines,
        "vllm_cfg": asdict(generation.vllm_cfg),
        "vllm_kwargs": generation.vllm_kwargs,
    }
    return KeptSpeeds(generation.specrollout, config.policy.model_name, num_engines, about)
