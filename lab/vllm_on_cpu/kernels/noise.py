# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling noise in numba functions.

It consists of uniform and Gumbel numbers from a hash of seed, position and token id. The hash is murmur3 (Appleby 2011, public
domain). Its integers and the uniform numbers have the same bits as in vLLM's Triton functions
(`v1/worker/gpu/sample/gumbel.py`). Gumbel numbers differ from vLLM's by the rounding of two logarithms. Before 0.31 vLLM has
Philox in place of murmur3 (Salmon et al. 2011). The functions at the end are for bodies of our own kernels with Philox.

Integers are combined by ufuncs. Numba would widen the operands of uint32 operators to 64 bits, which makes multiplications
three times slower.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import F32, I32, U32, log

DRAFT_SALT = 1 << 30
"""Number that is added to the position for the noise of a draft, if the draft must not share the noise of the target model."""

_KEY_1, _KEY_2, _STATE = U32(0xCC9E2D51), U32(0x1B873593), U32(0xE6546B64)
_FINAL_1, _FINAL_2 = U32(0x85EBCA6B), U32(0xC2B2AE35)
_NUM_BYTES = U32(16)
_LOW_32 = 0xFFFFFFFF
_SECOND_DOMAIN = U32(0x9E3779B9)
_PHILOX_0, _PHILOX_2 = U32(0xD2511F53), U32(0xCD9E8D57)
_PHILOX_KEY_0, _PHILOX_KEY_1 = U32(0x9E3779B9), U32(0xBB67AE85)
_SMALLEST_OF_PHILOX = F32(4.6566127342e-10)
_SMALLEST_REST = F32(2.0**-24)
_2ND, _3RD, _4TH, _5TH, _6TH, _7TH, _8TH = (F32(1 / n) for n in range(2, 9))


@njit(cache=True)
def _rotated(value, left, right):  # type: ignore[no-untyped-def]
    return np.bitwise_or(np.left_shift(value, U32(left)), np.right_shift(value, U32(right)))


@njit(cache=True)
def _mixed(state, key):  # type: ignore[no-untyped-def]
    key = np.multiply(_rotated(np.multiply(key, _KEY_1), 15, 17), _KEY_2)
    state = _rotated(np.bitwise_xor(state, key), 13, 19)
    return np.add(np.multiply(state, U32(5)), _STATE)


@njit(cache=True)
def _state_of(domain, seed, position):  # type: ignore[no-untyped-def]
    state = _mixed(domain, U32(seed & _LOW_32))
    state = _mixed(state, U32((seed >> 32) & _LOW_32))
    return _mixed(state, U32(position & _LOW_32))


@njit(cache=True)
def row_state(seed, position):  # type: ignore[no-untyped-def]
    """Returns the uint32 that determines a row's noise, from an int64 seed and position."""
    return _state_of(U32(0), np.int64(seed), np.int64(position))


@njit(cache=True)
def token_bits(state, token):  # type: ignore[no-untyped-def]
    """Returns 32 random bits for a uint32 token id, from the state of its row. No two tokens of a row get the same bits."""
    h = np.bitwise_xor(_mixed(state, token), _NUM_BYTES)
    h = np.multiply(np.bitwise_xor(h, np.right_shift(h, U32(16))), _FINAL_1)
    h = np.multiply(np.bitwise_xor(h, np.right_shift(h, U32(13))), _FINAL_2)
    return np.bitwise_xor(h, np.right_shift(h, U32(16)))


@njit(cache=True)
def uniform_of(bits):  # type: ignore[no-untyped-def]
    """Returns (bits + 1/2) / 2^32, which is from 2^-33 to 1, rounded once to float32."""
    high = F32(np.right_shift(bits, U32(16)))
    low = F32(np.bitwise_and(bits, U32(0xFFFF)))
    return high * F32(2.0**-16) + (low + F32(0.5)) * F32(2.0**-32)


@njit(cache=True, error_model="numpy")
def gumbel_of(uniform):  # type: ignore[no-untyped-def]
    """Returns -log(-log(1 - uniform)) in float32, which is largest for small `uniform`.

    Below 1/4 the inner logarithm is a series, as in vLLM.
    """
    series = _5TH + uniform * (_6TH + uniform * (_7TH + uniform * _8TH))
    series = F32(1) + uniform * (_2ND + uniform * (_3RD + uniform * (_4TH + uniform * series)))
    rest = F32(1) - uniform
    rest = rest if rest > _SMALLEST_REST else _SMALLEST_REST
    small, large = uniform * series, -log(rest)  # both are computed, so that a loop has no branch
    return -log(small if uniform < F32(0.25) else large)


