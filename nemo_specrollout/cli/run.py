# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run` and `report`: a GRPO run, resumable, with a report however it ends."""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli.prepare import EXIT_FAILED, Prepared, prepare_run, use_threads
from nemo_specrollout.cli.nemo_rl_environment import entry
from nemo_specrollout.cli.terminal import Interrupts, scratch_folder
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import at, runtime_of
from nemo_specrollout.config.nemo_rl_values import unknown_overrides
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import can_run_nemo_rl

if TYPE_CHECKING:
    from lab.local.progress import Progress
    from lab.local.run_directory import RunDirectory
    from lab.local.runner import GrpoRunner


def run(parsed: argparse.Namespace) -> int:
    """Starts or resumes a run; returns 0 when all steps are done. Raises ConfigError and KeyboardInterrupt."""
    tree = load_config(parsed.config, parsed.overrides)
    if runtime_of(tree) == "nemo_rl":
        return _run_nemo_rl(tree, parsed)
    if parsed.script is not None:
        raise ConfigError("--script: only a run in NeMo-RL has one; set runtime=nemo_rl, or leave it out")
    return _run_local(tree)


def report(parsed: argparse.Namespace) -> int:
    """Writes `report.html` and `picture.png` of a local run or a run in NeMo-RL, also while it runs; prints their paths.

    Raises ConfigError if the folder is no run directory, or its files are damaged.
    """
    # The folder is looked at before the charts' packages, which may be missing, are imported.
    from nemo_specrollout.reports import records

    run_dir = parsed.run_dir
    if records.is_local_run(run_dir):
        records.check_local_run(run_dir)
        from lab.local.run_report import write_pages as write_local_pages

        page, picture = write_local_pages(run_dir)
    else:
        folder = records.find_folder(run_dir)
        records.check_lines(folder / records.METRICS)
        from nemo_specrollout.reports.nemo_rl_page import write_pages

        page, picture = write_pages(folder)
    print(f"report  {page}\npicture {picture}")
    return 0


def _run_nemo_rl(tree: dict[str, Any], parsed: argparse.Namespace) -> int:
    """Runs NeMo-RL's own script with our block in effect. It resumes from `checkpointing.checkpoint_dir`.

    If this Python has no NeMo-RL, this process becomes the same command in the environment of NeMo-RL's driver.
    """
    findings = [*prepare_nemo_rl(tree), *unknown_overrides(parsed.config, parsed.overrides)]
    if not can_run_nemo_rl():
        script = [] if parsed.script is None else ["--script", parsed.script]
        log_dir = Path(str(at(tree, "logger.log_dir", "logs"))).absolute()
        command, environment = entry(["run", str(parsed.config), *parsed.overrides, *script], log_dir)
        os.execvpe(command[0], command, environment)
    for finding in findings:
        print(f"{finding.kind}: {finding}")
    from nemo_specrollout.nemo_rl.installation import run as run_nemo_rl

    run_nemo_rl(tree, None if parsed.script is None else Path(parsed.script))
    return 0


def _run_local(tree: dict[str, Any]) -> int:
    prepared = prepare_run(tree)
    use_threads(prepared.config.cluster.threads)
    from lab.local.progress import Progress
    from lab.local.run_directory import CompleteRun, RunDirectory
    from lab.local.run_report import results_are_of, write_results

    config, progress = prepared.config, Progress()
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
    """Runs the remaining steps, then writes the results, however the steps end; returns the exit code.

    Raises KeyboardInterrupt, ConfigError if the policy diverged, and OSError.
    """
    started, ended = time.perf_counter(), None
    completed = False
    runner = _start(prepared, directory, progress)
    with Interrupts() as interrupts:
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
    """Writes summary, report and picture; returns the summary. Warns and returns None if they cannot be written.

    Raises nothing, so that the error which ended the run is reported.
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
    """Starts engine and policy; nothing is written before both have started. Raises ConfigError if one refuses."""
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
