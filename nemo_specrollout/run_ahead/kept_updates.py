# SPDX-License-Identifier: Apache-2.0
"""What a driver has learned from updates about texts made ahead, kept for the next start of the run."""

from pathlib import Path

from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.learned.kept_file import KeptFile
from nemo_specrollout.learned.state import begin_with, state_of
from nemo_specrollout.run_ahead.coming_texts import ComingTexts

KIND = "run_ahead"
"""Prefix of the names of the files."""


class KeptUpdates:
    """Owns the file with what `ComingTexts` learn. Only a run that resumes reads it, because other runs have other updates."""

    def __init__(self, coming: ComingTexts, config: LearnedConfig, model: str, *, begins_again: bool = False) -> None:
        """`model` is the policy's name. `begins_again` is that of `ComingTexts`. Each of its values has a file of its own."""
        self._coming = coming
        self._file: KeptFile | None = None
        if config.warm_start and config.folder is not None:
            self._file = KeptFile(Path(config.folder), KIND, {"model": model, "begins_again": begins_again})
        self._num_steps = 0

    def begin(self, *, resumes: bool) -> None:
        """Lets `ComingTexts` begin with what was kept, if the run resumes."""
        if self._file is None or not resumes:
            return
        found = self._file.read()
        if found.state is None:
            return
        try:
            begin_with([(self._coming, found.state)])
        except ValueError as error:
            self._file.unfit(str(error))
        else:
            self._num_steps = found.num_steps

    def keep(self) -> None:
        """Keeps what was learned up to the end of a step. Does not wait for the disk."""
        self._num_steps += 1
        if self._file is not None and self._file.is_due:
            self._file.keep(state_of(self._coming), self._num_steps)

    def settle(self) -> None:
        """Waits until what was kept is on disk."""
        if self._file is not None:
            self._file.settle()

    def take_alarms(self) -> list[str]:
        """Returns what went wrong with the file since the last call."""
        problem = None if self._file is None else self._file.take_problem()
        return [] if problem is None else [problem]
