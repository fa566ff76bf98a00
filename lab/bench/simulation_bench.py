# SPDX-License-Identifier: Apache-2.0
"""Compares rollouts that the simulator predicts with the same rollouts on this machine.

    python -m lab.bench.simulation_bench CONFIG --out DIR [--rounds N] [--one-worker] [key=value ...]

CONFIG is a config of the local runner that names an EAGLE-3 head. Each round first measures the costs of engine steps and the
acceptance of the head, by a plain rollout and by one with k drafts. It does so for each number of engines, which the options
call workers, and for each number of requests. Then the round measures and predicts rollouts of other prompts. They are plain,
with k drafts, or with the budget `auto`, whose costs were not measured. They have few or many requests, which stay on their
engine or may move. With `--one-worker` there is only one engine, with the requests of CONFIG's step. Of a measured rollout,
the prediction uses only the lengths of the responses.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.bench.bench_command import bench_parser, write_facts
from lab.local.coordinator import DealingCoordinator
from lab.local.rollout_pool import RolloutPool
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.placement.cost_tables import CostCurve, CostTables
from lab.simulation.compare import simulate_step
from lab.simulation.scenario import Scenario
from lab.simulation.setting import AUTO, FIXED, PLAIN, Fleet, Setting, Variant
from lab.simulation.workload import acceptance_for, fitted
from nemo_specrollout.config.block import BLOCK_PATH, BudgetConfig, FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.installed.versions import this_machine
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN
from nemo_specrollout.telemetry.engine_stats import StepRows

# Drafts per step where the number is fixed.
K = 3
# Prompts, and samples of each.
FEW = (4, 4)
MANY = (8, 8)
# The acceptance of a request with fewer engine steps than this does not count, because it says little.
_LEAST_STEPS = 12
# Steps with about the same number of rows are averaged, in bins whose edges have this ratio.
_BIN = 1.25
_WARM_UP_ROUNDS = 1
MOVING = FastestOfNConfig(max_racers=1)


@dataclass(frozen=True)
class Case:
    """A setting in which rollouts are measured and predicted.

    `kind` is the way of drafting, and `size` has the number of prompts and of samples of each prompt. `tail` says what
    stragglers may do, or is None if they stay on their engine.
    """

    kind: str
    num_workers: int
    size: tuple[int, int]
    tail: FastestOfNConfig | None = None

    @property
    def name(self) -> str:
        """Returns the setting in words."""
        drafting = {PLAIN: "plain", FIXED: f"k={K}", AUTO: "auto"}[self.kind]
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        moving = "" if self.tail is None else ", moving"
        return f"{drafting}, {workers}, {self.size[0] * self.size[1]} requests{moving}"


_SETTINGS: tuple[tuple[int, tuple[int, int], FastestOfNConfig | None], ...] = (
    (1, FEW, None),
    (1, MANY, None),
    (2, FEW, None),
    (2, MANY, None),
    (2, MANY, MOVING),
)


def cases_of(config: RunConfig, one_worker: bool) -> list[Case]:
    """Returns the settings to measure, each with every way of drafting.

    With `one_worker`, the only setting is one engine with the requests of the config's own step.
    """
    own = (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt)
    settings = ((1, own, None),) if one_worker else _SETTINGS
    return [Case(kind, *setting) for kind in (PLAIN, FIXED, AUTO) for setting in settings]


class FirstWorkers:
    """The first few engines of a pool, with the interface that a coordinator needs."""

    def __init__(self, pool: RolloutPool, number: int) -> None:
        self._pool = pool
        self.methods = pool.methods[:number]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@dataclass(frozen=True)
class Calibration:
    """What a round has measured for the predictions.

    `verify` has the seconds of engine steps by number of rows, for each way of drafting. `drafting` has the seconds in which
    the head drafts one token, by number of requests. `acceptance` is the probability that a draft token is right, and `spread`
    is the standard deviation of its log-odds between requests. `prompt_tokens` is the mean length of a prompt.
    """

    verify: dict[str, CostCurve]
    drafting: CostCurve
    acceptance: float
    spread: float
    prompt_tokens: int


class SimulationBench:
    """Runs the bench. Owns a pool of engines for each way of drafting, and a coordinator for each case."""

    def __init__(self, config: RunConfig, cases: Sequence[Case]) -> None:
        generation = config.policy.generation
        self.config = config
        head = next((d for d in generation.specrollout.drafters if d.type == "eagle3"), None)
        if head is None:
            raise ConfigError(f"{BLOCK_PATH}.drafters: none is of type eagle3; name a head that drafts")
        self.pools = {}
        for kind, block in _blocks(head).items():
            changed = replace(generation, specrollout=block)
            self.pools[kind] = RolloutPool(
                Path(config.policy.model_name), changed, config.grpo.seed, max(case.num_workers for case in cases)
            )
        self._task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
        self._coordinators = {case: self._coordinator(case) for case in cases}
        self._step = 0

    def round(self) -> dict[str, tuple[float, float]]:
        """Rolls out each case once, and returns the measured and the predicted seconds by name of the case."""
        # Costs are also measured by requests, because a step's time depends on the lengths of texts, which tables ignore.
        settings = dict.fromkeys((case.num_workers, case.size) for case in self._coordinators)
        known = {setting: self._calibrate(*setting) for setting in settings}
        found = {}
        for case in self._coordinators:
            requests = self._requests(case.size)
            started = time.perf_counter()
            rollouts, _ = self._coordinators[case].roll_out(requests)
            seconds = time.perf_counter() - started
            self.pools[case.kind].finish_turns()
            lengths = np.array([len(r.token_ids) for r in rollouts]).reshape(case.size)
            found[case.name] = seconds, predicted_s(case, lengths, known[case.num_workers, case.size], self.config)
        return found

    def close(self) -> None:
        """Ends all engines."""
        for pool in reversed(self.pools.values()):
            pool.close()

    def _coordinator(self, case: Case) -> DealingCoordinator:
        pool = self.pools[case.kind]
        ladder = DecodeSpeedTable(pool.method_names)
        policy = None if case.tail is None else FastestOfN(case.tail, ladder)
        lengths = LengthEstimator(self.config.policy.generation.max_new_tokens)
        return DealingCoordinator(FirstWorkers(pool, case.num_workers), policy, ladder, lengths)

    def _requests(self, size: tuple[int, int]) -> list[RolloutRequest]:
        """Returns the requests of a new training step, with `size[0]` prompts and `size[1]` samples of each."""
        self._step += 1
        grpo = replace(self.config.grpo, num_prompts_per_step=size[0], num_generations_per_prompt=size[1])
        prompts = step_prompts(replace(self.config, grpo=grpo), self._step, self._task)
        return prompts.requests

    def _calibrate(self, num_workers: int, size: tuple[int, int]) -> Calibration:
        """Measures what the predictions need, by a plain rollout and by a rollout with k drafts.

        `size` is the number of prompts and the number of samples of each.
        """
        steps = {}
        rollouts = {}
        requests = {}
        for kind in (PLAIN, FIXED):
            pool = self.pools[kind]
            case = Case(kind, num_workers, size)
            before = pool.ask_each("counters")
            requests[kind] = self._requests(size)
            rollouts[kind], _ = self._coordinators[case].roll_out(requests[kind])
            pool.finish_turns()
            steps[kind] = [pool.ask(w, "stats", before[w].num_steps).trace for w in range(num_workers)]
        columns = {kind: _decode_steps(traces) for kind, traces in steps.items()}
        sample_stats = self.pools[FIXED].ask_each("take_sample_stats", requests[FIXED])
        length, spread = _head_quality(rollouts[FIXED], list(sample_stats.values())[:num_workers])
        points = {kind: (c["num_rows"], c["seconds"] - c["draft_s"]) for kind, c in columns.items()}
        points[AUTO] = tuple(np.concatenate([points[PLAIN][i], points[FIXED][i]]) for i in (0, 1))
        drafted = columns[FIXED]
        return Calibration(
            {kind: _curve(*xy) for kind, xy in points.items()},
            _curve(drafted["num_requests"], drafted["draft_s"] / K),
            acceptance_for(length, K, spread),
            spread,
            round(statistics.mean(len(r.prompt_token_ids) for r in requests[PLAIN])),
        )


def predicted_s(case: Case, lengths_PS: np.ndarray, known: Calibration, config: RunConfig) -> float:
    """Returns the seconds that the simulator predicts for a rollout of a case with responses of these lengths."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = _scenario(case, lengths_PS, known, config, Path(folder) / "profile.json")
        setting = Setting(Fleet(scenario), Variant(case.kind, case.kind, case.tail), traced=(lengths_PS,))
        return simulate_step(setting).rollout_s


