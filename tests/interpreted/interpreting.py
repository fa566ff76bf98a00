# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks for vLLM's kernels. Importing it mends that; TRITON_INTERPRET must be set before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _take_any_mask(method: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Triton's interpreter computes some masks as integers, and then does not take them."""

    def masked(self: Any, *args: Any) -> Any:
        args[index].data = args[index].data.astype(bool)
        return method(self, *args)

    return masked


def _log1p(x: Any) -> Any:
    """CUDA's function of that name, which the interpreter only declares; vLLM before 0.32 draws noise by it."""
    return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


InterpreterBuilder.create_masked_load = _take_any_mask(InterpreterBuilder.create_masked_load, 1)
InterpreterBuilder.create_masked_store = _take_any_mask(InterpreterBuilder.create_masked_store, 2)
libdevice.log1p = _log1p
