# SPDX-License-Identifier: Apache-2.0
"""Why the log-probs of engine and trainer may differ in this run, the likeliest first."""

from nemo_specrollout.config.nemo_rl_traps import VLLM_CFG, Tree, asynchronous_block, at


def gap_causes(tree: Tree) -> list[str]:
    """Sentences for the alarm, from NeMo-RL's config as plain values."""
    causes = []
    if at(tree, "policy.draft.enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    block, lag = asynchronous_block(tree), "max_trajectory_age_steps"
    is_in_flight = block is not None and at(tree, f"{block}.in_flight_weight_updates")
    if at(tree, "async_rl") is not None:
        block, lag, is_in_flight = "async_rl", "sampler", True
    if block is not None:
        causes.append(f"samples of an older policy ({block}.{lag}), which is no fault if it stays small")
    if is_in_flight and not at(tree, f"{block}.recompute_kv_cache_after_weight_updates"):
        causes.append(f"KV of older weights ({block}.recompute_kv_cache_after_weight_updates: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if at(tree, f"{VLLM_CFG}.precision") != "float32" or at(tree, "policy.precision") != "float32":
        causes.append(
            "rounding: engine and trainer compute in low precision; raise logprob_gap_alarm if it was so from the start"
        )
    return causes
