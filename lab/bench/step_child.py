# SPDX-License-Identifier: Apache-2.0
"""Runs GRPO step by step on request, as a child process of `lab.bench.step_turns`. Started by `python step_child.py SPEC`.

This file is started by its path and not as a module. So it can import the `lab` of another checkout, which the first entry of
PYTHONPATH names.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.local.progress import Progress
from lab.local.run_config import read_run_config
from lab.local.run_directory import RunDirectory
from lab.local.runner import GrpoRunner
from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.config.load import load_config


def main(spec: dict[str, Any]) -> None:
    """Starts the run. Then does a training step for each line on stdin, and writes the step's metrics to stdout.

    The end of stdin ends the run.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr
    tree = load_config(Path(spec["config"]), spec["overrides"])
    config, _ = read_run_config(tree)
    use_threads(config.cluster.threads)
    directory = RunDirectory(Path(config.logger.log_dir), tree, config.grpo.max_num_steps)
    runner = GrpoRunner(config, directory, Progress(Console(file=sys.stderr)))
    try:
        directory.begin()
        print(json.dumps("ready"), file=answers, flush=True)
        for step, _ in enumerate(sys.stdin):
            print(json.dumps(runner.step(step)), file=answers, flush=True)
    finally:
        runner.close()
        directory.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
