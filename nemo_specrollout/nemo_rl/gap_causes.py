# SPDX-License-Identifier: Apache-2.0
"""Why the log-probs of engine and trainer may differ in this run, the likeliest first."""

from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, Tree, asynchronous_block, at, stale_kv_field


def gap_causes(tree: Tree) -> list[str]:
    """Sentences for the alarm, from NeMo-RL's config as plain values."""
    causes = []
    if at(tree, "policy.draft.enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    block, field = asynchronous_block(tree), stale_kv_field(tree)
    lag = None if block is None else f"{block}.max_trajectory_age_steps"
    if at(tree, "async_rl") is not None:
        lag = "async_rl.sampler"
    if lag is not None:
        causes.append(f"samples of an older policy ({lag}), which is no fault if it stays small")
    if field is not None:
        causes.append(f"KV of older weights ({field}: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if at(tree, f"{VLLM_CFG}.precision") != "float32" or at(tree, "policy.precision") != "float32":
        causes.append(
            "rounding: engine and trainer compute in low precision; raise logprob_gap_alarm if it was so from the start"
        )
    return causes
