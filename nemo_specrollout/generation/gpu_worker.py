# SPDX-License-Identifier: Apache-2.0
"""Our worker for a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from nemo_specrollout.generation.engine_worker import EngineWorkerMixin


class SpecrolloutGPUWorker(EngineWorkerMixin, Worker):
    """vLLM's GPU worker under drafter-invariant sampling."""
