# SPDX-License-Identifier: Apache-2.0
"""Facts about a policy's layers, from its config.json, on which the way of verifying drafts depends; without transformers."""

from collections.abc import Iterator, Mapping
from typing import Any

_ATTENTION = ("attention", "moe", "mlp", "dense", "sparse")
"""Words in the names of layers that keep no recurrent state, in transformers' lists of layer types."""
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
_STATE_SIZES = ("ssm_state_size", "mamba_d_state", "mamba_ssm_dtype", "state_size", "linear_num_value_heads", "conv_L_cache")


def recurrent_layers(config: Mapping[str, Any]) -> str | None:
    """Returns the entry of a config.json that tells of recurrent layers, such as `layer_types: linear_attention`; else None.

    Such layers (Mamba, gated delta rules, short convolutions) keep a state for each request. vLLM plans its rollback after
    rejected drafts on the host.
    """
    for block in _blocks(config):
        for name in _LAYER_LISTS:
            found = block.get(name)
            kinds = list(found) if isinstance(found, list | tuple) else ["mamba"] * ("M" in str(found or ""))
            for kind in kinds:
                if "linear" in str(kind) or not any(word in str(kind) for word in _ATTENTION):
                    return f"{name}: {kind}"
        # A config of transformers lists its layers. Others only give the size of the state.
        if not any(block.get(name) for name in _LAYER_LISTS):
            for name in _STATE_SIZES:
                if block.get(name):
                    return f"{name}: {block[name]}"
    return None


def _blocks(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the config and, for a policy of several modalities, the config of its language model."""
    yield config
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(inner := config.get(name), Mapping):
            yield from _blocks(inner)
