# SPDX-License-Identifier: Apache-2.0
"""A drafter's vLLM worker for a CPU. Its own module, because importing vLLM's CPU worker changes the process."""

from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_specrollout.remote.drafter.shadow_worker import ShadowWorkerMixin


class ShadowCPUWorker(ShadowWorkerMixin, CPUWorker):
    """vLLM's CPU worker, with shadow sequences as its requests."""
