# SPDX-License-Identifier: Apache-2.0
"""Items of the GPU check that compare our Triton kernels with their references, and measure the time of a launch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lab.gpu.geometries import VOCAB_SIZE
from lab.gpu.gpu_stage import Findings
from lab.gpu.kernel_check import (
    CPU,
    Compared,
    compare_acceptance,
    compare_draft_sampling,
    compare_drafting,
    compare_row_sampling,
)
from nemo_specrollout.generation.engine.arguments import set_process_environment

HEAD_VOCAB_SIZE = 32_000
"""Number of tokens that a draft head of a Qwen3 usually knows."""


def kernels(findings: Findings) -> None:
    """Compares the kernels that need no vLLM with their references.

    Texts are tried in the device's memory and in the host's, because vLLM keeps them on the host if there is a draft head.
    """
    places = {"device": False, "host": True} if torch.cuda.is_available() else {"device": False}
    for num in findings.size((64, 1, 256, 1024), (3,)):
        _note(findings, f"acceptance, {num} requests", partial(compare_acceptance, num, _device()))
        for place, on_host in places.items():
            compare = partial(compare_drafting, num, _device(), on_host, findings.size(8, 2))
            _note(findings, f"drafting, {num} requests, texts on the {place}", compare)


def sampling(findings: Findings) -> None:
    """Compares the kernels that sample with vLLM's functions, over the vocabulary of a Qwen3 and over that of a draft head."""
    set_process_environment()
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()  # on a CPU, numba's bodies take the place of vLLM's kernels
    whole, reduced = findings.size((VOCAB_SIZE, HEAD_VOCAB_SIZE), (5000, 700))
    for num in findings.size((64, 1, 256), (3,)):
        _note(findings, f"rows, {num} requests", partial(compare_row_sampling, num, _device(), whole))
        for num_vocab in (whole, reduced):
            compare = partial(compare_draft_sampling, num, _device(), num_vocab)
            _note(findings, f"drafts, {num} requests, {num_vocab} tokens", compare)


def _device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else CPU


def _note(findings: Findings, name: str, compare: Callable[[], Compared]) -> None:
    """Notes which results of a comparison differ, and the time of each launch.

    A comparison that raises an error is noted as a problem.
    """
    try:
        compared = compare()
        differing = "; ".join(f"{part} by {gap:.2g}" for part, gap in compared.different.items())
        findings.check(not differing, f"{name}: {differing}")
        for part, launch in compared.launches.items():
            row: dict[str, Any] = {"differs": differing or "nothing"}
            findings.note(f"{name}: {part}", row | (_launch_times(launch) if torch.cuda.is_available() else {}))
    except Exception as error:
        findings.check(False, f"{name}: {type(error).__name__}: {error}")


def _launch_times(launch: Callable[[], Any], repeats: int = 50) -> dict[str, Any]:
    """Returns the microseconds of a launch from Python and of a launch in a CUDA graph."""

    def measured(call: Callable[[], Any]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            call()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / repeats

    figures: dict[str, Any] = {"us from Python": measured(launch)}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError as error:
        return {**figures, "us in a graph": f"not captured: {' '.join(str(error).split())[:100]}"}
    return {**figures, "us in a graph": measured(graph.replay)}
