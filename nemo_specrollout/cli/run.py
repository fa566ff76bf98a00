# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: a GRPO run, resumable, with a report at its end whatever the end is."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.interrupts import Interrupts
from nemo_specrollout.cli.prepare import Prepared, place_drafter, prepare_local, runtime_of, use_threads
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import nemo_rl_version

if TYPE_CHECKING:
    from nemo_specrollout.local.progress import Progress
    from nemo_specrollout.local.run_directory import RunDirectory
    from nemo_specrollout.local.runner import GrpoRunner


def run(path: Path, overrides: list[str]) -> int:
    """Runs, or goes on with, a run; 0 when all steps are done, 130 when interrupted."""
    tree = load_config(path, overrides)
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
    use_threads(prepared.config.cluster.threads)
    prepared = place_drafter(prepared)
    from nemo_specrollout.local.run_directory import RunDirectory

    config = prepared.config
    if config.data.dataset_name == "free_text":
        raise ConfigError("data.dataset_name: free_text has no reward to train on; use it in bench.workloads")
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
    from nemo_specrollout.local.async_runner import build_runner

    if prepared.ignored:
        progress.console.print(f"keys without effect: {', '.join(prepared.ignored)}", style="yellow")
    if prepared.placement:
        progress.console.print(f"placement {prepared.placement}", markup=False)
    if directory.next_step:
        progress.console.print(f"resuming {directory.path} at step {directory.next_step}")
    try:
        return build_runner(prepared.config, directory, progress)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the run cannot start: {' '.join(str(error).split())}") from error
