# SPDX-License-Identifier: Apache-2.0
"""Sends weights to an engine in another process, through host memory or as handles to GPU memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

Packed = list[tuple[str, Any]]
"""Weights as they are sent, each with its Hugging Face name. A weight is a tensor on the CPU, or a function with its arguments
that opens a tensor on the GPU."""


def packed(tensors: Iterable[tuple[str, torch.Tensor]], by_handle: bool) -> Packed:
    """Returns weights in a form that can be sent to another process, which opens them with `opened`.

    With `by_handle`, tensors on a GPU are not copied, because the other process reads them in place. So they must not be freed
    before the other process has read them.
    """
    return [(name, reduce_tensor(t) if by_handle and t.is_cuda else t.cpu()) for name, t in tensors]


def opened(weights: Packed) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the Hugging Face name and the tensor of each weight that `packed` has prepared."""
    for name, given in weights:
        if isinstance(given, torch.Tensor):
            yield name, given
        else:
            open_tensor, arguments = given
            yield name, open_tensor(*arguments)


def wait_for_gpu() -> None:
    """Waits until the GPU has finished all work of this process.

    Then this process has read all tensors that `opened` yielded, and the process that sent them may free them. Without a GPU,
    returns at once.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
