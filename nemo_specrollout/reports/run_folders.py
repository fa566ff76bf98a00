# SPDX-License-Identifier: Apache-2.0
"""Finds the records of a run from a folder that the user names, and reads the records of several starts as one run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.jobs import SUBMISSIONS, Launch
from nemo_specrollout.reports.records import (
    FOLDER,
    FORMAT,
    METRICS,
    RUN,
    Run,
    decoded,
    naming_damage,
    read_lines,
    read_object_or_nothing,
)
from nemo_specrollout.reports.starts import RunOfStarts, Start, separate_runs, without_failed

SCRIPT = "job.sh"
"""Name of the script of a run's jobs. A folder with this file is a run directory of `launch`."""
LOGS = "logs"
"""Name of the folder of NeMo-RL's logs in a run directory of `launch`."""


@dataclass(frozen=True)
class RunFolders:
    """The folders with a run's records, and the folder for its report."""

    pages: Path
    """Folder for the report. It is the run directory if `launch` has started the run. Otherwise it is the folder of the
    records if there is a single start, and NeMo-RL's log folder if there are several."""
    starts: Sequence[Path]
    """NeMo-RL's log folder of each start of the driver, the oldest first. Empty if the records are in `pages`."""
    launched: Path | None = None
    """Run directory of `launch`, or None if `launch` has not started the run."""


def find_folders(path: Path) -> RunFolders:
    """Returns the folders of a run. `path` is its run directory, its log folder, or the folder of one of its starts.

    For a run of `launch`, its run directory and the log folder in it give the same result. Raises ConfigError with a sentence
    if there are no records.
    """
    launched = _launched(path)
    logs = launched / LOGS if launched else path
    own = [*islice((f for f in (logs, logs / FOLDER) if has_records(f)), 1)]
    starts = sorted(filter(_is_start, logs.glob("exp_*")), key=lambda folder: int(folder.name.removeprefix("exp_")))
    recorded = [start for start in starts if has_records(start / FOLDER)]
    if own:
        return RunFolders(own[0], [])
    if launched and recorded:
        return RunFolders(launched, starts, launched)
    if launched:
        raise ConfigError(f"RUN_DIR: {_why_nothing(launched, starts)}")
    if not recorded:
        raise ConfigError(
            f"RUN_DIR: {path} is no run directory: it has neither {RUN} nor {FOLDER}/{RUN}; name the logger.log_dir of a "
            "run, or one of the folders exp_NNN that NeMo-RL makes there"
        )
    return RunFolders(recorded[0] / FOLDER, []) if len(recorded) == 1 else RunFolders(path, recorded)


def read_run(folders: RunFolders) -> Run:
    """Reads the records of a run. If the records of one start are damaged, the other starts are still read.

    Raises ConfigError if no start can be read, or if the log folder has the starts of several runs.
    """
    if not folders.starts:
        return _read(folders.pages)
    starts = [_read_start(folder) for folder in folders.starts]
    if not any(start.about for start in starts):
        raise ConfigError(f"RUN_DIR: {next(start.problem for start in starts if start.problem)}")
    if folders.launched:
        return RunOfStarts.of(folders.pages, starts, Launch.read(folders.launched))
    begun = without_failed(starts)
    if (count := separate_runs(begun)) > 1:
        names = ", ".join(start.name for start in begun)
        raise ConfigError(f"RUN_DIR: {folders.pages} holds {count} runs ({names}); name one of them")
    return RunOfStarts.of(folders.pages, begun) if len(begun) > 1 else _read(begun[0].folder / FOLDER)


def latest_run(log_dir: Path) -> Run | None:
    """Returns the newest start in a log folder that has a finished step and readable records, or None if there is none."""
    starts = filter(_is_start, log_dir.glob("exp_*")) if log_dir.is_dir() else ()
    newest_first = sorted(starts, key=lambda folder: -int(folder.name.removeprefix("exp_")))
    for folder in (log_dir, *(start / FOLDER for start in newest_first)):
        try:
            run = _read(folder) if has_records(folder) else None
        except (ConfigError, OSError):
            continue
        if run is not None and run.steps:
            return run
    return None


def has_records(folder: Path) -> bool:
    """Returns whether a start has written records into `folder`. A start does so before its first step."""
    return (folder / RUN).is_file() or (folder / METRICS).is_file()


def _launched(path: Path) -> Path | None:
    """Returns the run directory of `launch` if `path` is this directory or the log folder in it, and otherwise None."""
    for run in (path, path.absolute().parent if path.absolute().name == LOGS else path):
        if (run / SCRIPT).is_file() and not (run / RUN).exists():
            return run
    return None


def _is_start(folder: Path) -> bool:
    return re.fullmatch(r"exp_\d+", folder.name) is not None and folder.is_dir()


def _read_start(folder: Path) -> Start:
    if not has_records(folder / FOLDER):
        return Start(folder, {}, [])
    try:
        run = _read(folder / FOLDER)
    except ConfigError as error:
        return Start(folder, {}, [], str(error).removeprefix("RUN_DIR: "))
    except OSError as error:
        return Start(folder, {}, [], f"{error.filename}: {error.strerror}; mend that")
    return Start(folder, run.about, run.steps)


def _read(folder: Path) -> Run:
    """Returns the records in a folder. Raises OSError if a file cannot be read.

    Raises ConfigError if the records are damaged or if another version has written them.
    """
    if read_object_or_nothing(folder / RUN).get("records") != FORMAT:
        raise ConfigError(
            f"RUN_DIR: the records in {folder} were written by another version of nemo-specrollout, or {RUN} is damaged; "
            "make the report with that version, or bring the file back from a copy"
        )
    metrics = folder / METRICS
    text = decoded(metrics).strip() if metrics.is_file() else ""
    if text and not text.startswith("{") and not read_lines(metrics):
        raise ConfigError(
            f"RUN_DIR: {metrics} holds no record of a step; bring the file back from a copy, or name another run"
        )
    with naming_damage(folder):
        return Run.read(folder)


def _why_nothing(launched: Path, starts: Sequence[Path]) -> str:
    """Returns a sentence that says why a run of `launch` has no records, as far as its files tell, and what to do."""
    jobs = Launch.read(launched).jobs
    if starts:
        return (
            f"{starts[-1]} has no {FOLDER}/{RUN} yet: the driver is still loading, or it has ended before, or the block is "
            "off; its log, slurm/JOB-logs/ray-driver.log, tells"
        )
    if jobs:
        job = next((job for job in reversed(jobs) if job.has_begun), jobs[0])
        return f"{launched} has no records yet: job {job.id} {job.state}"
    if (launched / SUBMISSIONS).is_file():
        return f"{launched} has no records yet, and the id of its job is not known; `squeue --me` says whether Slurm has it"
    return f"{launched} has no records yet, because no job of it was submitted; give `launch` the same line without --dry-run"
