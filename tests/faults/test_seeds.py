# SPDX-License-Identifier: Apache-2.0
"""A user's own `SamplingParams.seed` with a prefill that takes several steps: V1's sampler on a CPU died of it.

V2 computes noise from seed and position, so nothing has to be skipped to get at a later token's noise.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytestmark = pytest.mark.integration


def requests() -> list[RolloutRequest]:
    """Prompts of 300 tokens."""
    return [RolloutRequest([(7 * i + j) % 90 + 5 for j in range(300)], i, 0) for i in range(3)]


@pytest.mark.parametrize("enabled", [True, False], ids=["ours", "stock"])
def test_a_seed_and_a_split_prefill_make_the_same_tokens(
    tiny_model: Path, start_engine: Callable[..., RolloutEngine], enabled: bool
) -> None:
    block = SpecrolloutConfig(enabled=enabled)
    kwargs = {"max_num_seqs": 4, "enable_prefix_caching": False}
    whole = start_engine(tiny_model, block, **kwargs)
    split = start_engine(tiny_model, block, **kwargs, max_num_batched_tokens=64)
    for seed in (5, 6):
        made = [engine.generate(requests(), seed=seed, extra_args=None) for engine in (whole, split)]
        assert [r.token_ids for r in made[0]] == [r.token_ids for r in made[1]]
    before = split.num_steps
    split.generate(requests(), seed=7, extra_args=None, max_tokens=1)
    assert split.num_steps - before > 3 * 300 // 64, "no prefill was split"
