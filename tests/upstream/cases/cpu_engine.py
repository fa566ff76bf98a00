# SPDX-License-Identifier: Apache-2.0
"""Imported before vllm: the environment of an engine of vLLM's own on this CPU, and the models of this repository."""

import os
from pathlib import Path

os.environ.update(
    NEMO_SPECROLLOUT_V2_ON_CPU="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_USE_V2_MODEL_RUNNER="1",
)
MODELS = Path(__file__).resolve().parents[3] / "examples" / "models"
