# SPDX-License-Identifier: Apache-2.0
"""CPU functions, compiled by numba, in place of the Triton kernels of vLLM's V2 model runner. They are called bodies.

vLLM's interface for them is `vllm.triton_utils.dispatcher`. A body has the same parameters as its kernel, in the same order.
One call of a body does the work of all programs of a kernel launch (`kernel_launch.numba_body`).
"""

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lab.vllm_on_cpu.kernels.kernel_launch import BODIES, parameters


def bodies() -> dict[str, Callable[..., None]]:
    """Imports all modules of this package, and returns their CPU functions by the full names of the kernels they replace."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return BODIES


@functools.cache
def register() -> int:
    """Replaces vLLM's kernels by our bodies, once per process. Returns the number of replaced kernels.

    Kernels that this vLLM does not have are skipped. Raises RuntimeError if a kernel has other parameters than its body.
    """
    from vllm.triton_utils.dispatcher import register_kernels

    found = {name: body for name, body in bodies().items() if _matches(name, body)}
    with _hidden("llvmlite"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about deprecated names that vLLM's search touches
        register_kernels(found)
    return len(found)


def _matches(name: str, body: Callable[..., Any]) -> bool:
    """Returns whether vLLM has a kernel. Raises RuntimeError if the kernel has other parameters than its body.

    Imports the kernel's module, so that vLLM's registration finds all references to the kernel.
    """
    module_name, attribute = name.rsplit(".", 1)
    try:
        kernel = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm.v1.worker.gpu"):
            raise
        return False
    if kernel is not None and parameters(kernel) != parameters(body):
        raise RuntimeError(
            f"the kernel {name} of this vLLM takes ({', '.join(parameters(kernel))}), but its body for a CPU was written "
            f"for ({', '.join(parameters(body))}): vLLM's V2 model runner cannot run on a CPU here"
        )
    return kernel is not None


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Returns a context in which a package's modules are hidden from vLLM's registration.

    The registration searches all modules, and fails on objects of llvmlite.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    try:
        yield
    finally:
        sys.modules.update(hidden)
