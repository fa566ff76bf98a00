# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its config, records and checkpoints. Every write is atomic."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_specrollout.config.files import sync_folder, temporary_names, write_atomically
from nemo_specrollout.config.strict import ConfigError, differences
from nemo_specrollout.config.versions import checkout_commit, installed_versions
from nemo_specrollout.local.checkpoints import Checkpoints, Damaged
from nemo_specrollout.local.directory_lock import LOCK, DirectoryLock
from nemo_specrollout.reports.records import read_lines
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile

LADDER = "ladder.json"
_MAY_CHANGE = {"grpo.max_num_steps", "logger.log_dir"}
"""Keys of the config that may change when a run is resumed."""
LINES = ("metrics.jsonl", "samples.jsonl", "trace.jsonl", "timeline.jsonl")
SUMMARY = "summary.json"
PAGES = ("report.html", "picture.png")
_TEMPORARY = temporary_names(("config.yaml", "run.json", LADDER, *LINES, SUMMARY, *PAGES))


class CompleteRun(ConfigError):
    """The folder holds this run, complete with `num_steps` steps."""

    def __init__(self, message: str, num_steps: int) -> None:
        super().__init__(message)
        self.num_steps = num_steps


class RunDirectory:
    """`config.yaml`, `run.json`, `metrics.jsonl`, `samples.jsonl`, `trace.jsonl`, `summary.json`, `report.html`,
    `ladder.json`, `checkpoints/step_N`.

    States: opened (only the lock is written), begun, closed. While it is open, no other run can open the folder.

    Invariant: from `begin` on, metrics and traces are about the steps before `next_step`, where a resumed run goes on.
    `begin` drops the lines of a step whose checkpoint was never finished.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Locks the folder. Raises ConfigError if another run has it, or if all of its checkpoints are damaged."""
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.damaged: list[Damaged] = []
        """Damaged checkpoints above the one to go on from; `begin` sets them aside."""
        self.engine_facts: Mapping[str, Any] = {}
        """Facts on the engine for `run.json` (`RolloutEngine.facts`)."""
        self._config = config
        self._lock = DirectoryLock(path)
        try:
            self._last, self.damaged = self.checkpoints.newest_whole()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], max_num_steps: int) -> "RunDirectory":
        """Opens a new run, or the one in the folder if its config differs at most in the number of steps.

        A run without a finished step starts from the beginning, whatever its config was.

        Raises ConfigError if the folder holds something else, or a run that is complete or keeps no checkpoints.
        """
        run = cls(path, config)
        try:
            run._check(max_num_steps)
        except BaseException:
            run.close()
            raise
        return run

    def _check(self, max_num_steps: int) -> None:
        path = self.path
        if all(entry.name == LOCK or _TEMPORARY.fullmatch(entry.name) for entry in path.iterdir()):
            return
        if not _is_provenance(path / "run.json"):
            raise ConfigError(f"logger.log_dir: {path} exists and is not a run directory; choose another")
        steps = [record["step"] for record in self.metrics()]
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
                f"logger.log_dir: {path} holds {len(steps)} steps, but {self.checkpoints.folder} holds no checkpoint of them; "
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
        """Writes config and `run.json`, when engines and policy have started; drops leftovers of an earlier process.

        Returns:
            Warnings for the user, about damaged checkpoints, which are set aside, and about a missing lock.
        """
        self.checkpoints.clear_leftovers()
        for path in list(self.path.iterdir()):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
        if self.next_step == 0:  # written first, because it marks the folder as a run directory
            write_atomically(self.path / "run.json", json.dumps({**_provenance(), **self.engine_facts}, indent=1))
        write_atomically(self.path / "config.yaml", yaml.safe_dump(dict(self._config), sort_keys=False))
        self._drop_unfinished_lines()
        unlocked = f"the file system of {self.path} has no locks: make sure that no other run uses the folder"
        return ([] if self._lock.works else [unlocked]) + [
            f"checkpoint {d.folder.name} is damaged ({d.reason}); it is kept as {self.checkpoints.set_aside(d).name}"
            for d in self.damaged
        ]

    def close(self) -> None:
        """Releases the folder for other runs."""
        self._lock.release()

    @property
    def next_step(self) -> int:
        """The step at which the run goes on."""
        return 0 if self._last is None else self._last + 1

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to go on from: the newest undamaged one. None in a new run."""
        return None if self._last is None else self.checkpoints.of(self._last)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of `metrics.jsonl`."""
        return read_lines(self.path / "metrics.jsonl")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends a line to the file `name`; it is on disk when this returns."""
        is_new = not (self.path / name).exists()
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path)

    def keep_checkpoint(self, step: int, save: Callable[[Path], None]) -> None:
        """Lets `save` write the checkpoint after `step`, by one rename, then removes old checkpoints."""
        self.checkpoints.folder.mkdir(exist_ok=True)
        save(self.checkpoints.of(step))
        self.checkpoints.forget_old()

    @property
    def ladder(self) -> LadderFile | None:
        """Draft ladder of a resumed run; None in a new run or with one engine."""
        file = self.path / LADDER
        return LadderFile.read(file, "logger.log_dir") if self.next_step and file.is_file() else None

    def write_ladder(self, ladder: LadderFile) -> None:
        """Writes `ladder.json`. Raises OSError."""
        write_atomically(self.path / LADDER, ladder.to_json())

    def _drop_unfinished_lines(self) -> None:
        for name in LINES:
            if not (self.path / name).is_file():
                continue
            kept = [r for r in read_lines(self.path / name) if r["step"] < self.next_step]
            write_atomically(self.path / name, "".join(json.dumps(r) + "\n" for r in kept))


def _read_yaml(file: Path) -> dict[str, Any] | None:
    """Returns the mapping in a YAML file; None if the file is missing or holds something else."""
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return read if isinstance(read, dict) else None


def _is_provenance(file: Path) -> bool:
    """Returns whether `file` is the `run.json` of a run."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(read, dict) and {"command", "versions", "started"} <= set(read)


def _provenance() -> dict[str, Any]:
    """Returns the content of `run.json`: the command, versions, commit and time of the start."""
    return {
        "command": " ".join(sys.argv),
        "versions": installed_versions(),
        "commit": checkout_commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
