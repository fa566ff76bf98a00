# SPDX-License-Identifier: Apache-2.0
"""Stages of the GPU check with the shipped policy: equal tokens, bfloat16 mismatches, the head, sleep and wake."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu.gpu_stage import POLICY, Stage, block, start_engine, task_requests
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.generation.requests import Rollout
from nemo_specrollout.local.statistics import count_equal

SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=0": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def check_tokens(stage: Stage) -> None:
    """Counts tokens that equal plain decoding in float32, for each kind of drafting and sampling."""
    requests = task_requests(*stage.size((32, 8), (12, 4), (2, 2)))
    ways: dict[str, tuple[SpecrolloutConfig, bool]] = {
        "none": (block(), True),
        "suffix, ngram": (block("suffix", "ngram"), True),
        "eagle3": (block("eagle3"), True),
        "all, random budget": (block("suffix", "ngram", "eagle3", budget=BudgetConfig("random")), True),
    }
    if stage.on_gpu:
        ways["all, random budget, CUDA graphs"] = (ways["all, random budget"][0], False)
    expected: dict[str, list[Rollout]] = {}
    for way, (specrollout, eager) in ways.items():
        engine = start_engine(POLICY, specrollout, eager=eager)
        figures: dict[str, Any] = {}
        for name, sampling in SAMPLINGS.items():
            rollouts = engine.generate(requests, **sampling)
            expected.setdefault(name, rollouts)
            equal, total = count_equal(rollouts, expected[name])
            figures[name] = {"equal": equal, "tokens": total}
        stage.note(way, figures | _acceptance(engine))
        engine.close()


def count_mismatches(stage: Stage) -> None:
    """Counts responses that differ in bfloat16: drafting against plain, and plain against itself in other batches.

    The capture sizes of CUDA graphs change the order of sums. So one run uses the sizes that vLLM chooses for each engine, and
    one run uses the same sizes for all engines.
    """
    requests = task_requests(*stage.size((64, 8), (16, 4), (2, 2)))
    ways: dict[str, dict[str, Any]] = {"sizes of their own": {}}
    if stage.on_gpu:
        ways["sizes alike"] = {"compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES}}
    for name, kwargs in ways.items():
        rollouts = {}
        for way, specrollout in {"plain": block(), "drafting": block("suffix", "ngram")}.items():
            engine = start_engine(POLICY, specrollout, eager=not stage.on_gpu, precision="bfloat16", **kwargs)
            rollouts[way] = engine.generate(requests)
            if way == "plain":
                rollouts["plain, in halves"] = [
                    r for part in (requests[::2], requests[1::2]) for r in engine.generate(part)
                ]
            engine.close()
        halves = rollouts.pop("plain, in halves")
        plain = rollouts["plain"]
        stage.note(
            name,
            {
                "drafting against plain": _divergence(rollouts["drafting"], plain),
                "plain in halves against plain": _divergence(halves, [*plain[::2], *plain[1::2]]),
            },
        )


def measure_head(stage: Stage) -> None:
    """Measures steps, acceptance and drafting time of the EAGLE-3 head by the number of tokens that it drafts."""
    requests = task_requests(*stage.size((32, 2), (16, 2), (2, 2)))
    for depth in stage.size((1, 2, 3, 5, 8), (1, 3), (2,)):
        engine = start_engine(POLICY, block("eagle3", budget=BudgetConfig("fixed", k=depth)), eager=not stage.on_gpu)
        engine.generate(requests[:8])
        steps = engine.num_steps
        started = time.perf_counter()
        rollouts = engine.generate(requests)
        seconds, num_steps = time.perf_counter() - started, engine.num_steps - steps
        figures = {"ms_per_step": 1e3 * seconds / num_steps, "draft_ms_per_step": _draft_ms(engine)}
        tokens = sum(len(r.token_ids) for r in rollouts)
        stage.note(f"{depth} drafts", figures | {"tokens": tokens, "steps": num_steps} | _acceptance(engine))
        engine.close()


def sleep_and_wake(stage: Stage) -> None:
    """Measures memory awake and asleep, and compares tokens after waking and after loading the same weights again."""
    requests = task_requests(8, 2)
    engine = start_engine(POLICY, block("suffix", "ngram"), eager=False, enable_sleep_mode=True)
    before = engine.generate(requests)
    stage.note("awake_gib", _used_gib())
    for level in (1, 2):
        engine._llm.sleep(level=level)
        stage.note(f"asleep_{level}_gib", _used_gib())
        engine._llm.wake_up()
        if level == 2:
            engine.load_weights(load_file(POLICY / "model.safetensors").items())
        stage.note(f"equal_after_{level}", count_equal(engine.generate(requests), before))
    engine.close()


def _acceptance(engine: RolloutEngine) -> dict[str, Any]:
    """Returns verified and accepted draft tokens by drafter and position."""
    stats = engine.stats(first_step=1 << 60)
    if stats is None or not stats.drafters:
        return {}
    return {key: dict(zip(stats.drafters, getattr(stats, key), strict=True)) for key in ("proposed", "accepted")}


def _draft_ms(engine: RolloutEngine) -> float:
    stats = engine.stats()
    assert stats is not None
    draft_s = stats.trace.column("draft_s")
    return 1e3 * float(draft_s.sum()) / max(int(np.count_nonzero(draft_s)), 1)


def _divergence(rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> dict[str, float]:
    """Returns how many responses differ, and how many tokens were compared: up to the first difference of each."""
    parted, compared = 0, 0
    for a, b in zip(rollouts, others, strict=True):
        differs = [x != y for x, y in zip(a.token_ids, b.token_ids, strict=False)]
        parted += any(differs)
        compared += differs.index(True) + 1 if any(differs) else len(differs)
    return {"parted": parted, "tokens": compared, "rate": parted / max(compared, 1)}


def _used_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 30)
