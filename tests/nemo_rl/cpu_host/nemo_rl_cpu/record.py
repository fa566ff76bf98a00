# SPDX-License-Identifier: Apache-2.0
"""Writes down the rollouts of NeMo-RL's loops that keep no rows of their steps: the SingleController and PPO."""

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "NEMO_RL_CPU_RECORD"


def record_groups(rollout_manager: ModuleType) -> None:
    """Each group that is done becomes a line of the file that the variable names."""
    native = rollout_manager.RolloutManager.run_rollout

    async def run_rollout(self: Any, input_sample: Any) -> Any:
        version = self._weight_version
        group = await native(self, input_sample)
        samples = [[message["token_ids"].tolist() for message in c.message_log] for c in group.completions]
        _record({"prompt": int(group.prompt_idx), "versions": [version, self._weight_version], "samples": samples})
        return group

    rollout_manager.RolloutManager.run_rollout = run_rollout  # type: ignore[attr-defined]


def record_batches(vllm_generation: ModuleType) -> None:
    """Each batch of rows that synchronous engines have made becomes a line of that file."""
    native = vllm_generation.VllmGeneration.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = native(self, *args, **kwargs)
        lengths = made["unpadded_sequence_lengths"].tolist()
        _record([row[:length].tolist() for row, length in zip(made["output_ids"], lengths, strict=True)])
        return made

    vllm_generation.VllmGeneration.generate = generate  # type: ignore[attr-defined]


def _record(line: Any) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
