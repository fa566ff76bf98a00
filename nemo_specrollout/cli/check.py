# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout check`: what would run, and why, in a second and without torch."""

from pathlib import Path

from nemo_specrollout.cli.prepare import Prepared, prepare
from nemo_specrollout.config.versions import installed_versions


def check(path: Path, overrides: list[str]) -> int:
    """Prints what the config means on this machine; raises ConfigError if it cannot run."""
    prepared = prepare(path, overrides)
    for name, text in explain(prepared):
        print(f"{name:<12} {text}")
    return 0


def explain(prepared: Prepared) -> list[tuple[str, str]]:
    """Pairs of a subject and a sentence."""
    config, model = prepared.config, prepared.model_config
    grpo, generation = config.grpo, config.policy.generation
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    lines = [
        ("runtime", f"{config.runtime}: one machine, vLLM and Megatron-Core in one process on the CPU"),
        ("versions", ", ".join(f"{n} {v}" for n, v in installed_versions().items())),
        ("policy", f"{config.policy.model_name}: {model['num_hidden_layers']} layers, hidden {model['hidden_size']}, "
                   f"vocabulary {model['vocab_size']}, {config.policy.precision}"),
        ("task", f"{config.data.dataset_name}: additions of 2 to {config.data.max_terms} terms, answers checked by a rule"),
        ("step", f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} samples = {samples} requests, "
                 f"{samples // config.policy.train_global_batch_size} optimizer steps; {grpo.max_num_steps} steps in all"),
        ("sampling", f"temperature {generation.temperature}, top_p {generation.top_p}, top_k {generation.top_k or 'off'}, "
                     f"up to {generation.max_new_tokens} tokens"),
        *_explain_speculation(prepared),
        ("output", config.logger.log_dir),
    ]  # fmt: skip
    if prepared.ignored:
        lines.append(("ignored", f"keys without effect in the local runner: {', '.join(prepared.ignored)}"))
    return lines


def _explain_speculation(prepared: Prepared) -> list[tuple[str, str]]:
    generation = prepared.config.policy.generation
    block = generation.specrollout
    if not block.enabled:
        return [("speculation", "off: exactly vLLM's own sampler and no drafts")]
    method = generation.vllm_kwargs.get("speculative_config")
    if method is not None:
        return [("speculation", f"vLLM's own {method}, under the drafter-invariant sampler")]
    if not block.drafters:
        return [("speculation", "none: no drafters; the drafter-invariant sampler alone")]
    names = ", ".join(f"{d.type} (contexts to {d.max_order} tokens)" for d in block.drafters)
    budget = {
        "auto": "as many draft tokens as pay by the measured step times, per request, none where none pays",
        "fixed": f"{block.budget.k} draft tokens for every request, always",
        "random": "a random number of draft tokens: a test setting",
    }[block.budget.policy]
    verify = block.verify.requests_per_step
    return [
        ("drafters", names),
        ("budget", f"{block.budget.policy}: {budget}; at most {block.num_speculative_tokens}"),
        ("exactness", "a draft is accepted only if it equals the policy's own sample: tokens do not depend on drafters; "
                      + (f"{verify} requests a step are decoded again plainly to show it" if verify else "not re-checked")),
    ]  # fmt: skip
