# SPDX-License-Identifier: Apache-2.0
"""Bodies in numba for the Triton kernels of vLLM's V2 model runner, which let it run on a CPU at a CPU's speed.

vLLM's own place for them is `vllm.triton_utils.dispatcher`. Each module here exports `KERNELS`, a body for each kernel's
name. A body has its kernel's parameters, in order, and does in one call what the launch's whole grid does.
"""

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_v2_cpu.kernels.kernel_launch import parameters

WHERE = "vllm.v1.worker.gpu."
"""What the names of all kernels start with."""


def bodies() -> dict[str, Callable[..., Any]]:
    """The bodies of all modules of this package, by the kernel's name."""
    merged: dict[str, Callable[..., Any]] = {}
    for module in pkgutil.iter_modules(__path__):
        merged |= getattr(importlib.import_module(f"{__name__}.{module.name}"), "KERNELS", {})
    return merged


@functools.cache
def register() -> int:
    """Puts the bodies in the kernels' places, once a process; the number of kernels that have one.

    Raises RuntimeError where a kernel of the running vLLM takes other arguments than its body. What this vLLM does not
    have is passed over.
    """
    from vllm.triton_utils.dispatcher import register_kernels

    found = {name: body for name, body in bodies().items() if _matches(name, body)}
    with _out_of_sight("llvmlite"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of deprecated names that the search comes across
        register_kernels(found)
    return len(found)


def _matches(name: str, body: Callable[..., Any]) -> bool:
    """Whether vLLM has the kernel. Imports its module, so that the registration finds every name for it."""
    module_name, attribute = name.rsplit(".", 1)
    try:
        kernel = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(WHERE[:-1]):
            raise
        return False
    if kernel is not None and parameters(kernel) != parameters(body):
        raise RuntimeError(
            f"the kernel {name} of this vLLM takes ({', '.join(parameters(kernel))}), but its body for a CPU was written "
            f"for ({', '.join(parameters(body))}): vLLM's V2 model runner cannot run on a CPU here"
        )
    return kernel is not None


@contextmanager
def _out_of_sight(package: str) -> Iterator[None]:
    """Hides a package's modules: the registration looks through all modules, and fails on llvmlite's objects."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    try:
        yield
    finally:
        sys.modules.update(hidden)
