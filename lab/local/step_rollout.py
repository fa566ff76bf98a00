# SPDX-License-Identifier: Apache-2.0
"""The rollout of a training step, with its prompts, its responses and their statistics.

The module also checks some tokens of a rollout, and defines the interface of the engines of a run (`RolloutSource`).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lab.local.engine import Generation, RolloutEngine
from lab.local.run_config import RunConfig, check_prompt
from lab.local.statistics import RolloutStats, count_equal, rollout_stats, stock_stats
from lab.local.tasks import Task, task_name
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.storage.model_folder import stop_token_ids
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile

if TYPE_CHECKING:
    from nemo_specrollout.heads.features.features import SequenceFeatures


@dataclass(frozen=True)
class StepPrompts:
    """The requests of a training step, and the problem of each request in the same order."""

    problems: list[Any]
    requests: list[RolloutRequest]


@dataclass(frozen=True)
class StepRollout:
    """The responses of a training step in the order of its requests, with statistics."""

    prompts: StepPrompts
    rollouts: list[Rollout]
    stats: RolloutStats
    sample_stats: list[dict[str, Any] | None]
    """Facts about each sample for `samples.jsonl` (`telemetry/sample_stats.py`)."""
    tokens_checked: int = 0
    """Number of tokens that were decoded again without speculation."""
    tokens_equal: int = 0
    """Number of checked tokens that were the same without speculation."""
    verify_s: float = 0.0
    """Seconds that the check of tokens took."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Metrics of the step by name, besides those of `stats`."""
    num_older_B: list[int] | None = None
    """Number of tokens of each response that policies older than the step's have sampled, or None in a synchronous step."""
    timeline: dict[str, Any] | None = None
    """Line of `timeline.jsonl`, or None with one engine."""


