# SPDX-License-Identifier: Apache-2.0
"""Adds to Triton's interpreter what vLLM's kernels need. Set TRITON_INTERPRET before importing this module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _take_any_mask(method: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Converts a method's mask to bool: the interpreter computes some masks as integers, and then rejects them."""

    def masked(self: Any, *args: Any) -> Any:
        args[index].data = args[index].data.astype(bool)
        return method(self, *args)

    return masked


def _log1p(x: Any) -> Any:
    """Implements CUDA's log1p, which the interpreter only declares. vLLM before 0.32 samples noise with it."""
    return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


InterpreterBuilder.create_masked_load = _take_any_mask(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _take_any_mask(InterpreterBuilder.create_masked_store, 2)
libdevice.log1p = _log1p
