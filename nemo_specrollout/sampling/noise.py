# SPDX-License-Identifier: Apache-2.0
"""Position-keyed Gumbel noise: one number for every (seed, output position, vocabulary id), the same on every machine.

The integers come from SplitMix64 (Steele, Lea, Flood 2014), the floats from IEEE-754 float32 additions, multiplications
and divisions in a stated order and nothing else, so that a CPU and a GPU agree to the last bit. `docs/exactness.md`
states the function; `tests/test_noise.py` holds known answers.

Shapes: R logits rows, V vocabulary.
"""

from functools import lru_cache

import torch

from nemo_specrollout.sampling.constants import (
    ATANH_SIXTH,
    ATANH_THIRD,
    GAMMA,
    LN2,
    LOG_SQRT_HALF,
    MIX_1,
    MIX_2,
    SQRT_HALF,
)

# Rows are sampled in chunks of at most this many logits, which bounds the noise to a few MB.
CHUNK_ELEMENTS = 1 << 19


def as_int64(value: int) -> int:
    """`value` modulo 2^64 as the signed integer that torch stores."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def mix64(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 `z`, in place: a bijection whose every output bit depends on all input bits."""
    z ^= (z >> 30) & 0x3FFFFFFFF
    z *= as_int64(MIX_1)
    z ^= (z >> 27) & 0x1FFFFFFFFF
    z *= as_int64(MIX_2)
    z ^= (z >> 31) & 0x1FFFFFFFF
    return z


def row_keys(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """The 64-bit key of each row's noise, from int64 seeds and output positions (index in the whole sequence)."""
    gamma = as_int64(GAMMA)
    return mix64(mix64(seeds_R + gamma) + (positions_R + 1) * gamma)


@lru_cache(maxsize=8)
def _vocabulary_steps(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * as_int64(GAMMA)


def _horner(t: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    result = t * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        result = result.add_(coefficient).mul_(t)
    return result.add_(coefficients[0])


def _exponential(h: torch.Tensor) -> torch.Tensor:
    """Exp(1) float32 from 64 random bits: a geometric number of halvings, plus -log(1-x) for x in (0, 1/2]."""
    high = ((h >> 40) & 0xFFFFFF).bitwise_or_(1).to(torch.float32)
    halvings = (150 - (high.view(torch.int32) >> 23)).to(torch.float32)
    x = (h & 0xFFFFFFFF).to(torch.float32).mul_(2.0**-33).add_(2.0**-34)
    s = x / (2.0 - x)
    return _horner(s * s, ATANH_THIRD).mul_(s).add_(halvings.mul_(LN2))


def _negative_log(e: torch.Tensor) -> torch.Tensor:
    """-log(e) for positive, normal float32 `e`."""
    bits = e.view(torch.int32)
    exponent = ((bits >> 23) - 126).to(torch.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    s = (mantissa - SQRT_HALF).div_(mantissa + SQRT_HALF)
    log = _horner(s * s, ATANH_SIXTH).mul_(s).add_(LOG_SQRT_HALF).add_(exponent.mul_(LN2))
    return log.neg_()


def gumbel_noise(keys_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [R, V], of the rows whose keys are `keys_R` (see `row_keys`)."""
    h = keys_R.unsqueeze(1) + _vocabulary_steps(vocab_size, keys_R.device)
    return _negative_log(_exponential(mix64(h)))
