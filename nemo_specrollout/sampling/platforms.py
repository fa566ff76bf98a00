# SPDX-License-Identifier: Apache-2.0
"""Chooses vLLM's worker class and the modules of kernels for the type of device on which an engine runs.

On a GPU, they are vLLM's GPU worker and this package's Triton kernels. Another platform, such as the laboratory's CPU,
registers its own worker class and its own kernels before an engine starts.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""Full name of vLLM's worker class for a GPU."""


class KernelModule(StrEnum):
    """The full names of this package's modules of Triton kernels.

    They are not imported directly, because another platform may have registered other modules in their place. `kernels_for`
    imports the right module when the type of the device is known.
    """

    ROW_SAMPLING = "nemo_specrollout.generation.step.row_sampling_triton"
    """Kernels that sample from rows of logits, accept draft tokens and compute log-probs.

    `generation/step/row_sampling.py` launches them.
    """
    EQUALITY = "nemo_specrollout.sampling.equality_triton"
    """Kernel that accepts the draft tokens that equal the sampled tokens. `sampling/equality.py` launches it."""
    STEP = "nemo_specrollout.drafters.step_triton"
    """Kernels of the draft board, which chooses among drafters, and of the indexes in which text drafters look up tokens.

    `drafters/board.py` and `drafters/device_index.py` launch them.
    """
    AHEAD = "nemo_specrollout.drafters.ahead_triton"
    """Kernel that drafts from texts which engines have decoded early (`run_ahead`). `drafters/ahead.py` launches it."""
    DRAFT_SAMPLING = "nemo_specrollout.generation.drafting.draft_sampling_triton"
    """Kernels that sample draft tokens with the request's own noise. `generation/drafting/draft_sampling.py` launches them."""
    DRAFT_STREAM = "nemo_specrollout.remote.verifier.draft_stream_triton"
    """Kernel that finds the draft tokens of remote drafters for requests. `remote/verifier/draft_stream.py` launches it."""


@dataclass(frozen=True)
class Platform:
    """The worker class and the kernels for devices of one type other than a GPU."""

    worker: str
    """Full name of vLLM's worker class."""
    kernels: Mapping[KernelModule, str]
    """Full names of the modules that take the place of the modules of Triton kernels. They have the same functions."""


_platforms: dict[str, Platform] = {}
"""The registered platforms, by torch's name for the type of their devices, such as `cpu`."""


def register_platform(device_type: str, platform: Platform) -> None:
    """Registers a platform. Engines that this process starts on devices of `device_type` use its worker class and kernels."""
    _platforms[device_type] = platform


def kernels_for(device_type: str, module: KernelModule) -> ModuleType:
    """Imports and returns a module of kernels for devices of `device_type`.

    It is `module` itself, or the module that a platform has registered in its place.
    """
    platform = _platforms.get(device_type)
    return importlib.import_module(module if platform is None else platform.kernels[module])


def native_worker(device_type: str) -> Any:
    """Returns vLLM's worker class for devices of `device_type`."""
    platform = _platforms.get(device_type)
    module, _, name = (GPU_WORKER if platform is None else platform.worker).rpartition(".")
    return getattr(importlib.import_module(module), name)
