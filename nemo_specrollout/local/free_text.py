# SPDX-License-Identifier: Apache-2.0
"""The task `free_text`: prompts for stories, letters and explanations.

There is no reward. So the task serves the bench and the training of draft heads, not GRPO.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_specrollout.local.grammar import Grammar, Writer
from nemo_specrollout.local.tasks import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


@dataclass(frozen=True)
class FreeTextProblem:
    """A prompt for a text."""

    prompt: str


class FreeText:
    """The task of a run (`tasks.Task`): an endless list of prompts for each seed."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer

    def problems(self, seed: int, num: int, start: int = 0) -> list[FreeTextProblem]:
        """Returns prompts `start` to `start + num - 1` of the seed's list; the same in every process."""
        writers = (Writer(PROMPTS, random.Random(f"{seed}-{i}"), habit=0.0) for i in range(start, start + num))
        return [FreeTextProblem(writer.write("prompt")) for writer in writers]

    def encode(self, problem: FreeTextProblem) -> list[int]:
        """Returns the prompt's token ids by the chat template."""
        return encode_chat(self._tokenizer, problem.prompt)

    def reward(self, problem: FreeTextProblem, response_ids: Sequence[int]) -> float:
        """Raises NotImplementedError: there is no rule for the worth of a free text."""
        raise NotImplementedError("free_text has no reward; train on another data.dataset_name")
