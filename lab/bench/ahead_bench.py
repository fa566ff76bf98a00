# SPDX-License-Identifier: Apache-2.0
"""Measures how far texts of older weights agree with the texts that newer weights sample, and how much branches add.

    python -m lab.bench.ahead_bench CONFIG --out DIR [--rates 1e-6,2e-5] [--lengths 256,2048] [--free-texts 8] [key=value ...]

CONFIG is a config of the local runner. For each learning rate the policy takes two steps of GRPO. Then an engine decodes the
same requests with the weights of the start, after one step and after two. Responses to the config's requests end by
themselves, and free text always has the greatest length. The engine gets the texts of the older weights as drafts when it
decodes with the newer weights.

The score gap of a token is the best noisy score minus the second-best. The bench takes gaps under the older weights, because
an engine knows these while it makes the text. It recomputes them by a forward pass of the same weights with the same noise,
and reports for what share of tokens this pass samples the engine's token.

A branch is a text that goes on with the second-best token (the runner-up) where the gap is small. `BranchChoice` chooses the
branches with a `FlipModel`, which predicts from gaps where an update changes the token. This model has learned from the run's
first update. For the first update itself it has learned nothing. The columns 1, 2 and 4 are for this number of branches per
text. The column "best first" is for four branches per text on average, where some texts get more than others.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.bench.ahead_paths import TextPair, learn, num_followed, num_steps
from lab.bench.bench_charts import ahead_chart
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.bench.near_ties import TieFinder, Ties
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
from nemo_specrollout.run_ahead.decisions.flips import FlipModel

Tokens = list[list[int]]
Weights = dict[str, torch.Tensor]
# The step whose requests are decoded. No step that trains has its prompts.
STEP = 1_000
# The pairs of weights whose texts are compared. Weights are named by the number of updates before them, older ones first.
PAIRS = ((0, 1), (1, 2), (0, 2))
# Draft tokens of a request per replayed engine step. The first number is the default of `run_ahead.most_drafts`. The second
# one fits if four requests share a step of 1,024 rows.
K, K_OF_FEW = 32, 256
# Numbers of branches of each text.
NUM_BRANCHES = (0, 1, 2, 4)
BEST_FIRST = "best first"
# Most paths of a text (itself and its branches) if the best branches over all texts are chosen first.
MOST_PATHS = 17


def weights_after(config: RunConfig, tree: dict[str, Any], num_steps: int) -> Generator[Weights]:
    """Yields the policy's weights before the first step of a GRPO run, and after each of its `num_steps` steps."""
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
    """Returns the size of an update of weights.

    `norm` is the norm of the change divided by that of the older weights. `changed` is the share of the weights that changed.
    """
    changed = sum(int((older[name] != newer[name]).sum()) for name in older)
    norm_2 = sum(float((newer[name] - older[name]).double().square().sum()) for name in older)
    whole_2 = sum(float(older[name].double().square().sum()) for name in older)
    return {"norm": (norm_2 / whole_2) ** 0.5, "changed": changed / sum(map(torch.numel, older.values()))}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common before the first one that differs."""
    return num_kept(as_bytes(a), b)


def replayed_steps(truth: Sequence[int], draft: Sequence[int], k: int) -> int:
    """Returns the number of engine steps that make the tokens of `truth` if `draft` provides the draft tokens.

    An engine step at some position verifies up to `k` tokens of `draft` from this position on. It makes the tokens before the
    first wrong one, and one more token.
    """
    at = steps = 0
    while at < len(truth):
        at += common(truth[at : at + k], draft[at : at + k]) + 1
        steps += 1
    return steps


def agreement(truths: Tokens, drafts: Tokens) -> dict[str, Any]:
    """Compares responses (`truths`) with the texts that were their drafts. Returns figures of how far both agree."""
    pairs = list(zip(truths, drafts, strict=True))
    total = sum(len(truth) for truth, _ in pairs)
    same = sum(sum(a == b for a, b in zip(truth, draft, strict=False)) for truth, draft in pairs)
    return {
        "tokens": total,
        "prefixes": [common(truth, draft) for truth, draft in pairs],
        "in_prefix": sum(common(truth, draft) for truth, draft in pairs) / total,
        "at_position": same / total,
        "identical": mean(truth == draft for truth, draft in pairs),
        "tokens_per_step": total / sum(replayed_steps(truth, draft, K) for truth, draft in pairs),
    }


@dataclass(frozen=True)
class Decoded:
    """The responses of one set of weights to each kind of requests, and their near-ties under the same weights."""

    texts: dict[str, Tokens]
    ties: dict[str, list[Ties]]


class AheadBench:
    """Owns an engine, which decodes the same requests with one set of weights after another, and a finder of near-ties."""

    def __init__(self, config: RunConfig, lengths: Sequence[int], num_free: int) -> None:
        generation = config.policy.generation
        folder = Path(config.policy.model_name)
        tokenizer = load_tokenizer(folder)
        task = build_task(config.data, tokenizer)
        free = build_task(DataConfig(dataset_name="free_text"), tokenizer)
        self.lengths = sorted(lengths)
        whole = [replace(r, exact_length=self.lengths[-1]) for r in step_prompts(config, STEP, free).requests]
        self.requests = {"mixed": step_prompts(config, STEP, task).requests, "free text": whole[:num_free]}
        block = SpecrolloutConfig(
            drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), run_ahead=RunAheadConfig(most_drafts=K)
        )
        room = replace(generation.vllm_cfg, max_model_len=self.lengths[-1] + 256)
        kwargs = {**generation.vllm_kwargs, "kv_cache_memory_bytes": 4 << 30}
        changed = replace(generation, specrollout=block, vllm_cfg=room, vllm_kwargs=kwargs)
        self._seed = config.grpo.seed
        self._engine = RolloutEngine(folder, changed, self._seed)
        self._finder = TieFinder(folder, getattr(torch, room.precision), generation.temperature)

    def decode(self, weights: Weights, drafts: dict[str, Tokens]) -> Decoded:
        """Returns the responses to each kind of requests under given weights.

        `drafts` has texts of older weights by kind of requests. They are the drafts.
        """
        self._engine.load_weights(iter(weights.items()))
        texts = {kind: self._decode(requests, drafts.get(kind)) for kind, requests in self.requests.items()}
        return Decoded(texts, self.ties(weights, texts))

    def ties(self, weights: Weights, texts: dict[str, Tokens]) -> dict[str, list[Ties]]:
        """Returns the near-ties of given texts under given weights, by kind of requests."""
        self._finder.load_weights(iter(weights.items()))
        return {
            kind: [
                self._finder.ties(r.prompt_token_ids, text, r.noise_seed(self._seed))
                for r, text in zip(self.requests[kind], texts[kind], strict=True)
            ]
            for kind in texts
        }

    def _decode(self, requests: Sequence[RolloutRequest], drafts: Tokens | None) -> Tokens:
        if drafts is not None:
            requests = [replace(r, ahead=as_bytes(d)) for r, d in zip(requests, drafts, strict=True)]
        return [rollout.token_ids for rollout in self._engine.generate(requests)]

    def rows(self, rate: float, weights: Iterator[Weights], start: list[Decoded]) -> Iterator[dict[str, Any]]:
        """Yields the rows of a learning rate.

        `weights` yields the weights before the first step of GRPO and after each of two steps. `start` holds the responses of
        the weights before the first step, because they are the same for every learning rate. If it is empty, this method fills
        it.
        """
        held = [next(weights)]
        if not start:
            start.append(self.decode(held[0], {}))
        made = start[:1]
        for number in (1, 2):
            held.append(next(weights))
            made.append(self.decode(held[number], made[number - 1].texts))
        flips = FlipModel()
        for older, newer in PAIRS:
            size = size_of_update(held[older], held[newer])
            pairs = pairs_of(made[older], made[newer].texts, self.ties(held[older], made[newer].texts))
            for kind, texts in pairs.items():
                for length in self.lengths if kind == "free text" else [None]:
                    about = {"rate": rate, "older": older, "newer": newer, "kind": kind, "length": length}
                    cut = [pair.cut(length) for pair in texts]
                    truths, drafts = ([t[:length] for t in made[m].texts[kind]] for m in (newer, older))
                    yield {**about, **size, **agreement(truths, drafts), **partings(cut), **branched(cut, flips)}
            if (older, newer) == PAIRS[0]:
                learn(flips, [pair for texts in pairs.values() for pair in texts])


def pairs_of(older: Decoded, newer: dict[str, Tokens], of_newer: dict[str, list[Ties]]) -> dict[str, list[TextPair]]:
    """Returns the pairs of an older and a newer text, by kind of requests.

    `of_newer` has the near-ties of the newer texts under the older weights.
    """
    return {
        kind: [
            TextPair(np.array(a, np.int32), np.array(b, np.int32), *ties)
            for a, b, *ties in zip(older.texts[kind], newer[kind], older.ties[kind], of_newer[kind], strict=True)
        ]
        for kind in newer
    }


def partings(pairs: Sequence[TextPair]) -> dict[str, Any]:
    """Returns figures of the positions at which the texts of each pair part, and the number of flips.

    A flip is a position of the newer text at which the older weights sample another token. The texts part at the first one.
    """
    parted = [(pair, pair.flips[0]) for pair in pairs if pair.flips]
    gaps = [pair.of_newer.gap_P for pair in pairs]
    ranks = [
        int((pair.of_older.gap_P < pair.of_older.gap_P[at]).sum()) for pair, at in parted if at < len(pair.older_P)
    ]
    return {
        "texts": len(pairs),
        "parted": len(parted),
        "ranks": ranks,
        "ranks_so_far": [int((p.of_newer.gap_P[:at] < p.of_newer.gap_P[at]).sum()) for p, at in parted],
        "gaps": [float(p.of_newer.gap_P[at]) for p, at in parted],
        "to_runner_up": sum(p.flips_to_runner_up([at]) for p, at in parted),
        "flips": sum(len(pair.flips) for pair in pairs),
        "flips_to_runner_up": sum(pair.flips_to_runner_up(pair.flips) for pair in pairs),
        "median_gap": median(np.concatenate(gaps).tolist()),
        "recomputed": mean(float((p.of_older.token_P == p.older_P).mean()) for p in pairs),
    }


def branched(pairs: Sequence[TextPair], flips: FlipModel) -> dict[str, Any]:
    """Returns how much of the newer texts is drafted right with branches, and the scale of the flip model in nats.

    There are figures for each number of branches per text, and for "best first".
    """
    followed = {str(n): [num_followed([pair], flips, n, 1 + n)[0] for pair in pairs] for n in NUM_BRANCHES}
    followed[BEST_FIRST] = num_followed(pairs, flips, NUM_BRANCHES[-1], MOST_PATHS)
    return {"scale": flips.scale, "branches": {name: foreseen(pairs, numbers) for name, numbers in followed.items()}}


def foreseen(pairs: Sequence[TextPair], followed: Sequence[int]) -> dict[str, Any]:
    """Returns how much of the newer texts is drafted right by texts of older weights with branches.

    `followed` has the result of `num_followed`. It says for each pair how many flips have a branch with the newer text's
    token, from the first flip up to the first without such a branch.
    """
    drafted = [pair.drafted_N(number) for pair, number in zip(pairs, followed, strict=True)]
    total = sum(map(len, drafted))
    return {
        "right": sum(int(right_N.sum()) for right_N in drafted) / total,
        "tokens_per_step": total / sum(num_steps(right_N, K) for right_N in drafted),
        "slowest": max(num_steps(right_N, K) for right_N in drafted),
        "slowest_of_few": max(num_steps(right_N, K_OF_FEW) for right_N in drafted),
        "all_followed": mean(number == len(pair.flips) for pair, number in zip(pairs, followed, strict=True)),
    }


def main() -> int:
    """Runs the bench. Prints two tables, and writes `ahead.json` and `ahead.png` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rates", default="1e-6,5e-6,2e-5,1e-4")
    parser.add_argument("--lengths", default="256,768,2048")
    parser.add_argument("--free-texts", type=int, default=8)
    options = parser.parse_intermixed_args()
    tree = load_config(options.config, ["grpo.max_num_steps=2", "checkpointing.enabled=false", *options.overrides])
    config, _ = read_run_config(tree)
    bench = AheadBench(config, list(map(int, options.lengths.split(","))), options.free_texts)
    rows: list[dict[str, Any]] = []
    start: list[Decoded] = []
    for rate in map(float, options.rates.split(",")):
        megatron = replace(config.policy.megatron_cfg, optimizer=replace(config.policy.megatron_cfg.optimizer, lr=rate))
        weights = weights_after(replace(config, policy=replace(config.policy, megatron_cfg=megatron)), tree, 2)
        rows += bench.rows(rate, weights, start)
        weights.close()
        write_facts(
            options.out / "ahead.json", {"config": str(options.config), "overrides": options.overrides, "rows": rows}
        )
    ahead_chart(rows, options.out / "ahead.png")
    for table in (table_of(rows), branch_table_of(rows)):
        log_console().print(table)
    return 0


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of how long texts of older and newer weights stay equal."""
    values = {
        "lr": lambda row: f"{row['rate']:.0e}",
        "updates": lambda row: f"{row['older']} to {row['newer']}",
        "norm": lambda row: f"{row['norm']:.1e}",
        "changed": lambda row: f"{row['changed']:.1%}",
        "text": lambda row: row["kind"],
        "length": lambda row: str(row["length"] or "own"),
        "tokens": lambda row: f"{row['tokens']:,}",
        "identical": lambda row: f"{row['identical']:.0%}",
        "in prefix": lambda row: f"{row['in_prefix']:.0%}",
        "at position": lambda row: f"{row['at_position']:.0%}",
        "tokens a step": lambda row: f"{row['tokens_per_step']:.1f}",
    }
    return _table(
        "responses by older and by newer weights; in prefix: tokens before the first that differs", values, rows
    )


def branch_table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the positions at which texts part, and of the tokens that branches draft right."""
    values = {
        "lr": lambda row: f"{row['rate']:.0e}",
        "updates": lambda row: f"{row['older']} to {row['newer']}",
        "text": lambda row: row["kind"],
        "length": lambda row: str(row["length"] or "own"),
        "part": lambda row: f"{row['parted']}/{row['texts']}",
        "rank": lambda row: _listed(row["ranks"]),
        "so far": lambda row: _listed(row["ranks_so_far"]),
        "flips": lambda row: str(row["flips"]),
        "runner-up": lambda row: str(row["flips_to_runner_up"]),
        **{name: _right(name) for name in (*map(str, NUM_BRANCHES), BEST_FIRST)},
        "slowest": lambda row: "-".join(str(row["branches"][n]["slowest"]) for n in ("0", BEST_FIRST)),
    }
    title = (
        "first partings by rank of the gap, in the whole text and so far; tokens drafted right by branches a text; steps of "
        "the slowest request without branches and best first"
    )
    return _table(title, values, rows)


def _right(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['branches'][name]['right']:.2%}"


def _listed(ranks: Sequence[int]) -> str:
    """Returns ranks in ascending order, as text for a table cell. `ranks` begin at 0, and those in the text begin at 1."""
    return " ".join(str(1 + rank) for rank in sorted(ranks)) or "-"


def _table(title: str, values: Mapping[str, Callable[[dict[str, Any]], str]], rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(title)
    for name in values:
        table.add_column(name, justify="left" if name in ("text", "rank", "so far") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(value(row) for value in values.values()))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
