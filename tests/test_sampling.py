# SPDX-License-Identifier: Apache-2.0
"""The sampler, its three bodies, acceptance, seeds and identities.

Shapes: B requests, R rows, V vocabulary. Seeds are fixed, so a test passes always or never.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, tensor

from nemo_specrollout.generation.identity import RequestIdentity, resolve_identity, rollout_extra_args
from nemo_specrollout.sampling.acceptance import PLACEHOLDER, accept_by_equality, accept_by_equality_torch
from nemo_specrollout.sampling.noise import gumbel_noise, row_keys
from nemo_specrollout.sampling.sampler import sample_tokens, sample_tokens_torch
from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
MAX_SEED = 2**63 - 1
MIN_P_VALUE = 1e-6
MAX_Z = 5.0
NEVER = -math.inf
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def make_rows(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random logits with some -inf and some exact ties, seeds, positions, and every fifth row greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(num_rows, vocab_size, generator=generator) * 24).round() / 8
    masked = torch.rand(num_rows, vocab_size, generator=generator) < 0.1
    seeds_R = torch.randint(0, MAX_SEED, (num_rows,), generator=generator)
    positions_R = torch.randint(0, 2**41, (num_rows,), generator=generator)
    return logits_RV.masked_fill(masked, NEVER), seeds_R, positions_R, torch.arange(num_rows) % 5 == 4


def sample_many(logits_V: Tensor, num: int, position: int = 0, first_seed: int = 0) -> Tensor:
    """One token for each of `num` consecutive seeds, all from the same logits."""
    logits_RV = logits_V.float().expand(num, -1).contiguous()
    seeds_R = torch.arange(first_seed, first_seed + num)
    return sample_tokens(logits_RV, seeds_R, torch.full((num,), position), torch.zeros(num, dtype=torch.bool))


def one(logits: list[float], seed: int = 1, position: int = 1, greedy: bool = False) -> int:
    return sample_tokens(tensor([logits]), tensor([seed]), tensor([position]), tensor([greedy])).item()


def cancelling_rows(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits that are minus the noise: all scores tie at zero, and one wrong bit of noise moves a token away from 0."""
    _, seeds_R, positions_R, _ = make_rows(num_rows, vocab_size)
    logits_RV = -gumbel_noise(row_keys(seeds_R, positions_R), vocab_size)
    return logits_RV, seeds_R, positions_R, torch.zeros(num_rows, dtype=torch.bool)


@pytest.mark.parametrize("vocab_size", [1, 97, 32003])
def test_kernel_has_every_bit_of_the_noise(vocab_size):
    assert not sample_tokens(*cancelling_rows(20, vocab_size)).any()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 97, 1000, 32003, 600_000])
def test_kernel_equals_its_definition(vocab_size):
    rows = make_rows(37 if vocab_size < 100_000 else 3, vocab_size)
    assert torch.equal(sample_tokens(*rows), sample_tokens_torch(*rows))


def test_strided_logits_and_no_rows():
    logits_RV, *keys = make_rows(64, 131)
    wide_RV = torch.cat([logits_RV, logits_RV], dim=1)
    assert torch.equal(sample_tokens(wide_RV[:, :131], *keys), sample_tokens(logits_RV, *keys))
    none = [t[:0] for t in (logits_RV, *keys)]
    assert sample_tokens(*none).shape == sample_tokens_torch(*none).shape == (0,)


def test_a_row_is_sampled_alike_in_any_batch():
    rows = make_rows(50, 97)
    together = sample_tokens(*rows)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample_tokens(*(t[order] for t in rows)), together[order])
    assert torch.equal(torch.cat([sample_tokens(*(t[i : i + 1] for t in rows)) for i in range(50)]), together)


@pytest.mark.parametrize("position", [0, 1, 2**31, 2**40])
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_tokens_follow_the_softmax(scale, position):
    logits_V = torch.randn(24, generator=torch.Generator().manual_seed(3)) * scale
    num = 200_000 if position == 0 else 50_000
    counts = torch.bincount(sample_many(logits_V, num, position), minlength=24).double()
    expected = logits_V.double().softmax(0) * num
    common = expected >= 5
    if not common.all():
        counts = torch.cat([counts[common], counts[~common].sum().view(1)])
        expected = torch.cat([expected[common], expected[~common].sum().view(1)])
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > MIN_P_VALUE


def test_tokens_of_one_seed_follow_the_softmax_over_positions():
    logits_V = torch.randn(24, generator=torch.Generator().manual_seed(4))
    num = 200_000
    logits_RV = logits_V.expand(num, -1).contiguous()
    tokens = sample_tokens(logits_RV, torch.full((num,), 8), torch.arange(num), torch.zeros(num, dtype=torch.bool))
    expected = logits_V.double().softmax(0) * num
    assert stats.chisquare(torch.bincount(tokens, minlength=24).numpy(), expected.numpy()).pvalue > MIN_P_VALUE


