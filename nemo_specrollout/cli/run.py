# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: a GRPO run, resumable, with a report at its end whatever the end is."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.interrupts import Interrupts
from nemo_specrollout.cli.prepare import Prepared, check_trains, place_drafter, prepare_local, runtime_of, use_threads
from nemo_specrollout.cli.scratch import scratch_folder
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import nemo_rl_version

if TYPE_CHECKING:
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.run_directory import RunDirectory
    from nemo_specrollout.local.runner import GrpoRunner


def run(parsed: argparse.Namespace) -> int:
    """Runs, or goes on with, a run; 0 when all steps are done. Raises ConfigError and KeyboardInterrupt."""
    tree = load_config(parsed.config, parsed.overrides)
    return _run_nemo_rl(tree) if runtime_of(tree) == "nemo_rl" else _run_local(tree)


def _run_nemo_rl(tree: dict[str, Any]) -> int:
    """NeMo-RL's own GRPO, which resumes from `checkpointing.checkpoint_dir`, with the block in effect."""
    for finding in prepare_nemo_rl(tree):
        print(f"{finding.kind}: {finding}")
    if nemo_rl_version() is None:
        raise ConfigError(
            "runtime: nemo_rl, but NeMo-RL is not installed here; run in its container, see slurm/README.md"
        )
    from nemo_specrollout.nemo_rl.launcher import run as run_nemo_rl

    run_nemo_rl(tree)
    return 0


def _run_local(tree: dict[str, Any]) -> int:
    """The run in `logger.log_dir`."""
    prepared = prepare_local(tree)
    check_trains(prepared)
    use_threads(prepared.config.cluster.threads)
    prepared = place_drafter(prepared)
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.run_directory import CompleteRun, RunDirectory

    config, progress = prepared.config, Progress()
    path = Path(config.logger.log_dir)
    try:
        directory = RunDirectory.open(path, prepared.tree, config.grpo.max_num_steps)
    except CompleteRun:
        _complete_report(path, progress)
        raise
    try:
        with scratch_folder():
            return _run_in(directory, prepared, progress)
    finally:
        directory.close()


def _run_in(directory: "RunDirectory", prepared: Prepared, progress: "Progress") -> int:
    """All steps that are left, then the results, whatever the end is; the exit code. Raises KeyboardInterrupt."""
    from nemo_specrollout.local.results import write_results

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
            progress.warn("stopped: finished steps are kept; the same command goes on from there")
        finally:
            interrupts.shield()
            runner.close()
            summary: dict[str, Any] | None = None
            try:
                summary = write_results(directory.path, time.perf_counter() - started, completed)
            except OSError as error:  # of a full disk, say; what ended the run is told first
                progress.warn(f"summary and report could not be written: {error.strerror}")
    if summary is not None:
        progress.summary(summary, str(directory.path))
    if ended is not None:
        raise ended
    return 0


def _complete_report(path: Path, progress: "Progress") -> None:
    """Makes the report of a run that was killed after its last step, while that was written."""
    if all((path / name).is_file() for name in ("summary.json", "report.html", "picture.png")):
        return
    from nemo_specrollout.local.results import write_results

    write_results(path, None, completed=True)
    progress.warn(f"the report of this run was missing; it is in {path / 'report.html'} now")


def _start(prepared: Prepared, directory: "RunDirectory", progress: "Progress") -> "GrpoRunner":
    """Starts engine and policy; nothing is written before they stand. Raises ConfigError for what they refuse."""
    from nemo_specrollout.local.async_runner import build_runner

    if prepared.ignored:
        progress.warn(f"keys without effect: {', '.join(prepared.ignored)}")
    if prepared.placement:
        progress.console.print(f"placement {prepared.placement}", markup=False)
    if directory.next_step:
        progress.console.print(f"resuming {directory.path} at step {directory.next_step}", markup=False, soft_wrap=True)
    try:
        return build_runner(prepared.config, directory, progress)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the run cannot start: {' '.join(str(error).split())}") from error
