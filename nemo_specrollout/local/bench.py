# SPDX-License-Identifier: Apache-2.0
"""The bench: every way of rolling out the same requests, interleaved, under the same clock.

All rows but `stock` sample with the same noise and so make the same tokens; only time differs. Within a round the rows
take turns of a fifth of a second or so, so that whatever else the machine does hits them alike; speedups are of rounds.
"""

import importlib.util
import itertools
import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.table import Table

from nemo_specrollout.config.block import TEXT_DRAFTERS, BudgetConfig, DrafterConfig, SpecrolloutConfig
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.run import GenerationConfig, RunConfig
from nemo_specrollout.generation.arguments import native_config
from nemo_specrollout.generation.engine import RolloutEngine, RolloutRequest
from nemo_specrollout.local.acceptance_bench import acceptance_table, measure_acceptance_table
from nemo_specrollout.local.charts import bench_chart
from nemo_specrollout.local.records import column
from nemo_specrollout.local.rollout import MeasuredRollout, load_tokenizer, step_prompts
from nemo_specrollout.local.statistics import RolloutStats, count_equal
from nemo_specrollout.local.task import encode_prompt

# Matches of 2 to 5 tokens, as the n-gram rows of the papers; vLLM's default asks for 5 and finds next to nothing here.
_LOOKUP = {"ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 5}}

# Rounds that only warm up: kernels compile, the router learns what steps cost.
WARM_UP_ROUNDS = 1
# Turns of a row in a round, each as long as its last round suggests, so that all rows get done at about the same time.
# The first steps of a turn find cold caches, which an engine alone does not: so no turn is shorter than that.
TURNS = 40
MIN_TURN_S = 0.2
# The worst case is a matter of one per cent, and single rounds differ by more, short ones by most: times `num_rounds`.
USELESS_ROUNDS, USELESS_ROUNDS_OF_FEW, FEW = 4, 8, 16
# The row that tells whether a drafter with weights is worth having.
TEXT_ALONE = "ours, text drafters"
# Columns of a table that goes into a file.
WIDTH_OF_LOGS = 120
# A batch is called full from this share of the most requests on.
FULL = 0.75


@dataclass
class Mode:
    """One row of the bench: an engine and what was measured of it, round by round."""

    name: str
    generation: GenerationConfig
    engine: RolloutEngine
    turn_s: float = MIN_TURN_S
    stats: list[RolloutStats] = field(default_factory=list)
    tokens_equal: int = 0
    tokens_total: int = 0

    def reset(self) -> None:
        """Forgets what was measured."""
        self.stats, self.tokens_equal, self.tokens_total = [], 0, 0

    @property
    def is_stock(self) -> bool:
        return not self.generation.specrollout.enabled


def modes_of(config: RunConfig) -> dict[str, GenerationConfig]:
    """The generation config of every row, by its name."""
    ours = config.policy.generation
    block = ours.specrollout
    bare = {k: v for k, v in ours.vllm_kwargs.items() if k != "speculative_config"}
    sampler_only = replace(ours, vllm_kwargs=bare, specrollout=replace(block, enabled=True, drafters=()))
    modes = {
        "stock": replace(ours, vllm_kwargs=bare, specrollout=SpecrolloutConfig(enabled=False)),
        "plain": sampler_only,
    }
    for method, k in [(m, k) for m in fixed_methods() for k in config.bench.fixed_k]:
        speculative = {"method": method, "num_speculative_tokens": k, **_LOOKUP.get(method, {})}
        modes[f"{method} k={k}"] = replace(sampler_only, vllm_kwargs={**bare, "speculative_config": speculative})
    if block.model_drafter is not None:
        modes |= _fixed_model_modes(config, block.model_drafter, modes)
        if text := tuple(d for d in block.drafters if d.type in TEXT_DRAFTERS):
            modes[TEXT_ALONE] = replace(
                ours, specrollout=replace(block, enabled=True, drafters=text, draft_refresh=None)
            )
    return {**modes, "ours": replace(ours, specrollout=replace(block, enabled=True))}


def _fixed_model_modes(
    config: RunConfig, drafter: DrafterConfig, modes: dict[str, GenerationConfig]
) -> dict[str, GenerationConfig]:
    """vLLM's own way with the drafter with weights: greedy drafts under our sampler, where all tokens can be compared, and
    probabilistic ones under vLLM's, which accepts by the ratio of the two models' probabilities."""
    found = {}
    for k in config.bench.fixed_k:
        speculative = native_config(drafter, k)
        for name, base, more in (
            (f"{drafter.type} greedy k={k}", modes["plain"], {}),
            (f"{drafter.type} probabilistic k={k}", modes["stock"], {"draft_sample_method": "probabilistic"}),
        ):
            kwargs = {**base.vllm_kwargs, "speculative_config": {**speculative, **more}}
            found[name] = replace(base, vllm_kwargs=kwargs)
    return found


def fixed_methods() -> list[str]:
    """vLLM's own model-free methods that can run here."""
    return ["ngram", "suffix"] if importlib.util.find_spec("arctic_inference") else ["ngram"]


def run_bench(config: RunConfig) -> list[dict[str, Any]]:
    """Measures, writes `bench.json` and `bench.png`, prints the table; returns the rows."""
    out = Path(config.logger.log_dir)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    rows, counterfactual = _measure_rollouts(config)
    out.mkdir(parents=True, exist_ok=True)
    _set_aside(out, "bench.json", "bench.png", "bench.svg", "bench_useless.json", "bench_acceptance.json")
    write_atomically(out / "bench.json", json.dumps(rows, indent=1))
    bench_chart(rows, out / "bench.png")
    console.print(_table(rows))
    for line in counterfactual:
        console.print(line)
    if config.bench.acceptance_k and config.policy.generation.specrollout.model_drafter is not None:
        accepted = measure_acceptance_table(config)
        write_atomically(out / "bench_acceptance.json", json.dumps(accepted, indent=1))
        console.print(acceptance_table(accepted))
    if config.bench.useless_batches:
        worst = measure_useless_drafters(config)
        write_atomically(out / "bench_useless.json", json.dumps(worst, indent=1))
        console.print(_useless_table(worst))
    console.print(f"written to {out}/bench.json and {out}/bench.png")
    return rows


def _set_aside(folder: Path, *names: str) -> None:
    """Renames what an earlier bench left there, "bench.json" to "bench.1.json" or the next number that is free."""
    for path in (folder / name for name in names if (folder / name).exists()):
        numbered = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(p for p in numbered if not p.exists()))


