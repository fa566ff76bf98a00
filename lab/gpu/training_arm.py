# SPDX-License-Identifier: Apache-2.0
"""Runs one arm of the GPU check's item `training`, which is a run of the local runner that also records rows and memory.

    python -m lab.gpu.training_arm CONFIG.json

The run directory also gets `rows.jsonl` with the tokens of every row of a step, and `memory.jsonl` with the GPU memory in use
after each step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from lab.local.progress import Progress
from lab.local.run_config import read_run_config
from lab.local.run_directory import RunDirectory
from lab.local.runner import GrpoRunner
from lab.local.step_rollout import StepRollout

ROWS, MEMORY = "rows.jsonl", "memory.jsonl"
GIB = 1 << 30


class RecordingRunner(GrpoRunner):
    """A runner of GRPO that also records the tokens of each row, and the GPU memory after each step, in files."""

    def roll_out(self, step: int) -> StepRollout:
        rollout = super().roll_out(step)
        rows = [list(response.token_ids) for response in rollout.rollouts]
        _append(self.directory.path / ROWS, {"step": step, "rows": rows})
        return rollout

    def step(self, step: int) -> dict[str, Any]:
        record = super().step(step)
        _append(self.directory.path / MEMORY, {"step": step, **memory_in_use()})
        return record


def memory_in_use() -> dict[str, float]:
    """Returns the most GiB that this process's tensors took, and the GiB that all processes hold. Empty without a GPU.

    Allocators keep memory that they have once taken, so the second figure is close to the most that was held.
    """
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"trainer's peak GiB": torch.cuda.max_memory_allocated() / GIB, "GiB in use": (total - free) / GIB}


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as output:
        output.write(json.dumps(line) + "\n")


def main(config_file: Path) -> None:
    """Runs a new run to its end, as the config file says."""
    tree = json.loads(config_file.read_text(encoding="utf-8"))
    config, _ = read_run_config(tree)
    directory = RunDirectory(Path(config.logger.log_dir), tree, config.grpo.max_num_steps)
    runner = RecordingRunner(config, directory, Progress())
    try:
        directory.begin()
        runner.run()
    finally:
        runner.close()
        directory.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
