# SPDX-License-Identifier: Apache-2.0
"""A process of ours that says what it does in lines of JSON on stdout, and why it cannot in the last line on stderr."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

PARENT = "SPECROLLOUT_PARENT"
_PARENT_PERIOD_S = 0.5


def end_with_parent() -> None:
    """Has this process, a `JsonChild`, end soon after the one that started it, whatever it is doing by then."""
    parent = os.environ.get(PARENT)
    if parent is not None:
        threading.Thread(target=_watch_parent, args=(int(parent),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_PERIOD_S)
    os._exit(1)


class JsonChild:
    """`python -m MODULE ARGUMENT`. Owns the process. States: running, then ended."""

    def __init__(self, module: str, argument: str, environment: Mapping[str, str]) -> None:
        """Starts it, with `environment` over this process's own."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
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

    def said(self) -> Iterator[Any]:
        """What it says, as it says it, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                yield json.loads(line)
            except ValueError:  # a library printed something
                continue

    def last_words(self) -> str:
        """Of a process that has ended: the signal that killed it, or else the last line on stderr, or else its exit code."""
        if (self._process.returncode or 0) < 0:
            return f"killed by signal {-self._process.returncode}"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def kill(self) -> None:
        """Asks for no more; returns at once."""
        self._process.kill()

    def end(self) -> None:
        """Kills it and waits until it is gone."""
        self._process.kill()
        self._process.wait()
