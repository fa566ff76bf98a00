# SPDX-License-Identifier: Apache-2.0
"""Turns a numba or torch function into the body of one of vLLM's Triton kernels, and registers it under the kernel's name."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BODIES: dict[str, Callable[..., None]] = {}
"""Registered bodies by the full names of their kernels, such as `vllm.v1.worker.gpu.sample.min_p._min_p_kernel`."""
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Integer types that hold the bits of float types that numba does not know."""


@intrinsic
def void_pointer(_typing: Any, address: Any) -> Any:
    """Turns, inside a numba function, an address such as `tensor.data_ptr()` into a pointer for `numba.carray`."""
    return types.voidptr(address), lambda _context, builder, _signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@njit(cache=True, inline="always")
def int32_array(address, length):  # type: ignore[no-untyped-def]
    """Returns, inside a numba function, the int32 numbers at an address as an array."""
    return carray(void_pointer(address), (length,), np.int32)


def view(argument: Any) -> Any:
    """Returns a tensor's memory as an array with the tensor's strides. Returns anything that is no tensor unchanged.

    A bfloat16 tensor becomes an array of uint16, and a float16 tensor an array of int16. The integers are the bits of the
    floats, which can be copied or decoded.
    """
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.view(BITS.get(argument.dtype, argument.dtype)).numpy()


def numba_body(kernel: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Compiles a function with numba and registers it as the body of the kernel `vllm.v1.<kernel>`.

    The function has all parameters of the kernel, in the kernel's order. A launch passes tensors, numbers and None by
    position, and constexprs by keyword. The function gets all of them by position, and tensors as arrays. Options of Triton's
    compiler, such as `num_warps`, are dropped. A body gets no grid, so it takes the number of programs from the shape of an
    argument. `options` go to `numba.njit`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., None]:
        jitted, names = njit(cache=True, **options)(function), parameters(function)

        def launch(*args: Any, **constexprs: Any) -> None:
            arrays = [a.numpy() if type(a) is torch.Tensor and a.dtype not in BITS else view(a) for a in args]
            jitted(*arrays, *[constexprs[name] for name in names[len(arrays) :]])

        return _register(kernel, function, launch)

    return register


def torch_body(kernel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as the body of the kernel `vllm.v1.<kernel>`, like `numba_body`, but does not compile it.

    The function gets torch tensors.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        names = parameters(function)

        def launch(*args: Any, **named: Any) -> None:
            function(*args, *[named[name] for name in names[len(args) :]])

        # vLLM passes arguments by name if it finds the kernel's names here.
        launch.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return _register(kernel, function, launch)

    return register


def _register(kernel: str, function: Callable[..., Any], launch: Callable[..., None]) -> Callable[..., None]:
    launch.__name__, launch.__module__, launch.__doc__ = function.__name__, function.__module__, function.__doc__
    launch.arg_names = parameters(function)  # type: ignore[attr-defined]
    BODIES[f"vllm.v1.{kernel}"] = launch
    return launch


def parameters(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the parameters of a kernel or a body."""
    return tuple(getattr(kernel, "arg_names", None) or inspect.signature(kernel).parameters)
