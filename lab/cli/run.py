# SPDX-License-Identifier: Apache-2.0
"""The command `specrollout-lab run`, which starts or resumes a GRPO run on this machine.

It writes a report however the run ends.
"""

import argparse
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lab.cli.prepare import Prepared, prepare_run
from nemo_specrollout.cli.command_line import EXIT_FAILED, use_threads
from nemo_specrollout.cli.terminal import Interrupts, scratch_folder
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError

if TYPE_CHECKING:
    from lab.local.progress import Progress
    from lab.local.run_directory import RunDirectory
    from lab.local.runner import GrpoRunner


class RunInterrupts(Interrupts):
    """Handles signals that interrupt a run, but lets the run finish writing its results."""

    _is_shielded = False

    def shield(self) -> None:
        """Keeps later signals from raising KeyboardInterrupt. They are still remembered."""
        self._is_shielded = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        try:
            super()._interrupt(number, frame)
        except KeyboardInterrupt:
            if not self._is_shielded:
                raise


def run(parsed: argparse.Namespace) -> int:
    """Starts or resumes a run. Returns 0 when all steps are done. Raises ConfigError and KeyboardInterrupt."""
    prepared = prepare_run(load_config(parsed.config, parsed.overrides))
    use_threads(prepared.config.cluster.threads)
    from lab.local.progress import Progress
    from lab.local.run_directory import CompleteRun, RunDirectory
    from lab.local.run_report import results_are_of, write_results

    config = prepared.config
    progress = Progress()
    path = Path(config.logger.log_dir)
    try:
        directory = RunDirectory(path, prepared.tree, config.grpo.max_num_steps)
    except CompleteRun as error:
        if not results_are_of(path, error.num_steps):  # it was killed before its report was written
            write_results(path, None, completed=True)
            progress.warn(f"the report of this run was missing or incomplete; it is in {path / 'report.html'} now")
        raise
    try:
        with scratch_folder():
            return _run_in(directory, prepared, progress)
    finally:
        directory.close()


def _run_in(directory: "RunDirectory", prepared: Prepared, progress: "Progress") -> int:
    """Runs the remaining training steps, and writes the results however the steps end. Returns the exit code.

    Raises KeyboardInterrupt, ConfigError if the policy diverged, and OSError.
    """
    started = time.perf_counter()
    ended = None
    completed = False
    runner = _start(prepared, directory, progress)
    with RunInterrupts() as interrupts:
        try:
            for sentence in directory.begin():
                progress.warn(sentence)
            runner.run(before_step=interrupts.check)
            completed = True
        except KeyboardInterrupt as error:
            ended = error
            progress.warn("stopped: finished steps are kept; the same command resumes from there")
        except FloatingPointError as error:
            rate = prepared.config.policy.megatron_cfg.optimizer.lr
            fix = "lower the rate, or lengthen its warm-up, in another folder; the checkpoints so far are kept"
            raise ConfigError(f"policy.megatron_cfg.optimizer.lr: {rate:g}; {error}: {fix}") from error
        finally:
            interrupts.shield()
            runner.close()
            summary = _results(directory.path, time.perf_counter() - started, completed, progress)
    if summary is not None:
        progress.summary(summary, str(directory.path))
    if ended is not None:
        raise ended
    return 0 if summary is not None else EXIT_FAILED


def _results(path: Path, wall_s: float, completed: bool, progress: "Progress") -> dict[str, Any] | None:
    """Writes summary, report and picture, and returns the summary.

    If they cannot be written, warns and returns None. It does not raise then, because an error of its own would hide the one
    that has ended the run.
    """
    from lab.local.run_report import write_results

    try:
        return write_results(path, wall_s, completed)
    except OSError as error:  # for example a full disk
        progress.warn(f"summary and report could not be written: {error.strerror}")
    except ConfigError as error:
        progress.warn(str(error))
    return None


def _start(prepared: Prepared, directory: "RunDirectory", progress: "Progress") -> "GrpoRunner":
    """Starts the engine and the trainer of a run. Raises ConfigError if one of them refuses the config.

    Nothing is written before both have started.
    """
    from lab.local.runner import GrpoRunner

    if prepared.ignored:
        progress.warn(f"keys without effect: {', '.join(prepared.ignored)}")
    if prepared.placement:
        progress.console.print(f"placement {prepared.placement}", markup=False)
    if directory.next_step:
        progress.console.print(f"resuming {directory.path} at step {directory.next_step}", markup=False, soft_wrap=True)
    try:
        return GrpoRunner(prepared.config, directory, progress)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the run cannot start: {' '.join(str(error).split())}") from error
