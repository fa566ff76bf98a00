# SPDX-License-Identifier: Apache-2.0
"""Writes down how far each weight update moves the policy of an engine, so that tests see that a run trains."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_rl_cpu.refit import device_id

VARIABLE = "NEMO_RL_CPU_WEIGHTS"
KEPT = "NEMO_RL_CPU_KEPT_WEIGHTS"
"""Variable with a folder for the weights of each update, 0.safetensors and so on, as vLLM names them."""
Weights = dict[str, torch.Tensor]


def measure_updates(vllm_backend: ModuleType) -> None:
    """Each update that NeMo-RL's worker extension ends becomes a line of the file that the variable names."""
    extension = vllm_backend.VllmInternalWorkerExtension
    native = extension._weight_update_lifecycle

    @contextmanager
    def lifecycle(self: Any, transport: Any) -> Iterator[Any]:
        with native(self, transport) as finalize:
            yield finalize
        if path := os.environ.get(VARIABLE):
            _measure(self, Path(path))
        if folder := os.environ.get(KEPT):
            _keep(self, Path(folder))

    extension._weight_update_lifecycle = lifecycle


def _measure(worker: Any, path: Path) -> None:
    """Compares the policy with its first weights and with its last ones; one rank of a tensor-parallel group is enough."""
    from vllm.distributed import get_tensor_model_parallel_rank  # not before vLLM itself asks for it

    if get_tensor_model_parallel_rank() != 0:
        return
    weights = {name: weight.detach().clone() for name, weight in worker.model_runner.model.named_parameters()}
    first, last = getattr(worker, "nemo_rl_cpu_weights", (weights, weights))
    worker.nemo_rl_cpu_weights = (first, weights)
    line = {
        "engine": f"{device_id()} {os.getpid()}",
        "since_first": relative_change(first, weights),
        "since_last": relative_change(last, weights),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _keep(worker: Any, folder: Path) -> None:
    number = getattr(worker, "nemo_rl_cpu_updates", 0)
    worker.nemo_rl_cpu_updates = number + 1
    folder.mkdir(exist_ok=True)
    weights = {name: weight.detach().clone() for name, weight in worker.model_runner.model.named_parameters()}
    unfinished = folder / f"{number}.{os.getpid()}"
    save_file(weights, unfinished)
    unfinished.replace(folder / f"{number}.safetensors")


def relative_change(before: Weights, after: Weights) -> float:
    """Norm of the change of all weights, divided by their norm before.

    A tensor's change of scale is left out: weight decay makes one, though there is nothing to learn.
    """
    change = [_without_scaling(weight.double(), after[name].double()) for name, weight in before.items()]
    return _norm(change) / _norm(list(before.values()))


def _without_scaling(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    square = torch.sum(before * before)
    return after - before * (torch.sum(before * after) / square if square > 0 else 1.0)


def _norm(tensors: list[torch.Tensor]) -> float:
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2 for tensor in tensors]
    return float(torch.stack(squares).sum().sqrt())
