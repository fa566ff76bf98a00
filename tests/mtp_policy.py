# SPDX-License-Identifier: Apache-2.0
"""A small random policy with a multi-token prediction head, in the layout of MiMo: a Qwen2 with one more layer."""

import json
import shutil
from pathlib import Path

from conftest import STEP_ADDER


def save_mtp_policy(folder: Path) -> None:
    """Saves a policy whose next token depends mostly on the embedding of the last one.

    The head reads that embedding too, so most of its drafts are right. Fewer are right if its attention or its noise is wrong.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    model, size = Qwen2ForCausalLM(config), config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(5.0)
        model.lm_head.weight.mul_(4.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.1."
    head = {name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    head |= {f"{name}_layernorm.weight": torch.ones(size) for name in ("input", "post_attention")}
    head |= {f"{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
    head["input_proj.weight"] = torch.cat([0.1 * torch.randn(size, size) / size**0.5, torch.eye(size)], dim=1)
    tensors |= {f"model.mtp_layers.0.{name}": t.clone() for name, t in head.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STEP_ADDER / name, folder / name)
