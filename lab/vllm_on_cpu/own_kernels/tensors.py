# SPDX-License-Identifier: Apache-2.0
"""Calls of numba functions with CPU tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch


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