def _scenario(case: Case, lengths_PS: np.ndarray, known: Calibration, config: RunConfig, profile: Path) -> Scenario:
    max_tokens = config.policy.generation.max_new_tokens
    tables = CostTables(this_machine(), "policy", "head", (known.verify[case.kind],), "thread", (), (known.drafting,))
    profile.write_text(tables.to_json(), encoding="utf-8")
    lengths = fitted(lengths_PS.ravel(), max_tokens)
    head = {"name": "head", "draft": "eagle3", "acceptance": known.acceptance, "spread": known.spread}
    return build(
        Scenario,
        {
            "title": case.name,
            "model": config.policy.model_name,
            "cluster": {"device": "measured", "num_gpus": case.num_workers},
            "batch": {
                "num_prompts": case.size[0],
                "num_samples": case.size[1],
                "prompt_tokens": known.prompt_tokens,
                "max_requests": config.most_in_flight,
            },
            "lengths": {"median": lengths.median, "sigma": lengths.sigma, "max_tokens": max_tokens},
            "drafting": {"k": K, "methods": [head]},
            "costs": {"kind": "tables", "profile": str(profile)},
        },
        "",
    )


def _blocks(head: DrafterConfig) -> dict[str, SpecrolloutConfig]:
    return {
        PLAIN: SpecrolloutConfig(drafters=()),
        FIXED: SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=K)),
        AUTO: SpecrolloutConfig(drafters=(head,)),
    }


