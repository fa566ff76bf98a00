# SPDX-License-Identifier: Apache-2.0
"""Results of the checks of `nemo-specrollout doctor`, and child processes for checks that may crash."""

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
"""Environment variable with the process id of the parent of a child process."""
_SHOWN_LINES = 6
"""Maximum number of lines of a child process's log that the terminal shows."""
_LOG_LINES = 60
"""Maximum number of lines of a child process's log that an `Outcome` keeps."""
_ORDER, _TOLD, _LOG, _ERROR = "order.json", "told.jsonl", "log", "error"
Tell = Callable[[str, Any], None]
"""Function with which a child process reports an answer. Its arguments are the answer's name and the answer, a JSON value."""


class State(StrEnum):
    """The outcome of a check. Only FAIL makes the command `doctor` fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check of `doctor`."""

    section: str
    name: str
    state: State
    found: str
    to_do: str = ""
    """A sentence that says how to mend what was found, or empty if there is nothing to do."""
    log: tuple[str, ...] = ()
    """The last lines of the log, if the check ran in a child process that failed."""

    @property
    def last_words(self) -> list[str]:
        """The last lines of `log`, without those of a stack trace."""
        lines = [line for line in self.log if line.strip() and not line.startswith((" ", "Traceback"))]
        return lines[-_SHOWN_LINES:]


@dataclass(frozen=True)
class Section:
    """A section of the output of `doctor`. Its methods return diagnoses of this section."""

    title: str

    def ok(self, name: str, found: str) -> Diagnosis:
        return Diagnosis(self.title, name, State.OK, found)

    def warn(self, name: str, found: str, to_do: str) -> Diagnosis:
        """Returns the diagnosis of a fault that may make runs slower or break some of them."""
        return Diagnosis(self.title, name, State.WARN, found, to_do)

    def fail(self, name: str, found: str, to_do: str, log: tuple[str, ...] = ()) -> Diagnosis:
        """Returns the diagnosis of a fault that breaks runs."""
        return Diagnosis(self.title, name, State.FAIL, found, to_do, log)


@dataclass(frozen=True)
class Outcome:
    """What a child process has answered before it ended, and how it ended."""

    told: Mapping[str, Any]
    failure: str
    """Why the child failed, in one line, or empty if it succeeded."""
    log: tuple[str, ...]
    """The last lines that the child wrote to stdout or stderr."""
    seconds: float


def run_child(module: str, order: Any, timeout_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs `python -m MODULE` in a child process, and returns what the child has answered and how it ended.

    The main code of the module must call `answer`. Raises OSError if the child cannot be started.

    Args:
        module: dotted name of the module.
        order: JSON value that the child gets as its task.
        timeout_s: seconds after which the child is killed.
        environment: environment variables for the child, in addition to those of this process.
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
    """Runs the module in a child process, and returns why it failed, or "" if it succeeded.

    If the child process takes too long, it is killed with all processes that it has started. `folder` is for the files by
    which parent and child exchange data.
    """
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
    """Starts a thread that ends this process as soon as its parent has ended, so that no engine is left behind."""
    parent = os.environ.get(PARENT)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def answer(work: Callable[[Any, Tell], None]) -> None:
    """Does the task of a child process that `run_child` has started, and ends the process.

    It calls `work(order, tell)`. Every answer that `work` gives by `tell` is written to a file at once, so that it is not lost
    if the process crashes. The process ends without the clean-up of libraries, which may crash.
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
    """Returns the type of an exception and the beginning of its message, in one line."""
    message = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
