# SPDX-License-Identifier: Apache-2.0
"""Drafter-invariant sampling: token = arg-max(logits / T + noise(seed, position)).

One function, three bodies that agree to the last bit: plain torch (the definition), a numba kernel on a CPU, a Triton
kernel on a GPU. Source: Daliri, Musco, Suresh, arXiv 2408.07978.

Shapes: R logits rows, V vocabulary.
"""

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
    if not logits_RV.shape[:1] == seeds_R.shape == positions_R.shape == greedy_R.shape:
        raise ValueError(f"{len(logits_RV)} rows of logits need as many seeds, positions and flags")
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits_RV must be float32 for a reproducible sample, got {logits_RV.dtype}")
    if logits_RV.is_cuda:
        from nemo_specrollout.sampling.triton_kernel import sample_rows_triton

        return sample_rows_triton(logits_RV, seeds_R, positions_R, greedy_R)
    from nemo_specrollout.sampling.cpu_kernel import sample_rows

    tokens_R = torch.empty(seeds_R.shape, dtype=torch.int64)
    sample_rows(logits_RV.numpy(), seeds_R.numpy(), positions_R.numpy(), greedy_R.numpy(), tokens_R.numpy())
    return tokens_R


def sample_tokens_torch(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    """`sample_tokens` as it is defined, on any device, in row chunks that bound the memory for the noise."""
    num_rows, vocab_size = logits_RV.shape
    chunk = max(1, CHUNK_ELEMENTS // vocab_size)
    tokens = [
        _sample_chunk(
            logits_RV[i : i + chunk], seeds_R[i : i + chunk], positions_R[i : i + chunk], greedy_R[i : i + chunk]
        )
        for i in range(0, num_rows, chunk)
    ]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=logits_RV.device)


def _sample_chunk(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    noise_RV = gumbel_noise(row_keys(seeds_R, positions_R), logits_RV.shape[1])
    scores_RV = logits_RV + noise_RV.masked_fill_(greedy_R[:, None], 0.0)
    return scores_RV.argmax(dim=-1)
