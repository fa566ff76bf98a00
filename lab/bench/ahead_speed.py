# SPDX-License-Identifier: Apache-2.0
"""Measures rollouts whose texts were made ahead, and compares them with plain decoding and with what is possible.

    python -m lab.bench.ahead_speed CONFIG --out DIR [--rounds 4] [--ways plain run_ahead] [--updated] [key=value ...]

CONFIG is a config of the local runner. The engines of all ways take turns with the same requests:
  plain      has no drafters.
  text       has text drafters.
  no_texts   also has `run_ahead`, but its requests come without texts.
  beside     also has `run_ahead`, and decodes requests of the next step in free slots.
  run_ahead  also has `run_ahead`, and its requests come with texts made ahead.
The texts of the last way are the responses of `plain`, so all of their tokens are right. With `--updated` the policy takes a
step of GRPO first, and the older weights make the texts and their branches. A batch drains, or it is constant, and then all
responses have the same length. What is possible is computed from the step times that the engine of `run_ahead` has measured.
It assumes that all drafts are right, and that each engine step verifies as many of them as make the most tokens per second.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from lab.bench.ahead_bench import Weights, weights_after
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.local.engine import AheadRequest, RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, as_bytes
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.speculation.step_model import StepCosts

PLAIN, TEXT, IDLE, BESIDE, AHEAD = "plain", "text", "no_texts", "beside", "run_ahead"
TEXT_DRAFTERS = (SuffixDrafterConfig(), NgramDrafterConfig())
BLOCKS = {
    PLAIN: SpecrolloutConfig(drafters=()),
    TEXT: SpecrolloutConfig(drafters=TEXT_DRAFTERS),
    **dict.fromkeys((IDLE, BESIDE, AHEAD), SpecrolloutConfig(drafters=TEXT_DRAFTERS, run_ahead=RunAheadConfig())),
}
SLICE_S = 1.0
DRAINING = 0
"""The value of `--batches` for a batch that drains. Any other value is the number of requests of a constant batch."""
LENGTH = 256
"""Number of tokens of each response in a constant batch."""
WARM_UP_ROUNDS = 1


@dataclass(frozen=True)
class Timed:
    """The seconds of a rollout, and its responses."""

    seconds: float
    rollouts: list[Rollout]
    num_steps: int = 0
    """Number of engine steps."""
    num_early: int = 0
    """Number of tokens of the next step's requests that the engine made during the rollout."""
    delay_s: float = 0.0
    """Seconds by which making these `num_early` tokens made the rollout longer, estimated from measured step times."""


