# SPDX-License-Identifier: Apache-2.0
"""Times rollouts of a policy with a draft model in several layouts, and compares them with the planner's predictions.

    python -m lab.bench.placement_bench --out DIR [--hidden 192 --layers 16 --vocabulary 4096] [--upper-scale 0.2]
    python -m lab.bench.placement_bench --out DIR --trained
    python -m lab.bench.placement_bench --out DIR --policy models/smollm2_start --draft models/smollm2_draft [--rounds 3]

The layouts are plain decoding, coupled drafting in the policy's engine, and decoupled drafting in a remote drafter. By default
the bench makes a pair of models with random weights. With `--trained`, DIR has the models `policy` and `draft`, which
`lab.policies.warm_start` trained for the demo's task. With `--policy` and `--draft`, `pair_bench.py` measures a real pair.

All engines are started before the first round and run until the end. Each round goes through all of them, and a speedup is a
ratio of median seconds. There are engines with one thread, and engines with as many threads as there are cores. Engines with
the same number of threads share a process. A remote drafter is one more process.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.bench.cost_profile import MEASUREMENTS
from lab.bench.placement_ways import COUPLED_KS, MAX_DRAFTS, Timed, Way, acceptance_of, child_with, roll_out_in
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import Option, place
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.storage.files import write_atomically

if TYPE_CHECKING:
    from lab.local.engine import RolloutEngine

PROMPT = 20
DEFAULT_BATCHES = (1, 4, 8)
MAX_TOKEN_ID = 500  # of a prompt
LONG_PROBLEM = 8  # terms to add
PROFILED = (1, 4, 16, 64)
PROFILED_STEPS = 20
_KV_BYTES = 512 << 20
Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Work:
    """The requests of a rollout."""

    prompts: Prompts
    """Token ids of the prompts."""
    tokens: int
    """Length of each response, or the largest length if responses may end earlier."""
    is_exact: bool = True
    """Whether every response has exactly `tokens` tokens."""


COUPLED = tuple(Way("coupled", k) for k in COUPLED_KS)
BESIDE = (Way("decoupled", 8), Way("decoupled", MAX_DRAFTS), Way("decoupled"))
_engines: dict[Way, "RolloutEngine"] = {}


def generation_of(block: SpecrolloutConfig, tokens: int) -> GenerationConfig:
    """Returns the config of an engine that samples in float32 at temperature 1, with responses of up to `tokens` tokens."""
    kwargs = {"kv_cache_memory_bytes": _KV_BYTES, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    engine = VllmConfig(max_model_len=1024, precision="float32", enforce_eager=True)
    return GenerationConfig(vllm_cfg=engine, max_new_tokens=tokens, vllm_kwargs=kwargs, specrollout=block)


def start(folder: Path, ways: Sequence[Way], tokens: int) -> None:
    """Starts an engine for each way in this child process. `folder` has the models, and `tokens` bounds the responses."""
    from lab.local.engine import RolloutEngine

    for way in ways:
        block = way.block(str(folder / "draft"))
        _engines[way] = RolloutEngine(folder / "policy", generation_of(block, tokens), seed=1)


def roll_out(way: Way, work: Work) -> Timed:
    """Rolls out requests in this child process, in the engine of a way. All ways get the same requests."""
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    length = work.tokens if work.is_exact else None
    requests = [RolloutRequest(list(p), i, 0, exact_length=length) for i, p in enumerate(work.prompts)]
    return roll_out_in(_engines[way], requests)


def measure_costs(folder: Path, tokens: int, batches: tuple[int, ...]) -> dict[str, list[float]]:
    """Measures in this child process the seconds of verifying and drafting that the planner needs."""
    from lab.bench.cost_profile import ProfileSpec, measure

    block = BESIDE[0].block(str(folder / "draft"))
    spec = ProfileSpec(str(folder / "policy"), generation_of(block, tokens), batches, PROFILED_STEPS)
    return measure(spec, lambda done: None)


def close() -> None:
    """Stops the engines of this child process."""
    while _engines:
        _engines.popitem()[1].close()


class Bench:
    """Owns a child process for each number of threads, in which the engines run."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder = folder
        self.tokens = tokens
        self.ways: dict[tuple[int, Way], ProcessPoolExecutor] = {}
        self._children = {threads: child_with(threads) for threads in sorted({1, os.cpu_count() or 1})}
        for threads, child in self._children.items():
            ways = [Way("plain"), *COUPLED, *(BESIDE if threads == 1 else ())]
            self.ways |= {(threads, way): child for way in ways}

    def tables(self, batches: tuple[int, ...]) -> CostTables:
        """Returns the planner's cost tables. The child processes measure them before their engines start."""
        found = {
            n: c.submit(measure_costs, self.folder, self.tokens, batches).result() for n, c in self._children.items()
        }
        verify, draft, coupled = (
            tuple(CostCurve(n, batches, tuple(costs[name])) for n, costs in found.items()) for name in MEASUREMENTS
        )
        return CostTables("this machine", "policy", "draft", verify, "thread", draft, coupled)

    def start(self) -> None:
        """Starts all engines."""
        for threads, child in self._children.items():
            child.submit(start, self.folder, [w for n, w in self.ways if n == threads], self.tokens).result()

    def rounds(self, work: Work, num_rounds: int) -> dict[tuple[int, Way], list[Timed]]:
        """Returns the timed rollouts of every way. The ways take turns. The first round warms up and is dropped."""
        found: dict[tuple[int, Way], list[Timed]] = {key: [] for key in self.ways}
        for _ in track(range(num_rounds + 1), f"batch {len(work.prompts)}", transient=True):
            for (threads, way), child in self.ways.items():
                found[threads, way].append(child.submit(roll_out, way, work).result())
        return {key: timed[1:] for key, timed in found.items()}

    def close(self) -> None:
        """Ends all processes."""
        for child in self._children.values():
            child.submit(close).result()
            child.shutdown()


