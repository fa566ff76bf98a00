# SPDX-License-Identifier: Apache-2.0
"""Stages of the GPU check with the shapes of real models and random weights: time by batch size, launches and waits."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.gpu_stage import STOCK, Stage, block, start_engine
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.generation.requests import RolloutRequest

VOCAB_SIZE = 151_936
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 40_960, "rope_theta": 1e6,
    "dtype": "bfloat16", "eos_token_id": 151_645, "attention_bias": False,
}  # fmt: skip
GEOMETRIES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
}
WAYS = {"stock": STOCK, "ours, no drafts": block(), "ours, suffix and ngram": block("suffix", "ngram")}
PROMPT_LENGTH = 64
HOST_CALLS = ("Launch", "Synchronize", "cudaMemcpy", "cudaMemset")


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """Yields a folder with only the model's config: vLLM makes random weights."""
    geometry = GEOMETRIES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = {**COMMON, "vocab_size": VOCAB_SIZE, "tie_word_embeddings": name != "Qwen3-8B", **geometry}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def random_requests(num: int, length: int) -> list[RolloutRequest]:
    """Returns requests with random prompts and responses of `length` tokens."""
    prompts = np.random.default_rng(num).integers(10, VOCAB_SIZE // 2, (num, PROMPT_LENGTH)).tolist()
    return [RolloutRequest(ids, i, 0, exact_length=length) for i, ids in enumerate(prompts)]


def start_random(folder: Path, way: str, stage: Stage, max_num_seqs: int) -> RolloutEngine:
    """Starts an engine with random weights; with bfloat16 and CUDA graphs if there is a GPU."""
    return start_engine(
        folder, WAYS[way], eager=not stage.on_gpu, precision="bfloat16" if stage.on_gpu else "float32", length=1024,
        load_format="dummy", max_num_seqs=max_num_seqs, enable_prefix_caching=False,
    )  # fmt: skip


def measure_speed(stage: Stage) -> None:
    """Measures milliseconds of a step by batch size: plain vLLM, our sampler alone, and drafters whose drafts are wrong.

    Random weights repeat nothing, so this measures the cost of our part, not its gain.
    """
    batches: tuple[int, ...] = stage.size((1, 8, 32, 128, 256, 512), (1, 32, 256), (1, 4))
    length = stage.size(128, 64, 8)
    for name in stage.size(("Qwen3-0.6B", "Qwen3-8B"), ("Qwen3-0.6B",), ("tiny",)):
        with model_folder(name) as folder:
            for way in WAYS:
                engine = start_random(folder, way, stage, max(batches))
                engine.generate(random_requests(batches[-1], 8))
                figures = {}
                for batch in batches:
                    requests = random_requests(batch, length)
                    times = [_timed(engine, requests) for _ in range(stage.size(3, 2, 1))]
                    figures[str(batch)] = 1e3 * min(times) / length
                stage.note(f"{name}, {way}: ms per token of a request", figures)
                engine.close()


def _timed(engine: RolloutEngine, requests: list[RolloutRequest]) -> float:
    started = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - started


def profile_steps(stage: Stage) -> None:
    """Counts launches, copies and waits of a decode step on the host, and measures the share of time that the GPU works."""
    batch, length = 64, 48
    requests = random_requests(batch, length)
    with model_folder("Qwen3-0.6B") as folder:
        for way in WAYS:
            engine = start_random(folder, way, stage, batch)
            engine.generate(requests)
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            steps = engine.num_steps
            with torch.profiler.profile(activities=activities) as profiler:
                seconds = _timed(engine, requests)
                torch.cuda.synchronize()
            stage.note(way, _profile_figures(profiler, seconds, engine.num_steps - steps))
            engine.close()


def _profile_figures(profiler: torch.profiler.profile, seconds: float, num_steps: int) -> dict[str, Any]:
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy_us = 0.0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy_us += event.device_time
            kernels[event.name] += 1
        elif event.name.startswith("cu") and any(part in event.name for part in HOST_CALLS):
            calls[event.name] += 1
    return {
        "ms_per_step": 1e3 * seconds / num_steps,
        "gpu_works": busy_us / (1e6 * seconds),
        "host_calls_per_step": {name: count / num_steps for name, count in calls.most_common()},
        "kernels_per_step": {name[:80]: count / num_steps for name, count in kernels.most_common(40)},
    }
