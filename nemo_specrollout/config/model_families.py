# SPDX-License-Identifier: Apache-2.0
"""Families of models and options of a run, and what drafts mean for them. The tables are `model_families.yaml`.

Models are told apart by their names or their config.json alone, so transformers is not needed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_specrollout.config.nemo_rl_tree import Tree, at
from nemo_specrollout.installed.versions import version_numbers

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
_STATELESS = ("attention", "moe", "mlp", "dense", "sparse")
"""Words in the names of layers without a recurrent state, in transformers' lists of layer types."""
_STATE_SIZES = ("ssm_state_size", "mamba_d_state", "state_size", "linear_num_value_heads", "conv_L_cache")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")

NEWEST_FAMILY = (0, 32, 0)
"""First version of vLLM whose V2 model runner the column `tested` is about. The column `older` is about earlier versions."""
NOT_TRIED = "not tried"

Row = dict[str, Any]
"""A row of the tables. It has a name, the texts `drafts`, `tested` and `older`, and the patterns by which a config fits."""


@cache
def _tables() -> dict[str, list[Row]]:
    """Returns the rows of the tables `families` and `options`."""
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))  # type: ignore[return-value]


def all_families() -> list[Row]:
    """Returns the rows of all families."""
    return _tables()["families"]


def all_options() -> list[Row]:
    """Returns the rows of all options."""
    return _tables()["options"]


def families_of(model: str, config: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of the families that a model belongs to. The list is empty if none is known.

    The model is recognized by its config.json, or by its name if `config` is empty. A dense model has no special layers, so
    the family `dense` is returned only if the model belongs to no other family.
    """
    names = [str(block.get("model_type", "")) for block in _blocks(config)] if config else [model]
    rows = [row for row in all_families() if any(re.search(row["match"], name.lower()) for name in names)]
    return [row for row in rows if row["name"] != "dense" or len(rows) == 1]


def options_of(tree: Tree) -> list[Row]:
    """Returns the rows of the options that are on in a config."""
    return [row for row in all_options() if any(_begins(at(tree, path), value) for path, value in _fields(row))]


def row_in_words(row: Row, version: str | None) -> str:
    """Returns what a row says of drafts with a version of vLLM, which may be unknown (None)."""
    numbers = None if version is None else version_numbers(version)
    is_older = numbers is not None and numbers < NEWEST_FAMILY
    tested = row.get("older", NOT_TRIED) if is_older else row["tested"]
    with_version = f" with vLLM before {'.'.join(map(str, NEWEST_FAMILY[:2]))}" if is_older else ""
    return f"{row['name']}: {row['drafts']} (tested{with_version}: {tested})"


def _fields(row: Row) -> Iterable[tuple[str, str]]:
    """Returns pairs of a path in a config and the beginning of the values there that turn the option on."""
    return row.get("fields", {}).items()


def _begins(value: Any, beginning: str) -> bool:
    return str(value).lower().startswith(beginning)


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
