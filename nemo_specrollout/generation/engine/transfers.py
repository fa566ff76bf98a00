# SPDX-License-Identifier: Apache-2.0
"""Transfers between host and device, and between the ranks of an engine.

The host does not wait for the device in them, unless a docstring says so.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils import torch_utils
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


def is_output_rank() -> bool:
    """Returns whether this process is the output rank of its engine, which is the only rank whose outputs vLLM uses.

    It is the first tensor-parallel rank of the last pipeline stage.
    """
    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def agreed(decision: Any) -> Any:
    """Returns the `decision` of the first tensor-parallel rank on all tensor-parallel ranks.

    All ranks must call this. It is needed if a decision depends on a clock, because all ranks must decide alike.
    """
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast_object(decision, src=0)


def copy_first_rank(tensor: torch.Tensor) -> None:
    """Overwrites a tensor on the device with the values that it has on the first tensor-parallel rank.

    All ranks must call this. It is needed because all ranks must verify the same drafts, but messages from remote drafters
    reach them at different times.
    """
    group = get_tp_group()
    if group.world_size > 1:
        group.broadcast(tensor, src=0)


def to_device(values: Sequence[int], dtype: Any, device: torch.device) -> torch.Tensor:
    """Returns a few numbers as a tensor on the device. `dtype` is a NumPy type. The host does not wait for the copy."""
    return torch_utils.async_tensor_h2d(np.array(values, dtype), device=device)


def copy_to_device(values: np.ndarray, out: torch.Tensor) -> None:
    """Writes an array to `out`, a tensor on the device with the same shape. The host does not wait for the copy."""
    staged = torch.empty(values.shape, dtype=out.dtype, pin_memory=out.is_cuda)  # torch keeps it until it was copied
    staged.numpy()[:] = values
    out.copy_(staged, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the host into which `values` are being copied. From a GPU they arrive only later."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    return host


class HostCopy:
    """A copy on the host of a device tensor's values. On a GPU these values are one engine step old.

    Owns two host buffers, of which one is read while the other is written. Call `refresh()` in each engine step. On a GPU,
    `values` then has the tensor's values from the previous refresh, and on a CPU the present values. A refresh waits for the
    copy that the previous refresh has started, which has usually arrived long ago.
    """

    def __init__(self, source: torch.Tensor, is_late: bool | None = None) -> None:
        """`source` is the device tensor. With `is_late`, a test can make the values one refresh old even on a CPU."""
        self._source = source
        self._is_cuda = source.is_cuda
        self.is_late = source.is_cuda if is_late is None else is_late
        """Whether `values` are one refresh old, as they are on a GPU."""
        self._buffers = [torch.zeros_like(source, device="cpu", pin_memory=self._is_cuda) for _ in range(2)]
        # Events must block and not poll, because polling holds a lock of the driver.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)] if self._is_cuda else []
        self._readable = 0

    @property
    def values(self) -> np.ndarray:
        """The values as a read-only view, which is valid until the next refresh."""
        return self._buffers[self._readable].numpy()

    def refresh(self) -> None:
        """Starts a new copy, and makes the values of the previous copy readable in `values`."""
        if not self.is_late:
            self._buffers[0].copy_(self._source)
            return
        self._readable = 1 - self._readable
        free = 1 - self._readable
        if not self._is_cuda:
            self._buffers[free].copy_(self._source)
            return
        with gpu_sync_allowed():
            self._events[self._readable].synchronize()
        self._buffers[free].copy_(self._source, non_blocking=True)
        self._events[free].record()


class StageTimer:
    """Measures the seconds of a part of an engine step, with CUDA events or on a CPU with the clock.

    Owns the measurements that the GPU has not finished. Of these it keeps the last 8 at most.

    Example: call `timer.start()` before the part and `timer.stop(tag)` after it. In a later engine step, loop over `for tag,
    seconds in timer.finished()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started: Any = None
        self._under_way: deque[tuple[Any, Any, Any]] = deque(maxlen=8)
        self._finished: list[tuple[Any, float]] = []

    def start(self) -> None:
        """Starts to measure the time. Call `stop` at the end of the part that is measured."""
        self._started = self._event() if self._is_cuda else time.perf_counter()

    def stop(self, tag: Any) -> None:
        """Ends the measurement. `finished` returns its seconds later, together with `tag`."""
        if self._is_cuda:
            self._under_way.append((tag, self._started, self._event()))
        else:
            self._finished.append((tag, time.perf_counter() - self._started))

    def finished(self) -> list[tuple[Any, float]]:
        """Returns the tag and the seconds of each measurement that was completed since the last call."""
        while self._under_way and self._under_way[0][2].query():
            tag, started, stopped = self._under_way.popleft()
            self._finished.append((tag, started.elapsed_time(stopped) / 1000.0))
        finished = self._finished
        self._finished = []
        return finished

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
