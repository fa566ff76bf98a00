# SPDX-License-Identifier: Apache-2.0
"""Log-probs of a run's rows from weights alone, by Hugging Face's forward pass: no engine, no cache and none of our code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3ForCausalLM


def policies_of_updates(weights: Path, policy: Path) -> list[Qwen3ForCausalLM]:
    """The policy after each update, the first one first. `weights` is what the CPU host kept, `policy` has the config."""
    files = sorted(weights.glob("*.safetensors"), key=lambda file: int(file.stem))
    return [_policy(load_file(file), policy) for file in files]


def logprob_gaps(policies: Sequence[Qwen3ForCausalLM], row: Mapping[str, Any]) -> list[float]:
    """For each policy, the largest difference between its log-probs of a row's response and the engine's, nats.

    `row` is a line of NeMo-RL's log of a training batch, in which every value is a list in a list.
    """
    (length,) = row["input_lengths"] if isinstance(row["input_lengths"], list) else (row["input_lengths"],)
    tokens_T = torch.tensor(row["token_ids"][0][:length])
    engine_T = torch.tensor(row["generation_logprobs"][0][:length])
    is_response_T = torch.tensor(row["token_loss_mask"][0][:length]) > 0
    gaps = []
    for policy in policies:
        with torch.no_grad():
            logprobs_TV = policy(tokens_T[None]).logits[0, :-1].float().log_softmax(-1)
        own_T = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
        gaps.append(float((own_T - engine_T[1:])[is_response_T[1:]].abs().max()))
    return gaps


def _policy(named: Mapping[str, torch.Tensor], folder: Path) -> Qwen3ForCausalLM:
    config = AutoConfig.from_pretrained(folder)
    policy = Qwen3ForCausalLM(config).float().eval()
    heads = [config.head_dim * number for number in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    tensors = {}
    for name, tensor in named.items():
        for joined, parts, sizes in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj"), heads),
            ("gate_up_proj", ("gate_proj", "up_proj"), [config.intermediate_size] * 2),
        ):
            if joined in name:
                pieces = zip(parts, tensor.split(sizes), strict=True)
                tensors |= {name.replace(joined, part): piece for part, piece in pieces}
                break
        else:
            tensors[name] = tensor
    policy.load_state_dict({name: tensors[name][: len(own)] for name, own in policy.state_dict().items()})
    return policy
