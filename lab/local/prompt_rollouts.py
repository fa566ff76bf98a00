# SPDX-License-Identifier: Apache-2.0
"""Rollouts for an offline refresh without stored ones: the engine answers prompts. A killed process can be continued."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lab.local.run_config import read_run_config
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import unsupported_version, vllm_version
from nemo_specrollout.training.features.rollout_files import held_out_share, read_prompts
from nemo_specrollout.training.refresh.offline_data import RefreshJob

MAX_NUM_SEQS = 64
"""Requests that the engine decodes at the same time."""
CHUNK_REQUESTS = 256
"""Requests whose responses are written together."""
KV_CACHE_BYTES = 1 << 30
"""Memory of the engine's KV cache, bytes."""
CONFIG_SUFFIXES = (".yaml", ".yml")
"""Suffixes by which a config of the local runner is told from a file of prompts."""
SEED_OFFSET = 1_000_000
"""Distance from the task seeds of runs and benches, so that a head does not learn their prompts."""


def answer_prompts(job: RefreshJob) -> None:
    """Writes the policy's responses to the prompts of `job.options.prompts` into `job.state.rollouts`.

    Raises ConfigError for what vLLM refuses, ValueError for prompts that cannot be used.
    """
    options, file = job.options, Path(str(job.options.prompts))
    if file.suffix in CONFIG_SUFFIXES:
        found = task_prompts(file, options.num_prompts, options.seed)
    else:
        found = read_prompts(file, job.policy, job.facts.vocab_size)
    prompts = [p for p in found if len(p) < job.max_length]
    if len(prompts) < len(found):
        job.view.say(f"{len(found) - len(prompts)} prompts fill the context of {job.max_length} tokens: skipped")
    held_out_share(prompts, options.held_out_share)
    num_done = _cut_to_whole_lines(job.state.rollouts)
    if num_done < len(prompts) * options.samples_per_prompt:
        _check_vllm()
        _generate(job, prompts, num_done)


def task_prompts(config_file: Path, num: int, seed: int) -> list[list[int]]:
    """Returns prompts of the tasks in a config of the local runner, as token ids.

    The prompts come from its `bench.workloads` in turn, or else from its `data`. Raises ConfigError for an invalid
    config, and for tasks that do not exist.
    """
    from lab.local.step_rollout import load_tokenizer
    from lab.local.tasks import build_task, check_tasks

    config, _ = read_run_config(load_config(config_file, []))  # a full check would want the head that is to be made
    for data in config.workloads.values():
        if data.dataset_name == "reasoning_gym":
            check_tasks(data.tasks, "data.tasks")
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    tasks = [build_task(data, tokenizer) for data in config.workloads.values()]
    made = [task.problems(config.grpo.seed + SEED_OFFSET + seed, -(-num // len(tasks))) for task in tasks]
    pairs = [(task, problem) for row in zip(*made, strict=True) for task, problem in zip(tasks, row, strict=True)]
    return [task.encode(problem) for task, problem in pairs[:num]]


def _generate(job: RefreshJob, prompts: Sequence[Sequence[int]], num_done: int) -> None:
    """Appends a line for each sample after the first `num_done`.

    A response depends on its prompt, its number and the seed alone, so a continued process ends with the same rollouts.
    """
    from lab.local.engine import RolloutEngine
    from nemo_specrollout.generation.requests import RolloutRequest

    options = job.options
    longest = min(job.max_length, max(map(len, prompts)) + options.max_new_tokens)
    generation = GenerationConfig(
        VllmConfig(max_model_len=longest, precision=options.rollout_dtype),
        options.max_new_tokens,
        options.temperature,
        vllm_kwargs={"max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": KV_CACHE_BYTES},
        specrollout=SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig())),
    )
    samples = [(p, s) for p in range(len(prompts)) for s in range(options.samples_per_prompt)]
    engine = RolloutEngine(job.policy, generation, seed=options.seed)
    try:
        with job.view.bar("rollouts", len(samples)) as move:
            for start in range(num_done, len(samples), CHUNK_REQUESTS):
                chunk = samples[start : start + CHUNK_REQUESTS]
                requests = [RolloutRequest(prompts[p], p, s, options.policy_version) for p, s in chunk]

                def finished(count: int, start: int = start) -> None:
                    job.check()
                    move(start + count)

                rollouts = engine.generate(requests, finished)
                with job.state.rollouts.open("a") as file:
                    for request, made in zip(requests, rollouts, strict=True):
                        line = {
                            "prompt_token_ids": list(request.prompt_token_ids),
                            "response_token_ids": made.token_ids,
                        }
                        file.write(json.dumps(line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    finally:
        engine.close()


def _cut_to_whole_lines(file: Path) -> int:
    """Cuts off a line that a killed process did not finish; returns the number of remaining lines."""
    if not file.is_file():
        return 0
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with file.open("rb+") as opened:
            opened.truncate(len(whole))
    return whole.count(b"\n")


def _check_vllm() -> None:
    version = vllm_version()
    if version is None:
        raise ConfigError("--prompts needs vLLM, which is not installed here; give --rollouts instead")
    if (message := unsupported_version(version)) is not None:
        raise ConfigError(message)
    import torch

    if torch.cuda.is_available():
        raise ConfigError("--prompts generates on a CPU only so far; give --rollouts instead")
