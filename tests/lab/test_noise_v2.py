# SPDX-License-Identifier: Apache-2.0
"""Statistical tests of vLLM's sampling noise (V2: murmur3 of seed, position and token id), on about 4e9 numbers.

- The noise is MurmurHash3_x86_32 of 16 bytes: seed, low half of the position, token.
- Its numbers are uniform in 2^12 bins of their upper, middle and lower bits, and in the tail down to 1e-6. The tail decides
  which token is sampled.
- Neighbours in seed, position and token id are independent, in their bulk and where both are small. So are seeds and
  positions that differ in one bit, and a draft's salted position.
- Gumbel-max with the noise samples known distributions, with small and random 63-bit seeds, along one request and over many.
  Neighbouring samples are independent.

Known limits: a row's noise depends on 32 bits of state. So two requests with random seeds have the same noise at all
positions with probability 2^-32. For some pair of N requests it is N^2 / 2^33. Seeds below 2^32 never do. Rows whose states
differ in one bit are as rare. They have a correlation of up to 4 %.

Seeds are fixed, so results are reproducible. P-values are two-sided and corrected for their number (Bonferroni).

Shapes: R rows (a seed and a position each), V vocabulary, C cells of a table.
"""

import numpy as np
import pytest
from numba import njit
from scipy import stats

from lab.vllm_on_cpu.kernels.noise import (
    DRAFT_SALT,
    gumbel_of,
    row_state,
    token_bits,
    uniform_of,
)

pytestmark = pytest.mark.unit

MIN_P_VALUE = 1e-3
MASK_32 = 0xFFFFFFFF
RNG = np.random.default_rng(20241107)
BITS_OF_A_SEED, BITS_OF_A_POSITION = 63, 20

