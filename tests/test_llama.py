# SPDX-License-Identifier: Apache-2.0
"""A small Llama with tied embeddings, like the real model, and a head with a reduced vocabulary, in the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.local.statistics import count_equal
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytestmark = pytest.mark.integration

SUFFIX, NGRAM = (cls(num_slots=1 << 12) for cls in (SuffixDrafterConfig, NgramDrafterConfig))


@pytest.fixture(scope="module")
def head(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained EAGLE-3 head with three auxiliary layers and half of the vocabulary."""
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("llama") / "head"
    save_head(create_head(tiny_llama, draft_token_ids=range(1, 96, 2)), folder)
    return folder


def requests() -> list[RolloutRequest]:
    prompts = [[(7 * i + j) % 90 + 5 for j in range(20)] for i in range(4)]
    return [RolloutRequest(ids, i, s) for i, ids in enumerate(prompts) for s in range(3)]


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}], ids=["T=1", "T=0"])
def test_tokens_equal_those_of_plain_decoding(
    tiny_llama: Path, head: Path, start_engine: Callable[..., RolloutEngine], sampling: dict[str, Any]
) -> None:
    plain = start_engine(tiny_llama, SpecrolloutConfig(drafters=())).generate(requests(), **sampling)
    drafters = (SUFFIX, NGRAM, Eagle3DrafterConfig(model=str(head)))
    engine = start_engine(tiny_llama, SpecrolloutConfig(drafters=drafters, budget=RANDOM))
    equal, total = count_equal(engine.generate(requests(), **sampling), plain)
    assert equal == total > 400, f"{total - equal} of {total} tokens differ"
    assert engine.stats().num_accepted > 0, "no draft was right, so the test shows little"
