# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin with the engines of a module.

Modules share no engine: a further one in a process takes 0.1 s to start, and no test depends on another.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lab.local.engine import RolloutEngine
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import SpecrolloutConfig

KV_CACHE_BYTES = 1 << 26
"""The KV cache of 64 requests of 512 tokens each, for the shipped policy. A module may hold thirty engines."""


@pytest.fixture(scope="module")
def start_engine() -> Iterator[Callable[..., RolloutEngine]]:
    """Starts engines for a model and a `specrollout` block, and closes them after the module's tests."""
    engines: list[RolloutEngine] = []
    gc.collect()
    gc.freeze()  # excludes all imported modules from the collections below

    def start(model: Path, block: SpecrolloutConfig, max_new_tokens: int = 64, **vllm_kwargs: Any) -> RolloutEngine:
        kwargs = {"max_num_seqs": 64, "kv_cache_memory_bytes": KV_CACHE_BYTES, **vllm_kwargs}
        generation = GenerationConfig(
            VllmConfig(max_model_len=512), max_new_tokens, vllm_kwargs=kwargs, specrollout=block
        )
        engines.append(RolloutEngine(model, generation, seed=7))
        return engines[-1]

    yield start
    with mock.patch("gc.collect"):  # each engine would collect garbage three times
        for engine in engines:
            engine.close()
    gc.collect()
