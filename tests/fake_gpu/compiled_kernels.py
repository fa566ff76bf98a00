# SPDX-License-Identifier: Apache-2.0
"""Our kernels compiled for Hopper and Blackwell, at the sizes of a real run: size, registers, variants, rounding of scores.

`PYTHONPATH=. python tests/fake_gpu/compiled_kernels.py` prints a table.

Shapes: B requests, S request slots, D drafters, E evidence levels, K draft positions, L longest text, V vocabulary.
"""

import functools

import numpy as np
import pytest
import torch
import triton
from compiling import TARGETS, machine_code, specialized
from device import GPU, Launch, fake_gpu
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nemo_specrollout.drafters.ahead import AheadText
from nemo_specrollout.drafters.base import LEVEL_PRIORS, RowPrice, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.device_index import ContextIndex, Lookup, context_orders
from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
from nemo_specrollout.generation.step.row_sampling import draw_rows
from nemo_specrollout.generation.step.sampled_rows import Drafts, Logits, RowKeys, TieTables
from nemo_specrollout.remote.verifier.draft_stream import DraftStream
from nemo_specrollout.remote.verifier.draft_stream_triton import align
from nemo_specrollout.sampling.equality import accept_by_equality

S, D, K, L, V = 256, 3, 8, 8192, 151_936
TRITON = "3.9.0"
"""Version of Triton that the numbers below hold for. Versions differ in how many instructions they make."""
NUM_INSTRUCTIONS = {
    "_accept_rows": 52,
    "_align": 168,
    "_best_of_block": 929,
    "_best_of_row": 221,
    "_follow_path": 900,
    "_finish_rows": 1000,
    "_learn": 1202,
    "_observe": 1721,
    "_propose": 1878,
    "_score_blocks": 920,
}
"""Recorded number of machine instructions of each kernel for Hopper. If a kernel gets shorter, lower its number."""
MAX_GROWTH = 1.25
"""Allowed ratio of instructions to their recorded number."""


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


@functools.cache
def launches(num_requests: int = S, step: int = 0) -> dict[str, Launch]:
    """Returns a launch of each of our kernels, and of vLLM's sampler, by the kernel's name. A prompt is read in step 0."""
    with fake_gpu() as gpu:
        shape = BoardShape(S, K)
        board = DraftBoard(["suffix", "ngram", "eagle3"], np.tile(LEVEL_PRIORS, (D, 1)), shape, GPU, 2)
        salts_S, seen_S, slots_B = zeros(S, dtype=torch.int64), zeros(S), zeros(S, dtype=torch.int64)[:num_requests]
        indexes = [ContextIndex(1 << 18, context_orders(shortest, 6), GPU) for shortest in (1, 2)]
        lookups = [Lookup(index, salts_S, seen_S, drafter) for drafter, index in enumerate(indexes)]
        texts, counts_B = Texts(slots_B, zeros(S), zeros(S, L)), zeros(num_requests)
        board.observe(texts, counts_B, counts_B, step, lookups, K + 1 if step else L // 2)
        board.choose(texts, RowPrice(0.01 * step, 1e-4 * step), lookups)
        ahead = AheadText(S, L, V, GPU, most_paths=4)
        ahead.launch(texts, board.proposals_of(0))
        align(*texts, zeros(S, DraftStream.columns(16)), *board.proposals_of(0), zeros(3, dtype=torch.int64))
        num_rows, starts_B1 = num_requests * (K + 1), zeros(S + 1)[: num_requests + 1]
        slots_R, positions_R = zeros(num_rows, dtype=torch.int64), zeros(num_rows, dtype=torch.int64)
        keys, logits_RV = (
            RowKeys(slots_R, zeros(S, dtype=torch.float32), salts_S, positions_R),
            zeros(num_rows, V).float(),
        )
        draw_rows(Logits(logits_RV, bool(step)), keys, Logits(logits_RV, False), Drafts(zeros(num_rows), starts_B1, K))
        accept_by_equality(slots_R, zeros(num_rows), starts_B1, K)
        draft_keys, logits_BV = (slots_B, *keys[1:3], positions_R[:num_requests]), logits_RV[:num_requests].bfloat16()
        sample_with_score_gap(logits_BV, *draft_keys, board.tables.levels_DBK[2], zeros(dtype=torch.int64))
        gumbel_sample(logits_BV, *draft_keys, apply_temperature=True, is_drafting=False)
        return {launch.kernel.__name__: launch for launch in gpu.launches}


def test_every_own_kernel_is_checked() -> None:
    assert set(launches()) - {"_gumbel_sample_kernel"} == set(NUM_INSTRUCTIONS)


@pytest.mark.skipif(triton.__version__ != TRITON, reason=f"the numbers were recorded with Triton {TRITON}")
@pytest.mark.parametrize("name", NUM_INSTRUCTIONS)
def test_kernels_stay_short(name: str) -> None:
    count = machine_code(launches()[name]).instructions.total()
    assert count <= MAX_GROWTH * NUM_INSTRUCTIONS[name], f"{count} instructions, {NUM_INSTRUCTIONS[name]} so far"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NUM_INSTRUCTIONS)
