# SPDX-License-Identifier: Apache-2.0
"""The task of a local run: its interface, and the task that a config names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_specrollout.config.run_sections import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Problem(Protocol):
    """One problem of a task. Only the task that made it reads more than the prompt."""

    @property
    def prompt(self) -> str:
        """The user's words, without chat template."""
        ...


class Task(Protocol):
    """A source of problems with its reward. A problem depends on the seed and its index only."""

    def problems(self, seed: int, num: int, start: int = 0) -> list[Any]:
        """Returns problems `start` to `start + num - 1` of the seed's endless list; the same in every process."""
        ...

    def encode(self, problem: Any) -> list[int]:
        """Returns the prompt's token ids. The first token of a response follows the last of them."""
        ...

    def reward(self, problem: Any, response_ids: Sequence[int]) -> float:
        """Returns the reward of a response, 0 to 1. Any token ids have one."""
        ...


def build_task(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> Task:
    """Returns the task that `data` names."""
    if data.dataset_name == "reasoning_gym":
        from nemo_specrollout.local.reasoning_gym_task import ReasoningGymTask

        return ReasoningGymTask(tokenizer, data.tasks, data.system_prompt)
    if data.dataset_name == "free_text":
        from nemo_specrollout.local.free_text import FreeText

        return FreeText(tokenizer)
    from nemo_specrollout.local.step_addition import StepAddition

    return StepAddition(tokenizer, data.max_terms)


def encode_chat(tokenizer: "PreTrainedTokenizerFast", user: str, system: str | None = None) -> list[int]:
    """Returns the token ids of one user message by the model's chat template, ready for a response.

    `system` is the system prompt. With None the template uses its own, if it has one.
    """
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
