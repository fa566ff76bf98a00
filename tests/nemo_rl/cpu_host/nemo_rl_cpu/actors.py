# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's Ray actors on a machine without a GPU: logical GPUs, one environment."""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nemo_rl_cpu import cuda

LOGICAL_GPUS, ADDRESS = "NEMO_RL_CPU_LOGICAL_GPUS", "RAY_ADDRESS"
JOINS = "NEMO_RL_CPU_JOINS_RAY"
"""Variable of a process that joins the Ray that is there, as on the nodes of tests/slurm."""


def patch_ray(virtual_cluster: ModuleType) -> None:
    """A small Ray on this machine that believes in as many GPUs as the test asks for."""
    if os.environ.get(JOINS) == "1":
        return
    import ray

    def init_ray(*args: Any, **kwargs: Any) -> None:
        if ray.is_initialized():  # by the run before in this process
            return
        gpus = int(os.environ.get(LOGICAL_GPUS, "1"))
        os.environ.pop(ADDRESS, None)
        for is_last in (False, False, True):
            try:
                ray.init(num_cpus=8, num_gpus=gpus, include_dashboard=False, object_store_memory=600 << 20)
                os.environ[ADDRESS] = ray.get_runtime_context().gcs_address  # there may be other clusters here
                return
            except Exception as error:  # Ray's own class
                if is_last or "timed out during startup" not in str(error):
                    raise
                ray.shutdown()  # a busy machine: Ray waits 30 s, whatever its settings

    virtual_cluster.init_ray = init_ray  # type: ignore[attr-defined]


def patch_environments(registry: ModuleType) -> None:
    """Every actor runs in this interpreter."""
    for name in registry.ACTOR_ENVIRONMENT_REGISTRY:
        registry.ACTOR_ENVIRONMENT_REGISTRY[name] = sys.executable


def patch_data_plane(transfer_queue: ModuleType) -> None:
    """TransferQueue's actors run in this interpreter, too; a work tree has no metadata to read its version from."""
    transfer_queue._patch_tq_actor_runtime_env = lambda: None  # type: ignore[attr-defined]


# What this process does before it trains, set when NeMo-RL's worker is imported.
_preparations: list[Callable[[], None]] = []


def will_train_dtensor(worker_module: ModuleType) -> None:
    """FSDP2 over gloo."""
    _preparations.append(cuda.train_on_cpu)


def will_train_megatron(worker_module: ModuleType) -> None:
    """Megatron-Core by its local layer specs."""
    from nemo_rl_cpu import megatron

    _preparations.append(megatron.train_on_cpu)


def patch_numa(numa_utils: ModuleType) -> None:
    """The first call of a training actor's constructor, in the thread that will train."""

    def bind_to_gpu_numa(gpu: int) -> bool:
        while _preparations:
            _preparations.pop()()
        return False

    numa_utils.bind_to_gpu_numa = bind_to_gpu_numa  # type: ignore[attr-defined]
