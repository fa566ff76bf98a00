# SPDX-License-Identifier: Apache-2.0
"""Configs of EAGLE-3 heads in the layout of `speculators`: for a new head, and for a folder of either layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from nemo_specrollout.training.head.head_facts import HeadFacts

_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Fields of the policy's config that a new head's layer takes over."""
_NOT_OF_THE_LAYER = ("architectures", "model_type", "auto_map", "eagle_config", "torch_dtype", "dtype")
"""Fields of a head's config that do not describe its layer."""
_CONFIG_CLASSES: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
_DEFAULT_DRAFTS = 3
"""`speculative_tokens` of a saved config. vLLM uses the number only if the user gives none."""


def new_head_config(
    policy_folder: Path, layer_ids: Sequence[int], draft_vocab_size: int, device: torch.device | str
) -> Eagle3SpeculatorConfig:
    """Returns the config of a head with one layer, which has the shape of the policy's layers."""
    policy = AutoConfig.from_pretrained(policy_folder)
    policy = getattr(policy, "text_config", policy)
    config_class = _CONFIG_CLASSES["qwen3" if policy.model_type.startswith("qwen3") else "llama"]
    values = {name: getattr(policy, name) for name in _COPIED if getattr(policy, name, None) is not None}
    values.setdefault("head_dim", policy.hidden_size // policy.num_attention_heads)
    layer = config_class(num_hidden_layers=1, tie_word_embeddings=False, attention_bias=False, **values)
    return _eagle3_config(layer, policy_folder, device, layer_ids=layer_ids, draft_vocab_size=draft_vocab_size)


def stored_head_config(facts: HeadFacts, policy_folder: Path, device: torch.device | str) -> Eagle3SpeculatorConfig:
    """Returns the config of the head in a folder of either layout."""
    config = json.loads((facts.folder / "config.json").read_text())
    values = config if facts.is_flat else config["transformer_layer_config"]
    layer = _CONFIG_CLASSES[facts.model_type](**{k: v for k, v in values.items() if k not in _NOT_OF_THE_LAYER})
    return _eagle3_config(
        layer, policy_folder, device,
        layer_ids=facts.layer_ids, draft_vocab_size=facts.draft_vocab_size, **facts.flags,
    )  # fmt: skip


def _eagle3_config(
    layer: PretrainedConfig,
    policy_folder: Path,
    device: torch.device | str,
    *,
    layer_ids: Sequence[int],
    draft_vocab_size: int,
    norm_before_residual: bool = False,
    **flags: Any,
) -> Eagle3SpeculatorConfig:
    layer._attn_implementation = "simple_flex_attention" if torch.device(device).type == "cuda" else "sdpa"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=_DEFAULT_DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(policy_folder.absolute())),
        ),
        norm_before_residual=norm_before_residual,
        **flags,
    )