def test_all_values_fit_in_registers(name: str, target: str) -> None:
    code = machine_code(launches()[name], target)
    assert code.local_bytes == 0, f"{code.local_bytes} bytes of a thread are in memory, with {code.registers} registers"


@pytest.mark.parametrize("name", NUM_INSTRUCTIONS)
def test_one_variant_serves_all_steps(name: str) -> None:
    """A variant that a new number of requests or a later step needs would be compiled in the middle of a rollout."""
    steps = [(num_requests, step) for num_requests in (1, 2, 3, 16, 17, 256) for step in (0, 1, 16)]
    variants = {step: specialized(launches(*step)[name])[0].hash()[:6] for step in steps}
    assert len(set(variants.values())) == 1, variants


@functools.cache
def launches_of_texts_made_ahead() -> dict[str, Launch]:
    """Returns launches of the kernels that need more where texts are made ahead: 256 drafts, and near-ties of rows."""
    num_positions = 256
    with fake_gpu() as gpu:
        names = ["suffix", "ngram", "ahead"]
        board = DraftBoard(names, np.tile(LEVEL_PRIORS, (3, 1)), BoardShape(S, num_positions), GPU)
        salts_S, seen_S, slots_B = zeros(S, dtype=torch.int64), zeros(S), zeros(S, dtype=torch.int64)
        indexes = [ContextIndex(1 << 18, context_orders(shortest, 6), GPU) for shortest in (1, 2)]
        lookups = [Lookup(index, salts_S, seen_S, drafter) for drafter, index in enumerate(indexes)]
        texts, counts_B = Texts(slots_B, zeros(S), zeros(S, L)), zeros(S)
        board.observe(texts, counts_B, counts_B, 1, lookups, num_positions + 1)
        board.choose(texts, RowPrice(0.01), lookups)
        AheadText(S, L, V, GPU, most_paths=4).launch(texts, board.proposals_of(2))
        num_rows = 1056
        slots_R, positions_R = zeros(num_rows, dtype=torch.int64), zeros(num_rows, dtype=torch.int64)
        keys = RowKeys(slots_R, zeros(S, dtype=torch.float32), salts_S, positions_R)
        logits = Logits(zeros(num_rows, V, dtype=torch.bfloat16), True)
        drafts = Drafts(zeros(num_rows), zeros(33), num_positions)
        ties = TieTables(zeros(S, L, dtype=torch.float32), zeros(S, L), zeros(S, dtype=torch.bool))
        draw_rows(logits, keys, logits, drafts, ties)
        return {launch.kernel.__name__: launch for launch in gpu.launches}


@pytest.mark.parametrize("name", ["_observe", "_propose", "_follow_path", "_score_blocks", "_finish_rows"])
def test_kernels_of_texts_made_ahead_fit_in_registers(name: str) -> None:
    code = machine_code(launches_of_texts_made_ahead()[name])
    assert code.local_bytes == 0, f"{code.local_bytes} bytes of a thread are in memory, with {code.registers} registers"


@pytest.mark.parametrize("kernel", ["_best_of_block", "_score_blocks"])
def test_our_scores_round_like_those_of_vllm(kernel: str) -> None:
    """A fused multiply-add more or less changes the last bit of a score, so both kernels must have equally many."""
    ours, theirs = (machine_code(launches()[name]).instructions for name in (kernel, "_gumbel_sample_kernel"))
    for name in ("FADD", "FMUL", "FFMA", "MUFU"):
        assert ours[name] == theirs[name] > 0, name


if __name__ == "__main__":
    print("| kernel | " + " | ".join(f"{target}: instructions, registers" for target in TARGETS) + " |")
    print("|---|" + "---|" * len(TARGETS))
    for name in NUM_INSTRUCTIONS:
        codes = [machine_code(launches()[name], target) for target in TARGETS]
        print(f"| `{name}` | " + " | ".join(f"{c.instructions.total()}, {c.registers}" for c in codes) + " |")
