# SPDX-License-Identifier: Apache-2.0
"""Drafter-invariant sampling: token = arg-max(logits / T + noise(seed, position)).

One function, three bodies that agree to the last bit: plain torch (the definition), a numba kernel on a CPU, a Triton
kernel on a GPU. Source: Daliri, Musco, Suresh, arXiv 2408.07978.

Shapes: R logits rows, V vocabulary.
"""

from collections.abc import Iterator

import torch

from nemo_specrollout.sampling.noise import CHUNK_ELEMENTS, gumbel_noise, row_keys


def sample_tokens(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    """The sampled token of every row, int64 [R].

    Args:
        logits_RV: float32, after all logits processors and division by the temperature.
        seeds_R: int64 seed of the row's request.
        positions_R: int64 index, in the whole sequence, of the token to be sampled.
        greedy_R: bool; such rows take the arg-max without noise.

    Ties go to the smallest token id. Raises ValueError if the logits are not float32 or a row lacks an argument.
    """
    _check_rows(logits_RV, seeds_R, positions_R, greedy_R)
    if logits_RV.is_cuda:
        from nemo_specrollout.sampling.triton_kernel import sample_rows_triton

        return sample_rows_triton(logits_RV, seeds_R, positions_R, greedy_R)
    from nemo_specrollout.sampling.cpu_kernel import sample_rows

    tokens_R = torch.empty(seeds_R.shape, dtype=torch.int64)
    sample_rows(logits_RV.numpy(), seeds_R.numpy(), positions_R.numpy(), greedy_R.numpy(), tokens_R.numpy())
    return tokens_R


def sample_tokens_with_margin(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_tokens`, and by how many nats each token's score beat the runner-up's, float32 [R].

    A drafter that samples with the target's noise is the likelier to be right the larger the margin: it says how far the
    target's logits may differ before another token wins.
    """
    _check_rows(logits_RV, seeds_R, positions_R, greedy_R)
    if logits_RV.is_cuda:
        tokens_R = sample_tokens(logits_RV, seeds_R, positions_R, greedy_R)
        return tokens_R, _margins(logits_RV, seeds_R, positions_R, greedy_R)
    from nemo_specrollout.sampling.cpu_kernel import sample_rows_with_margin

    tokens_R, margins_R = torch.empty(seeds_R.shape, dtype=torch.int64), torch.empty(seeds_R.shape)
    arrays = (logits_RV.numpy(), seeds_R.numpy(), positions_R.numpy(), greedy_R.numpy())
    sample_rows_with_margin(*arrays, tokens_R.numpy(), margins_R.numpy())
    return tokens_R, margins_R


def _check_rows(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> None:
    if not logits_RV.shape[:1] == seeds_R.shape == positions_R.shape == greedy_R.shape:
        raise ValueError(f"{len(logits_RV)} rows of logits need as many seeds, positions and flags")
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits_RV must be float32 for a reproducible sample, got {logits_RV.dtype}")


def _margins(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    best_two = (s.topk(2, dim=-1).values for s in _score_chunks(logits_RV, seeds_R, positions_R, greedy_R))
    return torch.cat([s[:, 0] - s[:, 1] for s in best_two])


def sample_tokens_torch(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    """`sample_tokens` as it is defined, on any device, in row chunks that bound the memory for the noise."""
    tokens = [s.argmax(dim=-1) for s in _score_chunks(logits_RV, seeds_R, positions_R, greedy_R)]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=logits_RV.device)


def _score_chunks(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> Iterator[torch.Tensor]:
    """logits + noise, a few rows at a time."""
    num_rows, vocab_size = logits_RV.shape
    chunk = max(1, CHUNK_ELEMENTS // vocab_size)
    for rows in (slice(i, i + chunk) for i in range(0, num_rows, chunk)):
        noise_RV = gumbel_noise(row_keys(seeds_R[rows], positions_R[rows]), vocab_size)
        yield logits_RV[rows] + noise_RV.masked_fill_(greedy_R[rows, None], 0.0)
