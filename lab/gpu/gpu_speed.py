# SPDX-License-Identifier: Apache-2.0
"""Item of the GPU check with the shape of a real model and random weights: what our part of a step costs.

Random weights repeat nothing, so text drafters find nothing that is right: the cost is measured, not the gain.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.gpu.geometries import VOCAB_SIZE, model_folder
from lab.gpu.gpu_stage import STOCK, Findings, block, of_version, start_engine
from lab.local.engine import Generation, RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest

WAYS = {"stock": STOCK, "ours, no drafts": block(), "ours, suffix and ngram": block("suffix", "ngram")}
PROMPT_LENGTH = 64
HOST_CALLS = ("Launch", "Synchronize", "cudaMemcpy", "cudaMemset")


def random_requests(num: int, length: int) -> list[RolloutRequest]:
    """Returns requests with random prompts and responses of `length` tokens."""
    prompts = np.random.default_rng(0).integers(10, VOCAB_SIZE // 2, (num, PROMPT_LENGTH)).tolist()
    return [RolloutRequest(ids, i, 0, exact_length=length) for i, ids in enumerate(prompts)]


def start_random(folder: Path, specrollout: SpecrolloutConfig, **kwargs: Any) -> RolloutEngine:
    """Starts an engine with random weights, in bfloat16 on a GPU."""
    precision = "bfloat16" if torch.cuda.is_available() else "float32"
    defaults: dict[str, Any] = {"load_format": "dummy", "enable_prefix_caching": False}
    return start_engine(folder, specrollout, eager=False, precision=precision, **{**defaults, **kwargs})


def overhead(findings: Findings) -> None:
    """Measures steps of a small model, where our part is largest: stock vLLM, our sampler alone, and useless drafters."""
    batches = findings.size((1, 32, 64), (1, 2))
    length = findings.size(64, 8)
    with model_folder(findings.size("Qwen3-0.6B", "tiny")) as folder:
        for way, specrollout in WAYS.items():
            engine = start_random(folder, specrollout)
            engine.generate(random_requests(batches[-1], 8))
            for batch in batches:
                requests = random_requests(batch, length)
                rounds = range(1, findings.size(4, 2))
                times = [plain_step_ms(engine, of_version(requests, batch + i)) for i in rounds]
                findings.note(f"{batch} requests, {way}", {"ms a step": min(times), "slowest round": max(times)})
            profile(findings, way, engine, of_version(random_requests(batches[-1], findings.size(24, 8)), 1000))
            engine.close()


def plain_step_ms(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> float:
    """Returns the mean milliseconds of a decode step without accepted drafts, measured by the caller of the engine.

    All responses have one length. The first steps read prompts and the last ones wait, so neither counts.
    """
    generation = Generation(engine, requests)
    ended = []
    while not generation.is_done:
        generation.advance(0.0)
        ended.append(time.perf_counter())
    middle = ended[3:-2]
    return 1e3 * (middle[-1] - middle[0]) / (len(middle) - 1)


def profile(findings: Findings, way: str, engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> None:
    """Notes launches, copies and waits of a step on the host, and the share of time in which the GPU works."""
    has_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    steps = engine.num_steps
    started = time.perf_counter()
    with torch.profiler.profile(activities=activities + [torch.profiler.ProfilerActivity.CUDA] * has_gpu) as profiler:
        engine.generate(requests)
        if has_gpu:
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    num_steps = engine.num_steps - steps
    calls, kernels, busy_us = _events(profiler)
    summary = {"GPU works": busy_us / (1e6 * seconds), "launches a step": kernels.total() / num_steps}
    findings.note(way, summary | {name: count / num_steps for name, count in calls.most_common(6)}, "profile")
    for name, count in kernels.most_common(30):
        findings.note(f"{way}: {name[:60]}", {"a step": count / num_steps}, "kernels")


def _events(profiler: torch.profiler.profile) -> tuple[Counter[str], Counter[str], float]:
    """Returns calls of the host by name, kernels of the GPU by name, and the microseconds of the latter."""
    calls = Counter[str]()
    kernels = Counter[str]()
    busy_us = 0.0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy_us += event.device_time
            kernels[event.name] += 1
        elif event.name.startswith("cu") and any(part in event.name for part in HOST_CALLS):
            calls[event.name] += 1
    return calls, kernels, busy_us