def load_tokenizer(model: Path) -> Any:
    """Returns the tokenizer in a Hugging Face folder.

    A tokenizer without a pad token, such as Llama 3's, pads with its EOS token.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
    if tokenizer.pad_token is None and (ids := stop_token_ids(model)):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ids[0])
    return tokenizer


def step_prompts(config: RunConfig, step: int, task: Task) -> StepPrompts:
    """Returns the problems and requests of a step.

    They depend only on the config and the step, which is also the policy version.
    """
    grpo = config.grpo
    first = step * grpo.num_prompts_per_step
    problems = task.problems(grpo.seed, grpo.num_prompts_per_step, first)
    prompts = list(map(task.encode, problems))
    draftless = config.policy.generation.specrollout.tasks_without_drafts
    check_prompt(max(map(len, prompts)), config.policy.max_total_sequence_length)
    requests = [
        RolloutRequest(
            ids, first + i, sample, policy_version=step, speculate=task_name(config.data, problem) not in draftless
        )
        for i, (ids, problem) in enumerate(zip(prompts, problems, strict=True))
        for sample in range(grpo.num_generations_per_prompt)
    ]
    return StepPrompts([p for p in problems for _ in range(grpo.num_generations_per_prompt)], requests)


def check_tokens(
    rollout: StepRollout, generate: Callable[[list[RolloutRequest]], list[Rollout]], config: RunConfig
) -> StepRollout:
    """Decodes some requests again without speculation, and compares the tokens.

    Returns the rollout with `tokens_checked`, `tokens_equal` and `verify_s` filled in.
    """
    started = time.perf_counter()
    block = config.policy.generation.specrollout
    requests = rollout.prompts.requests
    count = min(block.verify.requests_per_step if block.enabled else 0, len(requests))
    chosen = [i * len(requests) // count for i in range(count)]  # spread evenly
    again = generate([replace(requests[i], speculate=False) for i in chosen]) if chosen else []
    equal, total = count_equal([rollout.rollouts[i] for i in chosen], again)
    return replace(rollout, tokens_checked=total, tokens_equal=equal, verify_s=time.perf_counter() - started)


class MeasuredRollout:
    """A rollout by one engine, with a clock that runs only while the rollout is advanced."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        at_a_time: int | None = None,
    ) -> None:
        self._engine = engine
        self._before = engine.counters()
        self._num_steps = engine.num_steps
        self._turn_since: float | None = None
        started = time.perf_counter()
        self._generation = Generation(engine, requests, on_finished, at_a_time=at_a_time)
        self._rested_since = time.perf_counter()
        self._seconds = self._rested_since - started

    @property
    def is_done(self) -> bool:
        return self._generation.is_done

    @property
    def seconds(self) -> float:
        """Seconds that the rollout has taken so far, without the time between two calls of `advance`."""
        return self._seconds + (0.0 if self._turn_since is None else time.perf_counter() - self._turn_since)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all responses have so far. Reading it is slow, so do not do it at every engine step."""
        return self._generation.num_tokens

    def advance(self, seconds: float = math.inf) -> None:
        """Continues the rollout for about `seconds`, or until all responses have ended."""
        self._engine.stood_still(time.perf_counter() - self._rested_since)
        self._turn_since = time.perf_counter()
        self._generation.advance(seconds)
        self._rested_since = time.perf_counter()
        self._seconds += self._rested_since - self._turn_since
        self._turn_since = None

    def result(self) -> tuple[list[Rollout], RolloutStats]:
        """Returns the responses and their statistics."""
        rollouts = self._generation.rollouts
        if self._before is None:
            return rollouts, stock_stats(rollouts, self._seconds, self._engine.num_steps - self._num_steps)
        after = self._engine.stats(first_step=self._before.num_steps)
        assert after is not None
        return rollouts, rollout_stats(self._before, after, rollouts, self._seconds, self._engine.max_num_seqs)


Prompts = Callable[[int], StepPrompts]
"""Function that returns the problems and requests of a training step."""


class RolloutSource(Protocol):
    """Interface of what rolls out the steps of a run, which is one engine or a fleet of engines."""

    def facts(self) -> Mapping[str, str | bool]:
        """Returns the settings that are in force in the engines, such as vLLM's version, model runner and CUDA graph mode."""

    def begin(self, steps: range) -> None:
        """Tells the source which steps the run will do. Called when the engines have the policy's weights.

        A source may begin to generate for these steps at once. This default does nothing, so everything is generated in
        `roll_out`.
        """
        return None

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Returns the responses on which a step trains.

        Calls `on_finished` with the number of finished responses as it grows.
        """

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces the weights of all engines by `tensors`, which have Hugging Face names."""

    def complete(self, rollout: StepRollout) -> StepRollout:
        """Returns the step's rollout with complete statistics. Called after the engines have loaded the new weights."""
        return rollout

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Replaces the EAGLE-3 head (`RolloutEngine.load_head`)."""

    def take_features(self) -> "list[SequenceFeatures]":
        """Returns the features that engines have captured since the last call, for the training of a head."""

    def capture_seconds(self) -> float:
        """Returns the seconds of engine time that capturing features has taken since the start."""

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call.

        They come from heads' canaries and from files that are kept for later starts.
        """

    def keep_learned(self) -> None:
        """Lets the engines write what they have learned to files, for later starts. Call it between two training steps."""

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each process that died since the last call."""

    def ladder_file(self) -> SpeedTableFile | None:
        """Returns the decode speeds that the engines have learned, in the form of a file, or None if there are none."""
        return None

    def close(self) -> None:
        """Ends the engines."""


class LocalEngine(RolloutEngine, RolloutSource):
    """The `RolloutSource` of a run with one engine."""

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """Starts the engine. Raises ConfigError for what vLLM refuses."""
        self._run_config = config
        self._prompts = prompts
        super().__init__(Path(config.policy.model_name), config.policy.generation, config.grpo.seed)

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        return check_tokens(self._rolled_out(step, on_finished), self.generate, self._run_config)

    def _rolled_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Rolls out a step and returns its responses, without a check of their tokens."""
        prompts = self._prompts(step)
        measured = MeasuredRollout(self, prompts.requests, on_finished)
        measured.advance()
        return StepRollout(prompts, *measured.result(), self.take_sample_stats(prompts.requests))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int = 0) -> None:
        """Replaces the weights by `tensors`, which have Hugging Face names.

        The policy version is not used, because each request names its own.
        """
        super().load_weights(tensors)
