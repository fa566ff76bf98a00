# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker of a CPU engine, in its own module: importing vLLM's CPU worker replaces parts of torch.cuda."""

from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_specrollout.generation import bfloat16_head  # noqa: F401 - registers the quantization method in each process
from nemo_specrollout.generation.vllm_worker import VllmWorkerMixin


class SpecrolloutCPUWorker(VllmWorkerMixin, CPUWorker):
    """vLLM's CPU worker with drafter-invariant sampling."""
