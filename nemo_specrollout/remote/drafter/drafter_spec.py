# SPDX-License-Identifier: Apache-2.0
"""Settings of a remote drafter, and the counters that its process reports. This module does not load torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.addresses import any_port
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.strict import ConfigError

CPU_KV_BYTES = 256 << 20
"""Size of a drafter's KV cache on a CPU, in bytes."""
GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a drafter takes if it has the GPU for itself."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec(RemoteDrafterConfig):
    """Settings of a remote drafter.

    These are the drafter's options in the config, its address, and the precision and the longest text of the policy's engines.
    """

    address: str = any_port("127.0.0.1")
    """ZeroMQ address to bind, where port 0 means any free port."""
    precision: str = "float32"
    max_model_len: int = 2048
    """Longest text of a request, in tokens."""


@dataclass
class DrafterReport:
    """Counters and state of a remote drafter, which its process reports."""

    address: str
    """Address at which the drafter listens, or empty before it listens."""
    is_up: bool = False
    """True if the engine has started."""
    num_steps: int = 0
    num_drafted: int = 0
    num_corrections: int = 0
    num_refused_frames: int = 0
    """Number of refused messages, plus the number of answers that did not reach their verifier."""
    refusal: str = ""
    """Why the latest message was refused, or why the latest lost answer did not reach its verifier."""
    num_open: int = 0
    """Number of shadow sequences in use."""
    draft_version: int = 0
    """Version of the weights that `publish-draft` or the folder `weights_from` has given last, or 0 for the weights of
    `model`."""
    weights_problem: str = ""
    """Why the newest weights in `weights_from` are not in use, or empty if they are."""
    busy_s: float = 0.0
    """Time that the engine spent drafting, in seconds."""
    up_s: float = 0.0
    """Time since the engine started, in seconds."""
    process: int = 0
    """Random number that identifies the process, if Ray has started it."""
    silence_s: float = 0.0
    """Seconds since the drafter's loop last ran `DrafterService.turn`, or since the process began. A large value means that
    the drafter hangs."""


def drafter_spec(
    drafter: RemoteDrafterConfig,
    vllm_cfg: Mapping[str, Any],
    address: str = DrafterSpec.address,
    *,
    on_cpu: bool = True,
) -> DrafterSpec:
    """Returns the settings of a remote drafter.

    `drafter` has the drafter's options in the config. `vllm_cfg` is NeMo-RL's config of the policy's engines. The drafter
    takes its precision and its longest text from there. Raises ConfigError if the drafter's model is missing.
    """
    if drafter.model.startswith(("/", ".")) and not Path(drafter.model).is_dir():
        raise ConfigError(f"drafters.model: {drafter.model} does not exist; name the folder of the draft model")
    memory: dict[str, float] = {"kv_cache_memory_bytes": CPU_KV_BYTES} if on_cpu else {}
    if not on_cpu and drafter.gpus:
        memory = {"gpu_memory_utilization": GPU_MEMORY_SHARE * drafter.gpus}
    shared = {name: vllm_cfg[name] for name in ("max_model_len", "precision") if name in vllm_cfg}
    if shared.get("precision") == "fp8":  # NeMo-RL's word for a quantization of the policy
        shared["precision"] = "auto"
    kwargs = {"enforce_eager": vllm_cfg.get("enforce_eager", True), **memory, **drafter.vllm_kwargs}
    return DrafterSpec(**{**vars(drafter), **shared, "address": address, "vllm_kwargs": kwargs})
