# SPDX-License-Identifier: Apache-2.0
"""Writes down the prompt groups of NeMo-RL's SingleController, which keeps no rows of its steps itself."""

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
        if path := os.environ.get(VARIABLE):
            samples = [[message["token_ids"].tolist() for message in c.message_log] for c in group.completions]
            line = {"prompt": int(group.prompt_idx), "versions": [version, self._weight_version], "samples": samples}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return group

    rollout_manager.RolloutManager.run_rollout = run_rollout  # type: ignore[attr-defined]
