# SPDX-License-Identifier: Apache-2.0
"""Compares a body of `lab.vllm_on_cpu.kernels` with vLLM's kernel in Triton's interpreter.

Import this module before triton and vllm, because it sets up both. Modules of this folder run in separate processes.
"""

import os

# With vLLM's CUDA build and a visible GPU, vLLM would find two drivers of Triton and do without it.
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import interpreting  # noqa: F401
import torch
import triton.backends
from torch import Tensor

from lab.vllm_on_cpu.kernels import bodies

# vLLM asks Triton only for an active backend.
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


@dataclass
class Launch:
    """A launch of a kernel. The tensors of `outputs` are compared, by default all tensors of `args`."""

    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any] = field(default_factory=dict)
    outputs: Callable[[], Iterable[Tensor]] | None = None

    def results(self) -> list[Tensor]:
        tensors = self.outputs() if self.outputs else [a for a in self.args if isinstance(a, Tensor)]
        return list(tensors)


def by_kernel(*makers: Callable[..., Launch]) -> dict[str, list[Callable[..., Launch]]]:
    """Groups makers of launches by the full name of the kernel whose body has the same name as the maker."""
    kernels = {body.__name__: name for name, body in bodies().items()}
    grouped: dict[str, list[Callable[..., Launch]]] = {}
    for maker in makers:
        function = maker.func if isinstance(maker, partial) else maker
        grouped.setdefault(kernels[function.__name__], []).append(maker)
    return grouped


def compare(name: str, body: Callable[..., None], make: Callable[[], Launch], tolerance: float, label: str) -> bool:
    """Launches kernel and body on equal inputs from `make`, and asserts equal results.

    Returns whether the kernel changed anything.
    """
    module, attribute = name.rsplit(".", 1)
    theirs, ours, untouched = make(), make(), make()
    getattr(importlib.import_module(module), attribute)[theirs.grid](*theirs.args, **theirs.constexprs)
    body(*ours.args, **ours.constexprs)
    for i, (expected, got) in enumerate(zip(theirs.results(), ours.results(), strict=True)):
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, i=i: f"{label}, {i}: {text}"
        )
    return not all(map(torch.equal, theirs.results(), untouched.results()))
