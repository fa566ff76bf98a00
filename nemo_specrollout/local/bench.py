# SPDX-License-Identifier: Apache-2.0
"""The bench: every way of rolling out the same requests, interleaved, under the same clock.

All rows sample with the same noise and so make the same tokens, but for vLLM's own speculation at a temperature above 0;
seconds a token are compared. Within a round the rows take turns of a fifth of a second or so; speedups are of rounds.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as RichProgress

from nemo_specrollout.config.block import BudgetConfig, DrafterConfig
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.run import RunConfig
from nemo_specrollout.generation.engine import RolloutRequest
from nemo_specrollout.local.acceptance_bench import acceptance_table, measure_acceptance_table
from nemo_specrollout.local.bench_figures import Figures, figures_of, host_share, row_figures
from nemo_specrollout.local.bench_rounds import play_round, started
from nemo_specrollout.local.bench_rows import OURS, BenchRow, bench_rows, plain_row
from nemo_specrollout.local.bench_tables import rollout_table, running_table, sentences, useless_table
from nemo_specrollout.local.charts import bench_chart
from nemo_specrollout.local.deep_policy import with_deep_policy
from nemo_specrollout.local.rollout import load_tokenizer, step_prompts
from nemo_specrollout.local.tasks import build_task

# Rounds that only warm up: kernels compile, engines learn what steps cost.
WARM_UP_ROUNDS = 1
# The worst case is a matter of one per cent, and single rounds differ by more, short ones by most: times `num_rounds`.
USELESS_ROUNDS, USELESS_ROUNDS_OF_FEW, FEW = 4, 8, 16
# Columns of a table that goes into a file.
WIDTH_OF_LOGS = 132


def run_bench(config: RunConfig) -> list[Figures]:
    """Measures, writes `bench.json` and `bench.png`, prints the tables; returns the rows."""
    out = Path(config.logger.log_dir)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    if config.bench.deepen > 1:
        config = with_deep_policy(config, out / "deep_policy")
    rows, lines = _measure_rollouts(config)
    out.mkdir(parents=True, exist_ok=True)
    _set_aside(out, "bench.json", "bench.png", "bench.svg", "bench_useless.json", "bench_acceptance.json")
    _write(out / "bench.json", rows)
    bench_chart(rows, out / "bench.png")
    console.print(rollout_table(rows))
    console.print(running_table(rows))
    for line in lines:
        console.print(line)
    if config.bench.acceptance_k and config.policy.generation.specrollout.model_drafter is not None:
        accepted = measure_acceptance_table(config)
        _write(out / "bench_acceptance.json", accepted)
        console.print(acceptance_table(accepted))
    if config.bench.useless_batches:
        worst = measure_useless_drafters(config)
        _write(out / "bench_useless.json", worst)
        console.print(useless_table(worst))
    console.print(f"written to {out}/bench.json and {out}/bench.png")
    return rows


def measure_useless_drafters(config: RunConfig) -> list[Figures]:
    """Plain against a drafter that is always wrong, at several batch sizes: what speculation costs where it cannot pay."""
    plain = plain_row(config)
    block = replace(plain.generation.specrollout, drafters=(DrafterConfig("random"),), budget=BudgetConfig("auto"))
    useless = BenchRow("useless", OURS, replace(plain.generation, specrollout=block))
    rows = []
    with started(config, [plain, useless]) as entrants:
        for batch in config.bench.useless_batches:
            for entrant in entrants:
                entrant.reset()
            num_rounds = config.bench.num_rounds * (USELESS_ROUNDS_OF_FEW if batch < FEW else USELESS_ROUNDS)
            for index, prompts in enumerate(itertools.islice(_requests_of(config), WARM_UP_ROUNDS + num_rounds)):
                requests = [prompts[i % len(prompts)] for i in range(batch)]
                play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
            row = row_figures(entrants[1], entrants[0])
            row["host_share"] = host_share([r.stats for r in entrants[1].rounds])
            rows.append({"batch": batch, **row})
    return rows


def _measure_rollouts(config: RunConfig) -> tuple[list[Figures], list[str]]:
    """The rows of `bench.json`, and what is to be said about them."""
    num_rounds = config.bench.num_rounds + WARM_UP_ROUNDS
    with started(config, bench_rows(config)) as entrants:
        with RichProgress() as bar:
            rounds = bar.track(itertools.islice(_requests_of(config), num_rounds), num_rounds, description="rounds")
            for index, requests in enumerate(rounds):
                play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
        rows = figures_of(entrants)
        return rows, sentences(rows, entrants)


def _requests_of(config: RunConfig) -> Iterator[list[RolloutRequest]]:
    """The requests of one round after the other."""
    task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
    for index in itertools.count():
        yield step_prompts(config, index, task).requests


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomically(path, json.dumps(rows, indent=1))


def _set_aside(folder: Path, *names: str) -> None:
    """Renames what an earlier bench left there, "bench.json" to "bench.1.json" or the next number that is free."""
    for path in (folder / name for name in names if (folder / name).exists()):
        numbered = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(p for p in numbered if not p.exists()))
