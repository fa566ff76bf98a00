# SPDX-License-Identifier: Apache-2.0
"""A config of NeMo-RL's SingleController (`async_rl`) or TransferQueue trainer (`data_plane`): what does not go together.

NeMo-RL finds most of it itself, after Ray and the dataset are up.
"""

from collections.abc import Iterator, Mapping

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.nemo_rl_traps import GENERATION, VLLM_CFG, Finding, Rule, Tree, at, broken, is_off, size_at


def controller_findings(tree: Tree) -> Iterator[Finding]:
    """All that is to be said about the two blocks."""
    yield from broken(_RULES, tree)
    if _is_controlled(tree):
        yield from _batches(tree)
    elif at(tree, "data_plane.enabled"):
        yield from _data_plane(tree)


def _is_controlled(tree: Tree) -> bool:
    return at(tree, "async_rl") is not None


def _is_checkpointed(tree: Tree) -> bool:
    return _is_controlled(tree) and bool(at(tree, "checkpointing.enabled"))


def _batches(tree: Tree) -> Iterator[Finding]:
    """A step of the SingleController is one optimizer step."""
    rows = size_at(tree, "grpo.num_prompts_per_step") * size_at(tree, "grpo.num_generations_per_prompt")
    text = f"a step has {rows} rows (num_prompts_per_step times num_generations_per_prompt): set it to {rows}"
    yield from broken([Rule("policy.train_global_batch_size", lambda batch: batch != rows, text)], tree)


def _data_plane(tree: Tree) -> Iterator[Finding]:
    tail = at(tree, f"{BLOCK_PATH}.fastest_of_n")
    is_on = isinstance(tail, Mapping) and tail.get("enabled", True)
    if is_on and not at(tree, f"{VLLM_CFG}.async_engine"):
        text = (
            "with data_plane.enabled rollouts are asked for by another process: set async_engine to true, or remove it"
        )
        yield Finding(f"{BLOCK_PATH}.fastest_of_n", text, "error")


_NO_VALIDATION = "the SingleController has no validation"
_RULES = (
    Rule("grpo.async_grpo", lambda v: v is not None, "beside async_rl; the SingleController reads async_rl alone: set it to "
         "null", when=_is_controlled),
    Rule("data_plane.enabled", is_off, "the SingleController keeps rollouts in the data plane: set it to true",
         when=_is_controlled),
    Rule(f"{VLLM_CFG}.async_engine", is_off, "the SingleController asks for rows one at a time: set it to true",
         when=_is_controlled),
    Rule(f"{GENERATION}.colocated.enabled", lambda v: v is None or bool(v), "the SingleController generates while it trains: "
         "set it to false and name GPUs in colocated.resources", when=_is_controlled),
    *(Rule(path, bool, f"{_NO_VALIDATION}: set it to 0 or false", when=_is_controlled)
      for path in ("grpo.val_period", "grpo.val_at_start", "grpo.val_at_end")),
    Rule("checkpointing.metric_name", lambda v: v is not None and not str(v).startswith("train:"),
         f"{_NO_VALIDATION}: name a metric of training, e.g. train:loss, or set it to null", when=_is_checkpointed),
)  # fmt: skip
