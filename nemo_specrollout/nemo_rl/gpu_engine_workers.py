# SPDX-License-Identifier: Apache-2.0
"""vLLM workers of a GPU engine under NeMo-RL: our worker with NeMo-RL's worker extension as a direct base."""

from nemo_rl.models.generation.vllm.vllm_backend import (
    VllmInternalWorkerExtension,
    VllmInternalWorkerExtensionWithCheckpointEngine,
)

from nemo_specrollout.generation.vllm_worker import SpecrolloutGPUWorker
from nemo_specrollout.nemo_rl.engine_workers import ExtensionOverrides


class NemoRlGPUWorker(ExtensionOverrides, VllmInternalWorkerExtension, SpecrolloutGPUWorker):
    """Worker that is refitted through NeMo-RL's IPC or collectives."""


class NemoRlCheckpointEngineGPUWorker(
    ExtensionOverrides, VllmInternalWorkerExtensionWithCheckpointEngine, SpecrolloutGPUWorker
):
    """Worker that is refitted through NeMo-RL's checkpoint engine."""
