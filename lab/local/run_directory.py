# SPDX-License-Identifier: Apache-2.0
"""The folder of a run, with its config, records, checkpoints and lock. Every write is atomic."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from lab.local.sealed_folder import DamagedFolder, check_seal
from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.config.strict import ConfigError, differences
from nemo_specrollout.installed.versions import checkout_commit, installed_versions
from nemo_specrollout.reports.records import FORMAT, METRICS, RUN, SUMMARY, read_lines, read_object_or_nothing
from nemo_specrollout.storage.files import sync_folder, write_atomically
from nemo_specrollout.stragglers.decisions.speed_table_file import LADDER, SpeedTableFile

NUM_CHECKPOINTS = 2
"""Number of checkpoints that are kept."""
LOCK = "run.lock"
LINES = (METRICS, "samples.jsonl", "trace.jsonl", "timeline.jsonl")
PAGES = ("report.html", "picture.png")
LEARNED = "learned"
"""Folder for what the engines of a run have learned, which the next start of the run reads (`learned` of the block)."""
_MAY_CHANGE = {"grpo.max_num_steps", "logger.log_dir"}
"""Keys of the config that may change when a run is resumed."""
_WRITTEN = ("config.yaml", RUN, LADDER, *LINES, SUMMARY, *PAGES)
_TEMPORARY = re.compile(rf"\.({'|'.join(map(re.escape, _WRITTEN))})\.[0-9]+")
"""Names of the temporary files that `replacing_file` leaves behind when its process dies."""
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of a file system without locks, e.g. Lustre mounted without `flock`."""


class CompleteRun(ConfigError):
    """Error for a folder that already has this run with all of its `num_steps` steps."""

    def __init__(self, message: str, num_steps: int) -> None:
        super().__init__(message)
        self.num_steps = num_steps


