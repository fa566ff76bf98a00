# SPDX-License-Identifier: Apache-2.0
"""Random policies with draft models that agree with them to an adjustable degree, for timing where nothing can be trained.

The draft model is the policy without its upper layers. The upper layers add to the residual stream only a share of what random
layers would add. The smaller this share is, the more often both models sample the same token under the same noise.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

_HEAD_SIZE, _SHARPNESS = 64, 10.0


@dataclass(frozen=True)
class PairShape:
    """Sizes of a policy and its draft model, which is the policy's first `draft_layers` layers.

    `upper_scale` is the factor on what the policy's other layers add to the residual stream.
    """

    hidden: int
    layers: int
    vocabulary: int
    draft_layers: int = 1
    upper_scale: float = 0.2


def make_pair(shape: PairShape, folder: Path, seed: int = 0) -> None:
    """Writes the policy and its draft model to `policy` and `draft` below `folder`."""
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(_config(shape, shape.layers))
    with torch.no_grad():
        for layer in policy.model.layers[shape.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(shape.upper_scale)
            layer.mlp.down_proj.weight.mul_(shape.upper_scale)
        policy.model.norm.weight.mul_(_SHARPNESS)
    draft = Qwen3ForCausalLM(_config(shape, shape.draft_layers))
    draft.load_state_dict({k: v for k, v in policy.state_dict().items() if k in draft.state_dict()})
    policy.save_pretrained(folder / "policy")
    draft.save_pretrained(folder / "draft")


def _config(shape: PairShape, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.hidden // _HEAD_SIZE,
        num_key_value_heads=max(1, shape.hidden // _HEAD_SIZE // 2),
        head_dim=_HEAD_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
