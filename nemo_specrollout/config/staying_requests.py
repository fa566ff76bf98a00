# SPDX-License-Identifier: Apache-2.0
"""Finds settings with which a request must stay in its engine, although `fastest_of_n` lets requests move to other engines.

When a request moves, the other engine gets its prompt and response so far as one prompt. So the other engine makes the same
tokens only if nothing depends on where the prompt ends. This module finds settings of a run with which something depends on
that. The function `is_portable` in generation/engine/vllm_requests.py finds such parameters of a single request.
"""

import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    at,
    model_config,
    strings_at,
)

PLUGINS = "vllm.logits_processors"
"""Name of the entry points by which an installed Python package adds a logits processor to every vLLM engine."""
_MAY_COUNT = "a logits processor may count from the end of the prompt, as budgets do"
_LACKS = "an engine that continues a request returns {} of its own tokens only"
WHY_ALL_STAY = {
    "logits_processors": _MAY_COUNT,
    PLUGINS: _MAY_COUNT,
    "watermark_config": "a watermark depends on how many tokens the response has",
    "enable_return_routed_experts": _LACKS.format("the experts"),
    "return_sampling_mask": _LACKS.format("the sampling masks"),
    "rswa_window": "the policy's attention sees all of the prompt, but only a window of the response",
    "canvas_length": "the policy is a diffusion model, which makes blocks of tokens from the end of the prompt on",
}
"""Reasons why every request must stay in its engine, as phrases.

The keys are arguments of vLLM, keys of the policy's config.json, and `PLUGINS` for installed plugins.
"""
ARGUMENTS_FOR_TOKENS = ("logits_processors", "watermark_config")
"""Arguments of vLLM with which a request that moves to another engine would get other tokens there."""
_ARGUMENTS_FOR_OUTPUTS = ("enable_return_routed_experts", "return_sampling_mask")
_POLICY_KEYS = ("rswa_window", "canvas_length")
_STOP_AT_STRINGS = ("sliding_puzzle_game", "code", "retriever")
"""Names of NeMo-RL's environments in which each turn ends at a stop string. They are keys of the config's block `env`."""


def plugins_here() -> list[str]:
    """Returns the names of the logits processors that Python packages installed here add to every vLLM engine."""
    return sorted({plugin.name for plugin in entry_points(group=PLUGINS)})


def staying_findings(tree: Tree) -> Iterator[Finding]:
    """Yields a warning for each setting of a config with which all or some requests must stay in their engine."""
    arguments = at(tree, VLLM_KWARGS, {})
    for name in (*ARGUMENTS_FOR_TOKENS, *_ARGUMENTS_FOR_OUTPUTS):
        if value := arguments.get(name):
            yield _none_moves(f"{VLLM_KWARGS}.{name}", value, WHY_ALL_STAY[name])
    if plugins := plugins_here():
        yield _none_moves(PLUGINS, plugins, f"these plugins are installed here, and {WHY_ALL_STAY[PLUGINS]}")
    policy = model_config(tree) or {}
    for name in _POLICY_KEYS:
        if policy.get(name) is not None:
            yield _none_moves("policy.model_name", at(tree, "policy.model_name"), WHY_ALL_STAY[name])
    for name in ("stop_strings", "bad_words"):
        if value := at(tree, f"{GENERATION}.{name}"):
            yield _none_moves(f"{GENERATION}.{name}", value, "they are looked for in the whole response")
    yield from _some_stay(tree)


def _none_moves(path: str, value: Any, why: str) -> Finding:
    text = f"{json.dumps(value, default=str)} with fastest_of_n; {why}, so every request stays in its engine and none moves"
    return Finding(path, text, "warning")


def _some_stay(tree: Tree) -> Iterator[Finding]:
    """Yields a warning for each setting with which some requests must stay in their engine, while others may move."""
    for name in _STOP_AT_STRINGS:
        if at(tree, f"env.{name}") is not None and _is_used(tree, name):
            text = "its turns end at a string; with fastest_of_n such requests stay in their engine, so none moves"
            yield Finding(f"env.{name}", text, "warning")
    if at(tree, f"{VLLM_CFG}.expose_http_server"):
        text = "true with fastest_of_n; requests that come through the server stay in their engine"
        yield Finding(f"{VLLM_CFG}.expose_http_server", text, "warning")
    for path, processor in strings_at(at(tree, "data", {}), ("processor",), "data."):
        if processor.startswith("vlm"):
            text = f"{processor} with fastest_of_n; prompts with images, video or audio stay in their engine"
            yield Finding(path, text, "warning")


def _is_used(tree: Tree, environment: str) -> bool:
    """Tells whether a data set of the run uses an environment.

    The block `env` does not tell this, because NeMo-RL's base configs also describe environments that a run does not use. If
    no data set names its environment, the answer is True for all environments.
    """
    named = [at(tree, f"data.{block}.env_name") for block in ("train", "default", "validation")]
    return environment in named or not any(named)
