# SPDX-License-Identifier: Apache-2.0
"""First stage of the GPU check: compares our Triton kernels with their numba bodies, and measures their time.

Shapes: B requests, D drafters, E evidence levels, K draft positions, L longest text, V vocabulary.
"""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.gpu_stage import Stage
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard, Tables
from nemo_specrollout.drafters.device_index import ContextIndex, context_orders
from nemo_specrollout.sampling.equality import accept_by_equality

D, K, L, V = 3, 8, 4096, 151_936
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROUNDING = 1e-4
"""Allowed difference between sums in another order of additions."""


def check_kernels(stage: Stage) -> None:
    """Compares each kernel with its numba body, and measures a launch from Python and in a CUDA graph."""
    for num_requests in stage.size((1, 64, 256, 1024), (64, 256), (4,)):
        for check in (check_equality, check_board, check_index, check_draft_sampling):
            name = f"{check.__name__.removeprefix('check_')}, {num_requests} requests"
            try:
                stage.note(name, check(num_requests))
            except Exception:
                stage.note(name, {"error": traceback.format_exc()[-2000:]})


def check_equality(num_requests: int) -> dict[str, Any]:
    """Checks acceptance by equality."""
    rng = np.random.default_rng(num_requests)
    starts = np.concatenate([[0], np.cumsum(rng.integers(1, K + 2, num_requests))])
    sampled_R = torch.from_numpy(rng.integers(0, 5, starts[-1]))
    inputs_R = torch.where(torch.from_numpy(rng.random(starts[-1]) < 0.7), sampled_R.roll(1), -1).int()
    tensors: Any = (sampled_R, inputs_R, torch.from_numpy(starts).int())
    expected = accept_by_equality(*[*tensors, K])
    on_gpu: Any = tuple(t.to(GPU) for t in tensors)
    got = accept_by_equality(*[*on_gpu, K])
    different = sum(int((g.cpu() != e).sum()) for g, e in zip(got, expected, strict=True))
    return {"different": different, **_taken(lambda: accept_by_equality(*[*on_gpu, K]))}


