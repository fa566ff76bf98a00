# SPDX-License-Identifier: Apache-2.0
"""One step's rollout: prompts, responses, what it took, and the proof that speculation changed nothing."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_specrollout.config.run_config import RunConfig, check_prompt
from nemo_specrollout.generation.engine import Generation, Rollout, RolloutEngine, RolloutRequest
from nemo_specrollout.local.fleet import RolloutFleet
from nemo_specrollout.local.statistics import RolloutStats, count_equal, rollout_stats, stock_stats
from nemo_specrollout.local.tasks import Problem, Task


@dataclass(frozen=True)
class StepPrompts:
    """The problems of a step and the requests for them, `num_generations_per_prompt` in a row for each problem."""

    problems: list[Problem]
    requests: list[RolloutRequest]


@dataclass(frozen=True)
class StepRollout:
    """What a step generated, with raw counts."""

    prompts: StepPrompts
    rollouts: list[Rollout]
    stats: RolloutStats
    tokens_checked: int
    tokens_equal: int
    verify_s: float
    sample_stats: list[dict[str, Any] | None]
    """What is written on each sample (`generation/sample_stats.py`)."""
    figures: dict[str, Any] = field(default_factory=dict)
    """More of the step's metrics."""
    num_older_B: list[int] | None = None
    """Of each response the tokens that older policies than the step's made; None where there are none."""
    timeline: dict[str, Any] | None = None
    """Who worked on which request when (`racing/timeline.py`), where there are several workers."""


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a Hugging Face folder, without its hub."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(model))


def step_prompts(config: RunConfig, step: int, task: Task) -> StepPrompts:
    """The prompts of `step`: a function of the run's seed and the step alone. The policy's version is the step."""
    grpo = config.grpo
    first = step * grpo.num_prompts_per_step
    problems = task.problems(grpo.seed, grpo.num_prompts_per_step, first)
    prompts = list(map(task.encode, problems))
    check_prompt(max(map(len, prompts)), config.policy.max_total_sequence_length)
    requests = [
        RolloutRequest(ids, first + i, sample, policy_version=step)
        for i, ids in enumerate(prompts)
        for sample in range(grpo.num_generations_per_prompt)
    ]
    return StepPrompts([p for p in problems for _ in range(grpo.num_generations_per_prompt)], requests)


def roll_out(
    engine: RolloutEngine | RolloutFleet, prompts: StepPrompts, config: RunConfig, on_finished: Callable[[int], None]
) -> StepRollout:
    """Generates the responses of a step, then decodes some of them again without speculation and compares."""
    timeline = None
    if isinstance(engine, RolloutFleet):
        rollouts, stats, timeline = engine.measure(prompts.requests, on_finished)
    else:
        measured = MeasuredRollout(engine, prompts.requests, on_finished)
        measured.advance()
        rollouts, stats = measured.result()
    sample_stats = engine.take_sample_stats(prompts.requests)
    started = time.perf_counter()
    block = config.policy.generation.specrollout
    chosen = _spread(len(prompts.requests), block.verify.requests_per_step if block.enabled else 0)
    again = decode_plainly(engine, [prompts.requests[i] for i in chosen]) if chosen else []
    equal, total = count_equal([rollouts[i] for i in chosen], again)
    return StepRollout(
        prompts, rollouts, stats, total, equal, time.perf_counter() - started, sample_stats, timeline=timeline
    )


class MeasuredRollout:
    """A rollout and the clock that runs while it is advanced; between turns the clock stands still."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        at_a_time: int | None = None,
    ) -> None:
        self._engine = engine
        self._report, self._num_steps = engine.report(first_step=1 << 60), engine.num_steps
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
        """On the clock so far, amid a turn too."""
        return self._seconds + (0.0 if self._turn_since is None else time.perf_counter() - self._turn_since)

    @property
    def num_tokens(self) -> int:
        """Tokens of the responses so far. Takes a while: not for every step."""
        return self._generation.num_tokens

    def advance(self, seconds: float = math.inf) -> None:
        """A turn of about `seconds`; the last lasts until all is done."""
        self._engine.stood_still(time.perf_counter() - self._rested_since)
        self._turn_since = time.perf_counter()
        self._generation.advance(seconds)
        self._rested_since = time.perf_counter()
        self._seconds += self._rested_since - self._turn_since
        self._turn_since = None

    def result(self) -> tuple[list[Rollout], RolloutStats]:
        """The responses, and what they took."""
        rollouts = self._generation.rollouts
        if self._report is None:
            return rollouts, stock_stats(rollouts, self._seconds, self._engine.num_steps - self._num_steps)
        after = self._engine.report(first_step=self._report["num_steps"])
        assert after is not None
        return rollouts, rollout_stats(self._report, after, rollouts, self._seconds, self._engine.max_num_seqs)


def decode_plainly(engine: RolloutEngine | RolloutFleet, requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """The same requests, with the same noise, one token a step."""
    return engine.generate([replace(r, speculate=False) for r in requests])


def _spread(total: int, count: int) -> list[int]:
    """`count` indices spread evenly over range(total)."""
    count = min(count, total)
    return [i * total // count for i in range(count)]
