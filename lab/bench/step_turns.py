# SPDX-License-Identifier: Apache-2.0
"""Measures steps of GRPO with and without `run_ahead`. All runs take turns step by step, so other load affects them alike.

    python -m lab.bench.step_turns CONFIG --out DIR --ways plain ours d1 [--steps 4] [--apart] [key=value ...]

CONFIG is a config of the local runner. All ways have the same prompts and seeds, and so the same samples and losses. `plain`
has no drafters, `ours` has text drafters, and `d1` to `d3` and `auto` also have `run_ahead`. `today` is `ours` in the checkout
that `--tree` names. With `--apart` the engine and the trainer have a core each. Otherwise they use all cores one after the
other. The first step only warms up, because it has no texts made ahead. `bench.deepen` of the config deepens the policy.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import track
from rich.table import Table

from lab.bench import step_child
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.local.run_config import read_run_config
from lab.policies.deep_policy import with_deep_policy
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.load import load_config

PLAIN, TODAY = "plain", "today"
_BLOCK = "policy.generation.specrollout"
_TEXT_DRAFTERS = f"{_BLOCK}.drafters=[{{type: suffix}}, {{type: ngram}}]"
_OFF = f"{_BLOCK}.run_ahead=null"
_APART_TODAY = f"{_BLOCK}.run_ahead={{enabled: false}}"
"""Override that puts the engine into a process of its own in checkouts that do not read `policy.generation.colocated`."""
WAYS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (f"{_BLOCK}.drafters=[]", _OFF),
    "ours": (_TEXT_DRAFTERS, _OFF),
    TODAY: (_TEXT_DRAFTERS, _OFF),
    **{f"d{n}": (_TEXT_DRAFTERS, f"{_BLOCK}.run_ahead={{steps: {n}}}") for n in (1, 2, 3)},
    "auto": (_TEXT_DRAFTERS, f"{_BLOCK}.run_ahead={{steps: auto}}"),
}
_ALL = (f"{_BLOCK}.verify.requests_per_step=0", f"{_BLOCK}.draft_refresh=null", "checkpointing.enabled=false")
WARM_UP = 1
"""Number of first training steps that medians leave out."""
_BEYOND = 4
"""Number of steps that the config has beyond the steps of the bench. So the last steps of the bench also have coming steps."""
_SAME = ("reward", "num_tokens", "loss")
"""Metrics that must be equal in all ways, because the ways have the same tokens and losses."""


@dataclass(frozen=True)
class Taken:
    """The metrics of one training step in each way."""

    step: int
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ratio(self, way: str, metric: str) -> float:
        """Returns how many times as fast `way` is as the first way. `metric` is the name of a metric in seconds."""
        first = next(iter(self.records.values()))
        return float(first[metric] / self.records[way][metric])

    @property
    def is_equal(self) -> bool:
        """Returns whether the samples and the losses of the step are the same in all ways."""
        found = {tuple(record[name] for name in _SAME) for record in self.records.values()}
        return len(found) == 1


class Run:
    """The GRPO run of one way, in a process of its own that waits for a request before each step. Owns the process."""

    def __init__(self, config: Path, overrides: Sequence[str], tree: Path, threads: int, log: Path) -> None:
        """Starts the process, which imports the checkout `tree`. Its output goes to the file `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        spec = json.dumps({"config": str(config.resolve()), "overrides": [*overrides]})
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", step_child.__file__, spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )

    def answer(self) -> Any:
        """Waits for the next answer of the process and returns it.

        The first answer says that the run has started, and the others are the metrics of a step. Raises RuntimeError if the
        process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a run has ended early; {self._log} says why, if it was not for want of memory")
        return json.loads(line)

    def step(self) -> Any:
        """Lets the process do the next training step, and returns the step's metrics."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer, which is missing then, says so
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Ends the run between two steps and waits for the end of its process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def run_in_turns(runs: Mapping[str, Run], num_steps: int) -> list[Taken]:
    """Does each training step in all runs and returns the metrics. The order of the runs changes from step to step."""
    names = list(runs)
    taken = []
    for step in track(range(num_steps), "steps", transient=True):
        turn = step % len(names)
        records = {name: runs[name].step() for name in names[turn:] + names[:turn]}
        taken.append(Taken(step, {name: records[name] for name in names}))
    return taken


def rows_of(steps: Sequence[Taken]) -> list[dict[str, Any]]:
    """Returns a row for each way, with its seconds and ratios in each step, and the ratios' medians after the warm-up."""
    counted = steps[WARM_UP:]
    rows = []
    for way in steps[0].records:
        row: dict[str, Any] = {"way": way, "equal": all(s.is_equal for s in steps)}
        for name, metric in (("step", "step_s"), ("generation", "generation_s")):
            row[f"{name}_s"] = [s.records[way][metric] for s in steps]
            row[f"{name}_ratios"] = [s.ratio(way, metric) for s in steps]
            row[f"{name}_ratio"] = statistics.median(s.ratio(way, metric) for s in counted)
        row |= {
            name: [s.records[way].get(name) for s in steps]
            for name in ("engine_steps", "ahead_tokens", "ahead_kept", "ahead_end_s")
        }
        rows.append(row)
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the ways. It has the steps after the warm-up, in the order of the run."""
    table = new_table(f"GRPO steps in turns; ratios over {rows[0]['way']}: median, and each step")
    for name in ("way", "step", "of each step", "generation", "of each step", "kept", "engine steps", "equal"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['step_ratio']:.2f}x",
            " ".join(f"{ratio:.2f}" for ratio in row["step_ratios"][WARM_UP:]),
            f"{row['generation_ratio']:.2f}x",
            " ".join(f"{ratio:.2f}" for ratio in row["generation_ratios"][WARM_UP:]),
            " ".join("-" if kept is None else f"{kept:.1%}" for kept in row["ahead_kept"][WARM_UP:]),
            " ".join(str(steps) for steps in row["engine_steps"][WARM_UP:]),
            str(row["equal"]),
        )
    return table


def _model_overrides(config: Path, overrides: Sequence[str], out: Path) -> list[str]:
    """Deepens the policy if `bench.deepen` of the config says so, and writes it below `out`.

    Returns the override that names the deepened policy, or an empty list if the policy stays as it is.
    """
    found, _ = read_run_config(load_config(config, [*_ALL, _TEXT_DRAFTERS, *overrides]))
    if found.bench.deepen == 1:
        return []
    return [f"policy.model_name={with_deep_policy(found, out / 'deep').policy.model_name}"]


def main() -> int:
    """Runs the bench. Prints a table, and writes `step_turns.json` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=[PLAIN, "ours", "d1"])
    parser.add_argument("--steps", type=int, default=4, help="steps after the warm-up")
    parser.add_argument("--apart", action="store_true", help="engine and trainer have a core each")
    parser.add_argument("--tree", type=Path, help="checkout of the way `today`")
    options = parser.parse_intermixed_args()
    if TODAY in options.ways and options.tree is None:
        parser.error("the way `today` needs --tree")
    num_steps = WARM_UP + options.steps
    threads = 1 if options.apart else len(os.sched_getaffinity(0))
    here = Path(step_child.__file__).parents[2]
    shared = [
        *_ALL,
        f"grpo.max_num_steps={num_steps + _BEYOND}",
        f"cluster.threads={threads}",
        f"policy.generation.colocated.enabled={str(not options.apart).lower()}",
        *_model_overrides(options.config, options.overrides, options.out),
    ]
    runs: dict[str, Run] = {}
    with TemporaryDirectory() as folder:
        try:
            for way in options.ways:
                changes = [*shared, *WAYS[way], f"logger.log_dir={folder}/{way}", *options.overrides]
                if way == TODAY and options.apart:
                    changes.append(_APART_TODAY)
                tree = options.tree if way == TODAY else here
                runs[way] = Run(options.config, changes, tree, threads, options.out / f"{way}.log")
                runs[way].answer()
            steps = run_in_turns(runs, num_steps)
        finally:
            for run in runs.values():
                run.close()
    rows = rows_of(steps)
    log_console().print(table_of(rows))
    facts = {"config": str(options.config), "overrides": options.overrides, "apart": options.apart, "rows": rows}
    write_facts(options.out / "step_turns.json", facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
