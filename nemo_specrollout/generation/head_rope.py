# SPDX-License-Identifier: Apache-2.0
"""RoPE and longest context of a draft head. vLLM reads both in the head's config, without a look at the policy's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEFAULTS = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}


def layer_config(folder: Path) -> Mapping[str, Any]:
    """Returns the part of a head's config.json that describes its decoder layer; empty if there is no readable file."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config.get("transformer_layer_config") or config


def head_context(folder: Path | None, longest: int) -> int | None:
    """Returns the longest context of the head in `folder`, in tokens; None if it is at least `longest`."""
    context = None if folder is None else layer_config(folder).get("max_position_embeddings")
    return context if context is not None and context < longest else None


def rope_difference(head: Mapping[str, Any], other: Mapping[str, Any], whose: str = "the policy's") -> str:
    """Returns the RoPE parameters of two configs that differ, such as "its rope_theta is 5000.0, the policy's 10000.0".

    The result is empty if none differ, or if the layers of one config differ among themselves.
    """
    mine, theirs = rope_parameters(head), rope_parameters(other)
    if mine is None or theirs is None:
        return ""
    names = [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]
    return ", ".join(f"its {n} is {mine.get(n)}, {whose} {theirs.get(n)}" for n in names)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns RoPE parameters by the names of transformers 5, in whichever layout the config has; None if layers differ."""
    named = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in named.values()):
        return None
    if "type" in named:
        named["rope_type"] = named.pop("type")
    flat = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    return {**_DEFAULTS, **flat, **named}
