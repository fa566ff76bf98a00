# SPDX-License-Identifier: Apache-2.0
"""Checks whether a NeMo-RL run gets what it needs from its cluster and its environment, which are GPUs and login keys."""

import math
import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    VLLM_CFG,
    Finding,
    Tree,
    at,
    drafter_types,
    findings,
    parallel_sizes,
    size_at,
)
from nemo_specrollout.installed.versions import can_run_nemo_rl

_RESOURCES = f"{GENERATION}.colocated.resources"
_ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable that names the GPU architectures for which kernels are compiled."""
_TRAINERS = {
    "policy.megatron_cfg": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ),
    "policy.dtensor_cfg": ("tensor_parallel_size", "context_parallel_size"),
}
"""Blocks of NeMo-RL's trainers, each with the names of its parallel sizes. NeMo-RL takes the first block that is enabled.

The number of the trainer's GPUs must be a multiple of the product of these sizes.
"""


@dataclass(frozen=True)
class GpuShares:
    """The number of GPUs that NeMo-RL gives to training and to generation. If both are colocated, they have the same GPUs."""

    training: int
    generation: int


def resource_findings(tree: Tree) -> Iterator[Finding]:
    """Yields findings about numbers of GPUs, parallel sizes, keys of logging services, and TORCH_CUDA_ARCH_LIST."""
    yield from _gpus(tree)
    yield from _logging_keys(tree)
    yield from _architectures(tree)


def _gpus(tree: Tree) -> Iterator[Finding]:
    teachers = "on_policy_distillation"
    if at(tree, f"{teachers}.enabled") and at(tree, f"{teachers}.non_colocated_teachers.enabled"):
        return  # each teacher takes nodes by rules of its own
    if at(tree, "cluster.gpus_per_node") is None:
        return  # `launch` takes the number from the cluster file
    wrong = list(_resources(tree))
    yield from wrong
    if not wrong:
        yield from _parallel_sizes(tree, gpu_shares(tree))


def _resources(tree: Tree) -> Iterator[Finding]:
    """Yields errors about the block `colocated.resources`, if generation is not colocated with training."""
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        return
    nodes = _policy_nodes(tree)
    gpus = size_at(tree, "cluster.gpus_per_node")
    own = size_at(tree, f"{_RESOURCES}.gpus_per_node", 0, low=0)
    own_nodes = size_at(tree, f"{_RESOURCES}.num_nodes", 0, low=0)
    is_controlled = at(tree, "async_rl") is not None
    if nodes == 1:
        yield from findings(
            (
                not own,
                f"{_RESOURCES}.gpus_per_node",
                "null; generation apart from training needs a number of GPUs",
                "error",
            ),
            (
                own_nodes > 1 and not is_controlled,
                f"{_RESOURCES}.num_nodes",
                f"{own_nodes}, but one node is there for training and generation: set it to null, or take more nodes",
                "error",
            ),
        )
        return
    yield from findings(
        (
            own != gpus and not (is_controlled and own),
            f"{_RESOURCES}.gpus_per_node",
            f"{own or 'null'}; with several nodes, generation takes whole ones: set it to cluster.gpus_per_node, {gpus}",
            "error",
        ),
        (
            not own_nodes and not is_controlled,
            f"{_RESOURCES}.num_nodes",
            f"{own_nodes or 'null'}; with several nodes, set the number of those that generate",
            "error",
        ),
    )


def _reward_gpus(tree: Tree, key: str) -> int:
    """Returns how many nodes or GPUs per node NeMo-RL gives to its reward model.

    `key` is `num_nodes` or `gpus_per_node`. Returns 0 if no data set uses the reward model, or if the config is for NeMo-RL's
    SingleController.
    """
    data = at(tree, "data", {})
    blocks = [data.get(name) for name in ("train", "validation", "default")]
    each = [item for block in blocks for item in (block if isinstance(block, list) else [block])]
    is_used = any(isinstance(item, Mapping) and item.get("env_name") == "reward_model" for item in each)
    if not is_used or at(tree, "async_rl") is not None:
        return 0
    return size_at(tree, f"env.reward_model.resources.{key}", 0, low=0)


def _policy_nodes(tree: Tree) -> int:
    """Returns the number of nodes for training and generation, which are all nodes without those of the reward model."""
    nodes = size_at(tree, "cluster.num_nodes")
    return nodes - _reward_gpus(tree, "num_nodes") if nodes > 1 else 1


def gpu_shares(tree: Tree) -> GpuShares:
    """Returns the number of GPUs for training and the number for generation, computed as NeMo-RL does.

    A number is 0 or negative if the config gives all GPUs to the other part. Raises ConfigError if a size in the config is not
    a whole number. Source: `setup` in algorithms/grpo.py, ppo.py and distillation.py of NeMo-RL.
    """
    nodes = _policy_nodes(tree)
    gpus = size_at(tree, "cluster.gpus_per_node")
    if size_at(tree, "cluster.num_nodes") == 1:
        gpus -= _reward_gpus(tree, "gpus_per_node")
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        return GpuShares(nodes * gpus, nodes * gpus)
    own = size_at(tree, f"{_RESOURCES}.gpus_per_node", gpus, low=0)
    if nodes == 1:
        return GpuShares(gpus - own, own)
    own_nodes = size_at(tree, f"{_RESOURCES}.num_nodes", low=0)
    return GpuShares((nodes - own_nodes) * gpus, own_nodes * own)


def _parallel_sizes(tree: Tree, shares: GpuShares) -> Iterator[Finding]:
    """Yields an error for each parallel size that NeMo-RL's trainer or NeMo-RL's `VllmGeneration` would refuse."""
    yield from _indivisible(tree, VLLM_CFG, ("tensor_parallel_size", "pipeline_parallel_size"), shares.generation)
    trainer = next((name for name in _TRAINERS if at(tree, f"{name}.enabled")), None)
    if trainer is not None:
        yield from _indivisible(tree, trainer, _TRAINERS[trainer], shares.training)
    tensor, pipeline, expert = parallel_sizes(tree)
    is_asynchronous = bool(at(tree, f"{VLLM_CFG}.async_engine"))
    yield from findings(
        (
            pipeline > 1 and not is_asynchronous and not drafter_types(tree),  # stages with drafters are refused anyway
            f"{VLLM_CFG}.async_engine",
            f"false with pipeline_parallel_size {pipeline}; NeMo-RL pipelines only asynchronous engines: set it to true",
            "error",
        ),
        (
            expert > 1 and expert % tensor,
            f"{VLLM_CFG}.expert_parallel_size",
            f"{expert}; NeMo-RL needs a multiple of tensor_parallel_size {tensor}, or 1",
            "error",
        ),
        (
            expert > tensor and expert % tensor == 0 and is_asynchronous,
            f"{VLLM_CFG}.async_engine",
            f"true with expert_parallel_size {expert} above tensor_parallel_size {tensor}; NeMo-RL refuses it: set false",
            "error",
        ),
    )


def _indivisible(tree: Tree, path: str, names: Sequence[str], gpus: int) -> Iterator[Finding]:
    """Yields an error if the number of GPUs is not a multiple of the product of some parallel sizes.

    `names` are the keys of these sizes in the block at `path`.
    """
    sizes = {name: size_at(tree, f"{path}.{name}") for name in names}
    group = math.prod(sizes.values())
    if gpus > 0 and gpus % group == 0:
        return
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    cluster = f"{size_at(tree, 'cluster.num_nodes')} x {size_at(tree, 'cluster.gpus_per_node')}"
    text = (
        f"{product} is {group} GPUs, which do not divide the {max(gpus, 0)} that it has of cluster's {cluster}, as NeMo-RL "
        "divides them: lower a size, or take more GPUs"
    )
    yield Finding(f"{path}.{max(sizes, key=lambda name: sizes[name])}", text, "error")


def _architectures(tree: Tree) -> Iterator[Finding]:
    """Yields a warning if a Megatron policy needs the environment variable TORCH_CUDA_ARCH_LIST and it is missing.

    There is no warning if NeMo-RL is not installed here, because then the run starts in another environment.
    """
    if at(tree, "policy.megatron_cfg.enabled") and can_run_nemo_rl() and not os.environ.get(_ARCHITECTURES):
        text = (
            "not set; NeMo-RL's container sets it, and without it no Megatron policy starts: set it, e.g. to 9.0 10.0"
        )
        yield Finding(_ARCHITECTURES, text, "warning")


@dataclass(frozen=True)
class _Service:
    """A logging service that NeMo-RL can use, and that needs a login key."""

    block: str
    key: str
    """Name of the environment variable with the login key."""
    mode: str
    """Name of the environment variable with the service's mode, such as `offline`."""
    without_key: tuple[str, ...]
    """Modes in which the service needs no key."""
    files: tuple[str, ...]
    """Files in the home folder where the login command of the service saves the key."""


