# SPDX-License-Identifier: Apache-2.0
"""The tasks of a local run, which are problems of `reasoning-gym` and free text, and the interface of all tasks.

The demo's own task is in `step_addition`.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lab.local.step_addition import Grammar, StepAddition, Writer
from nemo_specrollout.config.strict import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lab.local.run_sections import DataConfig, TaskConfig

ENDLESS = 2**31
"""Size with which most datasets of `reasoning-gym` are made. They make a problem only when it is requested."""
PART = 500
"""The problems of a task in `TASKS_IN_PARTS` come from many datasets, one after another. This is the number of problems in
each dataset."""
TASKS_IN_PARTS = ("acre", "gsm_symbolic", "list_functions", "pool_matrix", "word_ladder")
"""Tasks that cannot have a dataset of size `ENDLESS`. Three of them compute every problem when a dataset is made.
`word_ladder` refuses more than 20,000 problems, and `pool_matrix` needs seeds below 2**32."""


class Task(Protocol):
    """Interface of a task, which makes problems and rewards responses to them.

    A problem depends only on the seed and its index. Only the task that has made a problem knows its content.
    """

    def problems(self, seed: int, num: int, start: int = 0) -> list[Any]:
        """Returns problems `start` to `start + num - 1` of the endless list of a seed.

        The list is the same in every process.
        """
        ...

    def encode(self, problem: Any) -> list[int]:
        """Returns the token ids of a problem's prompt, after which the response begins."""
        ...

    def reward(self, problem: Any, response_ids: Sequence[int]) -> float:
        """Returns the reward of a response, from 0 to 1. The response may be any list of token ids."""
        ...


def build_task(data: "DataConfig", tokenizer: "PreTrainedTokenizerFast") -> Task:
    """Returns the task that `data` names."""
    if data.dataset_name == "reasoning_gym":
        return ReasoningGymTask(tokenizer, data.tasks, data.system_prompt)
    if data.dataset_name == "free_text":
        return FreeText(tokenizer)
    return StepAddition(tokenizer, data.max_terms)


def task_name(data: "DataConfig", problem: Any) -> str:
    """Returns the name of a problem's task, which is the name that `tasks_without_drafts` uses."""
    return problem.task if isinstance(problem, GymProblem) else data.dataset_name


def encode_chat(tokenizer: "PreTrainedTokenizerFast", user: str, system: str | None = None) -> list[int]:
    """Returns the token ids of a chat with one user message in the model's chat template, after which the response begins.

    `system` is the system prompt. With None, the template uses its own, if it has one.
    """
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# reasoning-gym


def check_tasks(tasks: "Sequence[TaskConfig]", path: str) -> None:
    """Makes one problem of each task, as a check.

    Raises ConfigError if a task or an option is unknown, or if the package is missing.
    """
    try:
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
            _create_dataset(task, 0)[0]
        except Exception as error:  # each task has checks of its own: assertions, type errors, value errors
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"{path}[{i}].options: {dict(task.options)} does not suit {task.name}: {reason}"
            ) from error


def _create_dataset(task: "TaskConfig", seed: int) -> Any:
    """Returns a dataset of `task` with an endless list of problems, or with `PART` problems for tasks in `TASKS_IN_PARTS`."""
    import reasoning_gym

    size = PART if task.name in TASKS_IN_PARTS else ENDLESS
    return reasoning_gym.create_dataset(task.name, size=size, seed=seed, **task.options)


@dataclass(frozen=True)
class GymProblem:
    """A problem of the task `task`, with the dataset that can score answers to it, and its entry in the dataset."""

    task: str
    dataset: Any
    entry: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        return str(self.entry["question"])


