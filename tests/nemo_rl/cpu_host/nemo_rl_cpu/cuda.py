# SPDX-License-Identifier: Apache-2.0
"""The calls of torch.cuda on NeMo-RL's path, and tensors asked for on a GPU."""

import contextlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GIB = 1 << 30
_NOTHING_TO_DO = (
    "set_device",
    "synchronize",
    "set_stream",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "manual_seed",
    "manual_seed_all",
)


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


def patch_calls(nemo_rl: ModuleType) -> None:
    """In every process that imports NeMo-RL: streams, synchronization, the current device."""
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event  # type: ignore[misc,assignment]
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *a, **k: _Stream()
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", "0"))
    for name in _NOTHING_TO_DO:
        setattr(cuda, name, lambda *a, **k: None)
    cuda.memory.empty_cache = lambda *a, **k: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: 0


def complete_placeholders(shm: ModuleType) -> None:
    """In an engine, where vLLM's CPU build puts stand-ins of its own for streams and events: before 0.32 they lack methods."""
    for theirs, ours in ((shm._StreamPlaceholder, _Stream), (shm._EventPlaceholder, _Event)):
        for name, method in vars(ours).items():
            if not name.startswith("__") and not hasattr(theirs, name):
                setattr(theirs, name, method)


def train_on_cpu() -> None:
    """In a training process: also memory figures, generators, gloo for nccl, and every tensor on the CPU."""
    cuda = torch.cuda
    cuda.device_count = lambda: 1
    cuda.get_device_name = lambda *a: "cpu"
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *a, **k: 0)
    properties = SimpleNamespace(total_memory=8 * _GIB, name="cpu", major=9, minor=0, multi_processor_count=1)
    cuda.get_device_properties = lambda *a, **k: properties
    cuda.mem_get_info = lambda *a: (4 * _GIB, 8 * _GIB)
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda *a, **k: None
    cuda.is_current_stream_capturing = lambda: False
    _gloo_for_nccl()
    _autocast_on_cpu()
    OnCpu().__enter__()


def _gloo_for_nccl() -> None:
    import torch.distributed as dist
    import torch.distributed.device_mesh as mesh

    init_process_group, init_device_mesh, new_group = dist.init_process_group, mesh.init_device_mesh, dist.new_group
    dist.init_process_group = lambda backend=None, **kwargs: init_process_group(backend="gloo", **kwargs)
    dist.new_group = lambda *a, backend=None, **kwargs: new_group(*a, backend=backend and "gloo", **kwargs)
    mesh.init_device_mesh = lambda device_type, *a, **k: init_device_mesh(_on_cpu(device_type), *a, **k)


def _autocast_on_cpu() -> None:
    native = torch.autocast

    class Autocast(native):  # type: ignore[misc,valid-type]
        def __init__(self, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
            super().__init__(_on_cpu(device_type), *args, **kwargs)

    torch.autocast = Autocast  # type: ignore[misc]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class OnCpu(TorchFunctionMode):
    """While entered, a tensor asked for on a GPU, by name, device or index, is made on the CPU, unpinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if "device" in kwargs:
            kwargs["device"] = "cpu" if _is_index(kwargs["device"]) else _on_cpu(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name in ("to", "type", "empty", "zeros", "ones"):
            args = tuple(_on_cpu(a) for a in args)
        if name == "to" and len(args) > 1 and _is_index(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)
