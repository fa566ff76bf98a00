# SPDX-License-Identifier: Apache-2.0
"""Items of the GPU check that measure what our part of an engine step costs, with the shape of a real model.

The weights are random, and texts of random weights do not repeat, so text drafters find no right tokens. The items measure the
cost of these drafters, not their gain.
"""

import cProfile
import pstats
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
    """Starts an engine with random weights, in bfloat16 on a GPU and in float32 elsewhere."""
    precision = "bfloat16" if torch.cuda.is_available() else "float32"
    defaults: dict[str, Any] = {"load_format": "dummy", "enable_prefix_caching": False}
    return start_engine(folder, specrollout, eager=False, precision=precision, **{**defaults, **kwargs})


def overhead(findings: Findings) -> None:
    """Measures engine steps of a small model, in which our part is largest.

    Compares stock vLLM, our sampler without drafters, and drafters that are never right.
    """
    batches = findings.size((1, 32, 64), (1, 2))
    _compare(findings, findings.size("Qwen3-0.6B", "tiny"), batches, WAYS)


def overhead_large(findings: Findings) -> None:
    """Measures engine steps of 128 requests with the shape of Qwen3-8B, plain and with drafters that soon rest.

    The table of kernels shows where our sampler uses other kernels than vLLM's, and the microseconds of both.
    """
    _compare(findings, findings.size("Qwen3-8B", "tiny"), findings.size((128,), (2,)), WAYS, max_num_seqs=128)


def _compare(
    findings: Findings, geometry: str, batches: Sequence[int], ways: dict[str, SpecrolloutConfig], **options: Any
) -> None:
    """Notes the time of engine steps in each way by number of requests, and then profiles.

    All engines live at the same time and take turns, forwards and backwards. So neither the growing state of the process nor a
    machine that changes its speed can favour one of them.
    """
    length = findings.size(64, 8)
    with model_folder(geometry) as folder:
        engines = {way: start_random(folder, specrollout, **options) for way, specrollout in ways.items()}
        for engine in engines.values():
            engine.generate(random_requests(batches[-1], 8))
        for batch in batches:
            _take_turns(findings, engines, random_requests(batch, length))
        for way, engine in engines.items():
            requests = random_requests(batches[-1], findings.size(24, 8))
            profile(findings, way, engine, of_version(requests, 1000))
            _profile_python(findings, way, engine, of_version(requests, 1001))
        for engine in engines.values():
            engine.close()


def _take_turns(findings: Findings, engines: dict[str, RolloutEngine], requests: Sequence[RolloutRequest]) -> None:
    """Notes milliseconds per engine step in the fastest and the slowest round of each engine.

    Also notes the milliseconds per engine step that the host spends on our drafting.
    """
    times: dict[str, list[float]] = {way: [] for way in engines}
    host_ms = dict.fromkeys(engines, 0.0)
    for number in range(1, findings.size(5, 3)):
        for way in list(engines) if number % 2 else list(engines)[::-1]:
            before = engines[way].counters()
            times[way].append(plain_step_ms(engines[way], of_version(requests, len(requests) + number)))
            after = None if before is None else engines[way].stats(before.num_steps)
            if after is not None:
                host_ms[way] = 1e3 * float(after.trace.column("host_s").mean())
    for way, found in times.items():
        row = {"ms a step": min(found), "slowest round": max(found), "ms of the host in our drafting": host_ms[way]}
        findings.note(f"{len(requests)} requests, {way}", row)


def plain_step_ms(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> float:
    """Returns the mean milliseconds of a decode step in which no drafts are accepted, measured outside of the engine.

    All responses must have one length. The first four engine steps do not count, because prompts are read in them. The last
    two do not count either, because in these the caller only waits for results.
    """
    generation = Generation(engine, requests)
    ended = []
    while not generation.is_done:
        generation.advance(0.0)
        ended.append(time.perf_counter())
    middle = ended[3:-2]
    return 1e3 * (middle[-1] - middle[0]) / (len(middle) - 1)


def profile(findings: Findings, way: str, engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> None:
    """Notes the host's launches, copies and waits per engine step, and the share of time in which the GPU works."""
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
    calls, kernels, kernel_us = _events(profiler)
    busy_us = sum(kernel_us.values())
    summary = {
        "GPU works": busy_us / (1e6 * seconds),
        "us of the GPU a step": busy_us / num_steps,
        "kernels a step": kernels.total() / num_steps,
        "launches a step": sum(count for name, count in calls.items() if "LaunchKernel" in name) / num_steps,
        "graph replays a step": sum(count for name, count in calls.items() if "GraphLaunch" in name) / num_steps,
    }
    findings.note(way, summary | {name: count / num_steps for name, count in calls.most_common(6)}, "profile")
    for name, us in sorted(kernel_us.items(), key=lambda kernel: -kernel[1])[:40]:
        row = {"a step": kernels[name] / num_steps, "us a step": us / num_steps}
        findings.note(f"{way}: {name[:60]}", row, "kernels")


def _profile_python(findings: Findings, way: str, engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> None:
    """Notes the share of Python's time that our functions take, and the number of their calls per engine step.

    The profiler slows all functions down.
    """
    steps = engine.num_steps
    profiler = cProfile.Profile()
    profiler.runcall(engine.generate, requests)
    total_s, own_s, own_calls = 0.0, 0.0, 0
    functions: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, num_calls, seconds, _, _) in functions.items():
        total_s += seconds
        if "/nemo_specrollout/" in file:
            own_s += seconds
            own_calls += num_calls
    row = {"share of our functions": own_s / total_s, "calls a step": own_calls / (engine.num_steps - steps)}
    findings.note(way, row, "python")


def _events(profiler: torch.profiler.profile) -> tuple[Counter[str], Counter[str], dict[str, float]]:
    """Returns how often each call was made on the host, how often each kernel ran, and the microseconds of each kernel.

    All three are mappings by the name of the call or kernel.
    """
    calls = Counter[str]()
    kernels = Counter[str]()
    kernel_us: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernel_us[event.name] = kernel_us.get(event.name, 0.0) + event.device_time
            kernels[event.name] += 1
        elif event.name.startswith("cu") and any(part in event.name for part in HOST_CALLS):
            calls[event.name] += 1
    return calls, kernels, kernel_us
