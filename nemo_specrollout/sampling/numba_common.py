# SPDX-License-Identifier: Apache-2.0
"""Functions that our numba kernels share: SplitMix64's output function, and calls with CPU tensors."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from nemo_specrollout.sampling.seeds import MIX_1, MIX_2

_MIX_1, _MIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)


@njit(cache=True, inline="always")
def mix64(z):  # type: ignore[no-untyped-def]
    """Returns a bijection of a uint64 whose every output bit depends on all input bits."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def on_tensors(jitted: Callable[..., Any]) -> Callable[..., None]:
    """Wraps a numba function so that it takes CPU tensors, named tuples of them, and numbers. It gets the tensors' memory."""

    @functools.wraps(jitted)
    def call(*args: Any) -> None:
        jitted(*map(_memory, args))

    return call


def _memory(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.numpy()
    if isinstance(argument, tuple) and isinstance(argument[0], torch.Tensor):
        return type(argument)(*map(_memory, argument))
    return argument
