# SPDX-License-Identifier: Apache-2.0
"""How a launch of one of vLLM's Triton kernels reaches the numba function that stands in for it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""What stands for the bits of a type that numba does not know."""


@intrinsic
def void_pointer(_typing: Any, address: Any) -> Any:
    """Inside a numba function: an address, such as `tensor.data_ptr()`, for `numba.carray(pointer, shape, dtype)`."""
    return types.voidptr(address), lambda _context, builder, _signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


def view(argument: Any) -> Any:
    """The tensor's memory as an array, with the tensor's strides; anything else unchanged.

    A bfloat16 tensor becomes an array of uint16, a float16 tensor one of int16: their bits, to be copied or decoded.
    """
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.view(BITS.get(argument.dtype, argument.dtype)).numpy()


def as_kernel(jitted: Callable[..., Any]) -> Callable[..., None]:
    """Makes a body for a kernel's launches of a numba function that has all of the kernel's parameters, in its order.

    A launch names tensors, numbers and None by position and constexprs by keyword. The function gets all of them by
    position, tensors as arrays. Options of Triton's compiler (`num_warps`) are dropped. There is no grid: the function
    takes the number of programs from a shape.
    """
    names = parameters(jitted)

    def launch(*args: Any, **constexprs: Any) -> None:
        arrays = [a.numpy() if type(a) is torch.Tensor and a.dtype not in BITS else view(a) for a in args]
        jitted(*arrays, *[constexprs[name] for name in names[len(arrays) :]])

    launch.__name__ = jitted.__name__
    launch.arg_names = names  # type: ignore[attr-defined]
    return launch


def as_torch_kernel(body: Callable[..., None]) -> Callable[..., None]:
    """The same of a function that takes tensors as they are, for a kernel whose launches name all arguments too."""
    names = parameters(body)

    def launch(*args: Any, **named: Any) -> None:
        body(*args, *[named[name] for name in names[len(args) :]])

    launch.__name__ = body.__name__
    launch.arg_names = names  # type: ignore[attr-defined]
    launch.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]  # vLLM passes by name only what it knows
    return launch


def parameters(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of a kernel, or of a body before or after `as_kernel`."""
    names = getattr(kernel, "arg_names", None)
    return tuple(names or inspect.signature(getattr(kernel, "py_func", kernel)).parameters)
