# SPDX-License-Identifier: Apache-2.0
"""A small random policy, and random DFlash and DSpark drafters for it, in the layouts that vLLM loads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from conftest import STEP_ADDER
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

MASK = 95
"""Token at positions that are not drafted yet."""
LAYER_IDS = (0, 2)
"""Layers of the policy whose outputs the drafters read."""
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip


def save_block_policy(folder: Path) -> None:
    """Saves a policy whose next token depends half on the last token and half on nothing.

    So a drafter that knows no text is sometimes right, if it draws the noise of the right position.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **_SIZES))
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.copy_(torch.randn(64) + torch.randn(96, 64))
        table[MASK] = table.mean(0)
        model.lm_head.weight.mul_(3.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STEP_ADDER / name, folder / name)


def save_dflash(folder: Path, **changes: Any) -> Path:
    """Saves a random DFlash of two layers, which shares the policy's embedding and LM head; `changes` go to its config."""
    known = {"mask_token_id": MASK, "target_layer_ids": list(LAYER_IDS)}
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": known, "block_size": 8, **changes}
    return _save(folder, config, _backbone())


def save_dspark(folder: Path, policy: Path, num_tokens: int = 96, **changes: Any) -> Path:
    """Saves a random DSpark with a confidence head, in which only the Markov head knows the last token.

    It drafts the last `num_tokens` tokens of the vocabulary.
    """
    of_policy = load_file(policy / "model.safetensors")
    table, lm_head = of_policy["model.embed_tokens.weight"].float(), of_policy["lm_head.weight"].float()
    tensors = _backbone()
    tensors["embed_tokens.weight"] = table.mean(0).expand(96, 64)
    tensors["norm.weight"] *= 0.7
    tensors["markov_head.markov_w1.weight"] = 0.7 * (table - table.mean(0))
    tensors["markov_head.markov_w2.weight"] = lm_head[-num_tokens:].clone()
    tensors["confidence_head.proj.weight"] = torch.randn(1, 128)
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    if num_tokens < 96:
        tensors["lm_head.weight"] = lm_head[-num_tokens:].clone()
        tensors["d2t"] = torch.full((num_tokens,), 96 - num_tokens)
    config = {
        "architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "target_layer_ids": list(LAYER_IDS), "markov_rank": 64,
        "draft_vocab_size": num_tokens, "enable_confidence_head": True, "confidence_head_with_markov": True,
        "block_size": 8, **changes,
    }  # fmt: skip
    return _save(folder, config, tensors)


def _backbone() -> dict[str, torch.Tensor]:
    """Returns the layers that both drafters have, by their names in checkpoints."""
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **_SIZES))
    tensors = {n: t.detach().clone() for n, t in model.model.state_dict().items() if not n.startswith("embed")}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.3
        if name.endswith("k_norm.weight"):
            tensors[name] = 0.5 + torch.rand(32)
    return tensors | {"fc.weight": 0.1 * torch.randn(64, 64 * len(LAYER_IDS)), "hidden_norm.weight": torch.ones(64)}


def _save(folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    written = {"num_hidden_layers": 2, "model_type": "qwen3", "rms_norm_eps": 1e-6, "dtype": "float32", **_SIZES}
    written["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps({**written, **config}))
    return folder
