# SPDX-License-Identifier: Apache-2.0
"""Provides prompts of real tasks with their right answers, for a machine without `reasoning-gym`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from lab.local.step_rollout import load_tokenizer
from lab.local.tasks import encode_chat
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

FILE = Path(__file__).with_name("prompts.json")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RealPrompts:
    """The problems of `prompts.json`, as prompts for a policy. Immutable."""

    def __init__(self, policy: Path) -> None:
        """Reads the problems. `policy` is the folder of a model with a chat template."""
        known = json.loads(FILE.read_text(encoding="utf-8"))
        self._tokenizer = load_tokenizer(policy)
        self._problems = known["problems"]
        self._system = known["system"]

    def requests(self, start: int, num_prompts: int, num_samples: int) -> list[RolloutRequest]:
        """Returns requests for `num_prompts` problems from number `start` on, with `num_samples` samples of each."""
        found = []
        for i in range(start, start + num_prompts):
            ids = encode_chat(self._tokenizer, self._problems[i]["question"], self._system)
            found += [RolloutRequest(ids, i, sample) for sample in range(num_samples)]
        return found

    def rewards(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> list[float]:
        """Returns 1 for each response whose last answer is right, and 0 for each other one."""
        return [
            float(_plain(self._answer(rollout)) == _plain(self._problems[request.prompt_index]["answer"]))
            for request, rollout in zip(requests, rollouts, strict=True)
        ]

    def _answer(self, rollout: Rollout) -> str:
        found = _ANSWER.findall(str(self._tokenizer.decode(rollout.token_ids, skip_special_tokens=True)))
        return found[-1] if found else ""


def _plain(answer: str) -> str:
    return re.sub(r"[\s'\"]", "", answer)
