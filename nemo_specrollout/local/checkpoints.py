# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run directory: `checkpoints/step_N`, each with checksums. The newest two are kept."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.config.files import DamagedFolder, check_seal
from nemo_specrollout.config.strict import ConfigError

NUM_KEPT = 2
"""Checkpoints that are kept."""
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Damaged:
    """A checkpoint whose files are not what was written."""

    folder: Path
    reason: str
    """Sentence that names the damage."""


class Checkpoints:
    """Owns `checkpoints/` of a run directory. Only names `step_N` count; other files in the folder belong to the user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, in order; the folders may be damaged. Raises OSError."""
        try:
            entries = list(os.scandir(self.folder))  # `glob` would ignore a folder that cannot be read
        except FileNotFoundError:
            return []
        found = (_STEP.fullmatch(entry.name) for entry in entries if entry.is_dir())
        return sorted(int(match[1]) for match in found if match is not None)

    def newest_whole(self) -> tuple[int | None, list[Damaged]]:
        """Returns the newest step whose checkpoint is undamaged, or None, and the damaged checkpoints above it.

        Reads all files of the checkpoints that it looks at. Raises ConfigError if all checkpoints are damaged.
        """
        damaged: list[Damaged] = []
        for step in reversed(self.steps()):
            try:
                check_seal(self.of(step))
            except DamagedFolder as error:
                damaged.append(Damaged(self.of(step), str(error)))
                continue
            return step, damaged
        if damaged:
            raise ConfigError(
                f"logger.log_dir: no checkpoint in {self.folder} is whole ({damaged[0].reason}); restore one from a copy, "
                f"remove {self.folder} to begin the run again, or choose another folder"
            )
        return None, []

    def of(self, step: int) -> Path:
        """Returns the folder of the checkpoint after `step`. Make it appear there by one rename."""
        return self.folder / f"step_{step}"

    def set_aside(self, damaged: Damaged) -> Path:
        """Renames a damaged checkpoint, so that it is ignored from now on; returns its new path."""
        aside = next(p for i in range(10_000) if not (p := _aside(damaged.folder, i)).exists())
        os.rename(damaged.folder, aside)
        return aside

    def forget_old(self) -> None:
        """Removes all but the newest `NUM_KEPT`."""
        for step in self.steps()[:-NUM_KEPT]:
            folder = self.of(step)
            if folder.is_symlink():  # the user has moved the checkpoint
                folder.unlink()
            else:
                shutil.rmtree(folder)

    def clear_leftovers(self) -> None:
        """Removes checkpoints that a killed process left unfinished."""
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.damaged{f'.{number}' if number else ''}")
