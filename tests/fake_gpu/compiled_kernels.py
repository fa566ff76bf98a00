# SPDX-License-Identifier: Apache-2.0
"""Our kernels compiled for an H100, at the sizes of a real run: number of instructions, and rounding of draft scores.

Shapes: B requests, D drafters, E evidence levels, K draft positions, L longest text, V vocabulary.
"""

import functools

import numpy as np
import pytest
import torch
from compiling import instructions
from device import GPU, Launch, fake_gpu
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nemo_specrollout.drafters.base import LEVEL_PRIORS, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.device_index import ContextIndex, context_orders
from nemo_specrollout.generation.draft_sampling import sample_with_score_gap
from nemo_specrollout.sampling.equality import accept_by_equality

B, D, K, L, V = 256, 3, 8, 8192, 151_936
NUM_INSTRUCTIONS = {
    "_accept_rows": 52,
    "_begin_step": 360,
    "_observe": 448,
    "_choose": 636,
    "_learn": 1521,
    "_walk": 627,
    "_best_of_block": 929,
    "_best_of_row": 221,
}
"""Recorded number of machine instructions of each kernel. If a kernel gets shorter, lower its number."""
MOST_GROWTH = 1.25
"""Allowed ratio of instructions to their recorded number."""


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


@functools.cache
def launches() -> dict[str, Launch]:
    """Returns a launch of each of our kernels, and of vLLM's sampler, by the kernel's name."""
    with fake_gpu() as gpu:
        board = DraftBoard(
            ["suffix", "ngram", "eagle3"], np.tile(LEVEL_PRIORS, (D, 1)), BoardShape(B, K, [2048]), GPU, 2
        )
        slots_B, total_len_S, text_SL = zeros(B, dtype=torch.int64), zeros(B), zeros(B, L)
        texts = Texts(slots_B, total_len_S, text_SL)
        board.observe(texts, zeros(B), zeros(B), 0)
        board.choose(texts)
        index = ContextIndex(1 << 18, context_orders(1, 6), GPU)
        salts_S = zeros(B, dtype=torch.int64)
        index.learn(texts, salts_S, zeros(B), K + 1)
        index.walk(texts, salts_S, board.level_rates_DL[0], 0.02, board.proposals_of(0))
        logits_BV = zeros(B, V, dtype=torch.bfloat16)
        keys = (slots_B, zeros(B, dtype=torch.float32), salts_S, zeros(B, dtype=torch.int64))
        sample_with_score_gap(logits_BV, *keys, board.tables.levels_DBK[2], zeros(dtype=torch.int64))
        gumbel_sample(logits_BV, *keys, apply_temperature=True, is_drafting=False)
        accept_by_equality(zeros(B * (K + 1), dtype=torch.int64), zeros(B * (K + 1)), zeros(B + 1), K)
        return {launch.kernel.__name__: launch for launch in gpu.launches}


def test_every_own_kernel_is_checked() -> None:
    assert set(launches()) - {"_gumbel_sample_kernel"} == set(NUM_INSTRUCTIONS)


@pytest.mark.parametrize("name", NUM_INSTRUCTIONS)
def test_kernels_stay_short(name: str) -> None:
    count = instructions(launches()[name]).total()
    assert count <= MOST_GROWTH * NUM_INSTRUCTIONS[name], f"{count} instructions, {NUM_INSTRUCTIONS[name]} so far"


def test_draft_scores_round_like_target_scores() -> None:
    """A fused multiply-add more or less changes the last bit of a score, so both kernels must have equally many."""
    ours, theirs = (instructions(launches()[name]) for name in ("_best_of_block", "_gumbel_sample_kernel"))
    for name in ("FADD", "FMUL", "FFMA", "MUFU"):
        assert ours[name] == theirs[name] > 0, name
