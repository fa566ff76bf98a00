# SPDX-License-Identifier: Apache-2.0
"""A thread that lets an engine decode early requests (`run_ahead`) while the engine has nothing else to do."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_specrollout.run_ahead.coming_texts import AheadPlan
from nemo_specrollout.run_ahead.early_requests import EarlyMade
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

SLICE_S = 0.05
"""Seconds of a slice, which is how long the thread decodes before it lets others use the engine. A call waits for the end of
the running slice."""

LEAST_S = 1e-3
"""Seconds of the shortest slice that can contain an engine step. After a shorter slice the thread waits, because no early
request can start at the moment."""


class EarlyWork:
    """Lets a `RollingEngine` decode early requests between calls of its engine. Owns the thread that does so.

    The thread decodes in slices of `SLICE_S`. Each call of the engine must be made within the context `set_aside`. The context
    waits for the end of the running slice, and lets no other slice begin before the call has ended. If the call decodes the
    engine's own requests, the same engine steps decode early requests too, without the thread.

    `plan` stops the thread until the next call uses `allow`. That call brings the requests of the training step, which must
    not wait for early requests.
    """

    def __init__(self, rolling: RollingEngine, has_own: Callable[[], bool]) -> None:
        """Starts the thread, which does nothing until `allow`.

        `has_own` returns whether the engine has requests of its own. While it has, the thread does not step the engine.
        """
        self._rolling = rolling
        self._has_own = has_own
        self._state = threading.Condition()
        self._is_asked = self._is_slicing = self._has_work = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Returns a context in which the thread does not use the engine.

        Raises the error of an earlier slice that has failed.
        """
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
        """Replaces the early requests that the engine may start by those of `plan`."""
        with self.set_aside():
            self._rolling.plan(plan.rows, plan.scale, plan.kept)
            self._has_work = False

    def allow(self) -> None:
        """Lets the thread decode early requests again.

        Must be called within the context `set_aside`. The thread goes on when the context has ended.
        """
        self._has_work = True

    def worth(self) -> EarlyWorth:
        """Returns the current worth of the early requests (`RollingEngine.worth`)."""
        with self.set_aside():
            return self._rolling.worth()

    def end(self, *, keeps_cache: bool) -> EarlyMade:
        """Stops all early requests and returns their texts. With `keeps_cache`, vLLM's cached prefixes stay."""
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
