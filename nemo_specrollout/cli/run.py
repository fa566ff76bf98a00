# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: a GRPO run, resumable, with a report at its end whatever the end is."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_specrollout.cli.interrupts import Interrupts
from nemo_specrollout.cli.prepare import Prepared, prepare
from nemo_specrollout.config.strict import ConfigError

if TYPE_CHECKING:
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.run_directory import RunDirectory
    from nemo_specrollout.local.runner import GrpoRunner


def run(path: Path, overrides: list[str]) -> int:
    """Runs, or goes on with, the run in `logger.log_dir`; 0 when all steps are done, 130 when interrupted."""
    prepared = prepare(path, overrides)
    from nemo_specrollout.local.run_directory import RunDirectory

    config = prepared.config
    directory = RunDirectory.open(Path(config.logger.log_dir), prepared.tree, config.grpo.max_num_steps)
    from nemo_specrollout.local.charts import run_picture
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.runner import summarize

    progress, started, completed = Progress(), time.perf_counter(), False
    runner = _start(prepared, directory, progress)
    directory.begin()
    try:
        with Interrupts() as interrupts:
            runner.run(before_step=interrupts.check)
        completed = True
    except KeyboardInterrupt:
        progress.console.print(
            "interrupted: finished steps are kept; the same command goes on from there", style="yellow"
        )
    finally:
        runner.close()
        summary = summarize(directory, time.perf_counter() - started, completed)
        run_picture(directory.path, directory.path / "picture.png")
    progress.summary(summary, str(directory.path))
    return 0 if completed else 130


def _start(prepared: Prepared, directory: "RunDirectory", progress: "Progress") -> "GrpoRunner":
    """Starts engine and policy; nothing is written before they stand. Raises ConfigError for what they refuse."""
    from nemo_specrollout.local.runner import GrpoRunner

    if prepared.ignored:
        progress.console.print(f"keys without effect: {', '.join(prepared.ignored)}", style="yellow")
    if directory.next_step:
        progress.console.print(f"resuming {directory.path} at step {directory.next_step}")
    try:
        return GrpoRunner(prepared.config, directory, progress)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the run cannot start: {' '.join(str(error).split())}") from error
