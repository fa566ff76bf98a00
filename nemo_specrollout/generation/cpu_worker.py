# SPDX-License-Identifier: Apache-2.0
"""Our worker for a CPU. Importing vLLM's CPU worker replaces parts of torch.cuda in the process: only a CPU may name it."""

from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_specrollout.generation import bfloat16_head  # noqa: F401 - vLLM learns of the method in each process
from nemo_specrollout.generation.engine_worker import EngineWorkerMixin


class SpecrolloutCPUWorker(EngineWorkerMixin, CPUWorker):
    """vLLM's CPU worker under drafter-invariant sampling."""
