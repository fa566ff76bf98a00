# SPDX-License-Identifier: Apache-2.0
"""The draft model that is distilled from a policy: its layers, what it is measured by, and a training of a few steps."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lab.policies.distilled_draft import (
    HELD_OUT,
    NUM_POSITIONS,
    TEXT_TOKENS,
    TEXTS,
    DraftSettings,
    acceptance,
    kept_layers,
    same_tokens,
    train,
)

SETTINGS = DraftSettings(layers=2, steps=3, texts=HELD_OUT + 12, batch_tokens=128, warm_up_steps=1, head_share=0.5)


@pytest.mark.unit
def test_layers_are_kept_in_even_steps_from_the_first_to_the_last() -> None:
    assert kept_layers(30, 4) == [0, 10, 19, 29] and kept_layers(5, 5) == [0, 1, 2, 3, 4] and kept_layers(30, 1) == [0]
    with pytest.raises(ValueError, match="layers is 6, but the policy has 5; choose 1 to 5"):
        kept_layers(5, 6)


@pytest.mark.unit
def test_two_distributions_agree_as_often_as_under_shared_gumbel_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_V, draft_V = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.2, 0.4, 0.3, 0.1])
    num = 40_000
    token_N = torch.multinomial(policy_V, num, replacement=True, generator=generator)
    policy_NV, draft_NV = policy_V.log().expand(num, 4), draft_V.log().expand(num, 4)
    assert same_tokens(policy_NV, policy_NV + 3.0, token_N, generator).all()
    found = same_tokens(policy_NV, draft_NV, token_N, generator).float().mean()
    # Both have their largest sum at i if the noise at i beats that at every j by the larger of two distances.
    ratios_VV = torch.maximum(policy_V / policy_V[:, None], draft_V / draft_V[:, None])
    assert float(found) == pytest.approx(float((1 / ratios_VV.sum(1)).sum()), abs=0.01)


@pytest.fixture
def out(tiny_llama: Path, tmp_path: Path) -> Path:
    """A folder of a draft model with texts that the policy is said to have sampled."""
    generator = torch.Generator().manual_seed(1)
    texts = [(torch.randint(96, (24,), generator=generator).tolist(), 8) for _ in range(SETTINGS.texts)]
    folder = tmp_path / "draft"
    folder.mkdir()
    key = {"base": str(tiny_llama), "seed": 0, "texts": SETTINGS.texts, "tokens": TEXT_TOKENS}
    (folder / TEXTS).write_text(json.dumps({"key": key, "texts": texts}))
    return folder


@pytest.mark.unit
def test_a_seed_gives_one_draft_model_with_the_policy_s_embedding(tiny_llama: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = []
    for _ in range(2):
        train(tiny_llama, out, SETTINGS, 2, Console(quiet=True))
        found.append(load_file(out / "model.safetensors"))
    first, second = found
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    policy = load_file(tiny_llama / "model.safetensors")
    embedding, layer = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[embedding], policy[embedding].bfloat16())
    last = policy["model.layers.4.mlp.up_proj.weight"].bfloat16()
    assert not torch.equal(first[layer], last) and torch.allclose(first[layer], last, atol=0.05)
    card = json.loads((out / "card.json").read_text())
    assert card["steps"] == 3 and card["tokens"] > 0 and len(card["acceptance"]) == NUM_POSITIONS
    assert (out / "tokenizer.json").read_text() == (tiny_llama / "tokenizer.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 2
    texts = json.loads((out / TEXTS).read_text())["texts"]
    assert acceptance(model, model, texts[:4], seed=0) == [1.0] * NUM_POSITIONS