def check_board(num_requests: int) -> dict[str, Any]:
    """Checks both kernels of the draft board for a few steps, each from the same state."""
    rng = np.random.default_rng(num_requests)

    def ints(*shape: int, high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, high, shape)).int()

    names = ["suffix", "ngram", "eagle3"]
    board = DraftBoard(names, np.tile(LEVEL_PRIORS, (D, 1)), BoardShape(num_requests, K, [2048]), CPU, 2)
    ours = DraftBoard(names, np.tile(LEVEL_PRIORS, (D, 1)), BoardShape(num_requests, K, [2048]), GPU, 2)
    slots_B = torch.from_numpy(rng.permutation(num_requests))
    board.open(slots_B, ints(num_requests, high=L))
    total_len_S, text_SL = ints(num_requests, high=L // 2) + 10, ints(num_requests, L, high=2)
    different: dict[str, float] = {}
    for step in range(8):
        for proposed, high in zip(board.tables[:3], (2, NUM_LEVELS, K + 1), strict=True):
            proposed.copy_(ints(*proposed.shape, high=high))
        num_sampled_B = ints(num_requests, high=K + 2)
        total_len_S[slots_B] += num_sampled_B
        texts, num_rejected_B = Texts(slots_B, total_len_S, text_SL), ints(num_requests, high=K)
        for table, value in zip(ours.tables, board.tables, strict=True):
            table.copy_(value)
        for each, device in ((board, CPU), (ours, GPU)):
            there = Texts(*(t.to(device) for t in texts))
            each.observe(there, num_sampled_B.to(device), num_rejected_B.to(device), step)
            each.choose(there)
        for name, value, table in zip(Tables._fields, board.tables, ours.tables, strict=True):
            gap = float((table.cpu().double() - value.double()).abs().max())
            if gap > (ROUNDING if value.is_floating_point() else 0):
                different[name] = max(gap, different.get(name, 0.0))
    num_sampled_B, num_rejected_B = num_sampled_B.to(GPU), num_rejected_B.to(GPU)
    return {
        "different": different,
        "observe": _taken(lambda: ours.observe(there, num_sampled_B, num_rejected_B, 0)),
        "choose": _taken(lambda: ours.choose(there)),
    }


def check_index(num_requests: int) -> dict[str, Any]:
    """Checks drafts of the context index after the same texts. Programs race, so a few drafts may differ."""
    rng = np.random.default_rng(num_requests)
    text_SL = torch.from_numpy(rng.integers(0, 50, (num_requests, 64)).repeat(4, axis=1)).int()
    slots_B, total_len_S = torch.arange(num_requests), torch.full((num_requests,), 200, dtype=torch.int32)
    rates_E = torch.from_numpy(LEVEL_PRIORS).float()
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    taken: dict[str, Any] = {}
    for device in (CPU, GPU):
        index = ContextIndex(1 << 18, context_orders(1, 6), device)
        texts, salts_S = Texts(*(t.to(device) for t in (slots_B, total_len_S, text_SL))), (slots_B * 7 + 1).to(device)
        learned_S = torch.zeros_like(texts.total_len_S)
        out = Proposals(
            torch.zeros(num_requests, K, dtype=torch.int32, device=device),
            torch.zeros(num_requests, K, dtype=torch.int8, device=device),
            torch.zeros(num_requests, dtype=torch.int32, device=device),
        )
        index.learn(texts, salts_S, learned_S, 200)
        walk = partial(index.walk, texts, salts_S, rates_E.to(device), 0.02, out)
        walk()
        found[device.type] = tuple(t.cpu() for t in out)
        if device is GPU:
            taken["learn"] = _taken(partial(index.learn, texts, salts_S, learned_S, K + 1))
            taken["walk"] = _taken(walk)
    same_BK = found["cpu"][0] == found["cuda"][0]
    in_range = bool(((found["cuda"][0] >= 0) & (found["cuda"][0] < 50)).all())
    return {"share_of_equal_drafts": float(same_BK.float().mean()), "in_range": in_range, **taken}


def check_draft_sampling(num_requests: int) -> dict[str, Any]:
    """Checks that drafts with the target's noise equal the tokens of vLLM's sampler on this device.

    A CPU computes other logarithms, so near ties may go the other way there.
    """
    from nemo_specrollout.generation.compat import draw
    from nemo_specrollout.generation.draft_sampling import sample_with_score_gap

    generator = torch.Generator().manual_seed(num_requests)
    logits_BV = torch.randn(num_requests, V, generator=generator).mul_(3).bfloat16()
    slots_B, positions_B = torch.arange(num_requests), torch.arange(num_requests) + 100
    temperature_S, seeds_S = torch.ones(num_requests), torch.arange(num_requests) * 977
    tensors = (logits_BV, slots_B, temperature_S, seeds_S, positions_B)
    levels_BK, column = torch.zeros(num_requests, K, dtype=torch.int8), torch.tensor(1)
    expected_B = sample_with_score_gap(*tensors, levels_BK, column)
    on_gpu: Any = (*(t.to(GPU) for t in tensors), torch.zeros_like(levels_BK, device=GPU), column.to(GPU))
    got_B = sample_with_score_gap(*on_gpu)
    target_B = draw(*on_gpu[:5], apply_temperature=True)
    some_V = torch.arange(0, V, 8, device=GPU)
    masked_BV = torch.full_like(on_gpu[0], -torch.inf).index_copy_(1, some_V, on_gpu[0][:, some_V])
    masked_B = draw(masked_BV, *on_gpu[1:5], apply_temperature=True)
    narrow: Any = (on_gpu[0][:, some_V], *on_gpu[1:5], torch.zeros_like(on_gpu[5]), on_gpu[6], some_V)
    reduced_B = sample_with_score_gap(*narrow)
    return {
        "unlike_vllm": int((got_B != target_B).sum() + (reduced_B != masked_B).sum()),
        "different_tokens": int((got_B.cpu() != expected_B).sum()),
        "different_levels": int((on_gpu[5].cpu() != levels_BK).sum()),
        **_taken(lambda: sample_with_score_gap(*on_gpu)),
    }


def _taken(launch: Callable[[], Any], repeats: int = 50) -> dict[str, Any]:
    """Returns the microseconds of a launch from Python, and of a launch in a CUDA graph."""

    def measured(call: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            call()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / repeats

    from_python = measured(launch)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError as error:
        return {"us": from_python, "us_in_graph": None, "not_captured": str(error)[:300]}
    return {"us": from_python, "us_in_graph": measured(graph.replay)}
