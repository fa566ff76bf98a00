# SPDX-License-Identifier: Apache-2.0
"""A drafter's vLLM worker for a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from nemo_specrollout.remote.drafter.shadow_worker import ShadowWorkerMixin


class ShadowGPUWorker(ShadowWorkerMixin, Worker):
    """vLLM's GPU worker, with shadow sequences as its requests."""
