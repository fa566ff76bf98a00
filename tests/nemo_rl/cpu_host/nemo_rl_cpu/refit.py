# SPDX-License-Identifier: Apache-2.0
"""Weights between processes: shared memory by value where CUDA shares handles, a TCPStore where NCCL broadcasts."""

import os
from types import ModuleType
from typing import Any

import torch

_CHUNK = 4 << 20  # a value of a TCPStore holds 8 MiB at most


def device_id() -> str:
    """The logical GPU that Ray lent this process."""
    return "CPU-" + os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def patch_nvml(nvml: ModuleType) -> None:
    """A device's name and free memory."""
    nvml.get_device_uuid = lambda index=0: device_id()  # type: ignore[attr-defined]
    nvml.get_free_memory_bytes = lambda index=0: 2 << 30  # type: ignore[attr-defined]


def patch_ipc(policy_utils: ModuleType) -> None:
    """A handle of a CPU tensor is rebuilt as what it is."""
    from torch.multiprocessing.reductions import rebuild_tensor

    policy_utils.rebuild_cuda_tensor_from_ipc = lambda handle, device: rebuild_tensor(*handle[0])  # type: ignore[attr-defined]


def patch_packing(packed_tensor: ModuleType) -> None:
    """Small packets, where NeMo-RL would take a share of the GPU's memory."""
    packed_tensor.get_target_packed_tensor_size = lambda: 16 << 20  # type: ignore[attr-defined]


def patch_collective(stateless_process_group: ModuleType) -> None:
    """NeMo-RL's group of trainer and engines, with a broadcast over the store that it has."""
    group = stateless_process_group.StatelessProcessGroup

    def init_nccl_communicator(self: Any, device: Any, *, peer: str = "nemo") -> None:
        self.num_broadcasts = 0

    def broadcast(self: Any, tensor: torch.Tensor, src: int) -> None:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for part in flat.split(_CHUNK):
            key = f"broadcast/{self.num_broadcasts}"
            self.num_broadcasts += 1
            if self.rank == src:
                self.tcp_store.set(key, part.numpy().tobytes())
            else:
                self.tcp_store.wait([key])
                part.copy_(torch.frombuffer(bytearray(self.tcp_store.get(key)), dtype=torch.uint8))

    group.init_nccl_communicator, group.broadcast = init_nccl_communicator, broadcast
