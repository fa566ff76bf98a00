# SPDX-License-Identifier: Apache-2.0
"""Our sampler on the simulated GPU: its launches in a step without drafts, and which variants of its kernels steps need."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decode_step import B, H, K, S, V, row_sampler, sampling_states, zeros
from device import GPU, FakeGpu, fake_gpu
from warm_up_checks import SIZES, variants

from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.step.near_ties import NearTies
from nemo_specrollout.generation.step.sampled_rows import Drafts

PADDED = V + 3


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        yield fake


def test_a_step_without_drafts_reads_logits_in_two_launches(gpu: FakeGpu) -> None:
    sampler: Any = row_sampler(sampling_states())
    sampler.get_logprobs_dims = lambda _: (0, 0)
    slots_B, logits_BV = zeros(B, dtype=torch.int64), zeros(B, V, dtype=torch.bfloat16)
    batch = SimpleNamespace(
        idx_mapping=slots_B, idx_mapping_np=np.arange(B), num_reqs=B, input_ids=zeros(B), positions=slots_B,
        logits_indices=slots_B, expanded_idx_mapping=slots_B, expanded_local_pos=zeros(B), cu_num_logits=zeros(B + 1),
        seq_lens=zeros(B), seq_lens_cpu_upper_bound=torch.zeros(B),
    )  # fmt: skip
    with gpu.step():
        output = sampler(logits_BV, batch)
    assert output.logprobs_tensors.logprobs.shape == (B, 1)
    assert gpu.done == [
        "index", "_score_blocks", "_finish_rows", "new_ones", "_get_num_sampled_and_rejected_kernel"
    ]  # fmt: skip


@pytest.mark.parametrize("is_early", [False, True], ids=["own requests", "early requests"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_warm_up_launches_every_variant(gpu: FakeGpu, dtype: torch.dtype, mode: str, is_early: bool) -> None:
    """The logits have padding between rows. vLLM's processed logits do not. Early requests ask for their near-ties."""
    sampler: Any = row_sampler(sampling_states())
    sampler.logprobs_mode = mode
    sampler.near_ties = NearTies(S, 4096, GPU)
    if is_early:
        sampler.near_ties.open([NewRequest(s, RequestIdentity(1, 2, ties=s), 10, range(12), 100) for s in range(S)])

    def compute_logits(hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH.new_empty(len(hidden_RH), PADDED, dtype=dtype)[:, :V]

    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_hidden_size=lambda: H, dtype=torch.bfloat16), device=GPU, rejection_sampler=sampler,
        num_speculative_steps=K, lora_config=None, model=SimpleNamespace(compute_logits=compute_logits),
    )  # fmt: skip
    sampler.warm_up(runner)
    warm = variants(gpu)
    sampler.apply_sampling_params = lambda logits, **_: zeros(*logits.shape, dtype=torch.float32)
    with gpu.step():
        for num_rows in SIZES:
            slots_R, rows_R = zeros(num_rows, dtype=torch.int64), zeros(num_rows)
            logits_RV = compute_logits(zeros(num_rows, H, dtype=torch.bfloat16))
            for drafts in (None, Drafts(rows_R, zeros(num_rows + 1), K)):
                for num_processed in (0, S):
                    sampler._is_processed_S[:] = num_processed
                    for has_logprobs in (False, True):
                        rows = (logits_RV, slots_R, slots_R, np.arange(num_rows), slots_R, lambda: None)
                        sampler.draw(*rows, None, np.zeros(num_rows), has_logprobs=has_logprobs, drafts=drafts)
    assert len(gpu.launches) == 16 * len(SIZES)
    assert variants(gpu) <= warm
