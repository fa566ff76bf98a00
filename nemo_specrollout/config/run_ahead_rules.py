# SPDX-License-Identifier: Apache-2.0
"""Checks configs with the block `run_ahead`, by which engines decode requests of coming RL steps early.

It finds settings with which the prompts of coming steps are not known early enough, and numbers that have no effect.
"""

import json
from collections.abc import Iterator, Mapping

from nemo_specrollout.config.block import BLOCK_PATH, RunAheadConfig
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    Finding,
    Tree,
    asynchronous_block,
    at,
    size_at,
)

BYTES_OF_TOKEN = 10
"""Bytes of memory on the driver for each token of a text that was decoded early.

They hold the token's id, the id of the second-best token (runner-up), and the difference between the scores of both.
"""
MIB = 1 << 20
_PATH = f"{BLOCK_PATH}.run_ahead"
_FIX = f"or remove {_PATH}"


def run_ahead_findings(tree: Tree, ahead: RunAheadConfig) -> Iterator[Finding]:
    """Yields findings about settings that do not fit `run_ahead`. `ahead` has the options of `run_ahead`, which is on."""
    asynchronous = asynchronous_block(tree)
    if asynchronous is not None:
        yield from _about_asynchronous(tree, ahead, asynchronous)
    yield from _unknown_prompts(tree)
    algorithm = next((name for name in ("grpo", "ppo", "distillation") if at(tree, name) is not None), "grpo")
    if at(tree, f"{algorithm}.use_dynamic_sampling"):
        yield from _about_filter(tree, ahead, algorithm)
    if asynchronous is None:
        yield from _about_numbers(tree, ahead, algorithm)
    if at(tree, f"{GENERATION}.temperature") == 0:
        text = (
            "0 with run_ahead; greedy sampling has no noise, so an update changes a token only where two scores are almost "
            "equal. Texts made ahead and their branches help all the same"
        )
        yield Finding(f"{GENERATION}.temperature", text, "note")


def _about_asynchronous(tree: Tree, ahead: RunAheadConfig, block: str) -> Iterator[Finding]:
    """Yields findings about `run_ahead` in an asynchronous run, where requests begin again when weights change.

    Errors name settings with which requests cannot begin again. A warning names a number that has no effect. `block` is the
    path of the block that makes the run asynchronous.
    """
    for name in ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates"):
        if not at(tree, f"{block}.{name}"):
            text = "false with run_ahead; asynchronous requests begin again when weights change, which needs it"
            yield Finding(f"{block}.{name}", f"{text}: set it to true, {_FIX}", "error")
    if at(tree, f"{BLOCK_PATH}.fastest_of_n") is not None:
        text = f"with run_ahead and {block}; requests that begin again do not move: remove one of them"
        yield Finding(f"{BLOCK_PATH}.fastest_of_n", text, "error")
    if at(tree, "env.should_use_nemo_gym"):
        text = f"true with run_ahead and {block}; requests of NeMo-Gym's agents do not begin again when weights change"
        yield Finding("env.should_use_nemo_gym", f"{text}: set {block}.enabled to false, {_FIX}", "error")
    if isinstance(ahead.steps, int):
        text = f"{ahead.steps} with {block}, whose engines are never idle; they begin no coming step early, but decode "
        yield Finding(f"{_PATH}.steps", f"{text}branches of the requests that they have: remove it", "warning")


def _unknown_prompts(tree: Tree) -> Iterator[Finding]:
    """Yields an error if a function of the user chooses the prompts of each RL step when the step begins, not earlier."""
    path = "data.use_multiple_dataloader"
    if (value := at(tree, path)) not in (None, False):
        shown = "a block" if isinstance(value, Mapping) else json.dumps(value)
        text = "a function of yours chooses each step's prompts when it begins: set it to false"
        yield Finding(path, f"{shown} with run_ahead; {text}, {_FIX}", "error")


def _about_filter(tree: Tree, ahead: RunAheadConfig, algorithm: str) -> Iterator[Finding]:
    """Yields an error if prompts of coming RL steps are not known early, because of dynamic sampling.

    With dynamic sampling, rewards decide how many batches of prompts a step takes.
    """
    filtered = f"{algorithm}.use_dynamic_sampling"
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        text = (
            "true with run_ahead; rewards decide whether the next prompts belong to this step, and when that is known, "
        )
        yield Finding(filtered, f"{text}engines on the trainer's GPUs sleep: set it to false, {_FIX}", "error")
    elif isinstance(ahead.steps, int) and ahead.steps > 1:
        text = f"{ahead.steps} with {filtered}; rewards decide which step the prompts after the next ones belong to"
        yield Finding(f"{_PATH}.steps", f"{text}: write auto or 1", "error")


def _about_numbers(tree: Tree, ahead: RunAheadConfig, algorithm: str) -> Iterator[Finding]:
    """Yields a warning if `run_ahead` looks beyond the end of the run, or if its texts may need more memory than allowed."""
    last = size_at(tree, f"{algorithm}.max_num_steps", 0, low=0)
    if isinstance(ahead.steps, int) and 0 < last <= ahead.steps:
        text = f"{ahead.steps}, but the run has {last} steps ({algorithm}.max_num_steps), so no text is made "
        yield Finding(f"{_PATH}.steps", f"{text}more than {last - 1} steps ahead", "warning")
    prompts, samples = (size_at(tree, f"{algorithm}.{name}", 1) for name in _SIZES)
    longest = size_at(tree, f"{GENERATION}.max_new_tokens", 0, low=0)
    needed = -(-prompts * samples * longest * BYTES_OF_TOKEN // MIB)
    if needed > ahead.text_mib:
        text = (
            f"{ahead.text_mib}; {prompts * samples} responses of {longest} tokens take up to {needed} MiB, so texts of the "
            f"next step may be forgotten: raise it to {needed}"
        )
        yield Finding(f"{_PATH}.text_mib", text, "warning")


_SIZES = ("num_prompts_per_step", "num_generations_per_prompt")
