# SPDX-License-Identifier: Apache-2.0
"""Measures rollouts whose drafts were made ahead and are all right, against plain decoding and against what is possible.

    python -m lab.bench.ahead_speed CONFIG --out DIR [--rounds 4] [key=value ...]

CONFIG is one of the local runner. Four engines take turns with the same requests: without drafters, with text drafters, with
`run_ahead` but without texts, and with the responses of the first engine as texts made ahead. A batch drains, or is constant:
then all responses have the same length. What is possible follows from the step times that the last engine has measured: each
step verifies as many right drafts of each request as make the most tokens a second.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, as_bytes
from nemo_specrollout.speculation.step_model import StepCosts

PLAIN, TEXT, IDLE, AHEAD = "plain", "text drafters", "run_ahead without texts", "run_ahead"
TEXT_DRAFTERS = (SuffixDrafterConfig(), NgramDrafterConfig())
BLOCKS = {
    PLAIN: SpecrolloutConfig(drafters=()),
    TEXT: SpecrolloutConfig(drafters=TEXT_DRAFTERS),
    IDLE: SpecrolloutConfig(drafters=TEXT_DRAFTERS, run_ahead=RunAheadConfig()),
    AHEAD: SpecrolloutConfig(drafters=TEXT_DRAFTERS, run_ahead=RunAheadConfig()),
}
DRAINING = 0
"""Workload whose batch drains; other numbers are requests of a constant batch."""
LENGTH = 256
"""Tokens of each response in a constant batch."""
WARM_UP_ROUNDS = 1


@dataclass(frozen=True)
class Timed:
    """Seconds of a rollout, and its responses."""

    seconds: float
    rollouts: list[Rollout]


class AheadSpeed:
    """Owns the engines."""

    def __init__(self, config: RunConfig) -> None:
        model = Path(config.policy.model_name)
        generation = config.policy.generation
        self._config = config
        self._step = 0
        self._task = build_task(config.data, load_tokenizer(model))
        self._engines = {
            way: RolloutEngine(model, replace(generation, specrollout=block), config.grpo.seed)
            for way, block in BLOCKS.items()
        }

    def round(self, batch: int) -> dict[str, Timed]:
        """Rolls out new requests in each engine. Steps are never repeated: drafters would remember the responses."""
        requests = step_prompts(self._config, self._step, self._task).requests
        self._step += 1
        if batch != DRAINING:
            requests = [replace(r, exact_length=LENGTH) for r in requests[:batch]]
        timed = {PLAIN: self._roll_out(PLAIN, requests)}
        texts = [as_bytes(r.token_ids) for r in timed[PLAIN].rollouts]
        with_texts = [replace(r, ahead=text) for r, text in zip(requests, texts, strict=True)]
        others = [TEXT, IDLE, AHEAD]
        for i in range(len(others)):
            way = others[(i + self._step) % len(others)]
            timed[way] = self._roll_out(way, with_texts if way == AHEAD else requests)
        return timed

    def _roll_out(self, way: str, requests: Sequence[RolloutRequest]) -> Timed:
        started = time.perf_counter()
        rollouts = self._engines[way].generate(requests)
        return Timed(time.perf_counter() - started, rollouts)

    def possible(self, lengths: Sequence[int]) -> float:
        """Returns the ratio of plain decoding and of verifying right drafts, both by the measured step times."""
        costs = self._engines[AHEAD].run_in_worker(lambda worker: worker.specrollout_accounts.step_model.costs())
        most = BLOCKS[AHEAD].most_drafts
        return drained_s(costs, lengths, 0) / drained_s(costs, lengths, most)

    def close(self) -> None:
        """Ends the engines."""
        for engine in reversed(self._engines.values()):
            engine.close()


def drained_s(costs: StepCosts, lengths: Sequence[int], most: int) -> float:
    """Returns the predicted seconds of responses whose steps verify up to `most` drafts of each request, all right."""
    left = np.array(lengths)
    seconds = 0.0
    while len(left):
        num_requests = len(left)
        options = [np.minimum(left, k + 1) for k in range(most + 1)]
        drafts = np.array([int(tokens.sum()) - num_requests for tokens in options])
        rate = np.array([tokens.sum() for tokens in options]) / costs.seconds(num_requests, drafts)
        best = int(np.where(drafts <= costs.most_drafts(num_requests), rate, 0.0).argmax())
        tokens = options[best]
        step_s = float(costs.seconds(num_requests, drafts[best : best + 1])[0])
        seconds += step_s
        left = (left - tokens)[left > tokens]
    return seconds


def row_of(batch: int, rounds: Sequence[dict[str, Timed]], possible: Sequence[float]) -> dict[str, Any]:
    """Returns the figures of a workload: seconds, and ratios of seconds as medians over rounds."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(r[a].seconds / r[b].seconds for r in rounds)

    texts = [{way: [x.token_ids for x in timed.rollouts] for way, timed in r.items()} for r in rounds]
    return {
        "batch": batch or "draining",
        "tokens": statistics.mean(sum(map(len, t[PLAIN])) for t in texts),
        "seconds": {way: statistics.median(r[way].seconds for r in rounds) for way in BLOCKS},
        "text": ratio(PLAIN, TEXT),
        "ahead": ratio(PLAIN, AHEAD),
        "possible": statistics.median(possible),
        "idle": ratio(TEXT, IDLE),
        "equal": all(t[way] == t[PLAIN] for t in texts for way in BLOCKS),
    }


def main() -> int:
    """Prints a table, and writes its rows to DIR/ahead_speed.json."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batches", default="0,1,4,8", help="0 for a batch that drains")
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    use_threads(config.cluster.threads)
    bench = AheadSpeed(config)
    rows = []
    for batch in map(int, options.batches.split(",")):
        rounds = []
        possible = []
        for _ in track(range(WARM_UP_ROUNDS + options.rounds), f"batch {batch}", transient=True):
            rounds.append(bench.round(batch))
            possible.append(bench.possible([len(r.token_ids) for r in rounds[-1][PLAIN].rollouts]))
        rows.append(row_of(batch, rounds[WARM_UP_ROUNDS:], possible[WARM_UP_ROUNDS:]))
    bench.close()
    table = new_table("drafts made ahead, all right: speed over plain decoding")
    for name in (
        "batch",
        "tokens",
        "plain s",
        "text drafters",
        "run_ahead",
        "possible",
        "of it",
        "idle over text",
        "equal",
    ):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            str(r["batch"]),
            f"{r['tokens']:,.0f}",
            f"{r['seconds'][PLAIN]:.1f}",
            f"{r['text']:.2f}x",
            f"{r['ahead']:.2f}x",
            f"{r['possible']:.2f}x",
            f"{r['ahead'] / r['possible']:.0%}",
            f"{r['idle']:.2f}",
            str(r["equal"]),
        )
    log_console().print(table)
    facts = {"config": str(options.config), "overrides": options.overrides, "rounds": options.rounds, "rows": rows}
    write_facts(options.out / "ahead_speed.json", facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
