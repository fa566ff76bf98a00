# SPDX-License-Identifier: Apache-2.0
"""A drafter's worker for a CPU, alone in its file as `cpu_worker.py` is."""

from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_specrollout.remote.drafter.shadow_worker import ShadowWorkerMixin


class ShadowCPUWorker(ShadowWorkerMixin, CPUWorker):
    """vLLM's CPU worker, for shadows."""
