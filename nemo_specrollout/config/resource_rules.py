# SPDX-License-Identifier: Apache-2.0
"""Rules about what a NeMo-RL run takes from its cluster and its environment: GPUs, and keys of logging services."""

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
"""Environment variable with the kinds of GPUs for which kernels are compiled."""
_TRAINERS = {
    "policy.megatron_cfg": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ),
    "policy.dtensor_cfg": ("tensor_parallel_size", "context_parallel_size"),
}
"""The blocks of NeMo-RL's trainers, in the order in which it looks for the enabled one.

The product of the named sizes is the number of GPUs in a group of ranks.
"""


@dataclass(frozen=True)
class GpuShares:
    """The GPUs of a run as NeMo-RL divides them. If generation is colocated with training, both have the same GPUs."""

    training: int
    generation: int


def resource_findings(tree: Tree) -> Iterator[Finding]:
    """Yields the findings about GPUs and parallel sizes, keys of logging services, and kinds of GPUs."""
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
    """Yields errors about `colocated.resources`, which is read if generation has GPUs of its own."""
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
    """Returns the value of `key`, `num_nodes` or `gpus_per_node`, for NeMo-RL's reward model.

    Returns 0 if no data use that model, or if the config is for NeMo-RL's SingleController.
    """
    data = at(tree, "data", {})
    blocks = [data.get(name) for name in ("train", "validation", "default")]
    each = [item for block in blocks for item in (block if isinstance(block, list) else [block])]
    is_used = any(isinstance(item, Mapping) and item.get("env_name") == "reward_model" for item in each)
    if not is_used or at(tree, "async_rl") is not None:
        return 0
    return size_at(tree, f"env.reward_model.resources.{key}", 0, low=0)


def _policy_nodes(tree: Tree) -> int:
    """Returns the number of nodes for training and generation."""
    nodes = size_at(tree, "cluster.num_nodes")
    return nodes - _reward_gpus(tree, "num_nodes") if nodes > 1 else 1


def gpu_shares(tree: Tree) -> GpuShares:
    """Returns the GPUs for training and generation (NeMo-RL: `setup` in algorithms/grpo.py, ppo.py and distillation.py).

    A share is 0 or negative if the other one takes all GPUs. Raises ConfigError for a size in the config that is not a whole
    number.
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
    """Yields an error for each parallel size that NeMo-RL's trainer or its `VllmGeneration` would refuse."""
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
    """Yields an error if `gpus` GPUs cannot be divided into groups of ranks.

    The size of a group is the product of the sizes `names` in the block at `path`.
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
    """Yields a warning if NeMo-RL is installed here, but the environment lacks a variable that its Megatron policy needs."""
    if at(tree, "policy.megatron_cfg.enabled") and can_run_nemo_rl() and not os.environ.get(_ARCHITECTURES):
        text = (
            "not set; NeMo-RL's container sets it, and without it no Megatron policy starts: set it, e.g. to 9.0 10.0"
        )
        yield Finding(_ARCHITECTURES, text, "warning")


@dataclass(frozen=True)
class _Service:
    """A service that NeMo-RL logs to, and that asks for a key."""

    block: str
    key: str
    """Environment variable of the key."""
    mode: str
    """Environment variable of the mode."""
    without_key: tuple[str, ...]
    """Modes that need no key."""
    files: tuple[str, ...]
    """Files in the home folder where the service's login command puts the key."""


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
    """Returns whether the key of a service is known here, or its mode needs none."""
    mode = os.environ.get(service.mode) or str(at(tree, f"logger.{service.block}.mode", ""))
    if os.environ.get(service.key) or mode in service.without_key:
        return True
    named = os.environ.get("NETRC") if service.block == "wandb" else None
    files = [Path(named).expanduser()] if named else [Path.home() / name for name in service.files]
    return any(_has_login(file, service.block) for file in files)


def _has_login(file: Path, service: str) -> bool:
    """Returns whether a netrc file has a login for a host with `service` in its name, or for the host in WANDB_BASE_URL."""
    own_server = os.environ.get("WANDB_BASE_URL", "")
    try:
        return any(service in host or host in own_server for host in netrc.netrc(str(file)).hosts)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
