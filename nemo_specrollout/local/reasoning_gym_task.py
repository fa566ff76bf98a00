# SPDX-License-Identifier: Apache-2.0
"""The task `reasoning_gym`: problems of `reasoning-gym` in the model's chat template, with its scorers as the reward."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.local.tasks import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_specrollout.config.run_sections import TaskConfig

ENDLESS = 2**31
"""Size of the datasets. A problem is made only when it is asked for."""


def check_tasks(tasks: "Sequence[TaskConfig]", path: str) -> None:
    """Makes one problem of each task. Raises ConfigError if a task or option is unknown, or if the package is missing."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"{path}: the package reasoning-gym cannot be imported ({error}); `make smollm2` installs it"
        ) from error
    for i, task in enumerate(tasks):
        if task.name not in DATASETS:
            raise ConfigError(
                f"{path}[{i}].name: {task.name!r} is no task of reasoning_gym{nearest(task.name, DATASETS)}"
            )
        try:
            reasoning_gym.create_dataset(task.name, size=ENDLESS, seed=0, **task.options)[0]
        except Exception as error:  # each task has checks of its own: assertions, type errors, value errors
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"{path}[{i}].options: {dict(task.options)} does not suit {task.name}: {reason}"
            ) from error


@dataclass(frozen=True)
class GymProblem:
    """One problem of one task."""

    task: str
    """Name of the task."""
    dataset: Any
    """Dataset that scores the problem."""
    entry: Mapping[str, Any]
    """The problem's entry in the dataset."""

    @property
    def prompt(self) -> str:
        return str(self.entry["question"])


class ReasoningGymTask:
    """The task of a run (`tasks.Task`): an endless list for each seed, of `reasoning-gym` problems mixed by weight."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", tasks: "Sequence[TaskConfig]", system_prompt: str | None = None
    ) -> None:
        """`system_prompt` is a text, the name of a prompt of `reasoning-gym`, or None for the chat template's own."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self._tokenizer = tokenizer
        self._tasks = tuple(tasks)
        self._system_prompt = SYSTEM_PROMPTS.get(system_prompt or "", system_prompt)
        self._datasets: dict[tuple[int, str], Any] = {}

    def problems(self, seed: int, num: int, start: int = 0) -> list[GymProblem]:
        """Returns problems `start` to `start + num - 1` of the seed's list; the same in every process."""
        names, weights = [t.name for t in self._tasks], [t.weight for t in self._tasks]
        found = []
        for index in range(start, start + num):
            name = random.Random(f"{seed}-{index}").choices(names, weights)[0]
            dataset = self._dataset(seed, name)
            found.append(GymProblem(name, dataset, dataset[index]))
        return found

    def encode(self, problem: GymProblem) -> list[int]:
        """Returns the prompt's token ids by the chat template. The first token of a response follows the last of them."""
        return encode_chat(self._tokenizer, problem.prompt, self._system_prompt)

    def reward(self, problem: GymProblem, response_ids: Sequence[int]) -> float:
        """Returns the task's own score, 0 to 1, of the text in the last `<answer>...</answer>`; 0 without one."""
        from reasoning_gym.utils import extract_answer

        text = str(self._tokenizer.decode(list(response_ids), skip_special_tokens=True))
        return float(problem.dataset.score_answer(extract_answer(text), problem.entry))

    def _dataset(self, seed: int, name: str) -> Any:
        if (seed, name) not in self._datasets:
            import reasoning_gym

            # A dataset makes problem i from seed + i. So the lists of close seeds would overlap.
            far = int.from_bytes(hashlib.sha256(f"{seed}-{name}".encode()).digest()[:5], "big")
            options = next(t.options for t in self._tasks if t.name == name)
            self._datasets[seed, name] = reasoning_gym.create_dataset(name, size=ENDLESS, seed=far, **options)
        return self._datasets[seed, name]