def test_shifted_logits_sample_alike():
    """Sums in the shift are exact here, so that only the softmax's own invariance is asked for."""
    logits_V = tensor([0.5, 1.0, -2.0, 0.25])
    assert (sample_many(logits_V, 20_000) != sample_many(logits_V + 4, 20_000)).sum() < 5


def test_greedy_rows_take_the_argmax_and_the_smallest_of_ties():
    assert one([1.0, 3.0, 2.0, 3.0], greedy=True) == 1
    assert one([0.0, -0.0, 0.0], greedy=True) == 0
    assert one([NEVER, NEVER], greedy=True) == 0
    tokens = [one([0.0, 0.0], seed, greedy=True) for seed in (0, 1, MAX_SEED)]
    assert tokens == [0, 0, 0]


def test_masked_tokens_are_never_sampled():
    assert set(sample_many(tensor([NEVER, 0.0, NEVER, -30.0]), 5_000).tolist()) == {1}
    assert [one([NEVER, NEVER, -1e30, NEVER], seed) for seed in range(20)] == [2] * 20
    assert one([NEVER, NEVER, NEVER]) == 0


def test_noise_does_not_move_large_logits():
    """Where a float32 cannot hold logit + noise, ties go to the smallest id, as in the definition."""
    rows = (torch.full((100, 50), 1e9), torch.arange(100), torch.arange(100), torch.zeros(100, dtype=torch.bool))
    assert torch.equal(sample_tokens(*rows), torch.zeros(100, dtype=torch.int64))
    assert torch.equal(sample_tokens_torch(*rows), torch.zeros(100, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_refused(dtype):
    logits_RV, *keys = make_rows(2, 5)
    with pytest.raises(ValueError, match="float32"):
        sample_tokens(logits_RV.to(dtype), *keys)


@pytest.mark.parametrize("noise_scale", [0.2, 0.7, 2.0])
def test_a_drafter_with_the_same_noise_agrees_as_often_as_promised(noise_scale):
    """Agreement has the closed form of weighted min-hashing, and is between (1 - TV) / (1 + TV) and 1 - TV."""
    generator = torch.Generator().manual_seed(5)
    target_V = torch.randn(50, generator=generator) * 2
    drafter_V = target_V + torch.randn(50, generator=generator) * noise_scale
    num = 100_000
    agreed = (sample_many(target_V, num) == sample_many(drafter_V, num)).double().mean().item()
    p, q = target_V.double().softmax(0).numpy(), drafter_V.double().softmax(0).numpy()
    exact = sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in range(50))
    assert abs(agreed - exact) < MAX_Z * math.sqrt(exact * (1 - exact) / num)
    distance = abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= exact <= 1 - distance


def test_a_drafter_with_other_noise_agrees_less():
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(6))
    others = sample_many(logits_V, 10_000, first_seed=10_000)
    chance = (logits_V.softmax(0) ** 2).sum().item()
    assert (sample_many(logits_V, 10_000) == others).double().mean().item() == pytest.approx(chance, abs=0.02)


# Acceptance


