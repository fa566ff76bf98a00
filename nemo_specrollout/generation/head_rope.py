# SPDX-License-Identifier: Apache-2.0
"""RoPE and longest context of a head, beside the policy's: vLLM takes both as they stand in the head's config, unsaid."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_USUAL = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}


def layer_config(folder: Path) -> Mapping[str, Any]:
    """What a head's config.json says of its decoder layer, in either layout; empty if there is none to read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config.get("transformer_layer_config") or config


def head_context(folder: Path | None, longest: int) -> int | None:
    """The longest context, in tokens, that the head of `folder` was made for, if that is less than `longest`."""
    made_for = None if folder is None else layer_config(folder).get("max_position_embeddings")
    return made_for if made_for is not None and made_for < longest else None


def rope_difference(head: Mapping[str, Any], other: Mapping[str, Any], whose: str = "the policy's") -> str:
    """How the RoPE of two configs differs, such as "its rope_theta is 5000.0, the policy's 10000.0"; empty if it does not, or
    if one has several."""
    mine, theirs = rope_parameters(head), rope_parameters(other)
    if mine is None or theirs is None:
        return ""
    names = [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]
    return ", ".join(f"its {n} is {mine.get(n)}, {whose} {theirs.get(n)}" for n in names)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """By the names of transformers 5, in whichever way the config spells them; None if layers differ."""
    named = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in named.values()):
        return None
    if "type" in named:
        named["rope_type"] = named.pop("type")
    flat = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    return {**_USUAL, **flat, **named}
