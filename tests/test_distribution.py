# SPDX-License-Identifier: Apache-2.0
"""Exactness in distribution: with drafts, the first three tokens follow the model's exact marginals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RandomDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytestmark = pytest.mark.integration

PROMPT = [0, 11, 23, 8, 30]
NUM_REQUESTS = 6000


def exact_marginals(model_folder: Path) -> list[np.ndarray]:
    """Returns P(token) at the first three output positions, summed over all prefixes."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def next_token(prefixes: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = [model(chunk).logits[:, -1] for chunk in prefixes.split(1024)]
        return torch.cat(logits).double().softmax(-1)

    prompt = torch.tensor([PROMPT])
    first = next_token(prompt)[0]
    vocabulary = torch.arange(len(first))
    after_one = next_token(torch.cat([prompt.expand(len(first), -1), vocabulary[:, None]], 1))
    pairs = torch.cartesian_prod(vocabulary, vocabulary)
    after_two = next_token(torch.cat([prompt.expand(len(pairs), -1), pairs], 1))
    joint = first[:, None] * after_one
    return [first.numpy(), joint.sum(0).numpy(), (joint.flatten()[:, None] * after_two).sum(0).numpy()]


def p_value(tokens: list[int], probabilities: np.ndarray) -> float:
    """Returns the chi-square p-value of the counts against the probabilities, with rare tokens pooled."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities / probabilities.sum() * len(tokens)
    common = expected >= 5
    pooled = [np.append(x[common], x[~common].sum()) for x in (counts, expected)]
    return float(chisquare(pooled[0], pooled[1]).pvalue)


def test_first_three_tokens_follow_the_exact_marginals(
    start_engine: Callable[..., RolloutEngine], tiny_model: Path
) -> None:
    block = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), RandomDrafterConfig()), budget=RANDOM)
    engine = start_engine(tiny_model, block)
    asked = [RolloutRequest(PROMPT, 0, sample) for sample in range(NUM_REQUESTS)]
    rollouts = engine.generate(asked, max_tokens=3, stop_token_ids=[], ignore_eos=True)
    assert engine.stats().num_accepted > 100, "too few accepted drafts for this test to show anything"
    for position, probabilities in enumerate(exact_marginals(tiny_model)):
        tokens = [r.token_ids[position] for r in rollouts]
        assert p_value(tokens, probabilities) > 1e-4, f"output position {position}"