class RunDirectory:
    """The folder of a run, which is locked while this object is open.

    It has `config.yaml`, `run.json`, `metrics.jsonl`, `samples.jsonl`, `trace.jsonl`, `summary.json`, `report.html`,
    `ladder.json`, `checkpoints/step_N` and `learned`. Making the object only writes the lock. `begin` writes the rest, and
    `close` releases the lock. Until then, no other run can use the folder.

    Invariant: from `begin` on, metrics and traces are about the steps before `next_step`, where a resumed run continues.
    `begin` drops the lines of a step whose checkpoint was never finished.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], max_num_steps: int) -> None:
        """Locks the folder. It must be new, or have a run whose config differs at most in the number of steps.

        A run without a finished step starts from the beginning, whatever its config was.

        Raises ConfigError if another process uses the folder, if the folder has files that are not of a run, or if all
        checkpoints are damaged. Raises it also if the run is complete, or if it has finished steps but keeps no checkpoints.
        """
        self.path = path
        self.facts: Mapping[str, Any] = {}
        """Facts about the engine and the block for `run.json`."""
        self._config = config
        self._checkpoints = path / "checkpoints"
        self._damaged: dict[int, str] = {}
        """Step and fault of each damaged checkpoint that is newer than the one to continue from. `begin` renames them."""
        self._lock = DirectoryLock(path)
        try:
            self._last = self._newest_whole()
            self._check(max_num_steps)
        except BaseException:
            self.close()
            raise

    def _check(self, max_num_steps: int) -> None:
        path = self.path
        # Engines may have learned something before the start of the run failed.
        left = (LOCK, LEARNED)
        if all(entry.name in left or _TEMPORARY.fullmatch(entry.name) for entry in path.iterdir()):
            return
        about = read_object_or_nothing(path / RUN)
        if not {"command", "versions", "started"} <= about.keys():
            raise ConfigError(f"logger.log_dir: {path} exists and is not a run directory; choose another")
        if about.get("records") != FORMAT:
            raise ConfigError(f"logger.log_dir: {path} holds a run of another version; choose another folder")
        steps = [record["step"] for record in read_lines(path / METRICS)]
        if self.next_step == 0 and not steps:
            return
        earlier = _read_yaml(path / "config.yaml")
        if earlier is None:
            raise ConfigError(f"logger.log_dir: {path / 'config.yaml'} is missing or damaged; restore it from a copy")
        if keys := sorted(differences(earlier, dict(self._config)) - _MAY_CHANGE):
            raise ConfigError(
                f"logger.log_dir: {path} holds a run of another config (it differs in {', '.join(keys[:4])}); choose another"
            )
        checkpointing = self._config.get("checkpointing") or {}
        saves = checkpointing.get("enabled", True)
        if self.next_step == 0 and saves and max(steps) >= checkpointing.get("save_period", 1):
            raise ConfigError(
                f"logger.log_dir: {path} holds {len(steps)} steps, but {self._checkpoints} holds no checkpoint of them; "
                "restore one from a copy, or choose another folder"
            )
        if self.next_step >= max_num_steps:
            raise CompleteRun(
                f"logger.log_dir: {path} holds this run, complete ({self.next_step} steps); see {path / 'report.html'}, "
                "choose another folder, or a larger grpo.max_num_steps to go on",
                self.next_step,
            )
        if steps and not saves:
            raise ConfigError(
                f"logger.log_dir: {path} holds steps of this run, which cannot go on: checkpointing.enabled is false; "
                "choose another folder"
            )

    def begin(self) -> list[str]:
        """Writes config and `run.json`, and removes what an interrupted process has left.

        Call it when engines and policy have started.

        Returns:
            Warnings for the user. There is one for each damaged checkpoint, which has been renamed, and one for a file system
            without locks.
        """
        for leftover in self._checkpoints.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for path in list(self.path.iterdir()):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
        if self.next_step == 0:  # written first, because it marks the folder as a run directory
            write_atomically(self.path / RUN, json.dumps({**_provenance(), **self.facts}, indent=1))
        write_atomically(self.path / "config.yaml", yaml.safe_dump(dict(self._config), sort_keys=False))
        for file in (self.path / name for name in LINES):
            if file.is_file():
                kept = [json.dumps(r) + "\n" for r in read_lines(file) if r["step"] < self.next_step]
                write_atomically(file, "".join(kept))
        unlocked = f"the file system of {self.path} has no locks: make sure that no other run uses the folder"
        return ([] if self._lock.works else [unlocked]) + [
            f"checkpoint step_{step} is damaged ({fault}); it is kept as {self._set_aside(step).name}"
            for step, fault in self._damaged.items()
        ]

    def close(self) -> None:
        """Releases the folder for other runs."""
        self._lock.release()

    @property
    def next_step(self) -> int:
        """The step at which the run continues."""
        return 0 if self._last is None else self._last + 1

    @property
    def checkpoint(self) -> Path | None:
        """The newest undamaged checkpoint, from which the run continues, or None in a new run."""
        return None if self._last is None else self._checkpoint(self._last)

    def with_learned(self, learned: LearnedConfig) -> LearnedConfig:
        """Returns `learned` with an absolute folder, which is in this run's folder unless `learned` names one."""
        folder = Path(learned.folder or self.path / LEARNED)
        return replace(learned, folder=str(folder.absolute()))

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends `record` as a line of JSON to the file `name`, and returns when it is on disk."""
        is_new = not (self.path / name).exists()
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path)

    def keep_checkpoint(self, step: int, save: Callable[[Path], None]) -> None:
        """Lets `save` write the checkpoint of `step`, and then removes all checkpoints but the newest `NUM_CHECKPOINTS`.

        `save` gets the checkpoint's folder, which it must make complete by a single rename.
        """
        self._checkpoints.mkdir(exist_ok=True)
        save(self._checkpoint(step))
        for old in self._saved_steps()[:-NUM_CHECKPOINTS]:
            folder = self._checkpoint(old)
            if folder.is_symlink():  # the user has moved the checkpoint
                folder.unlink()
            else:
                shutil.rmtree(folder)

    @property
    def ladder(self) -> SpeedTableFile | None:
        """Decode-speed table of a resumed run, or None in a new run or in a run with one engine."""
        file = self.path / LADDER
        return SpeedTableFile.read(file, "logger.log_dir") if self.next_step and file.is_file() else None

    # Checkpoints: only names `step_N` count; other files in the folder belong to the user

    def _checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step_{step}"

    def _saved_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint folder, in ascending order. The folders may be damaged. Raises OSError."""
        try:
            entries = list(os.scandir(self._checkpoints))  # `glob` would ignore a folder that cannot be read
        except FileNotFoundError:
            return []
        found = (_STEP.fullmatch(entry.name) for entry in entries if entry.is_dir())
        return sorted(int(match[1]) for match in found if match is not None)

    def _newest_whole(self) -> int | None:
        """Returns the newest step with an undamaged checkpoint, or None without checkpoints.

        Adds the damaged checkpoints of later steps to `_damaged`. Raises ConfigError if all checkpoints are damaged. Reads all
        files of the checkpoints that it looks at, from the newest on.
        """
        for step in reversed(self._saved_steps()):
            try:
                check_seal(self._checkpoint(step))
                return step
            except DamagedFolder as error:
                self._damaged[step] = str(error)
        if self._damaged:
            fault = next(iter(self._damaged.values()))
            raise ConfigError(
                f"logger.log_dir: no checkpoint in {self._checkpoints} is whole ({fault}); restore one from a copy, "
                f"remove {self._checkpoints} to begin the run again, or choose another folder"
            )
        return None

    def _set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint, so that it is ignored from now on, and returns its new path."""
        folder = self._checkpoint(step)
        names = [f"{folder.name}.damaged", *(f"{folder.name}.damaged.{i}" for i in range(1, 10_000))]
        aside = next(p for name in names if not (p := folder.with_name(name)).exists())
        os.rename(folder, aside)
        return aside


def _read_yaml(file: Path) -> dict[str, Any] | None:
    """Returns the mapping in a YAML file, or None if the file is missing or has something else."""
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return read if isinstance(read, dict) else None


def _provenance() -> dict[str, Any]:
    """Returns the content of `run.json`, with the command, versions, commit and time of the start."""
    return {
        "records": FORMAT,
        "command": " ".join(sys.argv),
        "versions": installed_versions(),
        "commit": checkout_commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class DirectoryLock:
    """A lock on a folder, by the file `run.lock` in it. The lock is held until `release`.

    The file names the process that has the lock. `works` is false if the file system has no locks, so that two runs could use
    the folder at once.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock, and makes the folder if it is missing.

        Raises OSError, or ConfigError if another process has the lock.
        """
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file, self.works = _locked(self._path)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S%z")}
        self._file.truncate(0)
        self._file.write(json.dumps(holder))
        self._file.flush()

    def release(self) -> None:
        """Releases the lock, and removes the folder if it was made for the lock and is empty."""
        if self._file.closed:
            return
        # The lock is still held, so a process that opened the file before will see that it is gone.
        self._path.unlink(missing_ok=True)
        if self._made and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()
        self._file.close()


def _locked(path: Path) -> tuple[IO[str], bool]:
    """Opens and locks the file. Returns the open file, and whether the file system has locks.

    Raises ConfigError if another process has the lock.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"logger.log_dir: {path.parent} is in use by {_holder(file)}; "
                "wait for it to end, stop it, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return file, False
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, True
        file.close()  # its holder removed it between `open` and `flock`


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, which has run since {holder['started']}"
    except (ValueError, LookupError, TypeError):
        return "another process"
    finally:
        file.close()
