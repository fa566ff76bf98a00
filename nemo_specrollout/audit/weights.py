# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint of the policy version that sampled a row, and loads it as a transformers model."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_specrollout.audit.recorded_run import RecordedRun
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.model_folder import tensor_files, tensor_shapes
from nemo_specrollout.storage.policy_checkpoint import hf_folder

_IN_MEMORY = 2
"""Number of policy versions that are in memory at a time. It is two because weights may change while a row is generated."""


class Weights:
    """Finds and loads the weights of a run's policy versions.

    Each policy version becomes two models. One computes in the engine's precision. The other has the same weight values, but
    computes in a finer precision.
    """

    def __init__(self, run: RecordedRun, given: Mapping[int, Path], device: str) -> None:
        """Saves where to find weights, but does not load any yet.

        Args:
            run: the run, whose checkpoints have the weights.
            given: folders with weights by policy version. They take precedence over the run's checkpoints.
            device: name of the torch device that gets the models.
        """
        self._run = run
        self._given = given
        self._device = device
        self._policies: dict[tuple[str, int], tuple[Any, Any]] = {}
        """The coarse and the fine model of each policy version in memory, by dtype and version, in the order of loading."""

    def folder(self, version: int) -> str:
        """Returns the Hugging Face folder of a policy version. For version 0 it may be the model's name on the Hub instead.

        Raises ValueError with the reason and a fix if there is no such folder.
        """
        if version in self._given:
            return str(hf_folder(self._given[version]))
        if version == 0:
            return str(hf_folder(Path(self._run.model))) if Path(self._run.model).is_dir() else self._run.model
        if self._run.checkpoints is None:
            raise ValueError("the run keeps no checkpoints; set checkpointing.enabled and checkpointing.save_period")
        checkpoint = self._run.checkpoints / f"step_{version + self._run.checkpoint_offset}"
        if not checkpoint.is_dir():
            raise ValueError(
                f"{checkpoint} is missing; a checkpoint is kept after each checkpointing.save_period steps, "
                "or name the weights by --weights"
            )
        return str(hf_folder(checkpoint))

    def is_known(self, version: int) -> bool:
        """Tells whether the weights of a policy version are available."""
        try:
            self.folder(version)
        except ValueError:
            return False
        return True

    def coarse_model(self, engine_dtype: str, version: int) -> Any:
        """Returns a model with the weights of policy version `version` that computes in the engine's precision.

        Raises ValueError if these weights are not available or cannot be loaded, and ConfigError if the device has too little
        memory.
        """
        return self._policy(engine_dtype, version)[0]

    def fine_model(self, engine_dtype: str, version: int) -> Any:
        """Returns a model with the weights of policy version `version` that computes in a finer precision than the engine.

        The weights have the same values as in the engine's precision. Raises the same errors as `coarse_model`.
        """
        return self._policy(engine_dtype, version)[1]

    def _policy(self, engine_dtype: str, version: int) -> tuple[Any, Any]:
        if (engine_dtype, version) not in self._policies:
            folder = self.folder(version)
            while len(self._policies) >= _IN_MEMORY:  # before the next one needs the memory
                del self._policies[next(iter(self._policies))]
            self._policies[engine_dtype, version] = self._loaded(folder, engine_dtype)
        return self._policies[engine_dtype, version]

    def _loaded(self, folder: str, engine_dtype: str) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        coarse_dtype = getattr(torch, engine_dtype)
        fine_dtype = torch.float64 if coarse_dtype is torch.float32 else torch.float32
        num_parameters = sum(map(math.prod, tensor_shapes(tensor_files(Path(folder))).values()))
        needed = num_parameters * (coarse_dtype.itemsize + fine_dtype.itemsize)
        if needed > (free := _free_bytes(self._device)):
            raise ConfigError(_too_large(folder, self._device, needed, free))
        try:
            coarse = AutoModelForCausalLM.from_pretrained(folder, dtype=coarse_dtype, local_files_only=True).eval()
            return coarse.to(self._device), copy.deepcopy(coarse).to(self._device, fine_dtype)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigError(_too_large(folder, self._device, needed, free)) from error
        except Exception as error:  # transformers has many errors of its own
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{folder} cannot be loaded ({reason})") from error


def _free_bytes(device: str) -> float:
    import torch

    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if Path("/proc/meminfo").is_file() else []
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "inf")
    return 1024 * float(kib)


def _too_large(folder: str, device: str, needed: float, free: float) -> str:
    return (
        f"--device: the policy in {folder} needs {needed / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free; "
        "take another device, or a machine with more memory"
    )
