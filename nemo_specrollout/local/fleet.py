# SPDX-License-Identifier: Apache-2.0
"""The rollout workers of a local run, which take the place of its engine: same weights, same requests, same tokens."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.run import RunConfig
from nemo_specrollout.config.tail import FastestOfNConfig
from nemo_specrollout.generation.coordinator import Coordinator
from nemo_specrollout.generation.engine import Rollout, RolloutRequest
from nemo_specrollout.generation.rollout_pool import RolloutPool
from nemo_specrollout.generation.timeline import WON, Timeline
from nemo_specrollout.local.statistics import RolloutStats, fleet_stats
from nemo_specrollout.scheduling.dispatch import in_shards
from nemo_specrollout.scheduling.fastest_of_n import FastestOfN
from nemo_specrollout.scheduling.ladder import Ladder, LadderFile
from nemo_specrollout.scheduling.response_lengths import LengthEstimator

if TYPE_CHECKING:
    from nemo_specrollout.training.features import SequenceFeatures


class RolloutFleet:
    """Owns the pool, the ladder, what is known of lengths, and the coordinators: one as configured, and one for checks, whose
    requests stay where they are dealt. Answers to what the runner asks of an engine."""

    def __init__(self, config: RunConfig) -> None:
        """Starts the workers. Raises ConfigError."""
        generation, model = config.policy.generation, Path(config.policy.model_name)
        tail = generation.specrollout.fastest_of_n or FastestOfNConfig(enabled=False)
        file = None if tail.ladder is None else LadderFile.read(Path(tail.ladder), f"{BLOCK_PATH}.fastest_of_n.ladder")
        self.pool = RolloutPool(model, generation, config.grpo.seed, config.cluster.rollout_workers)
        self.ladder = Ladder(self.pool.method_names, file)
        self._task = config.data.dataset_name
        lengths = LengthEstimator(generation.max_new_tokens)
        policy = FastestOfN(tail, self.ladder) if tail.enabled else None
        self._coordinator = Coordinator(self.pool, policy, self.ladder, lengths)
        self._plain = Coordinator(self.pool, None, Ladder(self.pool.method_names), LengthEstimator(1))
        self._timeline, self._policy_version = Timeline(1), 0

    def measure(
        self, requests: Sequence[RolloutRequest], on_finished: Callable[[int], None]
    ) -> tuple[list[Rollout], RolloutStats, dict[str, Any]]:
        """The responses, what they took, and the timeline, as plain data."""
        restarts = list(self.pool.num_restarts)
        before = self.pool.ask_each("report", 1 << 60)
        started = time.perf_counter()
        rollouts, self._timeline = self._coordinator.roll_out(requests, on_finished, self._task)
        seconds = time.perf_counter() - started
        self.pool.finish_turns()
        same = {w: r for w, r in before.items() if self.pool.is_alive(w) and self.pool.num_restarts[w] == restarts[w]}
        after = {w: self.pool.ask(w, "report", report["num_steps"]) for w, report in same.items()}
        shards = in_shards(len(requests), len(self.pool.methods))
        stats = fleet_stats(same, after, rollouts, shards, seconds, self.pool.capacity)
        return rollouts, replace(stats, tail=self._timeline.figures()), self._timeline.wire()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Responses, each by the worker that it is dealt to."""
        return self._plain.roll_out(requests)[0]

    def take_stamps(self, requests: Sequence[RolloutRequest]) -> list[dict[str, Any] | None]:
        """What is written on each sample of the last rollout: the winner's stamp, with the drafts of all who had it, who won,
        and who had it."""
        stamps = self.pool.ask_each("take_stamps", list(requests))
        return [self._stamp(i, {w: s[i] for w, s in stamps.items() if s[i] is not None}) for i in range(len(requests))]

    def _stamp(self, request: int, of: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
        spans = [s for s in self._timeline.spans if s.request == request]
        winner = next(s.worker for s in spans if s.outcome == WON)
        stamp = of.get(winner, {})
        counts = {key: sum(s[key] for s in of.values()) for key in ("num_drafted", "num_accepted") if of}
        return {**stamp, **counts, "won_by": winner, "workers": list(dict.fromkeys(s.worker for s in spans))}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights of all workers, by Hugging Face names."""
        self._policy_version += 1
        self._coordinator.load_weights(tensors, self._policy_version)

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Replaces the EAGLE-3 head of all workers that draft with it."""
        self.pool.ask_each("load_head", folder, expected_length, num_positions, drafting_by="eagle3")

    def take_features(self) -> list["SequenceFeatures"]:
        """What was captured, since last asked, for the training of a head."""
        return [f for features in self.pool.ask_each("take_features").values() for f in features]

    def capture_seconds(self) -> float:
        """What capturing features has taken of the engines' time; they work side by side, so of the one that it took most."""
        return max(self.pool.ask_each("capture_seconds").values())

    def take_alarms(self) -> list[dict[str, Any]]:
        """What the canaries raised since last asked."""
        return [a for alarms in self.pool.ask_each("take_alarms").values() for a in alarms]

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()
