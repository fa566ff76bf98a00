# SPDX-License-Identifier: Apache-2.0
"""The early requests of an engine process (`run_ahead`), which are decoded while the engine has nothing else to do."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_specrollout.run_ahead.coming_texts import AheadPlan
from nemo_specrollout.run_ahead.early_requests import EarlyMade
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

SLICE_S = 0.05
"""Seconds for which the thread decodes at a time. A call of the engine waits for the end of a slice."""

LEAST_S = 1e-3
"""Shortest slice in seconds that can have had a step."""


class EarlyWork:
    """Lets a `RollingEngine` decode early requests between the calls of its engine. Owns the thread that does so.

    Each call is made within the context `set_aside`. It waits for the end of a slice, and no slice begins before the call has
    ended. In the steps of the call itself, the rolling engine decodes early requests beside the engine's own.

    No slice begins between `plan` and the next call either, because that call brings the requests of the step.
    """

    def __init__(self, rolling: RollingEngine, has_own: Callable[[], bool]) -> None:
        """`has_own` tells whether the engine has requests of its own, which only a turn may step."""
        self._rolling = rolling
        self._has_own = has_own
        self._state = threading.Condition()
        self._is_asked = self._is_slicing = self._has_work = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keeps the thread from the engine while a call runs. Raises the error of a slice that has failed."""
        with self._state:
            self._is_asked = True
            self._state.wait_for(lambda: not self._is_slicing)
            if self._error is not None:
                raise self._error
        try:
            yield
        finally:
            with self._state:
                self._is_asked = False
                self._state.notify_all()

    def plan(self, plan: AheadPlan) -> None:
        """Sets the requests that the engine may start early from now on, in place of earlier ones."""
        with self.set_aside():
            self._rolling.plan(plan.rows, plan.scale, plan.kept)
            self._has_work = False

    def allow(self) -> None:
        """Lets the thread work from the end of this call on, if anything is left to do. Call it within `set_aside`."""
        self._has_work = True

    def worth(self) -> EarlyWorth:
        """Returns the current worth of the early requests (`RollingEngine.worth`)."""
        with self.set_aside():
            return self._rolling.worth()

    def end(self, *, keeps_cache: bool) -> EarlyMade:
        """Stops all early requests and returns their texts."""
        with self.set_aside():
            self._has_work = False
            return self._rolling.end(keeps_cache=keeps_cache)

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._has_work and not self._is_asked and not self._has_own())
                self._is_slicing = True
            started = time.perf_counter()
            try:
                self._has_work = self._rolling.slice(SLICE_S)
            except BaseException as error:  # the next call of the engine raises it
                self._error = error
                self._has_work = False
            with self._state:
                self._is_slicing = False
                self._state.notify_all()
                if time.perf_counter() - started < LEAST_S:  # what is left cannot start now
                    self._state.wait(SLICE_S)
