# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and restarts the drafter processes of a local run. The run waits for them only when its engine starts."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lab.local.json_child import JsonChild
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec

HANG_S = 30.0
"""Seconds without a report after which a drafter process that is up is killed."""
START_S = 600.0
"""Most seconds that a drafter process may take to start."""
FIRST_PAUSE_S = 1.0
"""Seconds between the first end of a drafter process and its restart. The pause doubles whenever a process ends before it has
reported anything."""
LONGEST_PAUSE_S = 60.0
_WATCH_PERIOD_S = 0.5


class DrafterProcess:
    """A drafter process that is restarted at the same address when it ends or hangs. Call `watch` periodically.

    The process is starting, up, down or stopped. Down means that it has ended and is restarted after a pause.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        self.spec = spec
        self.num_restarts = self.num_told = 0
        self.deaths: list[str] = []
        """Last output of each process that has ended. `DrafterPool.take_deaths` has already reported the first `num_told` of
        them."""
        self.status: DrafterReport | None = None
        """Latest report of the process, or None until it has bound its address."""
        self.told_problem = ""
        """Latest problem with new weights that `DrafterPool.take_deaths` has reported."""
        self._pause_s = FIRST_PAUSE_S
        self._resume_at_s = 0.0
        self._child: JsonChild | None = None
        self._heard_s = 0.0
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id, or None while no process exists."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """Whether the process is ready to draft."""
        return self.status is not None and self.status.is_up

    def watch(self) -> None:
        """Kills the process if it hangs. Restarts it if it has ended and the pause before a restart is over."""
        now_s = time.monotonic()
        if self._child is not None:
            silence_s = now_s - self._heard_s
            if silence_s > (HANG_S if self.is_up else START_S):
                self._child.kill()
            if not self._child.has_ended:
                return
            self.deaths.append(self._child.last_words())
            self._child, self.status = None, None
            self._resume_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if now_s >= self._resume_at_s:
            self.num_restarts += 1
            self._start()

    def stop(self) -> None:
        """Ends the process for good."""
        child = self._child
        self._child = None
        self._resume_at_s = math.inf
        if child is not None:
            child.end()

    def failure(self) -> str | None:
        """Returns the last output of the process if it ended before it was up, and None otherwise."""
        if self.is_up or self._child is None or not self._child.has_ended:
            return None
        return self._child.last_words()

    def _start(self) -> None:
        self._child = JsonChild("lab.local.drafter_process", self.spec, {"OMP_NUM_THREADS": "1"})
        self.status = None
        self._heard_s = time.monotonic()
        threading.Thread(target=self._listen, args=(self._child,), daemon=True).start()

    def _listen(self, child: JsonChild) -> None:
        """Keeps the latest report of `child` until the child ends. Runs in its own thread."""
        for report in child.reports():
            with contextlib.suppress(TypeError):
                status = DrafterReport(**report)
                if child is self._child:
                    self.spec = replace(self.spec, address=status.address)
                    self._heard_s = time.monotonic()
                    self._pause_s = FIRST_PAUSE_S
                    self.status = status  # last, because who waits for it reads the address then


class DrafterPool:
    """Owns the drafter processes of a run, and the thread that watches them.

    Example: make `pool = DrafterPool(specs)`, start an engine that drafts with `pool.addresses()`, and call
    `pool.wait_until_up()`. Call `pool.stop()` at the end.
    """

    def __init__(self, specs: Sequence[DrafterSpec]) -> None:
        """Starts all processes."""
        self.processes = [DrafterProcess(spec) for spec in specs]
        self._one_looks = threading.Lock()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def addresses(self) -> list[str]:
        """Waits until all drafters have bound their addresses, and returns the addresses.

        Raises ConfigError if a drafter cannot start.
        """
        self._wait(lambda process: process.status is not None)
        return [p.spec.address for p in self.processes]

    def wait_until_up(self) -> None:
        """Waits until all drafters are up. From then on, a thread restarts each drafter that fails.

        Raises ConfigError if a drafter cannot start.
        """
        self._wait(lambda process: process.is_up)
        self._watcher.start()

    def _wait(self, is_there: Callable[[DrafterProcess], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not all(map(is_there, self.processes)):
            reasons = [r for r in (p.failure() for p in self.processes) if r is not None]
            if not reasons and time.monotonic() > deadline:
                reasons = [f"not up after {START_S:.0f} s"]
            if reasons:
                self.stop()
                raise ConfigError(f"a drafter process cannot start: {reasons[0]}")
            time.sleep(0.05)

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each process that has ended since the last call, and for each that refuses new weights.

        It also restarts processes that have ended, as the watching thread does.
        """
        self._look()
        found: list[str] = []
        for number, process in enumerate(self.processes):
            untold = process.deaths[process.num_told :]
            process.num_told += len(untold)
            found += [
                f"drafter process {number} died ({w}); it is restarted, and no token depends on it" for w in untold
            ]
            problem = "" if process.status is None else process.status.weights_problem
            if problem not in ("", process.told_problem):
                process.told_problem = problem
                found.append(f"drafter process {number} goes on with the weights that it has: {problem}")
        return found

    def stop(self) -> None:
        """Ends all processes."""
        self._stopped.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self.processes:
            process.stop()

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_PERIOD_S):
            self._look()

    def _look(self) -> None:
        with self._one_looks:
            for process in self.processes:
                process.watch()


def with_addresses(block: SpecrolloutConfig, addresses: Sequence[str]) -> SpecrolloutConfig:
    """Returns `block` with `addresses` as the addresses of its remote drafter."""
    assert block.remote is not None
    remote = replace(block.remote, workers=0, addresses=tuple(addresses))
    return replace(block, drafters=tuple(remote if d is block.remote else d for d in block.drafters))
