# SPDX-License-Identifier: Apache-2.0
"""Child processes that report lines of JSON on stdout, and the reason for a failure in the last line of stderr."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nemo_specrollout.doctor.diagnosis import PARENT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class JsonChild:
    """A child process `python -m MODULE SPEC`, where SPEC is a dataclass of settings as JSON. Owns the process."""

    def __init__(self, module: str, spec: "DataclassInstance", environment: Mapping[str, str]) -> None:
        """Starts the process. `environment` is added to this process's own."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment, PARENT: str(os.getpid())},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def reports(self) -> Iterator[Any]:
        """Yields each line of JSON that the process prints on stdout, parsed, until the process ends. Skips other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                yield json.loads(line)
            except ValueError:  # a library printed something
                continue

    def last_words(self) -> str:
        """Returns why the process ended.

        This is the signal that killed it, or else the last line of stderr, or else the exit code.
        """
        if (self._process.returncode or 0) < 0:
            return f"killed by signal {-self._process.returncode}"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def kill(self) -> None:
        """Kills the process without waiting for its end."""
        self._process.kill()

    def end(self) -> None:
        """Kills the process and waits for its end."""
        self.kill()
        self._process.wait()
