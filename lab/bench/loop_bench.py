# SPDX-License-Identifier: Apache-2.0
"""Runs GRPO with and without speculation, and compares step times, idle cores, rewards and the policy gap.

    python -m lab.bench.loop_bench CONFIG [key=value ...] --out DIR [--steps 24] [--only WAY ...]

Each way is a run of CONFIG from the same policy, with the same prompts and seeds, on two cores. The policy gap is the mean
absolute difference between the log-probs of sampled tokens in the engine and in the trainer. DIR gets the run directories.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.bench.bench_command import bench_parser, write_facts
from nemo_specrollout.reports.panels import BLUE, GREEN, ORANGE, STYLE, light, over_steps
from nemo_specrollout.reports.records import Record, read_lines, running_mean, series

# First steps that do not count, because kernels compile, and an asynchronous run has generated nothing ahead yet.
WARM_UP = 3
_BLOCK = "policy.generation.specrollout"
_PLAIN = (f"{_BLOCK}.drafters=[]", f"{_BLOCK}.draft_refresh=null", f"{_BLOCK}.fastest_of_n=null")
_MOVING = (f"{_BLOCK}.fastest_of_n={{max_racers: 2, moving: true}}",)
_TWO_WORKERS = ("cluster.rollout_workers=2",)
_ASYNC = (
    "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true, "
    "recompute_kv_cache_after_weight_updates: true}",
    "loss_fn.use_importance_sampling_correction=true",
)
# No request is decoded twice, in any way.
_ALL = ("checkpointing.enabled=false", f"{_BLOCK}.verify.requests_per_step=0")


@dataclass(frozen=True)
class Way:
    """A way to run GRPO.

    `changes` are its overrides of the config. `trainer_threads` is the number of cores of its trainer. If there is only one
    engine, the engine has the same number of cores.
    """

    name: str
    changes: tuple[str, ...]
    trainer_threads: int
    colour: str

    @property
    def is_plain(self) -> bool:
        """Returns whether the engine decodes without drafts."""
        return set(_PLAIN) <= set(self.changes)

    @property
    def is_async(self) -> bool:
        """Returns whether the trainer works while the engine generates."""
        return set(_ASYNC) <= set(self.changes)

    @property
    def style(self) -> dict[str, Any]:
        """Returns Matplotlib's options for the way's line in a chart.

        The line of plain decoding is broad and pale, so that a line on top of it is visible.
        """
        return {"color": light(self.colour), "linewidth": 4.0} if self.is_plain else {"color": self.colour}


WAYS = (
    Way("one engine, plain", _PLAIN, 2, BLUE),
    Way("one engine, ours", (), 2, BLUE),
    Way("two workers, plain", (*_TWO_WORKERS, *_PLAIN), 2, GREEN),
    Way("two workers, ours", (*_TWO_WORKERS, *_MOVING), 2, GREEN),
    Way("asynchronous, plain", (*_ASYNC, *_PLAIN), 1, ORANGE),
    Way("asynchronous, ours", _ASYNC, 1, ORANGE),
)
"""The ways to run GRPO. With "one engine", the engine and the trainer use both cores one after the other. With "two workers",
two engines have a core each, and requests move between them. With "asynchronous", an engine has one core and the trainer has
the other."""


def run(way: Way, config: Path, folder: Path, overrides: Sequence[str]) -> Sequence[Record]:
    """Runs GRPO in a way, and returns the lines of its metrics.

    The run's output goes to `output.txt` in `folder`. Raises CalledProcessError if the run fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(way.trainer_threads)}
    command = [
        sys.executable,
        "-m",
        "lab.cli.main",
        "run",
        str(config),
        *_ALL,
        *way.changes,
        f"logger.log_dir={folder / 'run'}",
        *overrides,
    ]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)
    return read_lines(folder / "run" / "metrics.jsonl")


