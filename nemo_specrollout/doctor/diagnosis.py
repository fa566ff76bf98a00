# SPDX-License-Identifier: Apache-2.0
"""The result of one check of `nemo-specrollout doctor`."""

from dataclasses import dataclass
from enum import StrEnum

_SHOWN_LINES = 6
"""Lines of a process's log that the terminal shows."""


class State(StrEnum):
    """The verdict of a check. Only FAIL makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    section: str
    """Part of the output that has it."""
    name: str
    """Subject of the check."""
    state: State
    found: str
    """The observation."""
    to_do: str = ""
    """One sentence with the fix; empty if there is nothing to do."""
    log: tuple[str, ...] = ()
    """The last lines of the log of a process that failed."""

    @property
    def last_words(self) -> list[str]:
        """The last lines of the log without the frames of a stack trace."""
        lines = [line for line in self.log if line.strip() and not line.startswith((" ", "Traceback"))]
        return lines[-_SHOWN_LINES:]


@dataclass(frozen=True)
class Section:
    """A part of the output; makes its diagnoses."""

    title: str

    def ok(self, name: str, found: str) -> Diagnosis:
        """Returns the diagnosis of a check without objections."""
        return Diagnosis(self.title, name, State.OK, found)

    def warn(self, name: str, found: str, to_do: str) -> Diagnosis:
        """Returns the diagnosis of something that may cost speed or break some runs."""
        return Diagnosis(self.title, name, State.WARN, found, to_do)

    def fail(self, name: str, found: str, to_do: str, log: tuple[str, ...] = ()) -> Diagnosis:
        """Returns the diagnosis of something that breaks runs."""
        return Diagnosis(self.title, name, State.FAIL, found, to_do, log)
