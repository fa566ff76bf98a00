# SPDX-License-Identifier: Apache-2.0
"""A simulated CUDA device: tensors without contents, kernels that are recorded but not run, and errors if the host would wait.

Import this module before vllm, in a separate process: it makes vLLM find Triton, and replaces torch's CUDA events.
"""

import os

# With vLLM's CUDA build and a visible GPU, vLLM would find two drivers of Triton and do without it.
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.backends
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

# vLLM asks Triton only for an active backend.
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
import vllm.triton_utils  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402

del triton.backends.backends["cpu"]
assert vllm.triton_utils.HAS_TRITON

GPU = torch.device("cuda", 0)
# Operations that run nothing on the device: they allocate memory or create views.
FREE = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "view", "_unsafe_view", "reshape", "select",
    "slice", "unsqueeze", "squeeze", "expand", "transpose", "permute", "unbind", "split", "detach", "alias", "as_strided",
    "t", "lift_fresh",
}  # fmt: skip


class Waits(RuntimeError):
    """Raised where the host would wait for the device."""


@dataclass
class Launch:
    """A launch of a Triton kernel."""

    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class FakeGpu:
    """Records the operations of torch and the Triton kernels that run on the device, in order.

    While `is_guarded`, a copy for which the host would wait raises `Waits`.
    """

    done: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    replayed: list[Launch] = field(default_factory=list)
    """Kernels that graphs have replayed, in order. They are no launches of the host."""
    is_guarded: bool = False
    refuses_graphs: bool = False
    """Whether recording a graph fails."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Clears the records, and raises `Waits` if the host would wait."""
        self.done.clear()
        self.launches.clear()
        self.replayed.clear()
        self.is_guarded = True
        try:
            yield
        finally:
            self.is_guarded = False

    def refuse(self, reason: str) -> None:
        if self.is_guarded:
            raise Waits(reason)


class _NoDriver(TorchFunctionMode):
    """Replaces operations that need a CUDA driver: indexing, `torch.tensor` on the device, `copy_`, `contiguous`."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].is_cuda:
            return _indexed(args[0], args[1])
        if func is Tensor.__setitem__ and args[0].is_cuda:
            return self._assign(*args)
        options = dict(kwargs or {})
        if func is torch.tensor and torch.device(options.get("device") or "cpu").type == "cuda":
            device = options.pop("device")
            return torch.tensor(*args, **options).to(device)
        if func is Tensor.copy_:
            return _copy(*args, **options)
        if func is Tensor.contiguous and not args[0].is_contiguous():
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        return func(*args, **options)

    def _assign(self, tensor: Tensor, index: Any, value: Any) -> None:
        view, by = _basic(tensor, index)
        if all(i is None for i in by):
            _copy(view, value) if isinstance(value, Tensor) else view.fill_(value)
            return
        if not isinstance(value, Tensor):
            self._gpu.refuse(f"tensor[tensor] = {value!r} copies a number to the device and waits; use index_fill_")
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        torch.ops.aten.index_put_(view, by, value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_(target, source, non_blocking)


def _basic(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the view made by an index's numbers and slices, and the tensor that indexes each dimension."""
    index = index if isinstance(index, tuple) else (index,)
    if any(i is Ellipsis for i in index):
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *[slice(None)] * (tensor.dim() - len(index) + 1), *index[at + 1 :])
    by: list[Tensor | None] = []
    for i in index:
        dim = len(by)
        if i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, slice):
            start, stop, step = i.indices(tensor.shape[dim])
            if (start, stop, step) != (0, tensor.shape[dim], 1):
                tensor = torch.ops.aten.slice(tensor, dim, start, stop, step)
        elif isinstance(i, Tensor):
            pass
        else:
            tensor = tensor.select(dim, int(i))
            continue
        by.append(i if isinstance(i, Tensor) else None)
    return tensor, by


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    view, by = _basic(tensor, index)
    return view if all(i is None for i in by) else torch.ops.aten.index(view, by)


class _Device(TorchDispatchMode):
    """Runs device operations on tensors without contents and records them. Operations of the host run as usual."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu, self._fake = gpu, FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        places = [a.device.type for a in _tensors((*args, *options.values())) if a.dim() or a.is_cuda]
        places += [options["device"].type] if options.get("device") is not None else []
        if "cuda" not in places:
            return func(*args, **options)
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_") and "cpu" in places:
            if not (options.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
                self._gpu.refuse(f"{name} between host and device waits; use pinned memory and non_blocking=True")
            if name == "copy_" and not args[0].is_cuda:
                self._gpu.done.append(name)
                return args[0]
        with self._fake:
            result = func(*args, **options)
        if isinstance(result, Tensor) and not result.is_cuda:
            return torch.zeros(result.shape, dtype=result.dtype)
        if name not in FREE and func.namespace == "aten":
            self._gpu.done.append(name)
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Event:
    """A CUDA event that is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None: ...

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Graph:
    """A CUDA graph: what was launched while it was recorded. A replay is one operation of the host."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.launches: list[Launch] = []
        self.done: list[str] = []

    @contextmanager
    def recording(self, **_: Any) -> Iterator[None]:
        if self._gpu.refuses_graphs:
            raise RuntimeError("operation not permitted when stream is capturing")
        gpu = self._gpu
        before = (gpu.done, gpu.launches, gpu.is_guarded)
        gpu.done, gpu.launches, gpu.is_guarded = self.done, self.launches, True
        try:
            yield
        finally:
            gpu.done, gpu.launches, gpu.is_guarded = before

    def replay(self) -> None:
        self._gpu.done.append("replay")
        self._gpu.replayed.extend(self.launches)


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Allows tensors on `GPU` and records work there. The engine has one rank."""
    gpu = FakeGpu()

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        grid = grid(options) if callable(grid) else grid
        gpu.launches.append(Launch(kernel, tuple(grid), args, options))
        gpu.done.append(kernel.__name__)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for name in ("Event", "Stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _Event))
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init"))
        stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", lambda: _Graph(gpu)))
        stack.enter_context(mock.patch.object(torch.cuda, "graph", lambda graph, **kw: graph.recording(**kw)))
        for name in ("graph_pool_handle", "current_stream", "set_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_: None))
        for name, rank in (("_TP", {"world_size": 1, "rank_in_group": 0}), ("_PP", {"is_last_rank": True})):
            stack.enter_context(mock.patch.object(parallel_state, name, SimpleNamespace(**rank)))
        stack.enter_context(_Device(gpu))
        stack.enter_context(_NoDriver(gpu))
        yield gpu