def row_of(way: Way, steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of a way over the steps after its warm-up.

    The reward is the mean of the last quarter of all steps.
    """
    counted = steps[WARM_UP:] if way.is_async else steps[1:]
    last = steps[-max(1, len(steps) // 4) :]
    return {
        "way": way.name,
        "step_s": statistics.median(map(step_s, counted)),
        "generation_s": statistics.median(generation_s(m) for m in counted),
        "train_s": statistics.median(m["train_s"] + m["logprob_s"] for m in counted),
        "refit_s": statistics.median(m["refit_s"] for m in counted),
        "head_s": statistics.mean(map(head_s, counted)),
        "idle_share": statistics.mean(map(idle_share, counted)),
        "acceptance_length": statistics.mean(m["acceptance_length"] for m in counted),
        "reward": statistics.mean(m["reward"] for m in last),
        "gap": statistics.mean(m["logprob_gap"] for m in counted),
        "age": statistics.mean(m.get("policy_lag_mean", 0.0) for m in counted),
    }


def generation_s(step: Record) -> float:
    """Returns for how many seconds of a training step the trainer waits for generation."""
    return float(step["generation_s"])


def step_s(step: Record) -> float:
    """Returns the seconds of a training step, which are the sum of the seconds of its parts."""
    return generation_s(step) + step["logprob_s"] + step["train_s"] + step["refit_s"] + head_s(step)


def head_s(step: Record) -> float:
    """Returns how many seconds of a training step were spent on training a draft head."""
    return float(step.get("draft_refresh", {}).get("refresh_s") or 0.0)


def idle_share(step: Record) -> float:
    """Returns the share of the time of both cores in which they had no work.

    In a synchronous run, an engine idles if it ends before the other. In an asynchronous run, an engine idles if it has no
    requests, and the trainer idles while it waits for samples.
    """
    if "collector_idle_s" in step:
        return float((generation_s(step) + min(step["collector_idle_s"], step_s(step))) / (2 * step_s(step)))
    return float(step["tail"]["idle_share"] * step["rollout_s"] / step_s(step)) if "tail" in step else 0.0


def draw(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draws the reward and the policy gap of each run by training step."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((8.0, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        reward, gap = figure.subplots(1, 2)
        for way in (way for way in WAYS if way.name in runs):
            _draw_reward(reward, runs[way.name], way)
            gap.plot(*_line(runs[way.name], "logprob_gap", 1), **way.style)
        over_steps(gap, next(iter(runs.values())), "Policy gap of samples, nats a token")
        gap.set_yscale("log")
        gap.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0e}"))
        figure.legend(loc="outside lower center", ncols=min(len(runs), 3), labelcolor="linecolor")
        figure.savefig(path, dpi=150, format="png")


def _draw_reward(ax: Axes, steps: Sequence[Record], way: Way) -> None:
    window = max(1, len(steps) // 6)
    over_steps(ax, steps, "Mean reward of a step" if window == 1 else f"Mean reward of {window} steps")
    ax.plot(*_line(steps, "reward", window), label=way.name, **way.style)


def _line(steps: Sequence[Record], key: str, window: int) -> tuple[np.ndarray, np.ndarray]:
    return series(steps, "step"), running_mean(series(steps, key), window)


def main() -> int:
    """Runs the bench. Prints a table, and writes `loop.json` and `loop.png` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS], default=[way.name for way in WAYS])
    options = parser.parse_intermixed_args()
    overrides = [f"grpo.max_num_steps={options.steps}", *options.overrides]
    runs = {
        way.name: run(way, options.config, options.out / way.name.replace(", ", "_").replace(" ", "_"), overrides)
        for way in track([way for way in WAYS if way.name in options.only], "runs", transient=True)
    }
    rows = [row_of(way, runs[way.name]) for way in WAYS if way.name in runs]
    Console(width=120).print(_table(rows))
    draw(runs, options.out / "loop.png")
    facts = {"config": str(options.config), "steps": options.steps, "overrides": options.overrides, "rows": rows}
    write_facts(options.out / "loop.json", facts)
    return 0


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "run", "step", "generation", "training", "idle", "tokens/step", "reward", "gap", "age", pad_edge=False
    )
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['step_s']:.1f} s",
            f"{row['generation_s']:.1f} s",
            f"{row['train_s']:.1f} s",
            f"{row['idle_share']:.0%}",
            f"{row['acceptance_length']:.2f}",
            f"{row['reward']:.3f}",
            f"{row['gap']:.1e}",
            f"{row['age']:.1f}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