def rows_of(batch: int, found: dict[tuple[int, Way], list[Timed]]) -> list[dict[str, Any]]:
    """Returns a row for each way, with its seconds and its speedup over the fastest plain engine.

    The row's key `equal` says whether the way makes the tokens of plain decoding.
    """
    expected = found[1, Way("plain")][0].token_ids
    plain_s = min(_median_s(t) for (_, way), t in found.items() if way.mode == "plain")
    return [
        {
            "batch": batch,
            "way": str(way),
            "mode": way.mode,
            "threads": threads,
            "seconds": _median_s(timed),
            "over_plain": plain_s / _median_s(timed),
            "steps": statistics.median(t.num_steps for t in timed),
            "equal": all(t.token_ids == expected for t in timed),
            **_drafter_stats(timed),
        }
        for (threads, way), timed in found.items()
    ]


def _median_s(timed: Sequence[Timed]) -> float:
    return statistics.median(t.seconds for t in timed)


def _drafter_stats(timed: Sequence[Timed]) -> dict[str, Any]:
    """Returns how many draft tokens were verified and accepted, and how well a remote drafter kept up with its verifier."""
    before = timed[0].before
    after = timed[-1].after
    counts = {name: after[name] - before[name] for name in ("proposed", "accepted")}
    if after["supply"] is None:
        return counts
    return {**counts, **DrafterStats(**after["supply"]).since(DrafterStats(**before["supply"])).figures()}


