# SPDX-License-Identifier: Apache-2.0
"""The CPU bodies of vLLM's sampling kernels. `test_kernels.py` compares them with the kernels themselves."""

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from lab.vllm_on_cpu.kernels import gumbel, logprobs, noise
from lab.vllm_on_cpu.kernels.floats import exp_of_negative, log, stored, value_of

pytestmark = pytest.mark.unit

BLOCK = 1024


def sample(logits_RV: Tensor, temperatures_R: Tensor, divide: bool = True) -> Tensor:
    """Returns the sampled token of each row. Row r is of request r, whose temperature determines its seed and position."""
    num_rows, vocab_size = logits_RV.shape
    num_blocks = -(-vocab_size // BLOCK)
    tokens_RB = torch.empty(num_rows, num_blocks, dtype=torch.int64)
    maxima_RB = torch.empty(num_rows, num_blocks)
    seeds_R = (temperatures_R * 1000).long()
    gumbel.gumbel_sample(
        tokens_RB, num_blocks, maxima_RB, num_blocks, None, 0, 0, None, None, 0, logits_RV, logits_RV.stride(0),
        torch.arange(num_rows), seeds_R, seeds_R + 7, temperatures_R, vocab_size, BLOCK_SIZE=BLOCK, IS_DRAFTING=False,
        APPLY_TEMPERATURE=divide, USE_FP64=False, PER_TOKEN_COL=False,
    )  # fmt: skip
    return tokens_RB.gather(1, maxima_RB.argmax(1, keepdim=True))[:, 0]


def log_probs(logits_RV: Tensor, tokens_RK: Tensor) -> Tensor:
    output_RK = torch.empty(tokens_RK.shape)
    logprobs.topk_log_softmax(
        output_RK, logits_RV, logits_RV.stride(0), tokens_RK, tokens_RK.stride(0), tokens_RK.shape[1],
        logits_RV.shape[1], BLOCK_SIZE=BLOCK, TOPK_BLOCK_SIZE=1,
    )  # fmt: skip
    return output_RK


def ranks(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    output_R = torch.empty_like(tokens_R)
    logprobs.ranks(output_R, logits_RV, logits_RV.stride(0), tokens_R, logits_RV.shape[1], BLOCK_SIZE=8192)
    return output_R


def inputs(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns bfloat16 logits, a tenth of them -inf, and distinct temperatures."""
    torch.manual_seed(seed)
    logits_RV = (torch.randn(num_rows, vocab_size) * scale).bfloat16()
    logits_RV[torch.rand(logits_RV.shape) < 0.1] = -torch.inf
    return logits_RV, 0.5 + torch.arange(num_rows) / num_rows


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_no_block_is_skipped_wrongly(scale: float) -> None:
    """Sampling computes the noise of few blocks. The token must be the same as with the noise of all blocks."""
    logits_RV, temperatures_R = inputs(40, 5000, scale)
    logits_RV = logits_RV.float()
    tokens_R = sample(logits_RV, temperatures_R)
    for r, (row_V, temperature) in enumerate(zip(logits_RV.numpy(), temperatures_R.numpy(), strict=True)):
        seed = int(temperature * np.float32(1000))
        state = np.uint32(noise.row_state(seed, seed + 7))
        noise_V = [noise.gumbel_of(np.float32(noise.uniform_of(np.uint32(noise.token_bits(state, np.uint32(v))))))
                   for v in range(len(row_V))]  # fmt: skip
        assert (row_V / temperature + np.float32(noise_V)).argmax() == tokens_R[r]


def test_the_bound_is_above_the_noise() -> None:
    bits = np.concatenate([np.arange(1 << 12), 2**32 - 1 - np.arange(1 << 12), np.arange(0, 2**32, 99991)])
    for word in bits.astype(np.uint32):
        noise_of_word = noise.gumbel_of(np.float32(noise.uniform_of(word)))
        bound = noise.gumbel_bound(word)
        assert bound > noise_of_word
        assert bound < noise_of_word + 0.07 or word > 2**22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    logits_RV, temperatures_R = inputs(33, 4097, 2.0)
    logits_RV = logits_RV.to(dtype)
    tokens_R = sample(logits_RV, temperatures_R)
    log_probs_R = log_probs(logits_RV, tokens_R[:, None])
    ranks_R = ranks(logits_RV, tokens_R)
    for rows in ([4], [32, 4], list(range(32, -1, -1))):
        assert torch.equal(sample(logits_RV[rows], temperatures_R[rows]), tokens_R[rows])
        assert torch.equal(log_probs(logits_RV[rows], tokens_R[rows][:, None]), log_probs_R[rows])
        assert torch.equal(ranks(logits_RV[rows], tokens_R[rows]), ranks_R[rows])


def test_bits_of_bfloat16_and_padding_change_nothing() -> None:
    logits_RV, temperatures_R = inputs(9, 2500, 2.0)
    expected_R = sample(logits_RV.float(), temperatures_R)
    padded_RV = torch.nn.functional.pad(logits_RV.float(), (0, 28), value=99.0)[:, :2500]
    for same_RV in (logits_RV, padded_RV):
        assert torch.equal(sample(same_RV, temperatures_R), expected_R)
        columns = expected_R[:, None]
        assert torch.equal(log_probs(same_RV, columns), log_probs(logits_RV.float(), columns))
        assert torch.equal(ranks(same_RV, expected_R), ranks(logits_RV.float(), expected_R))


def test_ties_and_rows_without_a_token() -> None:
    logits_RV = torch.full((4, 3000), -1.0)
    logits_RV[0, [1700, 2900]] = 5.0
    logits_RV[1] = -torch.inf
    logits_RV[2, [8, 9]] = torch.tensor([-0.0, 0.0])
    logits_RV[3, 7] = torch.inf
    assert sample(logits_RV, torch.zeros(4)).tolist() == [1700, 0, 8, 7]
    assert sample(logits_RV[1:2], torch.ones(1)).tolist() == [0]


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_log_probabilities_are_as_good_as_those_of_torch(scale: float) -> None:
    torch.manual_seed(1)
    logits_RV, tokens_RK = torch.randn(8, 50_000) * scale, torch.randint(0, 50_000, (8, 20))
    expected_RK = torch.log_softmax(logits_RV.double(), -1).gather(1, tokens_RK)
    torch.testing.assert_close(log_probs(logits_RV, tokens_RK).double(), expected_RK, rtol=3e-7, atol=1e-6)


@njit
def decoded_and_encoded(bits_N, values_N, encoded_N):  # type: ignore[no-untyped-def]
    for i in range(len(bits_N)):
        values_N[i] = value_of(bits_N[i])
        encoded_N[i] = stored(values_N[i], encoded_N)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, torch.uint16), (torch.float16, torch.int16)])
def test_values_of_16_bit_floats(dtype: torch.dtype, bits: torch.dtype) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(dtype)
    values, encoded = torch.empty(1 << 16), torch.empty(1 << 16, dtype=torch.uint16)
    decoded_and_encoded(every.view(bits).numpy(), values.numpy(), encoded.numpy())
    torch.testing.assert_close(values, every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(encoded.view(torch.bfloat16), every.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_logarithm_and_exponential() -> None:
    x = np.exp(np.linspace(-60, 60, 20_000)).astype(np.float32)
    assert np.allclose([log(v) for v in x], np.log(x.astype(np.float64)), rtol=2e-7, atol=1.5e-7)
    y = -np.linspace(0, 87, 20_000).astype(np.float32)
    assert np.allclose([exp_of_negative(v) for v in y], np.exp(y.astype(np.float64)), rtol=6e-6, atol=0)
    assert np.float32(exp_of_negative(np.float32(-np.inf))) <= 2.0**-126
    assert np.isnan(exp_of_negative(np.float32(np.nan)))
