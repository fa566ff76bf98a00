# SPDX-License-Identifier: Apache-2.0
"""Why the log-probs of engine and trainer may differ in this run, the likeliest first."""

from typing import Any


def gap_causes(config: Any) -> list[str]:
    """Sentences for the alarm, from NeMo-RL's `MasterConfig`."""
    policy, generation = config.policy, config.policy["generation"]
    draft, async_grpo = policy.get("draft") or {}, getattr(getattr(config, "grpo", None), "async_grpo", None)
    async_rl = getattr(config, "async_rl", None)
    causes = []
    if draft.get("enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    if async_grpo is not None and async_grpo.enabled:
        causes.append(
            "samples of an older policy (async_grpo.max_trajectory_age_steps), which is no fault if it stays small"
        )
        if async_grpo.in_flight_weight_updates and not async_grpo.recompute_kv_cache_after_weight_updates:
            causes.append("KV of older weights (async_grpo.recompute_kv_cache_after_weight_updates: false)")
    if async_rl is not None:
        causes.append("samples of an older policy (async_rl.sampler), which is no fault if it stays small")
        if not async_rl.recompute_kv_cache_after_weight_updates:
            causes.append("KV of older weights (async_rl.recompute_kv_cache_after_weight_updates: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if generation["vllm_cfg"]["precision"] != "float32" or policy["precision"] != "float32":
        causes.append(
            "rounding: engine and trainer compute in low precision; raise logprob_gap_alarm if it was so from the start"
        )
    return causes