def _decode_steps(traces: Sequence[StepRows]) -> dict[str, np.ndarray]:
    """Returns the columns of several engines' traces, for pure decode steps only."""
    rows = np.array([row for trace in traces for row in trace.rows], float)
    columns = dict(zip(traces[0].columns, rows.T, strict=True))
    return {name: column[columns["is_decode"] > 0] for name, column in columns.items()}


def _curve(counts: np.ndarray, seconds: np.ndarray) -> CostCurve:
    """Returns the mean seconds by count. Means include occasional slow steps, which are part of a rollout too."""
    bins = np.round(np.log(counts) / np.log(_BIN)).astype(int)
    means = [(counts[bins == b].mean(), seconds[bins == b].mean()) for b in np.unique(bins)]
    rounded: dict[int, float] = {}
    for count, mean_s in means:
        rounded.setdefault(round(count), max(mean_s, 1e-9))
    return CostCurve(1, tuple(rounded), tuple(rounded.values()))


def _head_quality(
    rollouts: Sequence[Rollout], sample_stats: Sequence[Sequence[dict[str, Any] | None]]
) -> tuple[float, float]:
    """Returns the tokens per engine step over all requests, and the spread of the head's acceptance between requests.

    The spread is the standard deviation of the log-odds of acceptance, without the part that chance explains.
    """
    lengths = []
    log_odds = []
    chance = []
    num_tokens = num_steps = 0.0
    for of_workers, rollout in zip(zip(*sample_stats, strict=True), rollouts, strict=True):
        sample = next(s for s in of_workers if s is not None)
        steps = len(rollout.token_ids) - sample["num_accepted"]
        num_tokens += len(rollout.token_ids)
        num_steps += steps
        if steps >= _LEAST_STEPS:
            lengths.append(len(rollout.token_ids) / steps)
            p = min(max(acceptance_for(lengths[-1], K), 0.02), 0.98)
            log_odds.append(np.log(p / (1.0 - p)))
            chance.append(1.0 / (steps * lengths[-1] * p * (1.0 - p)))
    variance = float(np.var(log_odds) - np.mean(chance)) if len(log_odds) > 2 else 0.0
    return num_tokens / num_steps, max(variance, 0.0) ** 0.5


def rows_of(rounds: Sequence[dict[str, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Returns a row for each case, with its median measured and predicted seconds, and the errors of the predictions."""
    return [_row(name, [r[name] for r in rounds]) for name in rounds[0]]


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    errors = sorted(predicted / measured - 1.0 for measured, predicted in pairs)
    measured_s, predicted_s_ = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    over_all = sum(p[1] for p in pairs) / sum(p[0] for p in pairs) - 1.0
    return {
        "case": name,
        "measured_s": measured_s,
        "predicted_s": predicted_s_,
        "error": over_all,
        "errors": [errors[0], statistics.median(errors), errors[-1]],
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("setting", *(("measured", "predicted", "error of all", "of a round, median (range)")), pad_edge=False)
    for row in rows:
        low, middle, high = row["errors"]
        table.add_row(
            row["case"],
            f"{row['measured_s']:.2f} s",
            f"{row['predicted_s']:.2f} s",
            f"{row['error']:+.0%}",
            f"{middle:+.0%} ({low:+.0%} to {high:+.0%})",
        )
    return table


def _rounds(bench: SimulationBench, number: int) -> Iterator[dict[str, tuple[float, float]]]:
    for i in track(range(_WARM_UP_ROUNDS + number), "rounds", transient=True):
        found = bench.round()
        if i >= _WARM_UP_ROUNDS:
            yield found


def main() -> int:
    """Runs the bench. Prints a table, and writes its rows to `simulation_bench.json` in the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-worker", action="store_true", help="one worker only, with the requests of CONFIG's step")
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    bench = SimulationBench(config, cases_of(config, options.one_worker))
    rows = rows_of(list(_rounds(bench, options.rounds)))
    bench.close()
    Console(width=120).print(_table(rows))
    facts = {"config": str(options.config), "overrides": options.overrides, "rounds": options.rounds, "rows": rows}
    write_facts(options.out / "simulation_bench.json", facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