class AheadSpeed:
    """Runs the bench. Owns the engines, one for each way."""

    def __init__(self, config: RunConfig, ways: Sequence[str], weights: Sequence[Weights] = ()) -> None:
        """Starts the engines. The first of `weights` makes the texts, and the second makes the responses.

        Without weights, the texts are the responses of plain decoding.
        """
        model = Path(config.policy.model_name)
        generation = config.policy.generation
        self._config = config
        self._weights = weights
        self._step = 0
        self._task = build_task(config.data, load_tokenizer(model))
        self._engines = {
            way: RolloutEngine(model, replace(generation, specrollout=BLOCKS[way]), config.grpo.seed) for way in ways
        }
        if weights:
            for engine in self._engines.values():
                engine.load_weights(weights[1].items())
        self._rolling = {way: self._engines[way].rolling() for way in (BESIDE, AHEAD) if way in ways}

    def round(self, batch: int) -> dict[str, Timed]:
        """Rolls out new requests in the engine of each way, and returns the measurements by way.

        `batch` is `DRAINING` or the number of requests. Every round has other requests, because drafters remember responses.
        """
        requests = self._requests(self._step, batch)
        self._step += 1
        brought = self._with_older_texts(requests) if AHEAD in self._engines and self._weights else requests
        timed: dict[str, Timed] = {}
        if PLAIN in self._engines:
            timed[PLAIN] = self._roll_out(PLAIN, requests)
        if AHEAD in self._engines and not self._weights:
            texts = [as_bytes(r.token_ids) for r in timed[PLAIN].rollouts]
            brought = [replace(r, ahead=text) for r, text in zip(requests, texts, strict=True)]
        others = [way for way in self._engines if way != PLAIN]
        for i in range(len(others)):
            way = others[(i + self._step) % len(others)]
            if way == BESIDE:
                timed[way] = self._beside(requests, self._requests(self._step, batch))
            else:
                timed[way] = self._roll_out(way, brought if way == AHEAD else requests)
        return timed

    def _beside(self, requests: Sequence[RolloutRequest], coming: Sequence[RolloutRequest]) -> Timed:
        """Times a rollout in the engine of `BESIDE`, which may decode the requests `coming` in free slots.

        The texts of the coming requests are dropped.
        """
        self._rolling[BESIDE].plan(self._early(coming), FlipModel().scale, 1.0)
        timed = self._roll_out(BESIDE, requests)
        figures = self._rolling[BESIDE].end(keeps_cache=True).figures
        return replace(timed, num_early=figures.num_tokens, delay_s=figures.delay_s)

    def _requests(self, step: int, batch: int) -> list[RolloutRequest]:
        requests = step_prompts(self._config, step, self._task).requests
        return requests if batch == DRAINING else [replace(r, exact_length=LENGTH) for r in requests[:batch]]

    def _early(self, requests: Sequence[RolloutRequest]) -> list[EarlyRow]:
        seed = self._config.grpo.seed
        return [EarlyRow(r.prompt_token_ids, AheadRequest(r, r.noise_seed(seed))) for r in requests]

    def _with_older_texts(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Returns the requests with the texts and branches that the older weights make for them."""
        engine = self._engines[AHEAD]
        rolling = self._rolling[AHEAD]
        engine.load_weights(self._weights[0].items())
        rolling.plan(self._early(requests), FlipModel().scale, 1.0)
        while rolling.slice(SLICE_S):
            pass
        texts = rolling.end(keeps_cache=False).texts
        engine.load_weights(self._weights[1].items())
        found = [texts[r.noise_seed(self._config.grpo.seed)] for r in requests]
        return [replace(r, ahead=t.tokens, branches=t.branches) for r, t in zip(requests, found, strict=True)]

    def _roll_out(self, way: str, requests: Sequence[RolloutRequest]) -> Timed:
        engine = self._engines[way]
        num_steps = engine.num_steps
        started = time.perf_counter()
        rollouts = engine.generate(requests)
        return Timed(time.perf_counter() - started, rollouts, engine.num_steps - num_steps)

    def possible(self, lengths: Sequence[int]) -> float:
        """Returns how many times as fast as plain decoding a rollout is if all drafts are right.

        `lengths` are those of the responses. Both times are predicted from the step times that the engine of `AHEAD` has
        measured.
        """
        costs = self._engines[AHEAD].run_in_worker(lambda worker: worker.specrollout_router.policy.costs)
        most = BLOCKS[AHEAD].most_drafts
        return drained_s(costs, lengths, 0) / drained_s(costs, lengths, most)

    def close(self) -> None:
        """Ends all engines."""
        for engine in reversed(self._engines.values()):
            engine.close()


def drained_s(costs: StepCosts, lengths: Sequence[int], most: int) -> float:
    """Returns the predicted seconds in which responses of these lengths are decoded, if all drafts are right.

    An engine step verifies up to k drafts of every request, where k from 0 to `most` is the number that gives the most tokens
    per second.
    """
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
    """Returns the row of a workload, with the seconds of each way and with ratios of seconds as medians over rounds.

    `batch` is the workload's value in `--batches`. `possible` has the result of `AheadSpeed.possible` for each round.
    """
    texts = [{way: [x.token_ids for x in timed.rollouts] for way, timed in r.items()} for r in rounds]
    first = next(iter(rounds[0]))
    return {
        "batch": batch or "draining",
        "tokens": statistics.mean(sum(map(len, t[first])) for t in texts),
        "seconds": {way: [r[way].seconds for r in rounds] for way in rounds[0]},
        "engine_steps": {way: [r[way].num_steps for r in rounds] for way in rounds[0]},
        "text": ratio(rounds, PLAIN, TEXT),
        "ahead": ratio(rounds, PLAIN, AHEAD),
        "possible": statistics.median(possible) if possible else None,
        "idle": ratio(rounds, TEXT, IDLE),
        "delay": ratio(rounds, BESIDE, IDLE),
        "priced_delay_s": [sum(timed.delay_s for timed in r.values()) for r in rounds],
        "early_tokens": [sum(timed.num_early for timed in r.values()) for r in rounds],
        "equal": all(t[way] == t[first] for t in texts for way in rounds[0]),
    }


def ratio(rounds: Sequence[dict[str, Timed]], way: str, other: str) -> float | None:
    """Returns the seconds of `way` divided by the seconds of `other`, as the median over rounds, or None if one is missing."""
    if {way, other} <= rounds[0].keys():
        return statistics.median(r[way].seconds / r[other].seconds for r in rounds)
    return None


_COLUMNS = {
    "text drafters": "text",
    "run_ahead": "ahead",
    "possible": "possible",
    "idle over text": "idle",
    "beside over idle": "delay",
}
"""The headings of the columns that show ratios, with the key of each ratio in a row."""


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table with a line for each workload, from the rows of `row_of`."""
    table = new_table("texts made ahead: ratios of rollout times, and the seconds of the first way")
    for name in ("batch", "tokens", "seconds", *_COLUMNS, "equal"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = ["-" if row[key] is None else f"{row[key]:.3f}" for key in _COLUMNS.values()]
        first_s = statistics.median(next(iter(row["seconds"].values())))
        table.add_row(str(row["batch"]), f"{row['tokens']:,.0f}", f"{first_s:.1f}", *ratios, str(row["equal"]))
    return table


def main() -> int:
    """Runs the bench. Prints a table, and writes its rows to `ahead_speed.json` in the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batches", default="0,1,4,8", help="0 for a batch that drains")
    parser.add_argument("--ways", nargs="+", choices=list(BLOCKS), default=[PLAIN, TEXT, IDLE, AHEAD])
    parser.add_argument("--updated", action="store_true", help="older weights make the texts")
    options = parser.parse_intermixed_args()
    if AHEAD in options.ways and PLAIN not in options.ways:
        parser.error(f"the way {AHEAD} needs the way {PLAIN}")
    tree = load_config(options.config, ["grpo.max_num_steps=1", "checkpointing.enabled=false", *options.overrides])
    config, _ = read_run_config(tree)
    use_threads(config.cluster.threads)
    weights = list(weights_after(config, tree, 1)) if options.updated else []
    bench = AheadSpeed(config, [way for way in BLOCKS if way in options.ways], weights)
    rows = []
    for batch in map(int, options.batches.split(",")):
        rounds = []
        possible = []
        for _ in track(range(WARM_UP_ROUNDS + options.rounds), f"batch {batch}", transient=True):
            rounds.append(bench.round(batch))
            if AHEAD in options.ways:
                possible.append(bench.possible([len(r.token_ids) for r in rounds[-1][PLAIN].rollouts]))
        rows.append(row_of(batch, rounds[WARM_UP_ROUNDS:], possible[WARM_UP_ROUNDS:]))
    bench.close()
    log_console().print(table_of(rows))
    facts = {"config": str(options.config), "overrides": options.overrides, "rounds": options.rounds, "rows": rows}
    write_facts(options.out / "ahead_speed.json", {**facts, "updated": options.updated})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
