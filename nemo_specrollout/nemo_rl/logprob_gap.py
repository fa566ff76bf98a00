# SPDX-License-Identifier: Apache-2.0
"""The gap between the engine's and the trainer's log-probs in a NeMo-RL run, with its likely causes and its alarm."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, Tree, asynchronous_block, at, stale_kv_field


def logprob_gap(metrics: Mapping[str, Any]) -> float | None:
    """Returns the log-prob gap of a step in nats per token, or None if NeMo-RL does not log it.

    NeMo-RL logs the mean of exp|difference|. The result is the logarithm of this mean. It is at least the mean of
    |difference|, and almost equal to it if the differences are small.
    """
    error = metrics.get("token_mult_prob_error")
    return None if error is None else math.log(max(float(error), 1.0))


def gap_alarms(gap: float, *, bound: float, causes: Sequence[str]) -> list[str]:
    """Returns a list with an alarm if `gap` is above `bound` (both in nats per token), and otherwise an empty list."""
    if gap <= bound:
        return []
    return [
        f"engine and trainer differ by {gap:.4f} nats a token, above logprob_gap_alarm {bound}. "
        f"Likely causes, the likeliest first: {'; '.join(causes)}."
    ]


def gap_causes(tree: Tree) -> list[str]:
    """Returns the likely causes of a log-prob gap in a run with the config `tree`, the likeliest first."""
    block = asynchronous_block(tree)
    stale_kv = stale_kv_field(tree)
    is_controlled = at(tree, "async_rl") is not None
    is_async = is_controlled or block is not None
    causes = []
    if at(tree, "policy.draft.enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    if is_async:
        lag = "async_rl.sampler" if is_controlled else f"{block}.max_trajectory_age_steps"
        causes.append(f"samples of an older policy ({lag}), which is no fault if the gap stays small")
    if stale_kv is not None:
        causes.append(f"KV of older weights in requests that go on after an update ({stale_kv}: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if is_async and at(tree, f"{VLLM_CFG}.enable_prefix_caching") is not False:
        prefixes = "cached prefixes of older weights, which the block should keep every request from"
        causes.append(f"{prefixes} (report it if {VLLM_CFG}.enable_prefix_caching: false closes the gap)")
    if any(at(tree, path) != "float32" for path in (f"{VLLM_CFG}.precision", "policy.precision")):
        rounding = "rounding: engine and trainer compute in low precision"
        causes.append(f"{rounding}; raise logprob_gap_alarm if it was so from the start")
    return causes
