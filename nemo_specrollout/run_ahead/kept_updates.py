# SPDX-License-Identifier: Apache-2.0
"""Keeps a file of what the driver has learned about how weight updates change texts. The next start of the run reads it."""

from pathlib import Path

from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.learned.kept_file import KeptFile
from nemo_specrollout.learned.state import begin_with, state_of
from nemo_specrollout.run_ahead.coming_texts import ComingTexts

KIND = "run_ahead"
"""Prefix of the names of the files that keep what was learned from weight updates."""


class KeptUpdates:
    """Owns the file that keeps what `ComingTexts` have learned about how weight updates change texts.

    Only a run that resumes reads the file, because in other runs weight updates change texts differently.
    """

    def __init__(self, coming: ComingTexts, config: LearnedConfig, model: str, *, begins_again: bool = False) -> None:
        """`model` is the policy's name. `begins_again` is the argument with which `coming` was made.

        A file of a run with another `model` or another `begins_again` is not read.
        """
        self._coming = coming
        self._file: KeptFile | None = None
        if config.warm_start and config.folder is not None:
            self._file = KeptFile(Path(config.folder), KIND, {"model": model, "begins_again": begins_again})
        self._num_steps = 0

    def begin(self, *, resumes: bool) -> None:
        """Gives `ComingTexts` what an earlier start has learned, if the run resumes."""
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
        """Writes what was learned up to the end of a training step, if it is time to write the file again.

        Does not wait for the disk.
        """
        self._num_steps += 1
        if self._file is not None and self._file.is_due:
            self._file.keep(state_of(self._coming), self._num_steps)

    def settle(self) -> None:
        """Waits until what was written is on disk."""
        if self._file is not None:
            self._file.settle()

    def take_alarms(self) -> list[str]:
        """Returns the problems with the file since the last call, as sentences for the user."""
        problem = None if self._file is None else self._file.take_problem()
        return [] if problem is None else [problem]
