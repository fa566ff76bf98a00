# SPDX-License-Identifier: Apache-2.0
"""The result of one check of `nemo-specrollout doctor`, and child processes for checks that may crash."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

PARENT = "SPECROLLOUT_PARENT"
"""Environment variable with the process id of a child's parent."""
_SHOWN_LINES = 6
"""Most lines of a process's log that the terminal shows."""
_LOG_LINES = 60
"""Most lines of the log that an outcome keeps."""
_ORDER, _TOLD, _LOG, _ERROR = "order.json", "told.jsonl", "log", "error"
Tell = Callable[[str, Any], None]
"""Function with which a child process reports an answer, which is a JSON value, under a name."""


class State(StrEnum):
    """The result of a check. Only FAIL makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    section: str
    name: str
    state: State
    found: str
    to_do: str = ""
    """One sentence with the fix, or empty if there is nothing to do."""
    log: tuple[str, ...] = ()
    """The last lines of the log of a process that failed."""

    @property
    def last_words(self) -> list[str]:
        """The last lines of the log without the frames of a stack trace."""
        lines = [line for line in self.log if line.strip() and not line.startswith((" ", "Traceback"))]
        return lines[-_SHOWN_LINES:]


@dataclass(frozen=True)
class Section:
    """A part of the output, which creates its diagnoses."""

    title: str

    def ok(self, name: str, found: str) -> Diagnosis:
        return Diagnosis(self.title, name, State.OK, found)

    def warn(self, name: str, found: str, to_do: str) -> Diagnosis:
        """Returns the diagnosis of something that may cost speed or break some runs."""
        return Diagnosis(self.title, name, State.WARN, found, to_do)

    def fail(self, name: str, found: str, to_do: str, log: tuple[str, ...] = ()) -> Diagnosis:
        """Returns the diagnosis of something that breaks runs."""
        return Diagnosis(self.title, name, State.FAIL, found, to_do, log)


@dataclass(frozen=True)
class Outcome:
    """The end of a child process, with all answers that the child gave before it failed."""

    told: Mapping[str, Any]
    failure: str
    """Reason of the failure in one line, or empty if the child succeeded."""
    log: tuple[str, ...]
    """The last lines that the child or a library wrote."""
    seconds: float


def run_child(module: str, order: Any, timeout_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs `python -m MODULE`, whose main code calls `answer`, and passes it `order`, a JSON value.

    Returns what the child told and how it ended. A child that runs for longer than `timeout_s` is killed. `environment`
    overrides variables of this process. Raises OSError if the child cannot be started.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        folder = Path(name)
        (folder / _ORDER).write_text(json.dumps(order), encoding="utf-8")
        (folder / _TOLD).touch()
        failure = _run(module, folder, timeout_s, environment or {})
        complete_lines, _, _ = (folder / _TOLD).read_text(encoding="utf-8").rpartition("\n")
        lines = (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    told = dict(map(json.loads, complete_lines.splitlines()))
    error = told.pop(_ERROR, "")
    log = tuple(line.rstrip() for line in lines[-_LOG_LINES:])
    return Outcome(told, error or failure, log, time.perf_counter() - started)


def _run(module: str, folder: Path, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Returns how the process failed, or an empty string. On return the process and its children have ended."""
    whole = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment, PARENT: str(os.getpid())}
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=whole,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:g} s"
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def end_with_parent() -> None:
    """Makes this process exit soon after its parent has ended, whatever it is doing then."""
    parent = os.environ.get(PARENT)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def answer(work: Callable[[Any, Tell], None]) -> None:
    """Calls `work(order, tell)` and ends the process without the libraries' clean-up, which may crash.

    Each answer by `tell` is written at once, so that none is lost.
    """
    end_with_parent()
    folder = Path(sys.argv[1])

    def tell(name: str, value: Any) -> None:
        with (folder / _TOLD).open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value]) + "\n")

    code = 0
    try:
        work(json.loads((folder / _ORDER).read_text(encoding="utf-8")), tell)
    except Exception as error:
        traceback.print_exc()
        tell(_ERROR, in_one_line(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def in_one_line(error: BaseException) -> str:
    """Returns an exception's type and the beginning of its message."""
    message = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
