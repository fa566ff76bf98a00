# SPDX-License-Identifier: Apache-2.0
"""Shapes of real models, as Hugging Face configs. vLLM makes random weights for them."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB_SIZE = 151_936
"""Vocabulary size of every Qwen3."""
_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
    "attention_bias": False,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-30B-A3B": {
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
    "tiny experts": {
        **_EXPERTS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}
"""The options of the config in which the models differ, by name of the model. The tiny models are for rehearsals."""


def hf_config(name: str) -> dict[str, Any]:
    """Returns the config of the model with this name in Hugging Face's format."""
    return {**_COMMON, **GEOMETRIES[name]}


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """Yields a folder that contains only the config of the model with this name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(name)), encoding="utf-8")
        yield Path(folder)
