# SPDX-License-Identifier: Apache-2.0
"""Figures of the device on the host, a step old, without waiting for the device."""

import numpy as np
import torch


class HostCopy:
    """A tensor's values as of an earlier step; owns two buffers, one to read and one to be written.

    Example: `copy.refresh()` in each step, then `copy.values` is what the tensor held at the refresh before, or just now on a
    CPU, where the device's memory is the host's. That earlier copy has long arrived: the host is a step ahead at most.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._is_cuda = source.is_cuda
        self._buffers = [torch.zeros_like(source, device="cpu", pin_memory=self._is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []
        self._reads = 0

    @property
    def values(self) -> np.ndarray:
        """To be read only, until the next refresh."""
        return self._buffers[self._reads].numpy()

    def forget(self, row: int) -> None:
        """A row is zero from now on, as far as it is not on its way already."""
        for buffer in self._buffers:
            buffer[row] = 0

    def refresh(self) -> None:
        """Starts a copy; what the copy before it brought is there to be read, if it has arrived."""
        if not self._is_cuda:
            self._buffers[0].copy_(self._source)
            return
        self._reads = 1 - self._reads
        self._events[self._reads].synchronize()
        free = 1 - self._reads
        self._buffers[free].copy_(self._source, non_blocking=True)
        self._events[free].record()
