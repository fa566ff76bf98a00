# SPDX-License-Identifier: Apache-2.0
"""A random Qwen3 of two layers, small enough to be made and loaded in a second."""

from pathlib import Path

VOCABULARY = 96
LONGEST_TEXT = 512
# Spreads the logits, so that samples differ from one another and yet drafts come true at times.
_SHARPNESS = 12.0


def make_tiny_model(folder: Path, seed: int = 0) -> None:
    """Writes config and weights, no tokenizer, to `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=LONGEST_TEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(_SHARPNESS)
    model.save_pretrained(folder)
