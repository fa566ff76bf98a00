# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, hybrids and router replay on an older vLLM, which runs them on V1 unless it is told to use V2."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_model_families_exact import PLAIN, TEXT, requests
from tiny_policies import save_policy

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.local.statistics import count_equal
from nemo_specrollout.config.block import SpecrolloutConfig

pytestmark = [
    pytest.mark.older_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by `make test-oldest`"),
]
MIXED = SpecrolloutConfig(drafters=TEXT, budget=RANDOM)
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 1 << 26}


@pytest.mark.parametrize("family", ["Qwen3-Next", "Nemotron-H", "Granite 4", "Falcon-H1"])
def test_x(family: str, start_engine: Callable[..., RolloutEngine], tmp_path: Path) -> None:
    import older_recurrent

    older_recurrent.install()
    folder = older_recurrent.with_names_of_older_vllm(save_policy(family, tmp_path / "policy"))
    engine, plain = (start_engine(folder, block, max_new_tokens=24, **SMALL) for block in (MIXED, PLAIN))
    print(engine.facts())
    equal = total = 0
    for temperature in (0.0, 1.0):
        both = (e.generate(requests(1)[:3], temperature=temperature) for e in (engine, plain))
        found = count_equal(*both)
        equal, total = equal + found[0], total + found[1]
    stats = engine.stats()
    print("RESULT", family, equal, total, stats.num_accepted, stats.num_proposed)
    assert equal == total
