# SPDX-License-Identifier: Apache-2.0
"""The items of the GPU check, the most important first. Loads no torch."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from lab.gpu.arms import PREDICTIONS
from lab.gpu.machine import Machine
from nemo_specrollout.doctor.self_test import EXACT

GRACE = 0.6
"""An item is started only if at least this share of its expected seconds is left."""


@dataclass(frozen=True)
class Item:
    """A check that `gpu_check` runs in a process of its own."""

    function: str
    """The function that does the check, as "module.function" with a module of this package. It takes `Findings`."""
    seconds: float
    """Expected seconds on an H100, which are an estimate."""
    purpose: str
    gib: float = 8.0
    """GiB of GPU memory that the item needs."""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    needs_vllm: bool = True
    has_experts: bool = False
    """Whether the model is a mixture of experts, for which vLLM has a separate library."""
    not_on_cpu: str = ""
    """Why a rehearsal leaves the item out, or empty if it does not."""
    model: Callable[[], Path] | None = None
    """Returns the folder of the model that the item needs and that `make smollm2` makes. None if it needs no such model."""
    predictions: tuple[str, ...] = ()
    """Expectations that were written down before the run, and that are kept with its figures."""


def smollm2() -> Path:
    """Returns the folder of SmolLM2-135M, where `make smollm2` puts it or where the variable SMOLLM2_START says."""
    return Path(os.environ.get("SMOLLM2_START") or "models/smollm2_start")


def smollm2_head() -> Path:
    """Returns the folder of SmolLM2's EAGLE-3 head, in the working tree or where the variable SMOLLM2_HEAD says."""
    return Path(os.environ.get("SMOLLM2_HEAD") or Path(__file__).parents[2] / "examples" / "models" / "smollm2_eagle3")


ITEMS = {
    "kernels": Item(
        "gpu_kernels.kernels",
        60,
        "drafting and acceptance against their numba bodies; microseconds of a launch",
        4,
        needs_vllm=False,
    ),
    "sampling": Item("gpu_kernels.sampling", 35, "sampling of rows and drafts against vLLM's functions", 4),
    "tokens": Item("gpu_engines.tokens", 75, "tokens against plain decoding, float32, eager", environment=EXACT),
    "graphs": Item("gpu_engines.graphs", 55, "the same with CUDA graphs", environment=EXACT),
    "overhead": Item(
        "gpu_speed.overhead",
        110,
        "a step's ms against stock vLLM, launches, graph replays, our Python; shape of Qwen3-0.6B",
    ),
    "overhead_large": Item(
        "gpu_speed.overhead_large", 120, "the same for 128 requests, shape of Qwen3-8B; kernels of both", 66
    ),
    "real": Item(
        "real_model.real", 60, "SmolLM2-135M with its head and text drafters, against stock vLLM", model=smollm2
    ),
    "real_8b": Item(
        "real_8b.real_8b",
        480,
        "SmolLM2-135M and its head, widened to Qwen3-8B's cost: plain, vLLM's EAGLE-3, and ours, drained",
        125,
        model=smollm2,
        predictions=PREDICTIONS,
    ),
    "training": Item(
        "training.training",
        400,
        "GRPO with engine and trainer on one GPU: rows and losses in float32, seconds in bfloat16",
        40,
        environment=EXACT,
    ),
    "speed": Item("forced_acceptance.speed", 130, "what right drafts bring; shape of Qwen3-8B", 38),
    "bf16": Item("gpu_engines.bf16", 50, "responses that differ in bfloat16"),
    "syncs": Item(
        "gpu_engines.syncs", 60, "places where the host waits for the GPU", environment={"VLLM_GPU_SYNC_CHECK": "warn"}
    ),
    "head": Item("gpu_engines.head", 45, "acceptance and drafting time of an EAGLE-3 head"),
    "sleep": Item("gpu_engines.sleep", 35, "memory asleep, tokens after waking", environment=EXACT),
    "speed_experts": Item(
        "forced_acceptance.speed_experts", 150, "what right drafts bring; shape of Qwen3-30B-A3B", 74, has_experts=True
    ),
    "speed_right_less": Item(
        "forced_acceptance.speed_right_less", 150, "`speed` compiled, where 6 of 10 drafts are right", 38
    ),
    "head_compiled": Item("gpu_engines.head_compiled", 110, "`head` in bfloat16, in engines that vLLM compiles"),
    "hybrid_compiled": Item(
        "gpu_families.hybrid_compiled",
        120,
        "tokens of a hybrid with Mamba-2 layers (Nemotron-H), float32, compiled",
        environment=EXACT,
    ),
    "mla": Item("gpu_families.mla", 60, "responses that differ with DeepSeek's attention (MLA), bfloat16"),
    "batch_invariant": Item(
        "gpu_engines.bf16",
        55,
        "bf16 with VLLM_BATCH_INVARIANT=1",
        environment={"VLLM_BATCH_INVARIANT": "1"},
        not_on_cpu="vLLM's attention on a CPU has no such mode; `bf16` is the same code",
    ),
    "speed_compiled": Item("forced_acceptance.speed_compiled", 200, "`speed` in engines that vLLM compiles", 38),
    "rows": Item(
        "row_counts.rows", 180, "ms of a step by its rows: vLLM's graphs, larger ones, none; shape of Qwen3-8B", 38
    ),
    "compiled": Item("gpu_engines.compiled", 90, "one engine with torch.compile and all graphs"),
}


def reason_to_skip(item: Item, left_s: float, machine: Machine) -> str:
    """Returns why an item cannot be started with `left_s` seconds left, or an empty string if it can."""
    if item.needs_vllm and machine.vllm_problem:
        return machine.vllm_problem
    if item.has_experts and not machine.serves_experts:
        return "this vLLM has no kernels for mixtures of experts"
    if item.model is not None and (missing := _missing(item.model())):
        return missing
    if item.gib > machine.free_gib:
        return f"needs {item.gib:g} GiB of GPU memory, {machine.free_gib:.0f} are free"
    if left_s < GRACE * item.seconds:
        return f"takes about {item.seconds:g} s, {max(left_s, 0):.0f} s are left"
    return ""


def _missing(model: Path) -> str:
    """Returns a sentence that says which folder of SmolLM2 is missing and how to get it, or an empty string if none is."""
    if not (model / "config.json").is_file():
        return f"{model} is missing: run `make smollm2`"
    head = smollm2_head()
    return "" if (head / "config.json").is_file() else f"{head} is missing: run `python -m lab.gpu.parts back`"
