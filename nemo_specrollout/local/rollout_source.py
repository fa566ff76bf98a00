# SPDX-License-Identifier: Apache-2.0
"""Sources of a run's rollouts: the interface, and the source that is one engine in the run's process."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.local.step_rollout import MeasuredRollout, StepPrompts, StepRollout, check_tokens
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile

if TYPE_CHECKING:
    from nemo_specrollout.training.features.features import SequenceFeatures

Prompts = Callable[[int], StepPrompts]
"""Step to its prompts."""


class RolloutSource(Protocol):
    """Something that rolls out: one engine, a fleet of engines, or a fleet that works while the policy is trained."""

    def facts(self) -> Mapping[str, str | bool]:
        """Returns what is in force in the engines: vLLM's version, model runner, scheduling, CUDA graph mode."""

    def begin(self, steps: range) -> None:
        """Begins the steps of a run, when the engines have the policy's weights. By default a step begins when asked for."""
        return None

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Returns the responses that a step trains on. `on_finished` gets the number of finished ones as it grows."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces the weights of all engines, by Hugging Face name."""

    def complete(self, rollout: StepRollout) -> StepRollout:
        """Returns the step's rollout with all statistics, after the new weights were loaded."""
        return rollout

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Replaces the EAGLE-3 head (`RolloutEngine.load_head`)."""

    def take_features(self) -> "list[SequenceFeatures]":
        """Returns the features captured since the last call, for the training of a head."""

    def capture_seconds(self) -> float:
        """Returns the engine's seconds that capturing features has taken since the start."""

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms of canaries since the last call."""

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each process that died since the last call."""

    def ladder_file(self) -> LadderFile | None:
        """Returns the decode speeds that were learned; None where nothing was."""
        return None

    def close(self) -> None:
        """Ends the engines."""


class LocalEngine(RolloutEngine, RolloutSource):
    """The `RolloutSource` of a run with one engine."""

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """Starts the engine. Raises ConfigError for what vLLM refuses."""
        self._run_config, self._prompts = config, prompts
        super().__init__(Path(config.policy.model_name), config.policy.generation, config.grpo.seed)

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        prompts = self._prompts(step)
        measured = MeasuredRollout(self, prompts.requests, on_finished)
        measured.advance()
        rollout = StepRollout(prompts, *measured.result(), self.take_sample_stats(prompts.requests))
        return check_tokens(rollout, self.generate, self._run_config)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int = 0) -> None:
        """Replaces the weights, by Hugging Face name. Each request says itself which version it is for."""
        super().load_weights(tensors)
