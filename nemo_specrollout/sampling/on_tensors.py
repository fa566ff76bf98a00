# SPDX-License-Identifier: Apache-2.0
"""How a numba function is called with CPU tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def on_tensors(jitted: Callable[..., Any]) -> Callable[..., None]:
    """`jitted`, for positional arguments that are CPU tensors, whose memory it gets as arrays, or numbers."""

    @functools.wraps(jitted)
    def call(*args: Any) -> None:
        jitted(*[a.numpy() if isinstance(a, torch.Tensor) else a for a in args])

    return call
