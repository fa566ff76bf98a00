# SPDX-License-Identifier: Apache-2.0
"""Runs a module in another process with a time-out, so that a crash there, even of a library, does not spread."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.remote.verifier.json_child import PARENT, end_with_parent

_ORDER, _TOLD, _LOG, _ERROR = "order.json", "told.json", "log", "error"
_LOG_LINES = 60
"""Lines of the log that an outcome keeps."""
Tell = Callable[[str, Any], None]
"""Function by which a child gives an answer, a JSON value, under a name."""


@dataclass(frozen=True)
class Outcome:
    """The end of a child process, with all answers that the child gave before it failed."""

    told: Mapping[str, Any]
    """Answers by name."""
    failure: str
    """Reason of the failure in one line; empty if the child succeeded."""
    log: tuple[str, ...]
    """The last lines that the child or a library wrote."""
    seconds: float
    """Wall time of the process."""


def run_child(module: str, order: Any, timeout_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs `python -m MODULE`, whose main code calls `answer`, and passes it `order`, a JSON value.

    `environment` overrides variables of this process. Raises OSError if the process cannot be started.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        folder = Path(name)
        (folder / _ORDER).write_text(json.dumps(order), encoding="utf-8")
        failure = _run(module, folder, timeout_s, environment or {})
        told = json.loads((folder / _TOLD).read_text(encoding="utf-8")) if (folder / _TOLD).is_file() else {}
        lines = (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    error = told.pop(_ERROR, "")
    log = tuple(line.rstrip() for line in lines[-_LOG_LINES:])
    return Outcome(told, error or failure, log, time.perf_counter() - started)


def _run(module: str, folder: Path, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Returns how the process failed, or an empty string. On return the process and its children have ended."""
    whole = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment, PARENT: str(os.getpid())}
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=whole, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:g} s"
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return _in_words(code)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def answer(work: Callable[[Any, Tell], None]) -> None:
    """Calls `work(order, tell)` and ends the process. Each answer by `tell` is written at once, so that none is lost.

    The process ends without the libraries' clean-up, which may crash after all work is done.
    """
    end_with_parent()
    folder, told = Path(sys.argv[1]), dict[str, Any]()

    def tell(name: str, value: Any) -> None:
        told[name] = value
        write_atomically(folder / _TOLD, json.dumps(told))

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
