# SPDX-License-Identifier: Apache-2.0
"""Measures how long older and newer weights sample the same response: by size of the update, length and age.

    python -m lab.bench.ahead_bench CONFIG --out DIR [--rates 1e-6,2e-5] [--lengths 256,2048] [key=value ...]

CONFIG is one of the local runner. For each learning rate the policy takes two steps of GRPO. Then an engine decodes the same
requests with the weights of the start, after one step and after two. Requests of the config end where they end; free text has
the greatest length. Texts of older weights are drafts for the newer, so the figures come from the engine's own use.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from lab.bench.bench_charts import ahead_chart
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.local.engine import RolloutEngine
from lab.local.progress import Progress
from lab.local.run_config import RunConfig, read_run_config
from lab.local.run_directory import RunDirectory
from lab.local.run_sections import DataConfig
from lab.local.runner import GrpoRunner
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest, as_bytes, num_kept

Tokens = list[list[int]]
Weights = dict[str, torch.Tensor]
# The step whose requests are decoded; its prompts are in no step that trains.
STEP = 1_000
# Each pair of weights whose texts are compared: updates before the older, updates before the newer.
PAIRS = ((0, 1), (1, 2), (0, 2))
# Drafts a step of the replay.
K = 32


def weights_after(config: RunConfig, tree: dict[str, Any], num_steps: int) -> Generator[Weights]:
    """Yields the published weights of a GRPO run before its first step and after each."""
    with TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run", tree, num_steps)
        progress = Progress()
        try:
            runner = GrpoRunner(config, directory, progress)
            directory.begin()
            try:
                yield _copy(runner)
                for step in range(num_steps):
                    runner.step(step)
                    yield _copy(runner)
            finally:
                runner.close()
        finally:
            directory.close()


def _copy(runner: GrpoRunner) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in runner.policy.hf_tensors()}


def size_of_update(older: Weights, newer: Weights) -> dict[str, float]:
    """Returns the relative norm of a change of weights and the share of the numbers that changed."""
    changed = sum(int((older[name] != newer[name]).sum()) for name in older)
    norm_2 = sum(float((newer[name] - older[name]).double().square().sum()) for name in older)
    whole_2 = sum(float(older[name].double().square().sum()) for name in older)
    return {"norm": (norm_2 / whole_2) ** 0.5, "changed": changed / sum(map(torch.numel, older.values()))}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of tokens before the first that differs."""
    return num_kept(as_bytes(a), b)


def replayed_steps(truth: Sequence[int], draft: Sequence[int], k: int) -> int:
    """Returns the steps that make `truth` with up to `k` drafts a step from the same position of `draft`."""
    at = steps = 0
    while at < len(truth):
        at += common(truth[at : at + k], draft[at : at + k]) + 1
        steps += 1
    return steps


def agreement(truths: Tokens, drafts: Tokens, length: int | None) -> dict[str, float]:
    """Returns figures of the first `length` tokens of responses and drafts; None for all."""
    pairs = [(truth[:length], draft[:length]) for truth, draft in zip(truths, drafts, strict=True)]
    total = sum(len(truth) for truth, _ in pairs)
    same = sum(sum(a == b for a, b in zip(truth, draft, strict=False)) for truth, draft in pairs)
    return {
        "tokens": total,
        "in_prefix": sum(common(truth, draft) for truth, draft in pairs) / total,
        "at_position": same / total,
        "identical": mean(truth == draft for truth, draft in pairs),
        "tokens_per_step": total / sum(replayed_steps(truth, draft, K) for truth, draft in pairs),
    }


