# SPDX-License-Identifier: Apache-2.0
"""The command `specrollout-lab rollouts`, which writes a policy's responses to prompts, for `refresh-draft --rollouts`.

If the command is killed, it can be repeated and continues where it stopped.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.progress import Progress, TaskID

from lab.cli.prepare import check_model
from lab.local.model_folder_check import check_chat_template
from lab.local.run_config import RunConfig, read_run_config
from nemo_specrollout.cli.command_line import check_out, use_threads
from nemo_specrollout.cli.terminal import log_console, progress_bar
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError, raise_first_mistake
from nemo_specrollout.heads.features.rollout_files import token_ids_of, whole_token_ids
from nemo_specrollout.storage.text_files import json_of_line, text_lines

CHUNK_REQUESTS = 256
"""Number of requests whose responses are written to the file together."""
SEED_OFFSET = 1_000_000
"""Added to a config's seed when problems are chosen, so that a head does not learn the prompts of runs and benches."""


def rollouts(parsed: argparse.Namespace) -> int:
    """Appends a line to the file of `--out` for each sample that the file lacks. Returns 0. Raises ConfigError.

    A response depends only on its prompt, its number and the seed, so a continued command ends with the same rollouts.
    """
    counts = {"--num": parsed.num, "--samples": parsed.samples}
    raise_first_mistake("", *((n < 1, name, f"{n}; make at least one") for name, n in counts.items()))
    check_out(parsed.out)
    use_threads(os.cpu_count() or 1)
    # A full check of the config would demand the draft head, which is trained on these rollouts later.
    config, _ = read_run_config(load_config(parsed.config, parsed.overrides))
    policy = Path(config.policy.model_name)
    check_model(policy, config)
    if parsed.prompts is None:
        for data in config.workloads.values():
            check_chat_template(policy, data, "data")
        prompts = task_prompts(config, parsed.num, parsed.seed)
    else:
        prompts = _prompts_in(parsed.prompts, policy)
    fitting = [ids for ids in prompts if len(ids) < config.policy.max_total_sequence_length]
    console = log_console()
    num_done = _cut_to_whole_lines(parsed.out)
    if len(fitting) < len(prompts):
        console.print(f"{len(prompts) - len(fitting)} prompts fill the context: skipped")
    samples = [(p, s) for p in range(len(fitting)) for s in range(parsed.samples)]
    if num_done < len(samples):
        _answer(config, parsed, fitting, samples[num_done:])
    console.print(f"{len(samples)} rollouts in {parsed.out}")
    return 0


def task_prompts(config: RunConfig, num: int, seed: int) -> list[list[int]]:
    """Returns prompts as token ids. They are taken in turn from `bench.workloads`, or from `data` without workloads.

    Raises ConfigError for tasks that do not exist.
    """
    from lab.local.step_rollout import load_tokenizer
    from lab.local.tasks import build_task, check_tasks

    for data in config.workloads.values():
        if data.dataset_name == "reasoning_gym":
            check_tasks(data.tasks, "data.tasks")
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    tasks = [build_task(data, tokenizer) for data in config.workloads.values()]
    made = [task.problems(config.grpo.seed + SEED_OFFSET + seed, -(-num // len(tasks))) for task in tasks]
    pairs = [(task, problem) for row in zip(*made, strict=True) for task, problem in zip(tasks, row, strict=True)]
    return [task.encode(problem) for task, problem in pairs[:num]]


def _prompts_in(file: Path, policy: Path) -> list[list[int]]:
    """Returns the distinct prompts of a file as token ids, in the order of the file.

    A line of the file is a text, or {"prompt_token_ids": [...]}.
    """
    from lab.local.step_rollout import load_tokenizer

    try:
        read = [_prompt_in(line, where) for where, line in text_lines(file)]
    except ValueError as error:
        raise ConfigError(f"--prompts: {error}") from error
    tokenizer = load_tokenizer(policy)
    ids = [token_ids_of(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in read]
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, ids))]


def _prompt_in(line: str, where: str) -> str | list[int]:
    """Returns the prompt of a line, which is a text or a list of token ids. Raises ValueError if the line is not valid."""
    if not line.startswith("{"):
        return line.removesuffix("\r")
    ids = whole_token_ids(json_of_line(line, where).get("prompt_token_ids"), f"{where}: prompt_token_ids")
    if not ids:
        raise ValueError(f"{where}: prompt_token_ids is empty; give at least one token, or remove the line")
    return ids


def _answer(
    config: RunConfig, parsed: argparse.Namespace, prompts: Sequence[Sequence[int]], samples: Sequence[tuple[int, int]]
) -> None:
    """Writes a response for each sample. A sample is the index of its prompt and its number among the prompt's samples."""
    from lab.local.engine import RolloutEngine
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    generation = replace(config.policy.generation, specrollout=SpecrolloutConfig())
    engine = RolloutEngine(Path(config.policy.model_name), generation, seed=parsed.seed)
    try:
        with progress_bar(log_console()) as progress:
            bar = progress.add_task("rollouts", total=len(samples))
            for start in range(0, len(samples), CHUNK_REQUESTS):
                requests = [RolloutRequest(prompts[p], p, s) for p, s in samples[start : start + CHUNK_REQUESTS]]
                made = engine.generate(requests, partial(_move, progress, bar, start))
                with parsed.out.open("a", encoding="utf-8") as file:
                    for request, rollout in zip(requests, made, strict=True):
                        ids = {
                            "prompt_token_ids": list(request.prompt_token_ids),
                            "response_token_ids": rollout.token_ids,
                        }
                        file.write(json.dumps(ids) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    finally:
        engine.close()


def _move(progress: Progress, bar: TaskID, start: int, done: int) -> None:
    progress.update(bar, completed=start + done)


def _cut_to_whole_lines(file: Path) -> int:
    """Cuts off a last line that a killed process has not finished. Returns the number of lines that remain."""
    content = file.read_bytes() if file.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with file.open("rb+") as opened:
            opened.truncate(len(whole))
    return whole.count(b"\n")
