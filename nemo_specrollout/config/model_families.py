# SPDX-License-Identifier: Apache-2.0
"""Families of policies, and what drafts mean for them; without transformers. The table is `model_families.yaml`."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
_STATELESS = ("attention", "moe", "mlp", "dense", "sparse")
"""Words in the names of layers without a recurrent state, in transformers' lists of layer types."""
_STATE_SIZES = ("ssm_state_size", "mamba_d_state", "state_size", "linear_num_value_heads", "conv_L_cache")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of `families` and `options`."""
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))  # type: ignore[return-value]


def families_of(model: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a policy's families, by its config.json if that is known, else by its name; none if unknown."""
    names = [str(block.get("model_type", "")) for block in _blocks(config)] if config else [model]
    rows = [row for row in table()["families"] if any(re.search(row["match"], name.lower()) for name in names)]
    return [row for row in rows if row["name"] != "dense" or len(rows) == 1]


def recurrent_layers(config: Mapping[str, Any]) -> str | None:
    """Returns the entry of a config.json that tells of recurrent layers, such as `layer_types: linear_attention`; else None.

    Such layers (Mamba, gated delta rule, short convolution) keep a state for each request.
    """
    for block in _blocks(config):
        for name in _LAYER_LISTS:
            found = block.get(name)
            kinds = found if isinstance(found, list | tuple) else ["mamba"] * ("M" in str(found or ""))
            for kind in kinds:
                if "linear" in str(kind) or not any(word in str(kind) for word in _STATELESS):
                    return f"{name}: {kind}"
        sizes = () if any(block.get(name) for name in _LAYER_LISTS) else _STATE_SIZES
        for name in sizes:
            if block.get(name):
                return f"{name}: {block[name]}"
    return None


def _blocks(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a config, and the config of its language model if it has several modalities."""
    yield config
    for name in _INNER:
        if isinstance(inner := config.get(name), Mapping):
            yield from _blocks(inner)