def slow_acceptance(tokens: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Of each request: sampled tokens until, and with, the first that differs from its draft."""
    emitted = []
    for sampled, proposed in zip(tokens, drafts, strict=True):
        agreeing = 0
        while agreeing < len(proposed) and sampled[agreeing] == proposed[agreeing]:
            agreeing += 1
        emitted.append(sampled[: agreeing + 1])
    return emitted


@st.composite
def verified_batches(draw) -> tuple[list[list[int]], list[list[int]]]:
    num_drafts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    drafts = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in num_drafts]
    tokens = [draw(st.lists(st.integers(0, 1), min_size=n + 1, max_size=n + 1)) for n in num_drafts]
    return tokens, drafts


def accept(tokens: list[list[int]], drafts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    tokens_R = tensor(list(chain.from_iterable(tokens)))
    drafts_D = tensor(list(chain.from_iterable(drafts)), dtype=torch.int64)
    num_drafts_B = tensor([len(d) for d in drafts])
    compiled, defined = (f(tokens_R, drafts_D, num_drafts_B) for f in (accept_by_equality, accept_by_equality_torch))
    assert all(map(torch.equal, compiled, defined))
    return tokens_R, *compiled


@settings(max_examples=300, deadline=None)
@given(verified_batches())
def test_acceptance_equals_a_slow_reference(batch):
    tokens, drafts = batch
    tokens_R, emitted_BS, rows_BS = accept(tokens, drafts)
    expected = slow_acceptance(tokens, drafts)
    assert emitted_BS.shape == rows_BS.shape == (len(tokens), 1 + max(map(len, drafts)))
    for emitted_S, answer in zip(emitted_BS.tolist(), expected, strict=True):
        assert emitted_S == answer + [PLACEHOLDER] * (len(emitted_S) - len(answer))
    assert rows_BS.min() >= 0 and rows_BS.max() < len(tokens_R)
    stands = emitted_BS != PLACEHOLDER
    assert torch.equal(tokens_R[rows_BS][stands], emitted_BS[stands])
    starts_B = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1]
    assert torch.equal(rows_BS[:, 0], starts_B)


def test_acceptance_without_any_draft():
    _, emitted_BS, rows_BS = accept([[4], [7], [0]], [[], [], []])
    assert emitted_BS.tolist() == [[4], [7], [0]]
    assert rows_BS.tolist() == [[0], [1], [2]]


def test_acceptance_by_hand():
    _, emitted_BS, _ = accept([[5, 6, 7], [1], [2, 3]], [[5, 9], [], [2]])
    assert emitted_BS.tolist() == [[5, 6, -1], [1, -1, -1], [2, 3, -1]]


# Seeds and identities


def test_seeds_known_answers():
    assert request_seed(0, 0, 0, 0) == 0x149036A4DA7B2357
    assert request_seed(0, 0, 1, 0) == 0x08651B7B5B94276F
    assert request_seed(0, 1, 0, 0) == 0x5DE11EE962948697
    assert request_seed(0, 0, 0, 1) == 0x7C32AC7B80E30E51
    assert request_seed(1234, 56, 7, 89) == 0x3EF8D38717F6ACBA
    assert combine() == 0
    assert combine(0) == 0xA706DD2F4D197E6F
    assert combine(7, 42) >> 1 == 0x108D88BC119CA5C6


def test_content_hash_known_answers():
    assert content_hash([]) == 0x5A593CBA2BD05372
    assert content_hash([0]) == 0x0C6624E52DF50465
    assert content_hash([1, 2, 3]) == 0x5A7DAD46F30D5D3B
    assert content_hash(iter([3, 2, 1])) == 0x3B442DB6AEFF4F78
    assert content_hash(range(100)) == 0x5F99417EA83C5B1


def test_every_request_has_a_seed_of_its_own():
    seeds = [request_seed(*parts) for parts in product((0, 1, 17), range(40), range(16), range(5))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_order_of_parts_matters():
    assert combine(1, 2) != combine(2, 1)
    assert combine(0) != combine(0, 0)


def test_siblings_sample_independently():
    """Tokens of the samples of one group, at one position, follow the softmax and repeat only by chance."""
    logits_V = torch.randn(24, generator=torch.Generator().manual_seed(7))
    seeds_R = tensor([request_seed(3, prompt, sample, 2) for prompt, sample in product(range(2_000), range(16))])
    keys = (seeds_R, torch.full_like(seeds_R, 40), torch.zeros_like(seeds_R, dtype=torch.bool))
    tokens = sample_tokens(logits_V.expand(len(seeds_R), -1).contiguous(), *keys)
    p_V = logits_V.double().softmax(0)
    expected = (p_V * len(tokens)).numpy()
    assert stats.chisquare(torch.bincount(tokens, minlength=24).numpy(), expected).pvalue > MIN_P_VALUE
    pairs = [(a == b).double() for a, b in pairwise(tokens.view(2_000, 16).T)]
    chance = (p_V**2).sum().item()
    equal = torch.stack(pairs).mean().item()
    assert abs(equal - chance) < MAX_Z * math.sqrt(chance * (1 - chance) / 30_000)


@dataclass(frozen=True)
class Params:
    """The three fields of vLLM's `SamplingParams` that identities are made from."""

    temperature: float = 1.0
    seed: int | None = None
    extra_args: dict[str, Any] | None = field(default=None)


def identity(params: Params, engine_seed: int = 9, prompt: tuple[int, ...] = (1, 2, 3)) -> RequestIdentity:
    return resolve_identity("request-0", params, list(prompt), engine_seed)


def test_an_explicit_seed_comes_first():
    extra_args = {"specrollout": {"seed": 55, "prompt_index": 1, "speculate": False}}
    assert identity(Params(seed=4, extra_args=extra_args)) == RequestIdentity(55, content_hash([1, 2, 3]), False)
    assert identity(Params(extra_args={"specrollout": {"seed": 2**63 + 5}})).seed == 5


def test_indices_come_second():
    extra_args = rollout_extra_args(11, 3, 2)
    assert identity(Params(seed=4, extra_args=extra_args)).seed == request_seed(9, 11, 3, 2)
    assert identity(Params(extra_args={"specrollout": {"prompt_index": 11}})).seed == request_seed(9, 11, 0, 0)
    assert not identity(Params(extra_args=rollout_extra_args(11, 3, 2, speculate=False))).speculate


def test_sampling_seed_comes_third():
    assert identity(Params(seed=42), engine_seed=7).seed == 0x108D88BC119CA5C6
    assert identity(Params(seed=42, extra_args={"other": 1})).seed == combine(9, 42) >> 1
    assert identity(Params(seed=0, extra_args={"specrollout": {"speculate": False}})).seed == combine(9, 0) >> 1


def test_a_greedy_request_needs_no_seed():
    assert identity(Params(temperature=0.0)) == RequestIdentity(0, content_hash([1, 2, 3]))


def test_a_sampled_request_without_seed_is_refused():
    with pytest.raises(ValueError, match=r"request-0.*temperature 0\.7.*SamplingParams\.seed.*prompt_index"):
        identity(Params(temperature=0.7))


def test_siblings_share_a_group_and_nothing_else():
    first, second = (identity(Params(extra_args=rollout_extra_args(4, i, 0))) for i in (0, 1))
    assert first.group == second.group
    assert first.seed != second.seed
    assert identity(Params(seed=1), prompt=(1, 2)).group != first.group


# The Triton kernel: in a process of its own, since vLLM must not find Triton in this one

INTERPRETED = """
import torch
from tests.test_sampling import cancelling_rows, make_rows
from nemo_specrollout.sampling.sampler import sample_tokens_torch
from nemo_specrollout.sampling.triton_kernel import sample_rows_triton

assert not torch.cuda.is_initialized()
def check(*rows):
    assert torch.equal(sample_rows_triton(*rows), sample_tokens_torch(*rows)), rows[0].shape

for num_rows, vocab_size in [(0, 5), (1, 1), (7, 3), (9, 97), (5, 1000), (3, 1025), (1, 32003), (9, 4100)]:
    check(*make_rows(num_rows, vocab_size, seed=vocab_size))
assert not sample_rows_triton(*cancelling_rows(9, 4100)).any()

logits_RV, seeds_R, positions_R, greedy_R = make_rows(10, 2100, seed=8)
check(logits_RV[:, 40:1900], seeds_R, positions_R, greedy_R)
check(logits_RV[:, ::2], seeds_R, positions_R, greedy_R)
check(logits_RV[::2], seeds_R[::2], positions_R[::2], greedy_R[::2])
check(logits_RV[:2], torch.tensor([0, 2**63 - 1]), torch.tensor([0, 2**40]), greedy_R[:2])

inf, nan = float("inf"), float("nan")
special = torch.zeros(8, 2100)
special[0] = -inf
special[1, 1300] = inf
special[2, [7, 2000]] = nan
special[3, [5, 900]] = torch.tensor([inf, nan])
special[4] = -0.0
special[4, 1500] = 0.0
special[5] = torch.where(torch.arange(2100) == 2099, 0.0, -inf)
special[6] = 1e-42
special[6, 1100] = 2e-42
special[7, [3, 4]] = torch.tensor([-nan, nan])
for is_greedy in (False, True):
    check(special, torch.arange(8), torch.arange(8), torch.full((8,), is_greedy))
"""

PTX = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nemo_specrollout.sampling.triton_kernel import BLOCK, _best_of_split

types = ["*fp32", "i64", "*i64", "*i64", "*i1", "*i64", "i32", "i32", "constexpr"]
source = ASTSource(_best_of_split, dict(zip(_best_of_split.arg_names, types, strict=True)), {"BLOCK": BLOCK})
options = {"enable_fp_fusion": False, "num_warps": 4}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def run_script(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    env = {**os.environ, **environment}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_triton
def test_interpreted_triton_kernel_has_the_same_tokens():
    run_script(INTERPRETED, TRITON_INTERPRET="1")


@needs_triton
def test_compiled_triton_kernel_rounds_every_operation(tmp_path):
    """What an NVIDIA GPU would run: IEEE division, no fused multiply-add, no flush to zero, no approximation."""
    ptx = run_script(PTX, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    operations = set(re.findall(r"\b[a-z]+(?:\.[a-z0-9]+)*\.f32(?:\.[a-z0-9]+)*", ptx))
    assert {"add.rn.f32", "mul.rn.f32", "sub.rn.f32", "div.rn.f32"} <= operations
    assert not [name for name in operations if re.search(r"fma|mad|ftz|approx|full|neg\.ftz", name)]


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (3, 151_936), (64, 151_936), (700, 1000), (1, 1)])
def test_triton_kernel_on_a_gpu_equals_a_cpu(num_rows, vocab_size):
    rows = make_rows(num_rows, vocab_size)
    on_gpu = [t.cuda() for t in rows]
    assert not sample_tokens(*(t.cuda() for t in cancelling_rows(num_rows, vocab_size))).any()
    assert torch.equal(sample_tokens(*on_gpu).cpu(), sample_tokens(*rows))
    assert torch.equal(sample_tokens_torch(*on_gpu).cpu(), sample_tokens(*rows))
