# SPDX-License-Identifier: Apache-2.0
"""Platforms other than a GPU. Each of them registers its vLLM worker class and its own implementations of our kernels.

A GPU runs vLLM's GPU worker and our Triton kernels, and has no entry here. The plugin of another platform registers that
platform before an engine starts.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""vLLM's worker for a GPU."""


class KernelModule(StrEnum):
    """Our modules of Triton kernels, by their full names.

    `kernels_for` loads a module by name once the type of the device is known, because a platform may have registered another
    module in its place. The laboratory does so for a CPU.
    """

    ROW_SAMPLING = "nemo_specrollout.generation.step.row_sampling_triton"
    """Kernels that sample rows, accept drafts and compute log-probs. `generation/step/row_sampling.py` launches them."""
    EQUALITY = "nemo_specrollout.sampling.equality_triton"
    """The kernel that accepts drafts which equal the sampled tokens. `sampling/equality.py` launches it."""
    STEP = "nemo_specrollout.drafters.step_triton"
    """Kernels of the draft board and the context indexes. `drafters/board.py` and `drafters/device_index.py` launch them."""
    AHEAD = "nemo_specrollout.drafters.ahead_triton"
    """The kernel that drafts from texts made ahead. `drafters/ahead.py` launches it."""
    DRAFT_SAMPLING = "nemo_specrollout.generation.drafting.draft_sampling_triton"
    """Kernels that sample drafts with shared noise. `generation/drafting/draft_sampling.py` launches them."""
    DRAFT_STREAM = "nemo_specrollout.remote.verifier.draft_stream_triton"
    """The kernel that finds drafts of remote drafters for each request. `remote/verifier/draft_stream.py` launches it."""


@dataclass(frozen=True)
class Platform:
    """Names of the code that engines run on devices of one type."""

    worker: str
    """Full name of vLLM's worker class."""
    kernels: Mapping[KernelModule, str]
    """For each of our modules of Triton kernels, the full name of a module that has the same functions."""


_platforms: dict[str, Platform] = {}
"""Registered platforms by the type of their devices, as torch names it."""


def register_platform(device_type: str, platform: Platform) -> None:
    """Makes engines of this process on devices of `device_type` use a platform's vLLM worker and kernels."""
    _platforms[device_type] = platform


def kernels_for(device_type: str, module: KernelModule) -> ModuleType:
    """Returns our module of Triton kernels, or the module that the platform of `device_type` has registered in its place."""
    platform = _platforms.get(device_type)
    return importlib.import_module(module if platform is None else platform.kernels[module])


def native_worker(device_type: str) -> Any:
    """Returns vLLM's worker class for devices of `device_type`."""
    platform = _platforms.get(device_type)
    module, _, name = (GPU_WORKER if platform is None else platform.worker).rpartition(".")
    return getattr(importlib.import_module(module), name)
