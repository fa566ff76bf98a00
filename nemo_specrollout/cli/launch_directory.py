# SPDX-License-Identifier: Apache-2.0
"""The run directory of a launched run. Each file in it is written as a whole."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

import nemo_specrollout
import vllm_v2_cpu
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import ConfigError, differences

_MAY_CHANGE = {"grpo.max_num_steps", "grpo.max_num_epochs", "checkpointing.checkpoint_must_save_by"}
"""Keys that may differ when a run is resumed: its length, and the end of each job."""


class LaunchDirectory:
    """Owns `config.yaml`, `env.sh`, `setup.sh`, `job.sh`, `addon/` and `submissions.jsonl`; NeMo-RL adds checkpoints and logs.

    Invariant: after the first submission, config and code of the run stay the same. Until then they may be written again.
    `addon/` is a copy of this package, so that an edit of the original cannot change a run.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @property
    def submitted(self) -> bool:
        """Whether a job of this run was submitted, or has left a checkpoint."""
        return (self.path / "submissions.jsonl").is_file() or any(self.path.glob("checkpoints/step_*"))

    def check(self, config: str) -> None:
        """Raises ConfigError if a run with `config`, the text of `config.yaml`, cannot start or resume here."""
        existing = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not existing.is_dir():
            raise ConfigError(f"--run-dir: {self.path} cannot be a folder: {existing} is a file; choose another")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"--run-dir: {self.path} cannot be written to; choose another")
        if existing == self.path and any(self.path.iterdir()) and not (self.path / "job.sh").is_file():
            raise ConfigError(
                f"--run-dir: {self.path} exists and is not the directory of a launched run; choose another"
            )
        if self.submitted:
            self._check_same(config)

    def write(self, files: Mapping[str, str]) -> None:
        """Writes `files`, texts by name, in their order, and the code unless a submitted job uses it."""
        (self.path / "slurm").mkdir(parents=True, exist_ok=True)
        if not (self.submitted and (self.path / "addon").is_dir()):
            self._copy_code()
        for name, text in files.items():
            write_atomically(self.path / name, text)

    def note_submission(self, job_id: str, command: list[str]) -> None:
        """Appends a line to `submissions.jsonl`."""
        record = {"job_id": job_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
        with (self.path / "submissions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _check_same(self, config: str) -> None:
        try:
            earlier = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--run-dir: config.yaml of {self.path} cannot be read; choose another") from error
        keys = sorted(differences(earlier, yaml.safe_load(config)) - _MAY_CHANGE)
        if keys:
            raise ConfigError(
                f"--run-dir: {self.path} holds a run of another config (it differs in {', '.join(keys[:4])}); choose another"
            )

    def _copy_code(self) -> None:
        temporary, addon = self.path / f".addon.{os.getpid()}", self.path / "addon"
        for package in (nemo_specrollout, vllm_v2_cpu):
            source = Path(package.__file__ or "").parent
            shutil.copytree(source, temporary / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(addon, ignore_errors=True)
        os.replace(temporary, addon)