@njit(cache=True, error_model="numpy")
def gumbel_bound(bits):  # type: ignore[no-untyped-def]
    """Returns a float32 bound that `gumbel_of(uniform_of(bits))` never exceeds, at a third of its cost.

    For a uniform number u the noise is at most -log(u), because -log(1 - u) >= u. The logarithm is bounded by two facts:
    log2(2^n (1 + f)) >= n + f, and the bits of a float are n + f up to a scale. The bound is close to the noise where the
    noise is large.
    """
    as_float = np.float32(F32(bits) + F32(0.5)).view(np.int32)
    return F32(I32(I32(0x4F800000) - as_float)) * F32(0.693148 / 2**23) + F32(1e-5)


@njit(cache=True)
def uniform32(seed, position, token):  # type: ignore[no-untyped-def]
    """Returns the uniform float32 of an int64 seed, an int64 position and a token id."""
    return uniform_of(token_bits(row_state(seed, position), U32(token)))


@njit(cache=True, error_model="numpy")
def gumbel(seed, position, token):  # type: ignore[no-untyped-def]
    """Returns the Gumbel float32 of an int64 seed, an int64 position and a token id."""
    return gumbel_of(uniform32(seed, position, token))


@njit(cache=True, error_model="numpy")
def gumbel64(seed, position, token):  # type: ignore[no-untyped-def]
    """Returns the float64 noise of vLLM's option `use_fp64_gumbel`.

    It is -log(-log(u)), where u has the upper 53 of 64 random bits.
    """
    seed, position = np.int64(seed), np.int64(position)
    low = token_bits(_state_of(U32(0), seed, position), U32(token))
    high = token_bits(_state_of(_SECOND_DOMAIN, seed, position), U32(token))
    bits = ((np.uint64(high) << np.uint64(32)) | np.uint64(low)) >> np.uint64(11)
    uniform = (np.float64(bits) + 0.5) * 2.0**-53
    uniform = uniform - 2.0**-53 if uniform == 1.0 else uniform
    return -np.log(-np.log(uniform))


@njit(cache=True)
def _product(a, b):  # type: ignore[no-untyped-def]
    """Returns the upper and the lower word of the product of two words of 32 bits."""
    product = np.uint64(a) * np.uint64(b)
    return U32(product >> np.uint64(32)), U32(product & np.uint64(_LOW_32))


@njit(cache=True)
def _philox(key_0, key_1, counter_0, counter_1):  # type: ignore[no-untyped-def]
    """Returns the first word of Philox-4x32-10 for a key and a counter."""
    w0, w1, w2, w3 = counter_0, counter_1, U32(0), U32(0)
    for _ in range(10):
        high_0, low_0 = _product(_PHILOX_0, w0)
        high_2, low_2 = _product(_PHILOX_2, w2)
        w0 = np.bitwise_xor(np.bitwise_xor(high_2, w1), key_0)
        w2 = np.bitwise_xor(np.bitwise_xor(high_0, w3), key_1)
        w1, w3 = low_2, low_0
        key_0, key_1 = np.add(key_0, _PHILOX_KEY_0), np.add(key_1, _PHILOX_KEY_1)
    return w0


@njit(cache=True)
def philox_row_state(seed, position):  # type: ignore[no-untyped-def]
    """Returns the uint32 that determines a row's noise before vLLM 0.31, from an int64 seed and position."""
    seed, position = np.int64(seed), np.int64(position)
    key = U32(seed & _LOW_32), U32((seed >> 32) & _LOW_32)
    return _philox(key[0], key[1], U32(position & _LOW_32), U32((position >> 32) & _LOW_32))


@njit(cache=True)
def philox_uniform(state, token):  # type: ignore[no-untyped-def]
    """Returns the uniform float32 of a row's state and a uint32 token id, from 2^-31 to 1."""
    word = _philox(U32(state), U32(0), U32(token), U32(0))
    folded = np.bitwise_xor(word, U32(0xFFFFFFFF)) if word >> U32(31) else word
    return max(F32(I32(folded)) * _SMALLEST_OF_PHILOX, _SMALLEST_OF_PHILOX)


@njit(cache=True, error_model="numpy")
def philox_gumbel(state, token):  # type: ignore[no-untyped-def]
    """Returns the Gumbel float32 of a row's state and a uint32 token id."""
    return -log(-F32(np.log1p(-philox_uniform(state, token))))
