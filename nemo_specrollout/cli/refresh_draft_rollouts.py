# SPDX-License-Identifier: Apache-2.0
"""Rollouts for a refresh where none were stored: the policy answers prompts, in our engine; resumable."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_specrollout.cli.refresh_draft_options import RefreshOptions
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import unsupported_version, vllm_version

MAX_NUM_SEQS = 64
CHUNK_REQUESTS = 256
KV_CACHE_BYTES = 1 << 30


CONFIG_SUFFIXES = (".yaml", ".yml")
# Far from the seeds of runs and benches, whose prompts a head must not have learned.
SEED_OFFSET = 1_000_000


def task_prompts(config_file: Path, num: int, seed: int) -> list[list[int]]:
    """Prompts that the tasks of a config of the local runner make: of its `bench.workloads` in turn, or of its `data`.

    Raises ConfigError for a config that is none, or whose tasks do not exist.
    """
    from nemo_specrollout.cli.prepare import check_task
    from nemo_specrollout.config.load import load_config
    from nemo_specrollout.config.run_config import read_run_config
    from nemo_specrollout.local.step_rollout import load_tokenizer
    from nemo_specrollout.local.tasks import build_task

    config, _ = read_run_config(load_config(config_file, []))  # its head may be the one that is to be made
    sources = list(config.workloads.values())
    for data in sources:
        check_task(data)
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    tasks = [build_task(data, tokenizer) for data in sources]
    made = [task.problems(config.grpo.seed + SEED_OFFSET + seed, -(-num // len(tasks))) for task in tasks]
    pairs = [(task, problem) for row in zip(*made, strict=True) for task, problem in zip(tasks, row, strict=True)]
    return [task.encode(problem) for task, problem in pairs[:num]]


def generate_rollouts(
    options: RefreshOptions,
    policy_folder: Path,
    prompts: Sequence[Sequence[int]],
    max_length: int,
    file: Path,
    on_finished: Callable[[int], None],
) -> None:
    """Appends to `file` a line for each sample that it has not yet: what a request yields depends on its prompt, number and
    seed alone, so that a run which was killed ends with the same rollouts. Raises ConfigError for what vLLM refuses."""
    done = _keep_whole_lines(file)
    total = len(prompts) * options.samples_per_prompt
    if done >= total:
        return
    _check_vllm()
    from nemo_specrollout.config.block import SpecrolloutConfig
    from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
    from nemo_specrollout.config.run_sections import GenerationConfig, VllmConfig
    from nemo_specrollout.generation.engine import RolloutEngine
    from nemo_specrollout.generation.requests import RolloutRequest

    longest = min(max_length, max(map(len, prompts)) + options.max_new_tokens)
    block = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig()))
    kwargs = {"max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    generation = GenerationConfig(
        VllmConfig(max_model_len=longest, precision=options.rollout_dtype),
        options.max_new_tokens,
        options.temperature,
        vllm_kwargs=kwargs,
        specrollout=block,
    )
    engine = RolloutEngine(policy_folder, generation, seed=options.seed)
    try:
        for start in range(done, total, CHUNK_REQUESTS):
            numbers = range(start, min(start + CHUNK_REQUESTS, total))
            samples = [divmod(n, options.samples_per_prompt) for n in numbers]
            requests = [RolloutRequest(prompts[p], p, s, options.policy_version) for p, s in samples]
            rollouts = engine.generate(requests, lambda n, start=start: on_finished(start + n))  # type: ignore[misc]
            _append(file, [(prompts[p], r.token_ids) for (p, _), r in zip(samples, rollouts, strict=True)])
    finally:
        engine.close()


def _append(file: Path, rollouts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    with file.open("a") as opened:
        for prompt, response in rollouts:
            opened.write(json.dumps({"prompt_token_ids": list(prompt), "response_token_ids": list(response)}) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def _keep_whole_lines(file: Path) -> int:
    """Cuts off what a killed process did not finish; the number of lines that are left."""
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