_SERVICES = (
    _Service("wandb", "WANDB_API_KEY", "WANDB_MODE", ("offline", "disabled", "dryrun"), (".netrc", "_netrc")),
    _Service("swanlab", "SWANLAB_API_KEY", "SWANLAB_MODE", ("offline", "local", "disabled"), (".swanlab/.netrc",)),
)


def _logging_keys(tree: Tree) -> Iterator[Finding]:
    for service in _SERVICES:
        if not at(tree, f"logger.{service.block}_enabled") or _has_key(tree, service):
            continue
        text = (
            f"true, but no key is known here: neither {service.key} nor a login in ~/{service.files[0]}. A run without a key "
            f"ends at its start or waits for one: set {service.key} or {service.mode}=offline where the run starts"
        )
        yield Finding(f"logger.{service.block}_enabled", text, "warning")


def _has_key(tree: Tree, service: _Service) -> bool:
    """Tells whether a logging service has its login key on this machine, or is in a mode that needs none."""
    mode = os.environ.get(service.mode) or str(at(tree, f"logger.{service.block}.mode", ""))
    if os.environ.get(service.key) or mode in service.without_key:
        return True
    named = os.environ.get("NETRC") if service.block == "wandb" else None
    files = [Path(named).expanduser()] if named else [Path.home() / name for name in service.files]
    return any(_has_login(file, service.block) for file in files)


def _has_login(file: Path, service: str) -> bool:
    """Tells whether a netrc file has a login for a host with `service` in its name, or for the host in WANDB_BASE_URL."""
    own_server = os.environ.get("WANDB_BASE_URL", "")
    try:
        return any(service in host or host in own_server for host in netrc.netrc(str(file)).hosts)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