def main() -> int:
    """Runs the bench.

    Prints a table for each number of requests, and writes all rows to `placement.json` in the folder `--out`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("hidden", 192), ("layers", 16), ("vocabulary", 4096), ("tokens", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--upper-scale", type=float, default=0.2)
    parser.add_argument("--trained", action="store_true", help="DIR has the pair")
    parser.add_argument(
        "--batches", type=int, nargs="+", help="numbers of requests (default 1 4 8; of a real pair 1 4 8 16 32)"
    )
    parser.add_argument("--policy", type=Path, help="folder of a real policy")
    parser.add_argument("--draft", type=Path, help="folder of its draft model")
    parser.add_argument("--scale", type=float, default=1.0, help="of a real pair: factor on the lengths of responses")
    options = parser.parse_args()
    if (options.policy is None) != (options.draft is None):
        parser.error("--policy and --draft: one of them is missing; a real pair needs both")
    if options.policy is None:
        run(options, Console())
        return 0
    from lab.bench.pair_bench import run_pair

    return run_pair(options, Console(highlight=False, soft_wrap=True))


def run(options: argparse.Namespace, console: Console) -> None:
    """Runs the whole bench for a pair of models with random weights, or for the pair that was trained for the demo's task."""
    bench = Bench(options.out, options.tokens)
    shape: dict[str, Any] = {n: getattr(options, n) for n in ("hidden", "layers", "vocabulary", "upper_scale")}
    if options.trained:
        shape = {"trained": True}
    else:
        next(iter(bench.ways.values())).submit(_make, shape, options.out).result()
    tables = bench.tables(PROFILED)
    bench.start()
    rows = []
    for batch in options.batches or DEFAULT_BATCHES:
        prompts = task_prompts(options.out / "policy", batch) if options.trained else random_prompts(batch)
        work = Work(prompts, options.tokens, is_exact=not options.trained)
        of_batch = rows_of(batch, bench.rounds(work, options.rounds))
        acceptance = acceptance_of(of_batch)
        plan = place(tables, batch, os.cpu_count() or 1, acceptance, MAX_DRAFTS, max_groups=1)
        console.print(_table(of_batch, acceptance, plan.layouts))
        rows += [{**row, "acceptance": acceptance} for row in of_batch]
        rows += [{"batch": batch, "planned": True, **asdict(option)} for option in plan.layouts]
    bench.close()
    write_atomically(options.out / "placement.json", json.dumps({**shape, "rows": rows}, indent=1) + "\n")


def _make(shape: dict[str, Any], folder: Path) -> None:
    from lab.policies.model_pairs import PairShape, make_pair

    make_pair(PairShape(**shape), folder)


def random_prompts(batch: int) -> Prompts:
    """Returns prompts with random token ids that every vocabulary has."""
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(1, MAX_TOKEN_ID, PROMPT).tolist()) for _ in range(batch))


def task_prompts(policy: Path, batch: int) -> Prompts:
    """Returns prompts of long problems of the demo's task."""
    from lab.local.step_addition import encode_prompt, make_problems
    from lab.local.step_rollout import load_tokenizer

    tokenizer = load_tokenizer(policy)
    problems = [p for p in make_problems(0, 64 * batch) if len(p.terms) >= LONG_PROBLEM]
    return tuple(tuple(encode_prompt(p, tokenizer)) for p in problems[:batch])


def _table(rows: list[dict[str, Any]], acceptance: float, planned: Sequence[Option]) -> Table:
    table = Table(pad_edge=False, title=f"batch {rows[0]['batch']}, acceptance {acceptance:.3f}", title_justify="left")
    for name in ("way", "threads", "seconds", "steps", "x plain", "supply", "tokens equal"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda r: r["seconds"]):
        occupancy = row.get("occupancy")
        threads = "1+1" if row["mode"] == "decoupled" else str(row["threads"])
        table.add_row(
            row["way"],
            threads,
            f"{row['seconds']:.3f}",
            f"{row['steps']:.0f}",
            f"{row['over_plain']:.2f}",
            "-" if occupancy is None else f"{occupancy:.2f}",
            "yes" if row["equal"] else "NO",
        )
    for option in planned:
        size = f"{option.verifier_size}+{option.drafter_size}" if option.drafter_size else str(option.verifier_size)
        table.add_row(f"plan: {option.mode} {option.k}", size, "", "", f"{option.speedup:.2f}", "", "")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
