# SPDX-License-Identifier: Apache-2.0
"""Computes with numpy the Gumbel noise that vLLM's V2 model runner adds to logits when it samples.

vLLM samples by the Gumbel-max method. The score of a token is its processed logit plus its noise, and the token with the
largest score is sampled. The noise depends only on the request's seed, the position and the token.

A token is sampled at the position of the token before it, counted from the beginning of the prompt. For example, the first
token of a response to a prompt of n tokens is sampled at position n - 1.

Sources: `vllm/v1/worker/gpu/sample/gumbel.py` of vLLM 0.32 and 0.25.1, and Philox of `triton.language.rand`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
_U32 = np.uint32


@dataclass(frozen=True)
class NoiseScheme:
    """The method by which a range of vLLM versions computes the noise from the seed, the position and the token."""

    name: str
    uniform: Callable[[int, Integers, Integers], Floats]
    """Function of (seed, positions, tokens) that returns uniform random numbers in (0, 1). Positions and tokens broadcast."""
    smallest: float
    """The smallest number that `uniform` can return. The largest noise follows from it."""

    def noise(self, seed: int, positions: Integers, tokens: Integers) -> Floats:
        """Returns the noise of tokens at positions, float64, in the broadcast shape of both arrays.

        Args:
            seed: the seed that the request had in the engine, an integer of 64 bits.
            positions: for each token, the position of the token before it, counted from the beginning of the prompt.
            tokens: token ids, of a shape that broadcasts with that of `positions`.
        """
        with np.errstate(over="ignore"):
            uniform = self.uniform(seed, positions, tokens)
        return -np.log(-np.log1p(-uniform))

    @property
    def largest_noise(self) -> float:
        """The largest possible noise. A token whose logit plus this noise is below another token's score is never sampled."""
        return float(-np.log(-np.log1p(-self.smallest)))


def _words(seed: int) -> tuple[np.uint32, np.uint32]:
    """Returns the lower and the upper 32 bits of a seed."""
    return _U32(seed & 0xFFFFFFFF), _U32((seed >> 32) & 0xFFFFFFFF)


def _rotated(word: Any, bits: int) -> Any:
    return (word << _U32(bits)) | (word >> _U32(32 - bits))


def _mixed(state: Any, key: Any) -> Any:
    """Returns the state of MurmurHash3 after one more word of 32 bits, `key`, has been hashed."""
    key = _rotated(key * _U32(0xCC9E2D51), 15) * _U32(0x1B873593)
    return _rotated(state ^ key, 13) * _U32(5) + _U32(0xE6546B64)


def _murmur_uniform(seed: int, positions: Integers, tokens: Integers) -> Floats:
    """Returns uniform numbers in (0, 1), made from MurmurHash3 of the seed's two words, the position and the token.

    A hash h of 32 bits stands for the interval from h / 2^32 to (h + 1) / 2^32, and becomes the middle of this interval.
    """
    state: Any = np.zeros(1, _U32)
    for word in _words(seed):
        state = _mixed(state, word)
    state = _mixed(state, positions.astype(_U32))
    state = _mixed(state, tokens.astype(_U32)) ^ _U32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> _U32(shift))) * _U32(factor)
    state = state ^ (state >> _U32(16))
    return (state.astype(np.float64) + 0.5) * 2.0**-32


def _philox(key: tuple[Any, Any], counter: Any) -> Any:
    """Returns the first word of Philox-4x32-10 for a key of two words and a counter whose other words are zero."""
    words = [counter, np.zeros_like(counter), np.zeros_like(counter), np.zeros_like(counter)]
    key_0, key_1 = key
    for _ in range(10):
        product_0 = np.uint64(0xD2511F53) * words[0].astype(np.uint64)
        product_2 = np.uint64(0xCD9E8D57) * words[2].astype(np.uint64)
        words = [
            (product_2 >> np.uint64(32)).astype(_U32) ^ words[1] ^ key_0,
            product_2.astype(_U32),
            (product_0 >> np.uint64(32)).astype(_U32) ^ words[3] ^ key_1,
            product_0.astype(_U32),
        ]
        key_0 = key_0 + _U32(0x9E3779B9)
        key_1 = key_1 + _U32(0xBB67AE85)
    return words[0]


_SMALLEST_OF_PHILOX = 4.6566127342e-10


def _philox_uniform(seed: int, positions: Integers, tokens: Integers) -> Floats:
    """Returns uniform numbers in (0, 1), made by Philox.

    Philox makes a key from the seed and the position, and then a number from this key and the token.
    """
    position_seeds = _philox(_words(seed), positions.astype(_U32))
    position_seeds, counters = np.broadcast_arrays(position_seeds, tokens.astype(_U32))
    numbers = _philox((position_seeds, np.zeros_like(position_seeds)), counters).astype(np.int32).astype(np.int64)
    magnitudes = np.where(numbers < 0, -numbers - 1, numbers)
    return np.maximum(magnitudes.astype(np.float32) * np.float32(_SMALLEST_OF_PHILOX), _SMALLEST_OF_PHILOX).astype(
        float
    )


MURMUR = NoiseScheme("murmur", _murmur_uniform, 2.0**-33)
"""The noise of vLLM 0.31 and later."""
PHILOX = NoiseScheme("philox", _philox_uniform, _SMALLEST_OF_PHILOX)
"""The noise of vLLM 0.25.1 to 0.30."""


def scheme_of(vllm_version: str) -> NoiseScheme:
    """Returns the method by which a version of vLLM, such as "0.32.0+cpu", computes the noise."""
    major, minor = (int(part) for part in vllm_version.split(".")[:2])
    return MURMUR if (major, minor) >= (0, 31) else PHILOX