# MurmurHash3_x86_32: (key, seed, hash), as published with its implementations.
PUBLISHED = (
    (b"", 1, 0x514E28B7),
    (b"test", 0, 0xBA6BD213),
    (b"Hello, world!", 0, 0xC0363E43),
    (b"The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
)


@njit
def states_of(seeds_R, positions_R):  # type: ignore[no-untyped-def]
    states_R = np.empty(len(seeds_R), np.uint32)
    for r in range(len(seeds_R)):
        states_R[r] = row_state(seeds_R[r], positions_R[r])
    return states_R


@njit
def bin_counts(states_R, num_tokens, shift, mask):  # type: ignore[no-untyped-def]
    counts_C = np.zeros(mask + 1, np.int64)
    for r in range(len(states_R)):
        for v in range(num_tokens):
            bits = token_bits(states_R[r], np.uint32(v))
            counts_C[np.int64(np.right_shift(bits, np.uint32(shift))) & mask] += 1
    return counts_C


@njit
def num_below(states_R, num_tokens, limit):  # type: ignore[no-untyped-def]
    num = 0
    for r in range(len(states_R)):
        in_row = np.int32(0)
        for v in range(num_tokens):
            in_row += np.int32(token_bits(states_R[r], np.uint32(v)) < limit)
        num += in_row
    return num


@njit
def gumbel_values(states_R, num_tokens):  # type: ignore[no-untyped-def]
    values_RV = np.empty((len(states_R), num_tokens), np.float32)
    for r in range(len(states_R)):
        for v in range(num_tokens):
            values_RV[r, v] = gumbel_of(uniform_of(token_bits(states_R[r], np.uint32(v))))
    return values_RV


@njit
def pair_counts(first_R, second_R, num_tokens, step):  # type: ignore[no-untyped-def]
    """Counts pairs (token v of a first row, token v + step of a second) in a 32 x 32 table. Also counts pairs below 2^-7."""
    counts_CC, num_small = np.zeros((32, 32), np.int64), 0
    for r in range(len(first_R)):
        for v in range(num_tokens):
            a = token_bits(first_R[r], np.uint32(v))
            b = token_bits(second_R[r], np.uint32(v + step))
            counts_CC[np.int64(a) >> 27, np.int64(b) >> 27] += 1
            num_small += np.int64(a | b) < 1 << 25
    return counts_CC, num_small


@njit
def samples(states_R, logits_V):  # type: ignore[no-untyped-def]
    tokens_R, scores_V = np.empty(len(states_R), np.int64), np.empty_like(logits_V)
    for r in range(len(states_R)):
        for v in range(len(logits_V)):
            scores_V[v] = logits_V[v] + gumbel_of(uniform_of(token_bits(states_R[r], np.uint32(v))))
        tokens_R[r] = scores_V.argmax()
    return tokens_R


@njit
def smallest(states_R, num_tokens):  # type: ignore[no-untyped-def]
    """Returns the token of the largest noise, which is the token of the smallest number."""
    tokens_R = np.empty(len(states_R), np.int64)
    for r in range(len(states_R)):
        best = np.uint32(MASK_32)
        for v in range(num_tokens):
            bits = token_bits(states_R[r], np.uint32(v))
            if bits < best:
                best, tokens_R[r] = bits, v
    return tokens_R


def rotated(value: int, left: int) -> int:
    return ((value << left) | (value >> (32 - left))) & MASK_32


def scrambled(word: int) -> int:
    return rotated(word * 0xCC9E2D51 & MASK_32, 15) * 0x1B873593 & MASK_32


def murmur3(key: bytes, seed: int = 0) -> int:
    """Returns MurmurHash3_x86_32 of a key of any length."""
    whole, h = len(key) // 4 * 4, seed
    for i in range(0, whole, 4):
        h = (rotated(h ^ scrambled(int.from_bytes(key[i : i + 4], "little")), 13) * 5 + 0xE6546B64) & MASK_32
    h ^= scrambled(int.from_bytes(key[whole:], "little")) ^ len(key)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & MASK_32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & MASK_32
    return h ^ (h >> 16)


def small_seeds(num: int, position: int = 100) -> np.ndarray:
    """Returns states of requests with seeds 0, 1, ... at one position."""
    return states_of(np.arange(num), np.full(num, position))


def random_seeds(num: int) -> np.ndarray:
    return states_of(RNG.integers(0, 2**63, num), RNG.integers(0, 2**17, num))


def one_request(num: int, seed: int = 1234567) -> np.ndarray:
    """Returns states of one request at positions 0, 1, ..."""
    return states_of(np.full(num, seed), np.arange(num))


def grid(num: int) -> np.ndarray:
    """Returns states of seeds 0, 1, ... by positions 0, 1, ..."""
    side = int(num**0.5)
    seeds, positions = np.meshgrid(np.arange(side), np.arange(side))
    return states_of(seeds.ravel(), positions.ravel())


SOURCES = (small_seeds, random_seeds, one_request, grid)


def two_sided(sf: float, cdf: float) -> float:
    return min(1.0, 2 * min(sf, cdf))


def fit(counts_C: np.ndarray, expected_C: np.ndarray | None = None) -> float:
    """Returns the p-value of a chi-square test. Cells of small expected counts are merged."""
    counts_C = np.asarray(counts_C, float).ravel()
    expected_C = np.full(len(counts_C), counts_C.mean()) if expected_C is None else expected_C.ravel()
    few = expected_C < 10
    if few.any():
        counts_C = np.append(counts_C[~few], counts_C[few].sum())
        expected_C = np.append(expected_C[~few], expected_C[few].sum())
    statistic, degrees = ((counts_C - expected_C) ** 2 / expected_C).sum(), len(counts_C) - 1
    return two_sided(stats.chi2.sf(statistic, degrees), stats.chi2.cdf(statistic, degrees))


def rarity(count: int, expected: float) -> float:
    """Returns the p-value of a count of rare events."""
    return two_sided(stats.poisson.sf(count - 1, expected), stats.poisson.cdf(count, expected))


def assert_plausible(p_values: list[float]) -> None:
    assert min(p_values) * len(p_values) > MIN_P_VALUE, p_values


def pair_p_values(first_R: np.ndarray, second_R: np.ndarray, num_tokens: int, step: int = 0) -> list[float]:
    counts_CC, num_small = pair_counts(first_R, second_R, num_tokens, step)
    return [fit(counts_CC), rarity(num_small, counts_CC.sum() / 2**14)]


def test_it_is_murmur3() -> None:
    for key, seed, answer in PUBLISHED:
        assert murmur3(key, seed) == answer
    for seed, position, token in RNG.integers(0, [2**63, 2**40, 2**18], (200, 3)):
        key = int(seed).to_bytes(8, "little") + (int(position) & MASK_32).to_bytes(4, "little")
        bits = token_bits(np.uint32(row_state(seed, position)), np.uint32(token))
        assert bits == murmur3(key + int(token).to_bytes(4, "little"))


def test_numbers_are_uniform() -> None:
    p_values = []
    for source in SOURCES:
        states_R = source(1 << 10)
        p_values += [fit(bin_counts(states_R, 1 << 15, shift, (1 << 12) - 1)) for shift in (0, 10, 20)]
    assert_plausible(p_values)


def test_all_tokens_have_equal_chances() -> None:
    """The token of the largest noise among 2^16, in 2^12 rows: binned by the first and the last 8 bits of its id."""
    p_values = []
    for source in (small_seeds, random_seeds, one_request):
        tokens_R = smallest(source(1 << 12), 1 << 16)
        p_values += [fit(np.bincount(tokens_R >> 8, minlength=256)), fit(np.bincount(tokens_R & 255, minlength=256))]
    assert_plausible(p_values)


@pytest.mark.parametrize("probability", [1e-2, 1e-4, 1e-6])
def test_tail_is_uniform(probability: float) -> None:
    """Tests 2^28 numbers of each source."""
    limit = round(probability * 2**32)
    nums = [num_below(source(1 << 12), 1 << 16, np.uint32(limit)) for source in SOURCES]
    assert_plausible([rarity(num, limit / 2**32 * 2**28) for num in nums])


def test_values_are_gumbel() -> None:
    p_values = []
    for source in SOURCES:
        values = gumbel_values(source(1 << 8), 1 << 9).ravel().astype(np.float64)
        p_values.append(stats.kstest(values, stats.gumbel_r.cdf).pvalue)
    assert_plausible(p_values)


def test_neighbouring_positions_are_independent() -> None:
    p_values = []
    for step in (1, 2, 3, 16, 1 << 10, 1 << 16):
        positions = np.arange(1 << 9)
        for seed in (0, 7, 2**62 + 12345):
            seeds = np.full(1 << 9, seed)
            first, second = states_of(seeds, positions), states_of(seeds, positions + step)
            p_values += pair_p_values(first, second, 1 << 13)
    assert_plausible(p_values)


def test_neighbouring_seeds_are_independent() -> None:
    p_values = []
    for step in (1, 2, 3, 16, 1 << 10, 1 << 16):
        for start in (0, 2**40, 2**62 + 999):
            seeds, positions = start + np.arange(1 << 9), np.full(1 << 9, 77)
            p_values += pair_p_values(states_of(seeds, positions), states_of(seeds + step, positions), 1 << 13)
    assert_plausible(p_values)


def test_neighbouring_tokens_are_independent() -> None:
    steps = (1, 2, 3, 64, 1000, 1 << 16)
    states_R = grid(1 << 10)
    assert_plausible([p for step in steps for p in pair_p_values(states_R, states_R, 1 << 13, step)])


def test_inputs_that_differ_in_one_bit_are_independent() -> None:
    seeds, positions = RNG.integers(0, 2**63, 1 << 8), RNG.integers(0, 2**BITS_OF_A_POSITION, 1 << 8)
    seeds[::2] &= 0xFFFF
    first = states_of(seeds, positions)
    others = [states_of(seeds ^ (1 << bit), positions) for bit in range(BITS_OF_A_SEED)]
    others += [states_of(seeds, positions ^ (1 << bit)) for bit in range(BITS_OF_A_POSITION)]
    assert_plausible([p for second in others for p in pair_p_values(first, second, 1 << 12)])


def test_states_that_differ_in_one_bit_are_nearly_independent() -> None:
    """The worst case for the last steps of the hash. One pair of rows in 10^8 is such a pair."""
    states_R = RNG.integers(0, 2**32, 1 << 10).astype(np.uint32)
    num_pairs = len(states_R) << 13
    for bit in range(32):
        counts_CC, num_small = pair_counts(states_R, states_R ^ np.uint32(1 << bit), 1 << 13, 0)
        excess = (counts_CC**2).sum() * counts_CC.size / num_pairs**2 - 1 - counts_CC.size / num_pairs
        assert np.sqrt(max(excess, 0)) < 0.045
        assert rarity(num_small, num_pairs / 2**14) > 1e-4


def test_the_noise_of_ratio_test_drafts_is_independent() -> None:
    p_values = []
    for seeds in (np.arange(1 << 9), RNG.integers(0, 2**63, 1 << 9)):
        positions = np.arange(1 << 9)
        first, second = states_of(seeds, positions), states_of(seeds, positions + DRAFT_SALT)
        p_values += pair_p_values(first, second, 1 << 14)
    assert_plausible(p_values)


def test_rows_repeat_as_rarely_as_32_bits_allow() -> None:
    """Among N rows, N^2 / 2^33 pairs have equal states. Seeds with equal states have equal states at every position."""
    num = 1 << 19
    seeds, positions = RNG.integers(0, 2**63, num), np.full(num, 5)
    states_R = states_of(seeds, positions)
    repeated = [(len(states) - len(np.unique(states)), len(states)) for states in (grid(num), states_R)]
    assert_plausible([rarity(repeats, num_rows**2 / 2**33) for repeats, num_rows in repeated])
    assert len(np.unique(small_seeds(num))) == len(np.unique(one_request(num))) == num
    by_state = np.argsort(states_R)
    repeats = np.flatnonzero(np.diff(states_R[by_state]) == 0)
    first, second = seeds[by_state[repeats]], seeds[by_state[repeats + 1]]
    assert len(repeats) > 10
    assert (first != second).all()
    elsewhere = np.full(len(repeats), 99_999)
    assert np.array_equal(states_of(first, elsewhere), states_of(second, elsewhere))


@pytest.mark.parametrize(("vocab_size", "num_samples"), [(8, 1 << 20), (96, 1 << 18), (2000, 1 << 15)])
def test_samples_follow_the_distribution(vocab_size: int, num_samples: int) -> None:
    """Tests samples of each source and pairs of neighbouring samples. Probabilities span a factor of 10^4."""
    logits_V = np.linspace(0, -9.2 if vocab_size == 8 else -4, vocab_size).astype(np.float32)
    logits_V = np.random.default_rng(vocab_size).permutation(logits_V)
    probs_V = np.exp(logits_V.astype(np.float64))
    probs_V /= probs_V.sum()
    p_values = []
    for source in SOURCES:
        tokens_R = samples(source(num_samples), logits_V)
        p_values.append(fit(np.bincount(tokens_R, minlength=vocab_size), probs_V * len(tokens_R)))
        if vocab_size < 2000:
            pairs = tokens_R[:-1:2] * vocab_size + tokens_R[1::2]
            p_values.append(fit(np.bincount(pairs, minlength=vocab_size**2), np.outer(probs_V, probs_V) * len(pairs)))
    assert_plausible(p_values)
