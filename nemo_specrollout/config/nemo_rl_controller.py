# SPDX-License-Identifier: Apache-2.0
"""A config of NeMo-RL's SingleController (`async_rl`) or TransferQueue trainer (`data_plane`): what does not go together.

NeMo-RL finds most of it itself, after Ray and the dataset are up.
"""

import json
from collections.abc import Iterator, Mapping

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_traps import GENERATION, VLLM_CFG, Finding, Tree, at, size_at


def controller_findings(tree: Tree) -> Iterator[Finding]:
    """All that is to be said about the two blocks."""
    if at(tree, "async_rl") is not None:
        yield from _controller(tree)
    elif at(tree, "data_plane.enabled"):
        yield from _data_plane(tree)


def _controller(tree: Tree) -> Iterator[Finding]:
    if at(tree, "grpo.async_grpo") is not None:
        yield _refused(
            tree, "grpo.async_grpo", "beside async_rl; the SingleController reads async_rl alone: set it to null"
        )
    if not at(tree, "data_plane.enabled"):
        yield _refused(
            tree, "data_plane.enabled", "the SingleController keeps rollouts in the data plane: set it to true"
        )
    if not at(tree, f"{VLLM_CFG}.async_engine"):
        yield _refused(
            tree, f"{VLLM_CFG}.async_engine", "the SingleController asks for rows one at a time: set it to true"
        )
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        text = "the SingleController generates while it trains: set it to false and name GPUs in colocated.resources"
        yield _refused(tree, f"{GENERATION}.colocated.enabled", text)
    for path in ("grpo.val_period", "grpo.val_at_start", "grpo.val_at_end"):
        if at(tree, path):
            yield _refused(tree, path, "the SingleController has no validation: set it to 0 or false")
    yield from _batches(tree)
    yield from _metric(tree)


def _batches(tree: Tree) -> Iterator[Finding]:
    """A step of the SingleController is one optimizer step."""
    rows = size_at(tree, "grpo.num_prompts_per_step") * size_at(tree, "grpo.num_generations_per_prompt")
    batch = at(tree, "policy.train_global_batch_size")
    if batch != rows:
        text = f"a step has {rows} rows (num_prompts_per_step times num_generations_per_prompt): set it to {rows}"
        yield _refused(tree, "policy.train_global_batch_size", text)


def _metric(tree: Tree) -> Iterator[Finding]:
    name = at(tree, "checkpointing.metric_name")
    if at(tree, "checkpointing.enabled") and name is not None and not str(name).startswith("train:"):
        text = "the SingleController has no validation: name a metric of training, e.g. train:loss, or set it to null"
        yield _refused(tree, "checkpointing.metric_name", text)


def _data_plane(tree: Tree) -> Iterator[Finding]:
    tail = at(tree, f"{BLOCK_PATH}.fastest_of_n")
    is_on = isinstance(tail, Mapping) and tail.get("enabled", True)
    if is_on and not at(tree, f"{VLLM_CFG}.async_engine"):
        text = (
            "with data_plane.enabled rollouts are asked for by another process: set async_engine to true, or remove it"
        )
        yield Finding(f"{BLOCK_PATH}.fastest_of_n", text, "error")


def _refused(tree: Tree, path: str, text: str) -> Finding:
    return Finding(path, f"{json.dumps(at(tree, path), default=str)}; {text}", "error")