def _measure_rollouts(config: RunConfig) -> tuple[list[dict[str, Any]], list[str]]:
    modes = _start(config, modes_of(config))
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    try:
        with RichProgress() as bar:
            for round_index in bar.track(range(config.bench.num_rounds + WARM_UP_ROUNDS), description="rounds"):
                prompts = step_prompts(config, round_index, lambda p: encode_prompt(p, tokenizer))
                _round(modes, prompts.requests, keep=round_index >= WARM_UP_ROUNDS)
    finally:
        for mode in modes:
            mode.engine.close()
    plain = _named("plain", modes)
    return [_row(mode, plain) for mode in modes], _counterfactual_lines(modes, plain)


def _start(config: RunConfig, generations: dict[str, GenerationConfig]) -> list[Mode]:
    model = Path(config.policy.model_name)
    with RichProgress() as bar:
        names = bar.track(generations, description="starting engines")
        return [Mode(n, generations[n], RolloutEngine(model, generations[n], config.grpo.seed)) for n in names]


def _named(name: str, modes: list[Mode]) -> Mode:
    return next(m for m in modes if m.name == name)


def _round(modes: list[Mode], requests: list[RolloutRequest], *, keep: bool) -> None:
    """Every mode once on the same requests, in short turns; then their tokens are compared with plain's.

    `stock` samples otherwise, so it is given the lengths that the others will find.
    """
    plain = _named("plain", modes)
    as_long: list[RolloutRequest] = []
    if any(m.is_stock for m in modes):
        lengths = [len(r.token_ids) for r in plain.engine.generate(requests)]
        as_long = [replace(r, exact_length=n) for r, n in zip(requests, lengths, strict=True)]
    under_way = {m.name: MeasuredRollout(m.engine, as_long if m.is_stock else requests) for m in modes}
    while not all(r.is_done for r in under_way.values()):
        for mode in modes:
            if not under_way[mode.name].is_done:
                under_way[mode.name].advance(mode.turn_s)
    results = {name: rollout.result() for name, rollout in under_way.items()}
    for mode in modes:
        rollouts, stats = results[mode.name]
        mode.turn_s = max(MIN_TURN_S, stats.seconds / TURNS)
        if keep:
            mode.stats.append(stats)
            equal, total = count_equal(rollouts, results["plain"][0])
            mode.tokens_equal += equal
            mode.tokens_total += total


