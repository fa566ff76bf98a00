# SPDX-License-Identifier: Apache-2.0
"""Lets numba functions be called with CPU tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def on_tensors(jitted: Callable[..., Any]) -> Callable[..., None]:
    """Wraps a numba function so that it takes CPU tensors, named tuples of them, and numbers.

    The numba function gets the memory of the tensors as arrays.
    """

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
