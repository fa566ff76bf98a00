# SPDX-License-Identifier: Apache-2.0
"""The task of a local run: where problems come from, how they become prompts, and what a response is worth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_specrollout.config.run_sections import DataConfig
from nemo_specrollout.local.free_text import FreeText
from nemo_specrollout.local.task import encode_prompt, make_problems, reward_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Problem(Protocol):
    """One problem of a task. Only the task that made it reads more than the prompt."""

    @property
    def prompt(self) -> str:
        """The user's words, without chat template."""
        ...


class Task(Protocol):
    """A source of problems with its reward. Problems depend on the seed and their index only."""

    def problems(self, seed: int, num: int, start: int = 0) -> list[Any]:
        """Problems `start` to `start + num - 1` of the seed's endless list; the same in every process."""
        ...

    def encode(self, problem: Any) -> list[int]:
        """The prompt's token ids; a response's first token follows the last."""
        ...

    def reward(self, problem: Any, response_ids: Sequence[int]) -> float:
        """What the response is worth, 0 to 1; any token ids have a reward."""
        ...


class StepAddition:
    """The demo's task (`local/task.py`)."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", max_terms: int) -> None:
        self._tokenizer = tokenizer
        self._max_terms = max_terms

    def problems(self, seed: int, num: int, start: int = 0) -> list[Any]:
        return list(make_problems(seed, num, start, self._max_terms))

    def encode(self, problem: Any) -> list[int]:
        return encode_prompt(problem, self._tokenizer)

    def reward(self, problem: Any, response_ids: Sequence[int]) -> float:
        return reward_of_ids(problem, response_ids, self._tokenizer)


def build_task(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> Task:
    """The task that `data` names."""
    if data.dataset_name == "reasoning_gym":
        from nemo_specrollout.local.reasoning_gym_task import ReasoningGymTask

        return ReasoningGymTask(tokenizer, data.tasks, data.system_prompt)
    if data.dataset_name == "free_text":
        return FreeText(tokenizer)
    return StepAddition(tokenizer, data.max_terms)
