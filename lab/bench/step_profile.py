# SPDX-License-Identifier: Apache-2.0
"""Measures how the time of a decode step is divided between the network, sampling, the head, our work, and the rest of vLLM.

    OMP_NUM_THREADS=1 python -m lab.bench.step_profile CONFIG --out DIR [--batches 1,4,8,16,32]
        [--modes plain,ours] [key=value ...]

Modes are rows of the bench (`bench_rows.py`). `stock` is vLLM without our worker. It has vLLM's V2 runner, or the V1 runner if
VLLM_USE_V2_MODEL_RUNNER=0 and NEMO_SPECROLLOUT_V2_ON_CPU=0 are in the environment.

Each batch stays full, because another request replaces a finished one. Engine steps that read a prompt do not count. The
profile is valid only on a CPU, where functions return when their work is done.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from lab.bench.bench import request_stream, take_batch
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_rows import OURS, PLAIN, bench_rows
from lab.bench.bench_tables import new_table
from lab.local.engine import Generation, RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.arguments import set_process_environment
from nemo_specrollout.generation.engine.requests import RolloutRequest

NETWORK, LM_HEAD, SAMPLING, HEAD, HEAD_SAMPLING, OUR_WORK, REST = (
    "network",
    "LM head",
    "sampling",
    "head",
    "head, sampling",
    "ours",
    "rest of vLLM",
)
STAGES = (NETWORK, LM_HEAD, SAMPLING, HEAD, HEAD_SAMPLING, OUR_WORK, REST)


class StageClock:
    """Sums the seconds spent in wrapped functions, by stage. A stage is a part of an engine step, such as sampling.

    If a wrapped function calls another one, the seconds of the inner function count for the inner function's stage only.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Wraps `owner.name`, so that its seconds count for `stage`."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._count()
            self._open.append(stage)
            try:
                return original(*args, **kwargs)
            finally:
                self._count()
                self._open.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage since the last call."""
        seconds = self._seconds
        self._seconds = defaultdict(float)
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


@dataclass
class Profile:
    """Sums of the seconds and tokens of engine steps with one batch size."""

    batch: int
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Seconds of each stage."""

    def add(self, seconds: float, stages: dict[str, float], num_tokens: int) -> None:
        """Adds an engine step. Its seconds that belong to no other stage count for `REST`."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        for name, value in stages.items():
            self.stages[name] += value
        self.stages[REST] += seconds - sum(stages.values())

    def row(self) -> dict[str, Any]:
        """Returns the mean milliseconds of an engine step, in total and by stage, and the tokens a request gains in it."""
        steps = max(self.num_steps, 1)
        return {
            "batch": self.batch,
            "num_steps": self.num_steps,
            "step_ms": 1e3 * self.seconds / steps,
            "tokens_per_step": self.num_tokens / steps / self.batch,
            "stages_ms": {name: 1e3 * value / steps for name, value in self.stages.items()},
        }


def watch(engine: RolloutEngine) -> StageClock:
    """Replaces the functions of an engine that belong to a stage by ones that are timed. Returns the clock with their seconds.

    The engine must be in this process.
    """
    worker = engine.run_in_worker(lambda worker: worker)
    runner = worker.model_runner
    drafting = getattr(worker, "specrollout_router", None)
    clock = StageClock()
    clock.wrap(runner.model, "forward", NETWORK)
    clock.wrap(runner.model, "compute_logits", LM_HEAD)
    clock.wrap(runner, "sample" if hasattr(runner, "sample") else "_sample", SAMPLING)
    if drafting is not None:
        clock.wrap(runner.speculator, "propose", OUR_WORK)
        if drafting.model is not None:
            clock.wrap(drafting.model._depth, "propose", HEAD)
            clock.wrap(runner.speculator, "sample_draft", HEAD_SAMPLING)
    return clock


def profile(engine: RolloutEngine, clock: StageClock, requests: Sequence[RolloutRequest], batch: int) -> Profile:
    """Rolls out `requests`, `batch` at a time, and returns a profile of the engine steps with a full batch."""
    generation = Generation(engine, requests, at_a_time=batch)
    found = Profile(batch)
    reads_prompts, num_done, num_tokens = True, 0, 0
    clock.take()
    while not generation.is_done:
        started = time.perf_counter()
        generation.advance(0.0)
        seconds = time.perf_counter() - started
        stages = clock.take()
        tokens_before = num_tokens
        num_tokens = generation.num_tokens
        if not reads_prompts and len(requests) - num_done >= batch:
            found.add(seconds, stages, num_tokens - tokens_before)
        reads_prompts = generation.num_done > num_done
        num_done = generation.num_done
    return found


def measure(config: RunConfig, batches: Sequence[int], modes: Sequence[str] = (PLAIN, OURS)) -> list[dict[str, Any]]:
    """Returns a row for each mode and batch size.

    Each engine rolls out the first batch size twice, the first time to warm up.
    """
    every_row = bench_rows(replace(config, bench=replace(config.bench, rows=tuple(modes))))
    rows = []
    for way in [row for row in every_row if row.name in modes]:
        stream = request_stream(config)
        engine = RolloutEngine(Path(config.policy.model_name), way.generation, config.grpo.seed)
        clock = watch(engine)
        for i, batch in track(enumerate([batches[0], *batches]), way.name, len(batches) + 1, transient=True):
            found = profile(engine, clock, take_batch(stream, batch), batch)
            if i > 0:
                rows.append({"mode": way.name, **found.row()})
        engine.close()
    return rows


def main() -> None:
    """Runs the bench. Prints a table, and writes `step_profile.json` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batches", default="1,4,8,16,32", help="numbers of requests, separated by commas")
    parser.add_argument("--modes", default=f"{PLAIN},{OURS}", help="rows of the bench by name, separated by commas")
    options = parser.parse_intermixed_args()
    set_process_environment()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    rows = measure(config, [int(n) for n in options.batches.split(",")], options.modes.split(","))
    table = new_table("milliseconds of a decode step")
    for name in ("mode", "requests", "step", *STAGES, "tokens a request", "ms a token"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        stages = [f"{row['stages_ms'][name]:.1f}" for name in STAGES]
        per_token = row["step_ms"] / row["batch"] / max(row["tokens_per_step"], 1e-9)
        table.add_row(
            row["mode"],
            str(row["batch"]),
            f"{row['step_ms']:.1f}",
            *stages,
            f"{row['tokens_per_step']:.2f}",
            f"{per_token:.1f}",
        )
    Console(width=150, highlight=False).print(table)
    write_facts(options.out / "step_profile.json", rows)


if __name__ == "__main__":
    main()
