# SPDX-License-Identifier: Apache-2.0
"""Platforms other than a GPU, each of which registers its vLLM worker and its own bodies for our kernels.

A GPU runs vLLM's GPU worker and our Triton kernels, and has no entry here. A platform's plugin registers the platform before
an engine starts.
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

    `kernels_for` loads a module by name once the type of the device is known, because a platform may have registered other
    bodies for it. The laboratory does so for a CPU.
    """

    ROW_SAMPLING = "nemo_specrollout.generation.step.row_sampling_triton"
    """Sample rows, accept drafts and grade tokens. Launched by `generation/step/row_sampling.py`."""
    EQUALITY = "nemo_specrollout.sampling.equality_triton"
    """Accept drafts that equal the sampled tokens. Launched by `sampling/equality.py`."""
    STEP = "nemo_specrollout.drafters.step_triton"
    """Observe, learn and propose, for the draft board and all context indexes. Launched by `drafters/board.py`."""
    AHEAD = "nemo_specrollout.drafters.ahead_triton"
    """Follow the path of each request among its texts. Launched by `drafters/ahead.py`."""
    DRAFT_SAMPLING = "nemo_specrollout.generation.drafting.draft_sampling_triton"
    """Sample drafts with the target's noise. Launched by `generation/drafting/draft_sampling.py`."""
    DRAFT_STREAM = "nemo_specrollout.remote.verifier.draft_stream_triton"
    """Find the drafts of remote drafters that continue each request. Launched by `remote/verifier/draft_stream.py`."""


@dataclass(frozen=True)
class Platform:
    """The code that engines run on devices of one type."""

    worker: str
    """Full name of vLLM's worker class."""
    kernels: Mapping[KernelModule, str]
    """For each of our modules of Triton kernels, the full name of a module that has the same functions."""


_platforms: dict[str, Platform] = {}
"""Registered platforms by the type of their devices, as torch names it."""


def register_platform(device_type: str, platform: Platform) -> None:
    """Makes engines of this process on devices of `device_type` use a platform's worker and kernels."""
    _platforms[device_type] = platform


def kernels_for(device_type: str, module: KernelModule) -> ModuleType:
    """Returns our module of Triton kernels, or what a platform registered in its place."""
    platform = _platforms.get(device_type)
    return importlib.import_module(module if platform is None else platform.kernels[module])


def native_worker(device_type: str) -> Any:
    """Returns vLLM's worker class for the devices of this process."""
    platform = _platforms.get(device_type)
    module, _, name = (GPU_WORKER if platform is None else platform.worker).rpartition(".")
    return getattr(importlib.import_module(module), name)
