# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: a GRPO run, resumable, with a report at its end whatever the end is."""

import time
from pathlib import Path

from nemo_specrollout.cli.prepare import prepare


def run(path: Path, overrides: list[str]) -> int:
    """Runs, or goes on with, the run in `logger.log_dir`; 0 when all steps are done, 130 when interrupted."""
    prepared = prepare(path, overrides)
    from nemo_specrollout.local.run_directory import RunDirectory

    config = prepared.config
    directory = RunDirectory.open(Path(config.logger.log_dir), prepared.tree, config.grpo.max_num_steps)
    from nemo_specrollout.local.charts import run_picture
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.runner import GrpoRunner, summarize

    progress, started, completed = Progress(), time.perf_counter(), False
    if directory.next_step:
        progress.console.print(f"resuming {directory.path} at step {directory.next_step}")
    try:
        runner = GrpoRunner(config, directory, progress)
        try:
            runner.run()
            completed = True
        finally:
            runner.close()
    except KeyboardInterrupt:
        progress.console.print("interrupted: finished steps are kept, the same command goes on from there", style="yellow")
    finally:
        summary = summarize(directory, time.perf_counter() - started, completed)
        run_picture(directory.path, directory.path / "picture.png")
    progress.summary(summary, str(directory.path))
    return 0 if completed else 130
