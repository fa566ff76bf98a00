# SPDX-License-Identifier: Apache-2.0
"""Writes the report pages of a NeMo-RL run while it runs, so seldom that it takes less than 1 % of the time."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console

PAUSE_PER_WRITE = 100.0
"""Seconds to pause for each second that a write took, so that writes take less than 1 % of the time."""
SHORTEST_PAUSE_BETWEEN_PICTURES_S = 600.0
"""Smallest number of seconds between two pictures, because Weights & Biases and TensorBoard keep every picture."""
PICTURE_NAME = "train/specrollout/picture"
LogPlot = Callable[[Any, int, str], None]
"""NeMo-RL's function that logs a matplotlib figure. Its arguments are the figure, the step and a name."""


def next_write_s(began_s: float, ended_s: float, shortest_pause_s: float = 0.0) -> float:
    """Returns the earliest time of the next write in seconds, given when the last write began and ended."""
    return ended_s + max(PAUSE_PER_WRITE * (ended_s - began_s), shortest_pause_s)


class LiveReport:
    """Decides when the report pages of `folder` are written, and writes them.

    An error is shown once and never ends the run.
    """

    def __init__(self, folder: Path, last_step: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`last_step` is the last step of the run, after which the pages are written in any case."""
        self._folder = folder
        self._last_step = last_step
        self._clock = clock
        self._pages_due_s = self._picture_due_s = -math.inf
        self._is_behind = self._has_warned = False
        self._writer: Thread | None = None

    def step_done(self, step: int, log_plot: LogPlot | None = None) -> None:
        """Writes the pages if they are due. Call it when the records of a step are on disk.

        `log_plot` is None if NeMo-RL logs to no service. Under the SingleController, only the picture of the last step is
        logged.
        """
        self._is_behind = True
        is_last = step == self._last_step
        now_s = self._clock()
        if not is_last and now_s < self._pages_due_s:
            return
        if not is_last and _has_event_loop():  # the SingleController's rollouts run on this thread's event loop
            if self._writer is None or not self._writer.is_alive():
                self._writer = Thread(target=self._write, daemon=True)
                self._writer.start()
            return
        self._wait_for_thread()
        if is_last or now_s >= self._picture_due_s:
            self._write(step, log_plot)
            self._picture_due_s = next_write_s(now_s, self._clock(), SHORTEST_PAUSE_BETWEEN_PICTURES_S)
        else:
            self._write()

    def close(self) -> None:
        """Writes the pages once more, unless they already show every step."""
        self._wait_for_thread()
        if self._is_behind:
            self._write()

    def _wait_for_thread(self) -> None:
        """Waits until the thread has written its pages. Otherwise these older pages could overwrite newer ones."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, step: int = 0, log_plot: LogPlot | None = None) -> None:
        began_s = self._clock()
        self._is_behind = False
        try:
            from nemo_specrollout.reports.charts import figure_of
            from nemo_specrollout.reports.report import write_pages

            _, picture = write_pages(self._folder)
            if log_plot is not None:
                log_plot(figure_of(picture), step, PICTURE_NAME)
        except ImportError as error:
            self._warn(f"no report.html and picture.png: {error}; install matplotlib, or make them later")
        except Exception as error:  # a failed report must not end the run
            self._warn(f"report.html or picture.png was not written ({type(error).__name__}: {error}); the run goes on")
        self._pages_due_s = next_write_s(began_s, self._clock())

    def _warn(self, sentence: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            Console(stderr=True).print(f"specrollout: {sentence}", style="yellow", markup=False, highlight=False)


def _has_event_loop() -> bool:
    """Returns whether this thread runs coroutines."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
