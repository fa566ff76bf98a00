# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint of the policy version that made a row, and loads it as a transformers model."""

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
"""Number of policy versions that are in memory at a time. A row during which the weights changed needs two at once."""


class Weights:
    """Finds and loads the weights of a run's policy versions.

    Each policy version is loaded twice, once in the engine's precision, and once with the same numbers in a finer one.
    """

    def __init__(self, run: RecordedRun, given: Mapping[int, Path], device: str) -> None:
        """`given` has folders by policy version, which take precedence over the run's own. `device` has the models."""
        self._run = run
        self._given = given
        self._device = device
        self._policies: dict[tuple[str, int], tuple[Any, Any]] = {}
        """Both models of the policy versions in memory, by dtype and version, the oldest first."""

    def folder(self, version: int) -> str:
        """Returns the Hugging Face folder of a policy version, or the name of the run's first policy on the Hub.

        Raises ValueError with the reason and a fix if there is none.
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
        """Returns whether the weights of a policy version are available."""
        try:
            self.folder(version)
        except ValueError:
            return False
        return True

    def coarse_model(self, engine_dtype: str, version: int) -> Any:
        """Returns the model of a policy version in the precision of the engine. Raises ValueError and ConfigError."""
        return self._policy(engine_dtype, version)[0]

    def fine_model(self, engine_dtype: str, version: int) -> Any:
        """Returns the same model with the same weight values in a finer precision. Raises ValueError and ConfigError."""
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
