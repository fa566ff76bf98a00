# SPDX-License-Identifier: Apache-2.0
"""Measures what a large history of responses costs, in time for its files, in memory, and in slower engine steps.

    python -m lab.bench.history_store_bench CONFIG --out DIR [--gib 1] [key=value ...]

CONFIG is a config of the local runner. The history is filled with random texts of 2,048 tokens, a part of which belong to the
prompts of the config. Two engines of the config then roll out the same requests in turns, one with that history and one
without any. Random texts are never right as drafts, so the extra time of the first engine is the whole cost of a useless
history.
"""

import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.bench_command import bench_parser, write_facts
from lab.local.engine import Generation, RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.drafting.history_drafter import FOLDER, HistoryDrafter
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.history.segments import Text
from nemo_specrollout.history.store import HistoryStore
from nemo_specrollout.sampling.seeds import content_hash

TOKENS = 2048
TURN_S = 0.25
ROUNDS = 5
_MIB = 1 << 20


def timed(work: Callable[[], Any]) -> float:
    """Returns the seconds that a call of `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory() -> float:
    """Returns the most memory that this process has used so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fill(folder: Path, fingerprint: bytes, num_bytes: int, groups: Sequence[int], vocab_size: int) -> dict[str, float]:
    """Fills a history with about `num_bytes` of random texts. Returns their number and the speed of writing.

    A hundredth of the texts belong to `groups`, which are the hashes of the config's prompts.
    """
    rng = np.random.default_rng(0)
    store = HistoryStore(folder, 2 * num_bytes, fingerprint)
    store.open()
    num_texts = num_bytes // (4 * TOKENS + 32)
    write_s = 0.0
    for first in range(0, num_texts, 64):
        tokens = rng.integers(0, vocab_size, (64, TOKENS), dtype=np.int32)
        texts = [
            Text(groups[i % len(groups)] if i % 100 == 0 else int(rng.integers(1 << 62)), 0, tokens[i - first])
            for i in range(first, first + 64)
        ]
        write_s += timed(lambda texts=texts: store.append(texts))  # type: ignore[misc]
    store.close()
    return {"texts": num_texts, "write_mib_per_s": num_bytes / _MIB / write_s}


def start(folder: Path, num_bytes: int, fingerprint: bytes, groups: Sequence[int]) -> dict[str, float]:
    """Opens the history in `folder`, and returns the seconds and the MiB that this takes.

    Also returns the milliseconds to find the texts of one prompt among `groups`, and to read one text.
    """
    before = memory()
    store = HistoryStore(folder, 2 * num_bytes, fingerprint)
    open_s = timed(store.open)
    find_s = timed(lambda: [store.find(group) for group in groups]) / len(groups)
    places = [place for group in groups for place, _ in store.find(group)][:500]
    read_s = timed(lambda: [store.read(place) for place in places]) / len(places)
    return {"open_s": open_s, "memory_mib": memory() - before, "find_ms": 1e3 * find_s, "read_ms": 1e3 * read_s}


def main() -> int:
    """Runs the bench. Prints the figures, and writes them to `history_store.json` in the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    num_bytes = int(options.gib * 2**30)
    folder = Path(tempfile.mkdtemp())
    try:
        plain = engine_of(config, None)
        task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
        steps = [step_prompts(config, number, task).requests for number in range(ROUNDS + 1)]
        groups = sorted({content_hash(request.prompt_token_ids) for of_step in steps for request in of_step})
        probe = engine_of(config, folder / "probe")
        history = history_of(probe)
        fingerprint = history.service._store._fingerprint
        vocab_size = history.service._vocab_size
        probe.close()
        figures: dict[str, Any] = {
            "gib": options.gib,
            **fill(folder / FOLDER, fingerprint, num_bytes, groups, vocab_size),
        }
        figures |= start(folder / FOLDER, num_bytes, fingerprint, groups)
        figures |= beside(plain, engine_of(config, folder), steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, value in figures.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")
    write_facts(options.out / "history_store.json", figures)
    return 0


def engine_of(config: RunConfig, folder: Path | None) -> RolloutEngine:
    """Returns an engine of the config with the history in `folder`, or without a history if this is None."""
    learned = LearnedConfig(warm_start=False, folder=None if folder is None else str(folder))
    generation = config.policy.generation
    block = replace(generation.specrollout, learned=learned)
    return RolloutEngine(Path(config.policy.model_name), replace(generation, specrollout=block), config.grpo.seed)


def history_of(engine: RolloutEngine) -> HistoryDrafter:
    """Returns the history drafter of an engine."""
    found: HistoryDrafter = engine._llm.collective_rpc(lambda worker: worker.specrollout_router.history)[0]
    return found


def beside(plain: RolloutEngine, engine: RolloutEngine, steps: Sequence[Sequence[RolloutRequest]]) -> dict[str, Any]:
    """Returns what a history costs an engine, by comparing `engine`, which has a history, with `plain`, which has none.

    Both roll out the same requests in turns. The first of `steps` only warms up. Closes both engines.
    """
    ratios = []
    host_ms = []
    for number, requests in enumerate(steps):
        took = [0.0, 0.0]
        before = [each._ask(WorkerCalls.specrollout_totals) for each in (plain, engine)]
        running = [Generation(each, requests) for each in (plain, engine)]
        while not all(each.is_done for each in running):
            for i, each in enumerate(running):
                if not each.is_done:
                    took[i] += timed(lambda each=each: each.advance(TURN_S))  # type: ignore[misc]
        if number:
            ratios.append(took[1] / took[0])
            after = [each._ask(WorkerCalls.specrollout_totals) for each in (plain, engine)]
            host_ms.append([_host_ms(a, b) for a, b in zip(before, after, strict=True)])
    facts = history_of(engine).facts()
    engine.close()
    plain.close()
    return {
        "texts_fed": facts.num_fed,
        "seconds_over_none": statistics.median(ratios),
        "seconds_over_none_of_rounds": [round(ratio, 3) for ratio in ratios],
        "host_ms_a_step_without": statistics.median(without for without, _ in host_ms),
        "host_ms_a_step_with": statistics.median(with_history for _, with_history in host_ms),
    }


def _host_ms(before: Any, after: Any) -> float:
    """Returns the milliseconds per engine step of our own work on the host between two readings of an engine's totals."""
    num_steps = after["num_steps"] - before["num_steps"]
    return float(1e3 * (after["host_s"] - before["host_s"]) / max(num_steps, 1))


if __name__ == "__main__":
    raise SystemExit(main())
