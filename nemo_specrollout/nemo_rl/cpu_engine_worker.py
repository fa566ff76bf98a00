# SPDX-License-Identifier: Apache-2.0
"""vLLM worker of a CPU engine under NeMo-RL. It imports vLLM's CPU worker, so only CPU engines may import this module."""

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from nemo_specrollout.generation.cpu_worker import SpecrolloutCPUWorker
from nemo_specrollout.nemo_rl.engine_workers import ExtensionOverrides


class NemoRlCPUWorker(ExtensionOverrides, VllmInternalWorkerExtension, SpecrolloutCPUWorker):
    """Our CPU worker with NeMo-RL's worker extension as a direct base."""
