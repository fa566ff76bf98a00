# SPDX-License-Identifier: Apache-2.0
"""How long a stage of a step takes on the device, told when the device is done with it; nothing waits."""

import time
from collections import deque
from typing import Any

import torch


class StageTimer:
    """Times a stage by CUDA events, or by the clock on a CPU. Owns the measurements that are under way.

    Example: `timer.start()`, the stage, `timer.stop(tag)`; later `for tag, seconds in timer.finished()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started: Any = None
        self._under_way: deque[tuple[Any, Any, Any]] = deque(maxlen=8)
        self._finished: list[tuple[Any, float]] = []

    def start(self) -> None:
        """The stage begins."""
        if not self._is_cuda:
            self._started = time.perf_counter()
            return
        self._started = torch.cuda.Event(enable_timing=True)
        self._started.record()

    def stop(self, tag: Any) -> None:
        """The stage, of which `tag` says what it was, ends."""
        if not self._is_cuda:
            self._finished.append((tag, time.perf_counter() - self._started))
            return
        stopped = torch.cuda.Event(enable_timing=True)
        stopped.record()
        self._under_way.append((tag, self._started, stopped))

    def finished(self) -> list[tuple[Any, float]]:
        """Tags and seconds of the stages that have ended since last asked."""
        while self._under_way and self._under_way[0][2].query():
            tag, started, stopped = self._under_way.popleft()
            self._finished.append((tag, started.elapsed_time(stopped) / 1000.0))
        finished, self._finished = self._finished, []
        return finished
