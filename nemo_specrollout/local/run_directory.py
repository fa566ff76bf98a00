# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what was asked, what happened, and where to go on. Nothing in it is ever half-written."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import installed_versions
from nemo_specrollout.local.records import read_lines
from nemo_specrollout.scheduling.ladder import LadderFile

NUM_CHECKPOINTS_KEPT = 2
LADDER = "ladder.json"


class RunDirectory:
    """`config.yaml`, `run.json`, `metrics.jsonl`, `samples.jsonl`, `trace.jsonl`, `summary.json`, `report.html`,
    `ladder.json`, `checkpoints/step_N`.

    Invariant: metrics and traces are those of the steps before `next_step`, which is where a resumed run goes on; lines
    of a step whose checkpoint was never finished are dropped on resume. States: opened (nothing written), begun.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.next_step = self._last_checkpoint() + 1
        self._config = config
        self.engine_facts: Mapping[str, Any] = {}
        """What `run.json` says of the engine that is in force (`RolloutEngine.facts`)."""

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], max_num_steps: int) -> "RunDirectory":
        """A new run, or the one in the folder if its config is the same but for the number of steps.

        A run without a finished step has nothing to lose: it starts from the beginning, whatever its config was.

        Raises ConfigError where the folder holds something else, or a run that is complete or keeps no checkpoints.
        """
        run = cls(path, config)
        if not path.exists() or not any(path.iterdir()):
            return run
        earlier = yaml.safe_load((path / "config.yaml").read_text()) if (path / "config.yaml").is_file() else None
        if not isinstance(earlier, dict):
            raise ConfigError(f"logger.log_dir: {path} exists and is not a run directory; choose another")
        if run.next_step == 0 and not run.metrics():
            return run
        if _without_extent(earlier) != _without_extent(config):
            keys = ", ".join(_differences(_without_extent(earlier), _without_extent(config))[:4])
            raise ConfigError(
                f"logger.log_dir: {path} holds a run of another config (it differs in {keys}); choose another"
            )
        if run.next_step >= max_num_steps:
            raise ConfigError(
                f"logger.log_dir: {path} holds this run, complete ({run.next_step} steps); see {path / 'report.html'}, "
                "choose another folder, or a larger grpo.max_num_steps to go on"
            )
        if run.metrics() and not config.get("checkpointing", {}).get("enabled", True):
            raise ConfigError(
                f"logger.log_dir: {path} holds steps of this run, which cannot go on: checkpointing.enabled is false; "
                "choose another folder"
            )
        return run

    def begin(self) -> None:
        """Writes what is known before the first step; called when the run is sure to start."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", yaml.safe_dump(dict(self._config), sort_keys=False))
        if self.next_step == 0 or not (self.path / "run.json").is_file():
            write_atomically(self.path / "run.json", json.dumps({**_provenance(), **self.engine_facts}, indent=1))
        self._drop_unfinished_lines()

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        last = self._last_checkpoint()
        return self._checkpoint_of(last) if last >= 0 else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        return read_lines(self.path / "metrics.jsonl")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """One more line of `name`, on disk when this returns."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def new_checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` goes; it must appear there by one rename."""
        (self.path / "checkpoints").mkdir(exist_ok=True)
        return self._checkpoint_of(step)

    def forget_old_checkpoints(self) -> None:
        """Removes all but the newest two."""
        for step in sorted(self._checkpointed_steps())[:-NUM_CHECKPOINTS_KEPT]:
            shutil.rmtree(self._checkpoint_of(step))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1))

    @property
    def ladder(self) -> LadderFile | None:
        """What a run that goes on knows of draft methods; None of one that begins, or that has one worker."""
        file = self.path / LADDER
        return LadderFile.read(file, "logger.log_dir") if self.next_step and file.is_file() else None

    def write_ladder(self, ladder: LadderFile) -> None:
        write_atomically(self.path / LADDER, ladder.to_json())

    def _checkpoint_of(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step}"

    def _checkpointed_steps(self) -> list[int]:
        return [int(p.name.removeprefix("step_")) for p in (self.path / "checkpoints").glob("step_*")]

    def _last_checkpoint(self) -> int:
        return max(self._checkpointed_steps(), default=-1)

    def _drop_unfinished_lines(self) -> None:
        for name in ("metrics.jsonl", "samples.jsonl", "trace.jsonl", "timeline.jsonl"):
            if not (self.path / name).is_file():
                continue
            kept = [r for r in read_lines(self.path / name) if r["step"] < self.next_step]
            write_atomically(self.path / name, "".join(json.dumps(r) + "\n" for r in kept))


def _without_extent(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config less what may change when a run is continued."""
    grpo = {k: v for k, v in config.get("grpo", {}).items() if k != "max_num_steps"}
    return {**config, "grpo": grpo}


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [d for k in keys for d in _differences(a.get(k), b.get(k), f"{path}.{k}" if path else str(k))]
    return [] if a == b else [path]


def _provenance() -> dict[str, Any]:
    """The content of `run.json`: who started the run, on what."""
    return {
        "command": " ".join(sys.argv),
        "versions": installed_versions(),
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _commit() -> str | None:
    """The commit of the source tree that is running, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
