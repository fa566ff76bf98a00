# SPDX-License-Identifier: Apache-2.0
"""The block `fastest_of_n` in a NeMo-RL config: what it needs of the engines, and what of them stays where it is."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_traps import (
    GENERATION,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    at,
    generating_gpus,
    size_at,
    stale_kv_field,
)

_TAIL = f"{BLOCK_PATH}.fastest_of_n"
# With these a response cannot be made in parts.
_KEEPS_IN_PLACE = (
    f"{GENERATION}.stop_strings",
    f"{GENERATION}.bad_words",
    f"{VLLM_KWARGS}.enable_return_routed_experts",
)

# NeMo-RL's environments that end each turn at a string, by their names in `env`.
_STOP_AT_STRINGS = ("sliding_puzzle_game", "code", "retriever")


def num_engines(tree: Tree) -> int:
    """Engines of the run."""
    kinds = ("tensor", "pipeline")
    tensor, pipeline = (size_at(tree, f"{VLLM_CFG}.{kind}_parallel_size") for kind in kinds)
    return generating_gpus(tree) // max(tensor * pipeline, 1)


def tail_findings(tree: Tree, block: Mapping[str, Any]) -> Iterator[Finding]:
    """All that is to be said about `block`, which is complete."""
    tail = block["fastest_of_n"]
    if not tail or not tail["enabled"]:
        return
    if at(tree, "cluster") is not None:
        yield from _sizes(tail, num_engines(tree))
    tensor, expert = (size_at(tree, f"{VLLM_CFG}.{kind}_parallel_size") for kind in ("tensor", "expert"))
    if expert > tensor:
        text = (
            f"{expert} with tensor_parallel_size {tensor} and fastest_of_n; vLLM steps such engines all together, and one "
            "that takes turns would hold up the others: remove the block fastest_of_n"
        )
        yield Finding(f"{VLLM_CFG}.expert_parallel_size", text, "error")
    yield from _in_flight(tree)
    for path in _KEEPS_IN_PLACE:
        if value := at(tree, path):
            text = f"{json.dumps(value)} with fastest_of_n; such requests stay in their engine, nothing moves"
            yield Finding(path, text, "warning")
    for name in _STOP_AT_STRINGS:
        if at(tree, f"env.{name}") is not None and _is_used(tree, name):
            text = "its turns end at a string; with fastest_of_n such requests stay in their engine, nothing moves"
            yield Finding(f"env.{name}", text, "warning")
    if at(tree, f"{VLLM_CFG}.expose_http_server"):
        text = "true with fastest_of_n; requests that come through the server stay in their engine"
        yield Finding(f"{VLLM_CFG}.expose_http_server", text, "warning")


def _is_used(tree: Tree, environment: str) -> bool:
    """Returns whether the data name an environment. NeMo-RL's base configs describe environments that no data use."""
    named = [at(tree, f"data.{block}.env_name") for block in ("train", "default", "validation")]
    return environment in named or not any(named)


def _sizes(tail: Mapping[str, Any], engines: int) -> Iterator[Finding]:
    if engines < 2:
        text = "without effect: by the sizes of the cluster there is one engine, and no other to move to"
        yield Finding(_TAIL, text, "warning")
    elif tail["max_racers"] > engines:
        text = f"{tail['max_racers']} racers for {engines} engines; lower it to their number at most"
        yield Finding(f"{_TAIL}.max_racers", text, "error")
    elif len(tail["methods"]) > engines:
        text = f"{len(tail['methods'])} for {engines} engines; the last would never draft: name one for each at most"
        yield Finding(f"{_TAIL}.methods", text, "error")


def _in_flight(tree: Tree) -> Iterator[Finding]:
    field = stale_kv_field(tree)
    if field is not None:
        text = (
            "false with in-flight weight updates and fastest_of_n; after an update a request that moved would go on "
            "from another KV cache than one that stayed: set it to true"
        )
        yield Finding(field, text, "error")
