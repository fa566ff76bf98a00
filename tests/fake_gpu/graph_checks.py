# SPDX-License-Identifier: Apache-2.0
"""vLLM replays full CUDA graphs for decode steps whose requests verify unequal numbers of drafts."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from decode_step import TEXT, DecodeStep
from device import fake_gpu
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.utils import get_uniform_decode_token_count

from lab.gpu.row_counts import DEFAULT, LARGER, NONE, PIECEWISE, dispatch_by
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.generation.engine.cuda_graphs import vllms_graphs

Step = tuple[int, int]
"""Requests of a decode step, and rows of its forward pass after compaction."""


def manager(max_num_seqs: int, num_drafts: int, varlen: bool, sizes: list[int] | None = None) -> ModelCudaGraphManager:
    """Returns vLLM's graph manager as if it had captured these sizes, or all that it chooses by itself."""
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=None, cudagraph_capture_sizes=sizes,
        post_init_cudagraph_sizes=lambda: None,
    )  # fmt: skip
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192)
    config: Any = SimpleNamespace(
        compilation_config=compilation, scheduler_config=scheduler, model_config=SimpleNamespace(enforce_eager=False),
        speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False),
        uniform_decode_query_len=num_drafts + 1, performance_mode="balanced", num_speculative_tokens=num_drafts,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )  # fmt: skip
    VllmConfig._set_cudagraph_sizes(config)
    only_rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with (
        mock.patch.object(cudagraph_utils, "get_pp_group", lambda: only_rank),
        mock.patch.object(cudagraph_utils, "current_platform", mock.MagicMock()),
    ):
        made = ModelCudaGraphManager(
            config, torch.device("cpu"), compilation.cudagraph_mode, num_drafts + 1, varlen_decode=varlen
        )
    made._graphs_captured = True
    return made


def trace(max_num_seqs: int, num_drafts: int) -> Iterator[Step]:
    """Yields steps from a full batch to its last straggler, in which the budget keeps some, none or all drafts."""
    rng = np.random.default_rng(0)
    with fake_gpu():
        step = DecodeStep(TEXT)
    step.budget.req_states.req_id_to_index = {str(i): 0 for i in range(max_num_seqs)}
    for num_requests in range(max_num_seqs, 0, -1):
        names = [str(i) for i in range(num_requests)]
        kept_B = rng.integers(0, num_drafts + 1, num_requests)
        step.drafting.policy = SimpleNamespace(num_drafts=lambda *_, kept_B=kept_B: int(kept_B.sum()))
        rows = step.budget.get_num_tokens(dict.fromkeys(names, num_drafts + 1), dict.fromkeys(names, [-1] * num_drafts))
        assert rows == num_requests + kept_B.sum()
        yield num_requests, rows
        yield num_requests, num_requests
        yield num_requests, num_requests * (num_drafts + 1)


def mode(graphs: ModelCudaGraphManager, step: Step, num_drafts: int, is_decode: bool = True) -> CUDAGraphMode:
    """Returns how vLLM runs a step in which all drafts of every request were scheduled."""
    num_requests, rows = step
    longest = num_drafts + 1
    uniform = get_uniform_decode_token_count(num_requests, rows, longest, decode_graph_eligible=is_decode)
    desc = graphs.dispatch(num_requests, rows, uniform, 0, max_query_len=longest if is_decode else None)
    assert desc.num_tokens >= rows
    return desc.cg_mode


@pytest.mark.parametrize(("max_num_seqs", "num_drafts"), [(24, 5), (37, 3), (256, 8), (512, 3)])
def test_every_decode_step_is_a_full_graph(max_num_seqs: int, num_drafts: int) -> None:
    graphs = manager(max_num_seqs, num_drafts, varlen=True)
    largest = graphs.compilation_config.max_cudagraph_capture_size
    steps = list(trace(max_num_seqs, num_drafts))
    small = [step for step in steps if step[1] <= largest]
    assert len(small) > 20
    assert {mode(graphs, step, num_drafts) for step in small} == {CUDAGraphMode.FULL}
    assert {mode(graphs, step, num_drafts) for step in steps if step[1] > largest} <= {CUDAGraphMode.NONE}
    assert {mode(graphs, step, num_drafts, is_decode=False) for step in small} == {CUDAGraphMode.PIECEWISE}


def test_our_list_begins_with_vllms_own_sizes() -> None:
    assert vllms_graphs(512) == manager(512, 0, varlen=False).compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize(("max_num_seqs", "most_drafts"), [(32, 32), (37, 32), (64, 40)])
def test_steps_with_many_drafts_are_full_graphs(max_num_seqs: int, most_drafts: int) -> None:
    """The texts of `run_ahead` give each request 32 and more rows. Beyond the largest graph no kind of graph is left."""
    block = SpecrolloutConfig(run_ahead=RunAheadConfig(most_drafts=most_drafts))
    sizes = with_specrollout({"max_num_seqs": max_num_seqs}, block, "cuda")["compilation_config"]
    graphs = manager(max_num_seqs, most_drafts, varlen=True, sizes=sizes["cudagraph_capture_sizes"])
    largest = graphs.compilation_config.max_cudagraph_capture_size
    assert largest == min(max_num_seqs * (1 + most_drafts) // 16 * 16, 2048)
    for num_requests in (max_num_seqs, max_num_seqs // 2, 1):
        for rows in {num_requests, num_requests * (1 + most_drafts) // 2, num_requests * (1 + most_drafts)}:
            is_held = rows <= largest
            expected = {True: CUDAGraphMode.FULL, False: CUDAGraphMode.NONE}[is_held]
            assert mode(graphs, (num_requests, rows), most_drafts) == expected, (num_requests, rows)
            mixed = mode(graphs, (num_requests, rows), most_drafts, is_decode=False)
            assert mixed == (CUDAGraphMode.PIECEWISE if is_held else CUDAGraphMode.NONE)
    without = manager(max_num_seqs, most_drafts, varlen=True)
    assert mode(without, (max_num_seqs, 513), most_drafts) == CUDAGraphMode.NONE


def test_the_gpu_check_keeps_steps_out_of_graphs() -> None:
    """Each way of its item `rows` runs 32 requests in the kind of graph that its name says."""
    graphs = manager(32, 63, varlen=True, sizes=[*vllms_graphs(512), 1024, 1760])
    for way, kinds in {
        DEFAULT: (CUDAGraphMode.FULL, CUDAGraphMode.NONE),
        LARGER: (CUDAGraphMode.FULL, CUDAGraphMode.FULL),
        PIECEWISE: (CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE),
        NONE: (CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    }.items():
        graphs.dispatch = partial(dispatch_by, ModelCudaGraphManager.dispatch, graphs, way, 512)
        assert tuple(mode(graphs, (32, rows), 63) for rows in (512, 1024)) == kinds, way
        assert mode(graphs, (32, 512), 63, is_decode=False) in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)


def test_unequal_steps_need_adaptive_verification() -> None:
    graphs = manager(24, 5, varlen=False)
    modes = [mode(graphs, step, 5) for step in trace(24, 5)]
    assert 24 <= modes.count(CUDAGraphMode.FULL) < len(modes) / 2