class AheadBench:
    """Owns the engine that decodes the same requests with one set of weights after the other."""

    def __init__(self, config: RunConfig, lengths: Sequence[int]) -> None:
        generation = config.policy.generation
        tokenizer = load_tokenizer(Path(config.policy.model_name))
        task = build_task(config.data, tokenizer)
        free = build_task(DataConfig(dataset_name="free_text"), tokenizer)
        self.lengths = sorted(lengths)
        longest = [replace(r, exact_length=self.lengths[-1]) for r in step_prompts(config, STEP, free).requests]
        self.requests = {"mixed": step_prompts(config, STEP, task).requests, "free text": longest}
        block = SpecrolloutConfig(
            drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), run_ahead=RunAheadConfig(most_drafts=K)
        )
        room = replace(generation.vllm_cfg, max_model_len=self.lengths[-1] + 256)
        kwargs = {**generation.vllm_kwargs, "kv_cache_memory_bytes": 4 << 30}
        changed = replace(generation, specrollout=block, vllm_cfg=room, vllm_kwargs=kwargs)
        self._engine = RolloutEngine(Path(config.policy.model_name), changed, config.grpo.seed)

    def decode(self, weights: Weights, drafts: dict[str, Tokens]) -> dict[str, Tokens]:
        """Returns the responses to each kind of requests, with earlier responses as drafts."""
        self._engine.load_weights(iter(weights.items()))
        return {kind: self._decode(requests, drafts.get(kind)) for kind, requests in self.requests.items()}

    def _decode(self, requests: Sequence[RolloutRequest], drafts: Tokens | None) -> Tokens:
        if drafts is not None:
            requests = [replace(r, ahead=as_bytes(d)) for r, d in zip(requests, drafts, strict=True)]
        return [rollout.token_ids for rollout in self._engine.generate(requests)]

    def rows(self, rate: float, weights: Iterator[Weights], start: dict[str, Tokens]) -> Iterator[dict[str, Any]]:
        """Yields the rows of a learning rate; `start` has the texts of the weights at the start, and gets them first."""
        held = [next(weights)]
        texts = [start]
        start |= {} if start else self.decode(held[0], {})
        for number in (1, 2):
            held.append(next(weights))
            texts.append(self.decode(held[number], texts[number - 1]))
        for older, newer in PAIRS:
            size = size_of_update(held[older], held[newer])
            for kind in self.requests:
                truths = texts[newer][kind]
                drafts = texts[older][kind]
                prefixes = list(map(common, truths, drafts))
                for length in self.lengths if kind == "free text" else [None]:
                    about = {
                        "rate": rate,
                        "older": older,
                        "newer": newer,
                        "kind": kind,
                        "length": length,
                        "prefixes": prefixes,
                    }
                    yield {**about, **size, **agreement(truths, drafts, length)}


def main() -> int:
    """Prints a table and writes its rows to DIR/ahead.json, with a picture."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rates", default="1e-6,5e-6,2e-5,1e-4")
    parser.add_argument("--lengths", default="256,768,2048")
    options = parser.parse_intermixed_args()
    tree = load_config(options.config, ["grpo.max_num_steps=2", "checkpointing.enabled=false", *options.overrides])
    config, _ = read_run_config(tree)
    bench = AheadBench(config, list(map(int, options.lengths.split(","))))
    rows: list[dict[str, Any]] = []
    start: dict[str, Tokens] = {}
    for rate in map(float, options.rates.split(",")):
        megatron = replace(config.policy.megatron_cfg, optimizer=replace(config.policy.megatron_cfg.optimizer, lr=rate))
        weights = weights_after(replace(config, policy=replace(config.policy, megatron_cfg=megatron)), tree, 2)
        rows += bench.rows(rate, weights, start)
        weights.close()
        write_facts(
            options.out / "ahead.json", {"config": str(options.config), "overrides": options.overrides, "rows": rows}
        )
    ahead_chart(rows, options.out / "ahead.png")
    log_console().print(table_of(rows))
    return 0


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the table of the bench's rows."""
    table = new_table("responses by older and by newer weights; in prefix: tokens before the first that differs")
    for name in (
        "lr",
        "updates",
        "norm",
        "changed",
        "text",
        "length",
        "tokens",
        "identical",
        "in prefix",
        "at position",
        "tokens a step",
    ):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['rate']:.0e}",
            f"{row['older']} to {row['newer']}",
            f"{row['norm']:.1e}",
            f"{row['changed']:.1%}",
            row["kind"],
            str(row["length"] or "own"),
            f"{row['tokens']:,}",
            f"{row['identical']:.0%}",
            f"{row['in_prefix']:.0%}",
            f"{row['at_position']:.0%}",
            f"{row['tokens_per_step']:.1f}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
