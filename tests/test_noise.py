# SPDX-License-Identifier: Apache-2.0
"""The noise function: known answers, a slow second implementation, accuracy, distribution and independence.

Shapes: R rows, V vocabulary. Seeds are fixed, so a test passes always or never; thresholds are p-values above 1e-6.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nemo_specrollout.sampling import constants, cpu_kernel, seeds
from nemo_specrollout.sampling.noise import _exponential, _negative_log, as_int64, gumbel_noise, mix64, row_keys

pytestmark = pytest.mark.unit

EXACTNESS = (Path(__file__).parent.parent / "docs" / "exactness.md").read_text()
F32 = np.float32
MASK = (1 << 64) - 1
MAX_SEED = 2**63 - 1
MIN_P_VALUE = 1e-6
MAX_Z = 5.0
VOCAB_SIZES = (1, 3, 97, 1000, 32003)

# The first outputs of the published SplitMix64 generator from state 0.
SPLIT_MIX_64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)

# (seed, position, id): (key of the row, noise).
KNOWN = {
    (0, 0, 0): (0xA706DD2F4D197E6F, "-0x1.a21f8cp-2"),
    (0, 0, 1): (0xA706DD2F4D197E6F, "0x1.a6f972p-1"),
    (0, 0, 96): (0xA706DD2F4D197E6F, "0x1.0ad5ccp-2"),
    (0, 1, 0): (0xB382A305F4414F5E, "-0x1.6c59fap-2"),
    (1, 0, 0): (0x5E41AB087439611E, "0x1.6c8814p+0"),
    (42, 17, 31999): (0x72788AC53F004925, "0x1.2ecbdep-1"),
    (42, 18, 31999): (0xA837CCD7D3DF42BF, "0x1.219b94p+0"),
    (20240807, 1023, 3): (0x1697182D88EA31FF, "0x1.5ccb34p+1"),
    (0xC0FFEE, 4095, 50256): (0xFDB1689DA9EA6124, "0x1.4ef928p+0"),
    (123456789, 2**31, 128255): (0xE18E8622349474A3, "0x1.4ac8d8p-2"),
    (2**62, 2**31 - 1, 7): (0xA6436CC57EB0214B, "0x1.8f432ep-2"),
    (5, 2**40, 0): (0x1A651DCA637C9461, "-0x1.f91cc0p-1"),
    (MAX_SEED, 0, 0): (0x69C9D98A86C5CD1E, "-0x1.75e660p-3"),
    (MAX_SEED, 2**40, 151935): (0x0148379E6C6E4123, "0x1.15af1ep+0"),
}

# Bits of the hash at the ends of its range: all halvings, none, and the smallest and largest x of each.
EDGE_HASHES = (0, 1, MASK, 0xFFFFFFFF, 1 << 40, 1 << 63, 0xFFFFFFFF << 32, 0x8000000080000000, 0x00000100FFFFFFFF)


def noise_of(seeds_R: list[int], positions_R: list[int], vocab_size: int) -> torch.Tensor:
    return gumbel_noise(row_keys(torch.tensor(seeds_R), torch.tensor(positions_R)), vocab_size)


def slow_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_hash(seed: int, position: int, token: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    key = slow_mix((slow_mix((seed + gamma) & MASK) + (position + 1) * gamma) & MASK)
    return slow_mix((key + (token + 1) * gamma) & MASK)


def slow_gumbel(h: int) -> np.float32:
    """What `docs/exactness.md` says, one float32 operation at a time."""
    high = (h >> 40) | 1
    halvings = F32(24 - high.bit_length())
    x = F32(h & 0xFFFFFFFF) * F32(2.0**-33) + F32(2.0**-34)
    e = slow_odd(x / (F32(2) - x), constants.ATANH_THIRD) + halvings * F32(constants.LN2)
    mantissa, exponent = np.frexp(e)
    half = F32(constants.SQRT_HALF)
    log = slow_odd((mantissa - half) / (mantissa + half), constants.ATANH_SIXTH) + F32(constants.LOG_SQRT_HALF)
    return -(log + F32(exponent) * F32(constants.LN2))


def slow_odd(s: np.float32, coefficients: tuple[float, ...]) -> np.float32:
    t = s * s
    result = t * F32(coefficients[-1])
    for coefficient in reversed(coefficients[1:-1]):
        result = (result + F32(coefficient)) * t
    return (result + F32(coefficients[0])) * s


def float64_gumbel(h: np.ndarray) -> np.ndarray:
    """-log of an exponential whose distribution function is inverted at the same bits, in float64."""
    high = (h >> np.uint64(40) | np.uint64(1)).astype(np.float64)
    halvings = 23 - np.floor(np.log2(high))
    x = ((h & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-33
    return -np.log(halvings * np.log(2.0) - np.log1p(-x))


def hashes(keys_R: torch.Tensor, num: int) -> torch.Tensor:
    steps = torch.arange(1, num + 1, dtype=torch.int64) * as_int64(constants.GAMMA)
    return mix64(keys_R[:, None] + steps)


def numba_noise(key: int, vocab_size: int) -> np.ndarray:
    high_V, noise_V = np.empty(vocab_size, F32), np.empty(vocab_size, F32)
    cpu_kernel._row_noise(np.uint64(key), high_V, high_V.view(np.int32), noise_V, noise_V.view(np.int32))
    return noise_V


def uniform(gumbel: torch.Tensor) -> np.ndarray:
    return np.exp(-np.exp(-gumbel.double().numpy()))


def assert_independent(first: np.ndarray, second: np.ndarray) -> None:
    """No correlation of ranks, and no dependence in a 32 x 32 table, between paired uniform numbers."""
    first, second = first.ravel(), second.ravel()
    z = np.corrcoef(first, second)[0, 1] * np.sqrt(len(first))
    assert abs(z) < MAX_Z
    table = np.histogram2d(first, second, bins=32, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(table.ravel()).pvalue > MIN_P_VALUE


def test_mix64_continues_the_published_generator():
    states = torch.tensor([as_int64(i * constants.GAMMA) for i in range(1, 5)])
    assert [value & MASK for value in mix64(states).tolist()] == list(SPLIT_MIX_64)
    assert [seeds.mix64_int(i * constants.GAMMA) for i in range(1, 5)] == list(SPLIT_MIX_64)


@pytest.mark.parametrize(("where", "answer"), KNOWN.items(), ids=str)
def test_known_answers(where, answer):
    seed, position, token = where
    key, noise = answer
    assert row_keys(torch.tensor([seed]), torch.tensor([position])).item() & MASK == key
    assert noise_of([seed], [position], token + 1)[0, token].item().hex() == float.fromhex(noise).hex()


def test_documented_answers_and_constants():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in EXACTNESS.splitlines() if line.startswith("|")]
    answers = [row for row in rows if row[-1].lstrip("-").startswith("0x1.")]
    assert len(answers) >= 6
    for *where, key, noise in answers:
        seed, position, token = (eval(number.replace("^", "**")) for number in where)
        assert KNOWN[seed, position, token] == (int(key, 16), noise)
    bits = re.findall(r"[A-Z_0-9]+(?: = sqrt\(1/2\))? \| ([0-9A-F]{8})(?= )", EXACTNESS)
    values = (
        *constants.ATANH_THIRD,
        *constants.ATANH_SIXTH,
        constants.LN2,
        constants.SQRT_HALF,
        constants.LOG_SQRT_HALF,
    )
    assert sorted(bits) == sorted(f"{F32(value).view(np.uint32):08X}" for value in values)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 2**40), st.integers(0, 2000))
def test_equal_to_a_slow_implementation(seed, position, token):
    noise = noise_of([seed], [position], token + 1)[0, token].numpy()
    assert noise.view(np.int32) == slow_gumbel(slow_hash(seed, position, token)).view(np.int32)


def test_constants_are_exact_in_float32():
    named = (constants.LN2, constants.SQRT_HALF, constants.LOG_SQRT_HALF)
    for value in (*named, *constants.ATANH_THIRD, *constants.ATANH_SIXTH):
        assert float(F32(value)) == pytest.approx(value, rel=1e-16, abs=0)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_numba_kernel_has_the_same_bits(vocab_size):
    where = [(0, 0), (1, 2**31), (MAX_SEED, 2**40), (977, 31)]
    keys_R = row_keys(*torch.tensor(where).T)
    for key, expected_V in zip(keys_R.tolist(), gumbel_noise(keys_R, vocab_size).numpy(), strict=True):
        assert np.array_equal(numba_noise(key & MASK, vocab_size).view(np.int32), expected_V.view(np.int32))


def test_a_larger_vocabulary_extends_the_noise():
    assert torch.equal(noise_of([7], [9], 32003)[:, :97], noise_of([7], [9], 97))


def test_noise_of_a_row_does_not_depend_on_other_rows():
    batch = noise_of([3, MAX_SEED, 0, 3], [0, 5, 2**40, 1], 1000)
    assert torch.equal(batch[1], noise_of([MAX_SEED], [5], 1000)[0])
    assert torch.equal(batch[3], noise_of([3], [1], 1000)[0])


def test_accuracy_against_float64():
    h = hashes(row_keys(torch.tensor([11]), torch.tensor([12])), 1 << 22)
    error = gumbel_noise(row_keys(torch.tensor([11]), torch.tensor([12])), 1 << 22)[0].double().numpy()
    error -= float64_gumbel(h[0].numpy().view(np.uint64))
    assert np.abs(error).max() < 1.2e-6
    assert np.sqrt((error**2).mean()) < 1e-7
    assert abs(error.mean()) < 5e-8


@pytest.mark.parametrize(("num_halvings", "bound"), [(0, 2.1e-6), (1, 2e-7), (23, 4e-7)])
def test_accuracy_where_the_exponential_nearly_repeats(num_halvings, bound):
    """The smallest x after each number of halvings; with none, the noise is largest and float32 coarsest there."""
    h = torch.arange(1 << 20) | as_int64(1 << (63 - num_halvings))
    noise = _negative_log(_exponential(h.clone()))
    assert np.abs(noise.numpy() - float64_gumbel(h.numpy().view(np.uint64))).max() < bound


@pytest.mark.parametrize("h", EDGE_HASHES, ids=hex)
def test_ends_of_the_range(h):
    noise = float(slow_gumbel(h))
    assert noise == pytest.approx(float64_gumbel(np.array([h], np.uint64))[0], abs=2e-6)
    assert -2.812 < noise < 23.568


def test_distribution_is_gumbel():
    noise = noise_of(list(range(1024)), [100] * 1024, 2048).flatten()
    uniforms = uniform(noise)
    assert stats.kstest(uniforms, "uniform").pvalue > MIN_P_VALUE
    counts = np.histogram(uniforms, bins=1024, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE


def test_tail_is_gumbel():
    """Exceedances, which decide every sampled token of small probability; far below the smallest bin above."""
    noise = noise_of(list(range(4096)), [0] * 4096, 1024)
    for level in (8.0, 10.0, 12.0):
        expected = noise.numel() * -np.expm1(-np.exp(-level))
        assert abs((noise > level).sum().item() - expected) < MAX_Z * np.sqrt(expected)


@pytest.mark.parametrize("step", [1, 2, 2**16, 2**31])
def test_positions_are_independent(step):
    first = noise_of([5] * 1024, list(range(1024)), 1024)
    second = noise_of([5] * 1024, list(range(step, step + 1024)), 1024)
    assert_independent(uniform(first), uniform(second))


@pytest.mark.parametrize("flip", [1, 3, 2**32, 2**62])
def test_seeds_are_independent(flip):
    first = noise_of(list(range(1024)), [77] * 1024, 1024)
    second = noise_of([seed ^ flip for seed in range(1024)], [77] * 1024, 1024)
    index = torch.arange(1024) < (torch.arange(1024) ^ flip)  # each pair once
    assert_independent(uniform(first[index]), uniform(second[index]))


@pytest.mark.parametrize("step", [1, 2, 64, 1000])
def test_vocabulary_ids_are_independent(step):
    uniforms = uniform(noise_of(list(range(1024)), [3] * 1024, 2048))
    assert_independent(uniforms[:, :1024], uniforms[:, step : step + 1024])


def test_a_seed_and_a_position_do_not_trade_places():
    first = noise_of(list(range(1024)), [9] * 1024, 1024)
    second = noise_of([9] * 1024, list(range(1024)), 1024)
    others = torch.arange(1024) != 9
    assert_independent(uniform(first[others]), uniform(second[others]))


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1)])
def test_pairs_of_sampled_tokens_are_uniform(seed_step, position_step):
    """Arg-maxes of neighbours, each seed and position used once: no pattern survives into tokens."""
    base = torch.arange(1 << 17)
    first = gumbel_noise(row_keys(2 * base, 2 * base + 1), 16).argmax(1)
    second = gumbel_noise(row_keys(2 * base + seed_step, 2 * base + 1 + position_step), 16).argmax(1)
    counts = torch.bincount(first * 16 + second, minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > MIN_P_VALUE


def test_keys_do_not_repeat():
    grid = torch.cartesian_prod(torch.arange(1024), torch.arange(1024))
    assert len(row_keys(grid[:, 0], grid[:, 1]).unique()) == len(grid)
