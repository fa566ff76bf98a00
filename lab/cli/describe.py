# SPDX-License-Identifier: Apache-2.0
"""Describes a local run in sentences, for `specrollout-lab explain`. Imports no torch."""

import os

from lab.cli.prepare import Prepared
from lab.local.run_sections import DataConfig
from nemo_specrollout.cli.describe import describe_racing, describe_speculation, engine_in_words, sizes_in_words
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.engine_vllm import vllm_here
from nemo_specrollout.installed.versions import installed_versions

DRAFTERS_PLACE = "on this machine, one thread each, started and watched by the run"


def describe_local(prepared: Prepared) -> list[tuple[str, str]]:
    """Describes what a local run will do. Returns a list of lines, each as its name and its sentence."""
    config = prepared.config
    model = prepared.model_config
    grpo = config.grpo
    generation = config.policy.generation
    samples = grpo.samples_per_step
    num_workers = config.cluster.rollout_workers
    processes = f"Megatron-Core in the run's own process, vLLM in {num_workers} others, which are Ray actors"
    lines = [
        (
            "runtime",
            f"{config.runtime}: one machine's CPU, "
            f"{processes if num_workers > 1 else 'vLLM and Megatron-Core in one process'}",
        ),
        ("versions", ", ".join(f"{n} {v}" for n, v in installed_versions().items())),
        ("policy", f"{config.policy.model_name}: {sizes_in_words(model)}, {config.policy.precision}"),
        ("task", _describe_task(config.data)),
        (
            "step",
            f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} samples = {samples} requests, "
            f"{samples // config.policy.train_global_batch_size} optimizer steps; {grpo.max_num_steps} steps in all",
        ),
        (
            "sampling",
            f"temperature {generation.temperature}, top_p {generation.top_p}, top_k {generation.top_k or 'off'}, "
            f"up to {generation.max_new_tokens} tokens",
        ),
        *describe_speculation(generation.specrollout, generation.vllm_kwargs.get("speculative_config"), DRAFTERS_PLACE),
        (
            "engine",
            engine_in_words(
                generation.vllm_kwargs, vllm_here(), on_gpu=False, is_eager=generation.vllm_cfg.enforce_eager
            ),
        ),
        *_describe_workers(generation.specrollout, num_workers),
        ("output", config.logger.log_dir),
    ]
    if prepared.placement:
        lines.append(("placement", prepared.placement))
    if prepared.ignored:
        lines.append(("ignored", f"keys without effect in the local runner: {', '.join(prepared.ignored)}"))
    return lines


def _describe_task(data: DataConfig) -> str:
    if data.dataset_name == "reasoning_gym":
        total = sum(task.weight for task in data.tasks)
        shares = ", ".join(f"{task.name} {task.weight / total:.0%}" for task in data.tasks)
        return f"{data.dataset_name}: {shares}; answers scored by its own rules"
    if data.dataset_name == "free_text":
        return f"{data.dataset_name}: stories, letters, explanations; no reward, so for `bench` only"
    return f"{data.dataset_name}: additions of 2 to {data.max_terms} terms, answers checked by a rule"


def _describe_workers(block: SpecrolloutConfig, num_workers: int) -> list[tuple[str, str]]:
    """Returns lines about the engines and their stragglers, each as its name and its sentence. None with only one engine."""
    if num_workers == 1:
        return []
    kinds = block.drafters_of_engines
    methods = ["+".join(d.type for d in kinds[w % len(kinds)]) or "no drafter" for w in range(num_workers)]
    alike = len(set(methods)) == 1
    who = f"each with {methods[0]}" if alike else ", ".join(f"{w} with {name}" for w, name in enumerate(methods))
    cores = os.cpu_count() or 1
    few = f"; this machine has {cores}: they take turns" if cores < num_workers else ""
    return [
        ("workers", f"{num_workers} rollout workers, a core each{few}; {who}"),
        ("fastest_of_n", describe_racing(block.fastest_of_n, alike=alike, keeps=block.learned.warm_start)),
    ]
