# SPDX-License-Identifier: Apache-2.0
"""`report.html` and `picture.png` of a run that goes on, beside its records."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console

from nemo_specrollout.nemo_rl.write_throttle import WriteThrottle

# A picture is kept by Weights & Biases and TensorBoard each time.
LEAST_BETWEEN_PICTURES_S = 600.0
PICTURE_NAME = "train/specrollout/picture"
LogPlot = Callable[[Any, int, str], None]


class LiveReport:
    """Owns when the pages of `folder` were last written. What goes wrong with them is said once and never ends the run.

    It works in any process: in NeMo-RL's driver, and in the Ray actor of the single controller.
    """

    def __init__(self, folder: Path, last_step: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`last_step`: after which the pages are written in any case."""
        self._folder, self._last_step, self._clock = folder, last_step, clock
        self._pages, self._pictures = WriteThrottle(), WriteThrottle(least_s=LEAST_BETWEEN_PICTURES_S)
        self._is_behind = self._has_warned = False
        self._beside: Thread | None = None

    def step_done(self, step: int, log_plot: LogPlot | None = None) -> None:
        """The records of a step are there. `log_plot(figure, step, name)` is NeMo-RL's, if it logs anywhere."""
        self._is_behind = True
        is_last, now_s = step == self._last_step, self._clock()
        if not (is_last or self._pages.is_due(now_s)):
            return
        if not is_last and _has_event_loop():
            self._write_beside()
            return
        shows = log_plot is not None and (is_last or self._pictures.is_due(now_s))
        self._write(lambda picture: _log(picture, step, log_plot) if shows else None)
        if shows:
            self._pictures.wrote(now_s, self._clock())

    def close(self) -> None:
        """The run is over: the pages are of all its steps when this returns."""
        if self._beside is not None:
            self._beside.join()
        if self._is_behind:
            self._write(lambda picture: None)

    def _write_beside(self) -> None:
        """Writes in a thread, without a picture for loggers: the single controller's rollouts wait on its event loop."""
        if self._beside is None or not self._beside.is_alive():
            self._beside = Thread(target=self._write, args=(lambda picture: None,), daemon=True)
            self._beside.start()

    def _write(self, show: Callable[[Path], None]) -> None:
        began_s, self._is_behind = self._clock(), False
        try:
            from nemo_specrollout.reports.nemo_rl_page import write_pages

            _, picture = write_pages(self._folder)
            show(picture)
        except ImportError as error:
            self._warn(f"no report.html and picture.png: {error}; install matplotlib, or make them later")
        except Exception as error:  # a report is worth less than the run
            self._warn(f"report.html or picture.png was not written ({type(error).__name__}: {error}); the run goes on")
        self._pages.wrote(began_s, self._clock())

    def _warn(self, sentence: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            Console(stderr=True).print(f"specrollout: {sentence}", style="yellow", markup=False, highlight=False)


def _has_event_loop() -> bool:
    """Whether this thread runs coroutines."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _log(picture: Path, step: int, log_plot: LogPlot | None) -> None:
    from nemo_specrollout.reports.nemo_rl_charts import figure_of

    if log_plot is not None:
        log_plot(figure_of(picture), step, PICTURE_NAME)