class ReasoningGymTask:
    """Problems of several tasks of `reasoning-gym`, mixed by weight, with the package's own scores as the reward.

    Prompts are in the model's chat template.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", tasks: "Sequence[TaskConfig]", system_prompt: str | None = None
    ) -> None:
        """Makes the task.

        `system_prompt` is a text, the name of a prompt of `reasoning-gym`, or None for the chat template's.
        """
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self._tokenizer = tokenizer
        self._tasks = {task.name: task for task in tasks}
        self._system_prompt = SYSTEM_PROMPTS.get(system_prompt or "", system_prompt)
        self._datasets: dict[tuple[int, str], tuple[int, Any]] = {}
        """Number of the latest part and its dataset, by seed and task."""

    def problems(self, seed: int, num: int, start: int = 0) -> list[GymProblem]:
        weights = [task.weight for task in self._tasks.values()]
        found = []
        for index in range(start, start + num):
            name = random.Random(f"{seed}-{index}").choices(list(self._tasks), weights)[0]
            part, index_in_part = divmod(index, PART) if name in TASKS_IN_PARTS else (0, index)
            dataset = self._dataset(seed, name, part)
            found.append(GymProblem(name, dataset, dataset[index_in_part]))
        return found

    def encode(self, problem: GymProblem) -> list[int]:
        return encode_chat(self._tokenizer, problem.prompt, self._system_prompt)

    def reward(self, problem: GymProblem, response_ids: Sequence[int]) -> float:
        """Returns the score of the response's answer, from 0 to 1. A response without an answer scores 0.

        The answer is the text in the last `<answer>...</answer>`.
        """
        from reasoning_gym.utils import extract_answer

        text = str(self._tokenizer.decode(list(response_ids), skip_special_tokens=True))
        try:
            return float(problem.dataset.score_answer(extract_answer(text), problem.entry))
        except Exception:  # some scorers raise at an answer that is not of their form, e.g. prime_factorization's
            return 0.0

    def _dataset(self, seed: int, name: str, part: int) -> Any:
        if (latest := self._datasets.get((seed, name))) is not None and latest[0] == part:
            return latest[1]
        # A dataset makes problem i from seed + i, so the lists of close seeds would overlap.
        if name in TASKS_IN_PARTS:
            far = _hashed(f"{seed}-{name}-{part}", num_bytes=4) // 2
        else:
            far = _hashed(f"{seed}-{name}", num_bytes=5)
        dataset = _create_dataset(self._tasks[name], far)
        self._datasets[seed, name] = part, dataset
        return dataset


def _hashed(words: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:num_bytes], "big")


# Free text

PROMPTS: Grammar = {
    "prompt": {
        "Write a short story about <person> who <deed>.": 4, "Write a poem about <thing>.": 2,
        "Explain to a child why <question>.": 3, "Write a letter to <person> about <thing>.": 2,
        "Describe a day in the life of <person>.": 2, "Give me some advice: how can I <aim>?": 3,
        "What are the good and the bad sides of <thing>?": 3, "Tell me about the history of <thing>.": 2,
        "Write a dialogue between <person> and <person>.": 2, "Summarize what you know about <thing>.": 2,
    },
    "person": {
        "a lighthouse keeper": 1, "an old sailor": 1, "a young baker": 1, "a curious robot": 1, "a shy teacher": 1,
        "a retired astronaut": 1, "a village doctor": 1, "a street musician": 1, "a lonely dragon": 1, "a night nurse": 1,
        "a mountain guide": 1, "a clever fox": 1, "a small town mayor": 1, "a tired detective": 1, "a beekeeper": 1,
        "the captain of a submarine": 1,
    },
    "deed": {
        "finds a map": 1, "loses a key": 1, "learns to sing": 1, "misses the last train": 1, "builds a boat": 1,
        "discovers a secret garden": 1, "forgets a name": 1, "wins a strange contest": 1, "cannot sleep": 1,
        "gets a letter from the future": 1, "teaches a bird to talk": 1, "has to keep a promise": 1,
    },
    "thing": {
        "the sea in winter": 1, "coffee": 1, "bicycles": 1, "working at night": 1, "bridges": 1, "the railway": 1,
        "living in a big city": 1, "old books": 1, "chess": 1, "the telephone": 1, "gardens": 1, "wind power": 1,
        "writing by hand": 1, "the first snow": 1, "bread": 1, "maps": 1, "glass": 1, "school uniforms": 1,
    },
    "question": {
        "the sky is blue": 1, "we dream": 1, "leaves fall in autumn": 1, "the moon changes its shape": 1, "bread rises": 1,
        "cats purr": 1, "it rains": 1, "ice floats": 1, "we need to sleep": 1, "magnets attract iron": 1,
        "birds fly south": 1, "we have different languages": 1,
    },
    "aim": {
        "learn to cook": 1, "sleep better": 1, "make new friends": 1, "read more books": 1, "save money": 1,
        "stop being late": 1, "speak in front of people": 1, "grow tomatoes": 1, "write a good letter": 1,
        "plan a long walk": 1, "remember names": 1, "get up earlier": 1,
    },
}  # fmt: skip


class FreeText:
    """Prompts for stories, letters and explanations without a reward, for the bench and the training of draft heads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer

    def problems(self, seed: int, num: int, start: int = 0) -> list[str]:
        writers = (Writer(PROMPTS, random.Random(f"{seed}-{i}"), habit=0.0) for i in range(start, start + num))
        return [writer.write("prompt") for writer in writers]

    def encode(self, problem: str) -> list[int]:
        return encode_chat(self._tokenizer, problem)

    def reward(self, problem: str, response_ids: Sequence[int]) -> float:
        """Raises NotImplementedError, because there is no rule for the value of a free text."""
        raise NotImplementedError("free_text has no reward; train on another data.dataset_name")
