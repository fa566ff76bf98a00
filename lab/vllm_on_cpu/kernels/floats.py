# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on logits in numba functions. It has decoding, order keys for arg-max, a logarithm and an exponential.

LLVM vectorises these functions. No operation is fused or reordered, so a result has the same bits on every CPU and in every
batch. A 16-bit float is passed as its bits, a bfloat16 as uint16 and a float16 as int16 (`kernel_launch.view`).

Shapes: V vocabulary, N elements of a block.
"""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core.errors import TypingError
from numba.extending import overload

from lab.vllm_on_cpu.kernels.kernel_launch import void_pointer

F32, I32, U32 = np.float32, np.int32, np.uint32
NEGATIVE_INFINITY = F32(-np.inf)
LOWEST_KEY = I32(-0x7F800001)
"""Order key of -inf."""

LN2 = 0.693147182464599609375
"""log(2) as a float32, written exactly."""
SQRT_HALF = 0.707106769084930419921875
"""sqrt(1/2) as a float32, written exactly."""
LOG_SQRT_HALF = -0.3465736210346221923828125
"""log(sqrt(1/2)) as a float32, written exactly."""
ATANH_SIXTH = (2.0, 0.666668176651001, 0.399748295545578, 0.2992499768733978)
"""Coefficients of 2 atanh(s) / s as a float32 polynomial in t = s^2, lowest order first. It is a Chebyshev fit with a relative
error below 5e-9 on t in [0, 0.02945], the range that a logarithm needs."""
_LN2, _SQRT_HALF, _LOG_SQRT_HALF = F32(LN2), F32(SQRT_HALF), F32(LOG_SQRT_HALF)
_S0, _S1, _S2, _S3 = (F32(c) for c in ATANH_SIXTH)

_LOG2_E = F32(1.4426950408889634)
# Coefficients of P in 2^f = 1 + f P(f) for |f| <= 1/2, highest power first. A Chebyshev fit with a relative error of 7e-9.
_P5, _P4, _P3, _P2, _P1, _P0 = (
    F32(c)
    for c in (
        0.00015329332381952554,
        0.001339030684903264,
        0.009618467651307583,
        0.05550358444452286,
        0.24022647738456726,
        0.6931471824645996,
    )
)
# The sum of this and a small float32 has the nearest integer in its lowest bits.
_TO_INTEGER = F32(1.5 * 2**23)
_SMALLEST_EXPONENT = F32(-126.0)


def value_of(number: Any) -> Any:
    """Returns the float32 value of a logit. `number` is a float32, or the bits of a 16-bit float.

    Can only be called inside a numba function.
    """
    raise NotImplementedError


def stored(value: Any, like: Any) -> Any:
    """Converts the float32 `value` to the type in which the array `like` stores logits, and returns it.

    If that is bfloat16, returns the bits of the bfloat16. A float16 is not supported. Can only be called inside a numba
    function.
    """
    raise NotImplementedError


@njit(cache=True)
def _from_bfloat16(bits):  # type: ignore[no-untyped-def]
    return U32(np.left_shift(U32(bits), U32(16))).view(np.float32)


@njit(cache=True, error_model="numpy")
def _from_float16(bits):  # type: ignore[no-untyped-def]
    magnitude = U32(U32(bits) & U32(0x7FFF))
    scaled = U32(magnitude << U32(13)).view(np.float32) * F32(2.0**112)
    special = U32((magnitude << U32(13)) | U32(0x7F800000)).view(np.float32)
    value = scaled if magnitude < U32(0x7C00) else special
    return value if bits >= 0 else -value


@njit(cache=True)
def _to_bfloat16(value):  # type: ignore[no-untyped-def]
    bits = np.float32(value).view(np.uint32)
    rounded = U32(U32(bits) + U32(0x7FFF) + U32((bits >> U32(16)) & U32(1)))
    return np.uint16(U32(bits | U32(0x400000) if np.isnan(value) else rounded) >> U32(16))


@overload(value_of)
def _value_of(number):  # type: ignore[no-untyped-def]
    if number == types.uint16:
        return lambda number: _from_bfloat16(number)  # noqa: PLW0108
    if number == types.int16:
        return lambda number: _from_float16(number)  # noqa: PLW0108
    if number == types.float32:
        return lambda number: number
    raise TypingError(f"logits of type {number} are not supported")


@overload(stored)
def _stored(value, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.uint16:
        return lambda value, like: _to_bfloat16(value)
    if like.dtype == types.float32:
        return lambda value, like: F32(value)
    raise TypingError(f"logits of type {like.dtype} cannot be changed in place")


@njit(cache=True)
def row_of(matrix, row, num):  # type: ignore[no-untyped-def]
    """Returns the first `num` elements of a row as an array.

    The compiler knows that the array is contiguous, even if the matrix has padding between its rows.
    """
    address = matrix.ctypes.data + np.int64(row) * matrix.strides[0]
    return carray(void_pointer(address), (num,), matrix.dtype)


@njit(cache=True, error_model="numpy")
def decode(logits_N, values_N):  # type: ignore[no-untyped-def]
    """Writes the float32 values of `logits_N` to `values_N`."""
    for i in range(len(values_N)):
        values_N[i] = value_of(logits_N[i])


@njit(cache=True)
def order_key(value):  # type: ignore[no-untyped-def]
    """Returns the order key of a float32, which is an int32. Keys are ordered like the floats.

    LLVM vectorises a maximum of integers, but not of floats.
    """
    bits = np.float32(value).view(np.int32)
    return I32(bits ^ ((bits >> I32(31)) & I32(0x7FFFFFFF)))


@njit(cache=True)
def value_of_key(key):  # type: ignore[no-untyped-def]
    """Returns the float32 whose order key is `key`."""
    return I32(key ^ ((key >> I32(31)) & I32(0x7FFFFFFF))).view(np.float32)


@njit(cache=True, error_model="numpy")
def highest(values_N):  # type: ignore[no-untyped-def]
    """Returns the order key of the largest value of a contiguous float32 array, or of -inf if the array is empty."""
    best = LOWEST_KEY
    for i in range(len(values_N)):
        best = max(best, order_key(values_N[i]))
    return best


@njit(cache=True, error_model="numpy")
def log(value):  # type: ignore[no-untyped-def]
    """Returns the logarithm of a positive, normal float32. The error is about 1e-7 near 1, and 2 ulp elsewhere."""
    bits = np.float32(value).view(np.int32)
    exponent = F32(I32((bits >> I32(23)) - I32(126)))
    mantissa = I32((bits & I32(0x7FFFFF)) | I32(0x3F000000)).view(np.float32)
    s = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    t = s * s
    p = ((t * _S3 + _S2) * t + _S1) * t + _S0
    return (p * s + _LOG_SQRT_HALF) + exponent * _LN2


@njit(cache=True, error_model="numpy")
def exp_of_negative(value):  # type: ignore[no-untyped-def]
    """Returns the exponential of a float32 that is at most 0.

    A result below 2^-126 is replaced by 2^-126, even that of -inf. So use it only in sums with a much larger term.
    """
    exponent = value * _LOG2_E
    exponent = _SMALLEST_EXPONENT if exponent < _SMALLEST_EXPONENT else exponent
    shifted = exponent + _TO_INTEGER
    f = exponent - (shifted - _TO_INTEGER)
    p = ((((_P5 * f + _P4) * f + _P3) * f + _P2) * f + _P1) * f + _P0
    power_of_2 = np.add(np.left_shift(np.float32(shifted).view(np.int32), I32(23)), I32(0x3F800000))
    return (F32(1) + f * p) * I32(power_of_2).view(np.float32)
