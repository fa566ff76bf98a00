# SPDX-License-Identifier: Apache-2.0
"""One drafter process: its settings, its reports, and the object that starts, watches and restarts it."""

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_specrollout.remote.verifier.json_child import JsonChild

ANY_PORT = "tcp://127.0.0.1:0"
HANG_S = 30.0
"""Silence after which a process is killed, in seconds."""
START_S = 600.0
"""Longest time that a process may take to start, in seconds."""
FIRST_PAUSE_S = 1.0
"""Pause before a process is restarted, in seconds. It doubles with each end before the process has reported anything."""
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class DrafterSpec:
    """Settings of a drafter process."""

    model: str
    """Hugging Face folder of the draft model."""
    address: str = ANY_PORT
    """ZeroMQ address to bind; port 0 takes any free one."""
    precision: str = "float32"
    max_model_len: int = 2048
    """Longest text of a request, in tokens."""
    max_requests: int = 256
    """Requests to draft for at a time, of all verifiers."""
    most_ahead: int = 24
    """Draft tokens that a shadow sequence may be ahead of the committed text."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that may ask for drafts; empty allows all."""
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM."""


@dataclass
class DrafterStatus:
    """Counters and state that a drafter process reports."""

    address: str
    """Address at which it listens."""
    is_up: bool = False
    """Whether the engine has started."""
    num_steps: int = 0
    """Steps of the engine."""
    num_drafted: int = 0
    """Draft tokens."""
    num_corrections: int = 0
    """Corrections of shadow sequences."""
    num_refused_frames: int = 0
    """Frames that were dropped."""
    num_open: int = 0
    """Shadow sequences in use."""
    draft_version: int = 0
    """Version of the draft weights."""
    busy_s: float = 0.0
    """Time that the engine spent drafting, in seconds."""
    up_s: float = 0.0
    """Time since the engine started, in seconds."""


class DrafterProcess:
    """One drafter process, restarted at the same address when it ends or hangs. Call `watch` periodically.

    States: starting, up, down (until its pause is over), stopped.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        self.spec = spec
        self.num_restarts = 0
        self.last_words = ""
        """Last output of the process that ended most recently; empty before the first end."""
        self.deaths: list[str] = []
        """Last output of each process that has ended since the last `take_deaths`."""
        self.status: DrafterStatus | None = None
        """Latest report of the process; None until it has bound its address."""
        self._pause_s, self._resume_at_s = FIRST_PAUSE_S, 0.0
        self._child: JsonChild | None = None
        self._heard_s = 0.0
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process exists."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """Whether the process drafts."""
        return self.status is not None and self.status.is_up

    def watch(self) -> None:
        """Kills a process that hangs, and restarts one that has ended."""
        now_s = time.monotonic()
        if self._child is not None:
            silence_s = now_s - self._heard_s
            if silence_s > (HANG_S if self.is_up else START_S):
                self._child.kill()
            if not self._child.has_ended:
                return
            self._bury(now_s)
        if now_s >= self._resume_at_s:
            self.num_restarts += 1
            self._start()

    def stop(self) -> None:
        """Ends the process, which is not restarted."""
        child, self._child, self._resume_at_s = self._child, None, float("inf")
        if child is not None:
            child.end()

    def failure(self) -> str | None:
        """Returns the last output of a process that ended before it was up; None otherwise."""
        if self.is_up or self._child is None or not self._child.has_ended:
            return None
        return self._child.last_words()

    def _start(self) -> None:
        self._child = JsonChild("nemo_specrollout.remote.drafter.drafter_service", self.spec, {"OMP_NUM_THREADS": "1"})
        self.status, self._heard_s = None, time.monotonic()
        threading.Thread(target=self._listen, args=(self._child,), daemon=True).start()

    def _listen(self, child: JsonChild) -> None:
        """Reads the reports of a process until it ends. Runs in its own thread."""
        for report in child.reports():
            with contextlib.suppress(TypeError):
                status = DrafterStatus(**report)
                if child is self._child:
                    self.status, self._heard_s = status, time.monotonic()
                    self.spec = replace(self.spec, address=status.address)
                    self._pause_s = FIRST_PAUSE_S

    def _bury(self, now_s: float) -> None:
        assert self._child is not None
        self.last_words = self._child.last_words()
        self.deaths.append(self.last_words)
        self._child, self.status = None, None
        self._resume_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
