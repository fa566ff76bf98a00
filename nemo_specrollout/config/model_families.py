# SPDX-License-Identifier: Apache-2.0
"""Tells how speculative decoding works for a family of models or an option of a run, from `model_families.yaml`.

A model is recognized by its name or its config.json alone, so transformers is not needed.
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
"""Words in the names that transformers' configs give to types of layers without a recurrent state."""
_STATE_SIZES = ("ssm_state_size", "mamba_d_state", "state_size", "linear_num_value_heads", "conv_L_cache")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")

NEWEST_FAMILY = (0, 32, 0)
"""First version of vLLM to which the column `tested` of the tables applies. The column `older` applies to earlier versions."""
NOT_TRIED = "not tried"

Row = dict[str, Any]
"""A row of a table in `model_families.yaml`.

It has a name, the texts `drafts`, `tested` and `older`, and patterns for the configs to which the row applies.
"""


@cache
def _tables() -> dict[str, list[Row]]:
    """Returns the two tables of `model_families.yaml` under the keys `families` and `options`, each as a list of rows."""
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))  # type: ignore[return-value]


def all_families() -> list[Row]:
    """Returns the rows of all families of models in `model_families.yaml`."""
    return _tables()["families"]


def all_options() -> list[Row]:
    """Returns the rows of all options of a run in `model_families.yaml`."""
    return _tables()["options"]


def families_of(model: str, config: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of the families to which a model belongs. The list is empty if no family is known.

    `config` is the model's config.json. If it is empty, the model is recognized by its name `model`. The family `dense` is for
    models without special layers, so it is only returned if the model belongs to no other family.
    """
    names = [str(block.get("model_type", "")) for block in _blocks(config)] if config else [model]
    rows = [row for row in all_families() if any(re.search(row["match"], name.lower()) for name in names)]
    return [row for row in rows if row["name"] != "dense" or len(rows) == 1]


def options_of(tree: Tree) -> list[Row]:
    """Returns the rows of those options of `model_families.yaml` that are on in a config."""
    return [row for row in all_options() if any(_begins(at(tree, path), value) for path, value in _fields(row))]


def row_in_words(row: Row, version: str | None) -> str:
    """Returns a sentence about how drafts work for the family or option of `row`, and how this was tested.

    `version` is the version of vLLM, or None if it is not known.
    """
    numbers = None if version is None else version_numbers(version)
    is_older = numbers is not None and numbers < NEWEST_FAMILY
    tested = row.get("older", NOT_TRIED) if is_older else row["tested"]
    with_version = f" with vLLM before {'.'.join(map(str, NEWEST_FAMILY[:2]))}" if is_older else ""
    return f"{row['name']}: {row['drafts']} (tested{with_version}: {tested})"


def _fields(row: Row) -> Iterable[tuple[str, str]]:
    """Returns the settings that turn on the option of `row`, as pairs of a path in the config and the beginning of a value.

    The option is on if the value at one of the paths begins like this.
    """
    return row.get("fields", {}).items()


def _begins(value: Any, beginning: str) -> bool:
    return str(value).lower().startswith(beginning)


def recurrent_layers(config: Mapping[str, Any]) -> str | None:
    """Returns the entry of a config.json which shows that a model has recurrent layers, or None if it has none.

    An example is `layer_types: linear_attention`. Recurrent layers, such as Mamba or the gated delta rule, keep a state for
    each request.
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
    """Yields a config.json. If its model has several modalities, also yields its block about the language model."""
    yield config
    for name in _INNER:
        if isinstance(inner := config.get(name), Mapping):
            yield from _blocks(inner)