def _row(mode: Mode, plain: Mode) -> dict[str, Any]:
    """A row of `bench.json`. Speedups compare seconds a token, round by round."""
    pairs = zip(plain.stats, mode.stats, strict=True)
    speedups = sorted((p.seconds / p.num_tokens) / (s.seconds / s.num_tokens) for p, s in pairs)
    seconds, tokens = sum(s.seconds for s in mode.stats), sum(s.num_tokens for s in mode.stats)
    return {
        "mode": mode.name,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "target_steps": sum(s.num_target_steps for s in mode.stats),
        "acceptance_length": tokens / sum(s.num_request_steps for s in mode.stats),
        "speedup_vs_plain": statistics.median(speedups),
        "speedup_low": speedups[0],
        "speedup_high": speedups[-1],
        "tokens_equal": None if mode.is_stock else mode.tokens_equal,
        "tokens_total": tokens if mode.is_stock else mode.tokens_total,
    }


def _counterfactual_lines(modes: list[Mode], plain: Mode) -> list[str]:
    """How far the estimate of plain time, made by `ours` while speculating, is from the measured plain rounds."""
    ours = _named("ours", modes)
    pairs = zip(ours.stats, plain.stats, strict=True)
    errors = [s.plain_estimate_s / p.seconds - 1 for s, p in pairs if s.plain_estimate_s]
    lines = [_host_line(ours.stats)]
    if errors:
        lines.append(
            f"counterfactual: plain time as estimated while speculating is off by {statistics.median(errors):+.1%} "
            f"(median of {len(errors)} rounds, {min(errors):+.1%} to {max(errors):+.1%})"
        )
    return lines


def _host_line(stats: list[RolloutStats]) -> str:
    """The router's share of the time: of all of it, and of the steps with nearly as many requests as there ever are."""
    share = sum(s.router_host_s for s in stats) / sum(s.seconds for s in stats)
    requests, seconds, is_decode, host_s = (
        np.concatenate([column(s.trace, name) for s in stats])
        for name in ("num_requests", "seconds", "is_decode", "host_s")
    )
    line = f"router's host time: {share:.2%} of the rollout"
    is_full = (requests > FULL * requests.max()) & (is_decode > 0)
    if not is_full.any():
        return line
    share_when_full = host_s[is_full].sum() / seconds[is_full].sum()
    return f"{line}, {share_when_full:.2%} of decode steps with {requests[is_full].min():.0f} or more requests"


def measure_useless_drafters(config: RunConfig) -> list[dict[str, Any]]:
    """Plain against a drafter that is always wrong, at several batch sizes: what speculation costs where it cannot pay."""
    ours = config.policy.generation
    block = replace(ours.specrollout, enabled=True, drafters=(DrafterConfig("random"),), budget=BudgetConfig("auto"))
    generations = {"plain": modes_of(config)["plain"], "useless": replace(ours, specrollout=block)}
    modes = _start(config, generations)
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    rows = []
    try:
        for batch in config.bench.useless_batches:
            for mode in modes:
                mode.reset()
            num_rounds = config.bench.num_rounds * (USELESS_ROUNDS_OF_FEW if batch < FEW else USELESS_ROUNDS)
            for index in range(WARM_UP_ROUNDS + num_rounds):
                prompts = step_prompts(config, index, lambda p: encode_prompt(p, tokenizer)).requests
                requests = [prompts[i % len(prompts)] for i in range(batch)]
                _round(modes, requests, keep=index >= WARM_UP_ROUNDS)
            row = _row(modes[1], modes[0])
            row["host_share"] = sum(s.router_host_s for s in modes[1].stats) / row["seconds"]
            rows.append({"batch": batch, **row})
    finally:
        for mode in modes:
            mode.engine.close()
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "same requests, same noise, interleaved"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("mode", "seconds", "tokens/s", "steps", "tok/step", "speed over plain", "tokens equal"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        spread = f"{row['speedup_vs_plain']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        equal = "-" if row["tokens_equal"] is None else f"{row['tokens_equal']}/{row['tokens_total']}"
        table.add_row(
            row["mode"], f"{row['seconds']:.1f}", f"{row['tokens_per_s']:.0f}", str(row["target_steps"]),
            f"{row['acceptance_length']:.2f}", spread, equal, style="bold" if row["mode"] == "ours" else None,
        )  # fmt: skip
    return table


def _useless_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="drafters that are always wrong", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("batch", "speedup over plain", "router's host time", "tokens equal"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = f"{row['speedup_vs_plain']:.3f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        equal = f"{row['tokens_equal']} of {row['tokens_total']}"
        table.add_row(str(row["batch"]), spread, f"{row['host_share']:.2%}", equal)
    return table
