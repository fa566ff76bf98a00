# SPDX-License-Identifier: Apache-2.0
"""The record that all sections of `nemo-specrollout doctor` are made of."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The result of a check. Only FAIL makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Diagnosis:
    """One check: what was found, and what to do about it, one sentence, where there is something to do."""

    section: str
    name: str
    state: State
    found: str
    to_do: str = ""
    log: tuple[str, ...] = ()
    """The last lines of the log of a process that failed."""

    @property
    def last_words(self) -> list[str]:
        """A few lines of the log for a reader: without the frames of a stack trace."""
        lines = [line for line in self.log if line.strip() and not line.startswith((" ", "Traceback"))]
        return lines[-_SHOWN_LINES:]


_SHOWN_LINES = 6
