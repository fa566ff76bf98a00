# SPDX-License-Identifier: Apache-2.0
"""Drafts with the target's noise, acceptance by equality, seeds and identities.

Shapes: B requests, R rows, S request slots, V vocabulary, K draft positions. Seeds are fixed, so results are reproducible.
The noise itself: `test_noise_v2.py`. The same kernels for a GPU: `test_kernels.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from scipy import stats
from torch import Tensor, tensor

from lab.vllm_on_cpu import kernels as cpu_kernels
from lab.vllm_on_cpu.kernels import floats
from lab.vllm_on_cpu.kernels.noise import gumbel
from nemo_specrollout.drafters.base import NUM_LEVELS, SCORE_GAP_EDGES
from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
from nemo_specrollout.generation.drafting.model_drafter import share_noise
from nemo_specrollout.generation.engine.arguments import set_process_environment
from nemo_specrollout.generation.engine.identity import check_request, identity_of_unchecked, resolve_identity
from nemo_specrollout.generation.engine.requests import (
    RequestIdentity,
    RolloutRequest,
    as_bytes,
    rollout_extra_args,
)
from nemo_specrollout.sampling.equality import accept_by_equality
from nemo_specrollout.sampling.numba_common import mix64
from nemo_specrollout.sampling.seeds import GAMMA, MASK_64, combine, content_hash, mix64_int, request_seed

pytestmark = pytest.mark.unit

MAX_SEED = 2**63 - 1
MIN_P_VALUE = 1e-6
MAX_Z = 5.0
NEVER = -math.inf

# The first outputs of the published SplitMix64 generator from state 0.
SPLIT_MIX_64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)


# Drafts with the target's noise


@dataclass(frozen=True)
class Rows:
    """Rows of logits and their requests. Every fifth slot is greedy, the temperatures of the others differ."""

    logits_RV: Tensor
    slots_R: Tensor
    temperature_S: Tensor
    seeds_S: Tensor
    positions_R: Tensor

    def sampled(self, token_ids_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns tokens [R] and their evidence levels [R]."""
        levels_RK = torch.full((len(self.logits_RV), 3), 99, dtype=torch.int8)
        tokens_R = sample_with_score_gap(*vars(self).values(), levels_RK, tensor(1), token_ids_V)
        assert (levels_RK[:, [0, 2]] == 99).all(), "columns of other positions"
        return tokens_R, levels_RK[:, 1]


def make_rows(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, num_slots: int = 9) -> Rows:
    """Returns random logits with some ties, a tenth of them -inf. Requests have any number of rows; one row has no request."""
    rng = torch.Generator().manual_seed(vocab_size)
    logits_RV = (torch.randn(num_rows, vocab_size, generator=rng) * 24).round() / 8
    is_ruled_out = torch.rand(num_rows, vocab_size, generator=rng) < 0.1
    slots_R = torch.randint(0, num_slots, (num_rows,), generator=rng)
    slots_R[num_rows // 2] = -1
    temperature_S = torch.where(torch.arange(num_slots) % 5 == 4, 0.0, 0.5 + torch.arange(num_slots) / 8)
    seeds_S = torch.randint(0, MAX_SEED, (num_slots,), generator=rng)
    positions_R = torch.randint(0, 2**20, (num_rows,), generator=rng)
    return Rows(logits_RV.masked_fill(is_ruled_out, NEVER).to(dtype), slots_R, temperature_S, seeds_S, positions_R)


@njit
def gumbel_row(seed, position, vocab_size):  # type: ignore[no-untyped-def]
    return np.array([gumbel(seed, position, v) for v in range(vocab_size)])


def slow_scores(rows: Rows) -> list[np.ndarray]:
    """Returns logits / temperature + noise of each row, or the logits if the temperature is zero."""
    scores = []
    for logits_V, slot, position in zip(rows.logits_RV.numpy(), rows.slots_R, rows.positions_R, strict=True):
        temperature = rows.temperature_S[slot].item() if slot >= 0 else 0.0
        if temperature:
            noise_V = gumbel_row(rows.seeds_S[slot].item(), position.item(), len(logits_V)).astype(np.float32)
            scores.append(logits_V / np.float32(temperature) + noise_V)
        else:
            scores.append(logits_V)
    return scores


@pytest.fixture(scope="module")
def gumbel_sample() -> Callable[..., Tensor]:
    """vLLM's own sampler on this CPU."""
    set_process_environment()
    from vllm.v1.worker.gpu.sample import gumbel as module

    cpu_kernels.register()
    return module.gumbel_sample


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(40, 1), (40, 3), (40, 97), (20, 1025), (20, 32003)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_token_equals_that_of_vllm(
    gumbel_sample: Callable[..., Tensor], num_rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    rows = make_rows(num_rows, vocab_size, dtype)
    tokens_R, _ = rows.sampled()
    assert torch.equal(tokens_R, gumbel_sample(*vars(rows).values(), apply_temperature=True, is_drafting=False))


@pytest.mark.parametrize("vocab_size", [2, 97, 2100])
def test_the_level_is_the_number_of_edges_below_the_score_gap(vocab_size: int) -> None:
    rows = make_rows(200, vocab_size)
    tokens_R, levels_R = rows.sampled()
    expected = []
    for scores_V, token in zip(slow_scores(rows), tokens_R.tolist(), strict=True):
        assert token == scores_V.argmax()
        second, best = np.sort(scores_V)[-2:]
        expected.append(sum(np.float32(edge) < best - second for edge in SCORE_GAP_EDGES) if best > NEVER else token)
    has_token_R = (rows.logits_RV > NEVER).any(1)
    assert torch.equal(levels_R[has_token_R], tensor(expected, dtype=torch.int8)[has_token_R])
    assert set(levels_R.tolist()) <= set(range(NUM_LEVELS)) and len(set(levels_R.tolist())) > 8


def test_greedy_rows_take_the_first_argmax() -> None:
    logits_RV = tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 1.0, 1.5, 0.0]])
    for slots in ([0, 0], [-1, -1]):
        rows = Rows(logits_RV, tensor(slots), tensor([0.0]), tensor([5]), tensor([6, 7]))
        tokens_R, levels_R = rows.sampled()
        assert tokens_R.tolist() == [1, 2]
        assert levels_R.tolist() == [0, sum(edge < 0.5 for edge in SCORE_GAP_EDGES)]


def test_a_row_without_a_request_samples_without_noise() -> None:
    rows = make_rows(40, 97)
    without_requests = replace(rows, slots_R=torch.full((40,), -1))
    assert torch.equal(without_requests.sampled()[0], rows.logits_RV.argmax(1))


def test_a_reduced_vocabulary_drafts_only_its_own_tokens() -> None:
    """A draft head knows a part of the vocabulary. The noise of its tokens is the same as with the whole vocabulary."""
    rows = make_rows(200, 40)
    is_known_V = torch.arange(40) % 3 == 0
    reduced = replace(rows, logits_RV=rows.logits_RV.masked_fill(~is_known_V, NEVER))
    tokens_R, _ = rows.sampled()
    reduced_R, reduced_levels_R = reduced.sampled()
    narrow = replace(rows, logits_RV=rows.logits_RV[:, is_known_V].contiguous())
    narrow_R, narrow_levels_R = narrow.sampled(is_known_V.nonzero()[:, 0])
    assert torch.equal(narrow_R, reduced_R) and torch.equal(narrow_levels_R, reduced_levels_R)
    assert is_known_V[reduced_R].all()
    assert torch.equal(reduced_R[is_known_V[tokens_R]], tokens_R[is_known_V[tokens_R]])
    only_4_RV = torch.full((1, 9), NEVER).index_fill_(1, tensor([4]), -30.0)
    alone = replace(rows, logits_RV=only_4_RV, slots_R=rows.slots_R[:1], positions_R=rows.positions_R[:1])
    assert [t.item() for t in alone.sampled()] == [4, NUM_LEVELS - 1]


def test_a_row_does_not_depend_on_other_rows() -> None:
    rows = make_rows(50, 97)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    shuffled = replace(
        rows, logits_RV=rows.logits_RV[order], slots_R=rows.slots_R[order], positions_R=rows.positions_R[order]
    )
    assert all(torch.equal(a[order], b) for a, b in zip(rows.sampled(), shuffled.sampled(), strict=True))
    wide_RV = torch.cat([rows.logits_RV, rows.logits_RV], dim=1)[:, :97]
    strided = replace(rows, logits_RV=wide_RV)
    assert all(map(torch.equal, rows.sampled(), strided.sampled()))


def draws_and_levels(logits_V: Tensor, seeds: list[int], position: int = 40) -> tuple[Tensor, Tensor]:
    """Returns one token for each seed, and its level, all from the same logits at temperature 1."""
    num = len(seeds)
    logits_RV = logits_V.float().expand(num, -1).contiguous()
    rows = Rows(logits_RV, torch.arange(num), torch.ones(num), tensor(seeds), torch.full((num,), position))
    return rows.sampled()


def draws(logits_V: Tensor, seeds: list[int], position: int = 40) -> Tensor:
    return draws_and_levels(logits_V, seeds, position)[0]


@pytest.mark.parametrize("noise_scale", [0.2, 0.7, 2.0])
def test_shared_noise_gives_the_exact_rate_of_agreement(noise_scale: float) -> None:
    """Agreement has the closed form of weighted min-hashing, and is between (1 - TV) / (1 + TV) and 1 - TV."""
    generator, num = torch.Generator().manual_seed(5), 50_000
    target_V = torch.randn(50, generator=generator) * 2
    drafter_V = target_V + torch.randn(50, generator=generator) * noise_scale
    agreed = (draws(target_V, list(range(num))) == draws(drafter_V, list(range(num)))).double().mean().item()
    p, q = target_V.double().softmax(0).numpy(), drafter_V.double().softmax(0).numpy()
    exact = sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in range(50))
    assert abs(agreed - exact) < MAX_Z * math.sqrt(exact * (1 - exact) / num)
    distance = abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= exact <= 1 - distance


def test_other_noise_agrees_only_by_chance() -> None:
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(6))
    ours_R = draws(logits_V, list(range(10_000)))
    chance = (logits_V.softmax(0) ** 2).sum().item()
    for other_R in (draws(logits_V, list(range(10_000, 20_000))), draws(logits_V, list(range(10_000)), position=41)):
        assert (ours_R == other_R).double().mean().item() == pytest.approx(chance, abs=0.02)


def test_a_draft_of_a_larger_score_gap_is_right_more_often() -> None:
    generator, seeds = torch.Generator().manual_seed(8), list(range(20_000))
    target_V = torch.randn(50, generator=generator) * 2
    tokens_R, levels_R = draws_and_levels(target_V + torch.randn(50, generator=generator) * 0.7, seeds)
    is_right_R = (tokens_R == draws(target_V, seeds)).double()
    rates = [is_right_R[(levels_R >= low) & (levels_R < low + 4)].mean().item() for low in range(0, NUM_LEVELS, 4)]
    assert rates == sorted(rates) and rates[0] < 0.5 and rates[-1] > 0.97


def test_a_speculator_that_only_reads_does_not_sample() -> None:
    rows, levels_RK = make_rows(6, 97), torch.full((6, 3), 99, dtype=torch.int8)
    asked: list[int] = []
    only_reads = [True]

    def compute_draft_logits(hidden_RH: Tensor, step: int) -> Tensor:
        asked.append(step)
        return hidden_RH @ rows.logits_RV

    speculator = SimpleNamespace(compute_draft_logits=compute_draft_logits)
    share_noise(speculator, levels_RK, lambda: only_reads[0])
    arguments = (torch.eye(6), rows.positions_R, rows.slots_R, rows.temperature_S, rows.seeds_S, tensor(2), None)
    rows.logits_RV.clamp_(min=-99.0)
    assert not speculator.sample_draft(*arguments, spec_step_idx=2).any() and not asked and (levels_RK == 99).all()
    only_reads[0] = False
    tokens_R, expected_R = rows.sampled()
    assert torch.equal(speculator.sample_draft(*arguments, spec_step_idx=2), tokens_R) and asked == [2]
    assert torch.equal(levels_RK[:, 2], expected_R) and (levels_RK[:, :2] == 99).all()


# Acceptance


def slow_acceptance(tokens: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Returns the sampled tokens of each request up to and including the first that differs from its draft."""
    emitted = []
    for sampled, proposed in zip(tokens, drafts, strict=True):
        agreeing = 0
        while agreeing < len(proposed) and sampled[agreeing] == proposed[agreeing]:
            agreeing += 1
        emitted.append(sampled[: agreeing + 1])
    return emitted


@st.composite
def verified_batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    num_drafts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    drafts = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in num_drafts]
    tokens = [draw(st.lists(st.integers(0, 1), min_size=n + 1, max_size=n + 1)) for n in num_drafts]
    return tokens, drafts


def accept(
    tokens: list[list[int]], drafts: list[list[int]], num_positions: int, dtype: torch.dtype = torch.int32
) -> tuple[list[list[int]], list[int]]:
    inputs = [token for proposed in drafts for token in (0, *proposed)]
    starts_B1 = tensor([0, *map(len, tokens)]).cumsum(0).int()
    sampled_R = tensor([token for sampled in tokens for token in sampled])
    emitted_BK, counts_B = accept_by_equality(sampled_R, tensor(inputs, dtype=dtype), starts_B1, num_positions)
    assert emitted_BK.shape == (len(tokens), num_positions + 1)
    assert emitted_BK.dtype == torch.int64 and counts_B.dtype == torch.int32
    return emitted_BK.tolist(), counts_B.tolist()


@given(verified_batches(), st.integers(5, 7), st.sampled_from([torch.int32, torch.int64]))
def test_acceptance_equals_a_slow_reference(
    batch: tuple[list[list[int]], list[list[int]]], num_positions: int, dtype: torch.dtype
) -> None:
    emitted, counts = accept(*batch, num_positions, dtype)
    expected = slow_acceptance(*batch)
    assert counts == [len(answer) for answer in expected]
    assert emitted == [answer + [0] * (num_positions + 1 - len(answer)) for answer in expected]


def test_acceptance_by_hand() -> None:
    emitted, counts = accept([[5, 6, 7], [1], [2, 3]], [[5, 9], [], [2]], num_positions=2)
    assert emitted == [[5, 6, 0], [1, 0, 0], [2, 3, 0]] and counts == [2, 1, 2]


def test_acceptance_without_any_draft() -> None:
    assert accept([[4], [7], [0]], [[], [], []], num_positions=0) == ([[4], [7], [0]], [1, 1, 1])
    assert accept([[4], [7]], [[], []], num_positions=2) == ([[4, 0, 0], [7, 0, 0]], [1, 1])


def test_rows_of_the_next_request_are_not_drafts_of_this_one() -> None:
    """The row after a request's last row belongs to the next request. Its input may equal the sampled token."""
    sampled_R, inputs_R = tensor([7, 8, 9]), tensor([3, 7, 8], dtype=torch.int32)
    emitted_BK, counts_B = accept_by_equality(sampled_R, inputs_R, tensor([0, 1, 3], dtype=torch.int32), 1)
    assert emitted_BK.tolist() == [[7, 0], [8, 9]] and counts_B.tolist() == [1, 2]


# Seeds and identities


def test_mix64_continues_the_published_generator() -> None:
    states = [i * GAMMA & MASK_64 for i in range(1, 5)]
    assert [mix64_int(state) for state in states] == list(SPLIT_MIX_64)
    assert [int(mix64(np.uint64(state))) for state in states] == list(SPLIT_MIX_64)


def test_constants_are_exact_in_float32() -> None:
    for value in (floats.LN2, floats.SQRT_HALF, floats.LOG_SQRT_HALF, *floats.ATANH_SIXTH):
        assert float(np.float32(value)) == pytest.approx(value, rel=1e-16, abs=0)


def test_seeds_known_answers() -> None:
    assert request_seed(0, 0, 0, 0) == 0x149036A4DA7B2357
    assert request_seed(0, 0, 1, 0) == 0x08651B7B5B94276F
    assert request_seed(0, 1, 0, 0) == 0x5DE11EE962948697
    assert request_seed(0, 0, 0, 1) == 0x7C32AC7B80E30E51
    assert request_seed(1234, 56, 7, 89) == 0x3EF8D38717F6ACBA
    assert combine() == 0
    assert combine(0) == 0xA706DD2F4D197E6F
    assert combine(7, 42) >> 1 == 0x108D88BC119CA5C6


def test_content_hash_known_answers() -> None:
    assert content_hash([]) == 0x5A593CBA2BD05372
    assert content_hash([0]) == 0x0C6624E52DF50465
    assert content_hash([1, 2, 3]) == 0x5A7DAD46F30D5D3B
    assert content_hash(iter([3, 2, 1])) == 0x3B442DB6AEFF4F78
    assert content_hash(range(100)) == 0x5F99417EA83C5B1


def test_every_request_has_its_own_seed() -> None:
    seeds = [request_seed(*parts) for parts in product((0, 1, 17), range(40), range(16), range(5))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_order_of_parts_matters() -> None:
    assert combine(1, 2) != combine(2, 1)
    assert combine(0) != combine(0, 0)


def test_siblings_sample_independently() -> None:
    """Tokens of the samples of one group, at one position, follow the softmax and repeat only by chance."""
    logits_V = torch.randn(24, generator=torch.Generator().manual_seed(7))
    tokens_R = draws(logits_V, [request_seed(3, *who, 2) for who in product(range(2_000), range(16))])
    p_V = logits_V.double().softmax(0)
    expected = (p_V * len(tokens_R)).numpy()
    assert stats.chisquare(torch.bincount(tokens_R, minlength=24).numpy(), expected).pvalue > MIN_P_VALUE
    pairs = [(a == b).double() for a, b in pairwise(tokens_R.view(2_000, 16).T)]
    chance = (p_V**2).sum().item()
    equal = torch.stack(pairs).mean().item()
    assert abs(equal - chance) < MAX_Z * math.sqrt(chance * (1 - chance) / 30_000)


@dataclass(frozen=True)
class Params:
    """The fields of vLLM's `SamplingParams` that identities are made from."""

    temperature: float = 1.0
    seed: Any = None
    extra_args: Any = field(default=None)
    n: int = 1


def identity(params: Params, engine_seed: int = 9, prompt: tuple[int, ...] = (1, 2, 3)) -> RequestIdentity:
    return resolve_identity(params, list(prompt), engine_seed)


def test_an_explicit_seed_comes_first() -> None:
    extra_args = {"specrollout": {"seed": 55, "prompt_index": 1, "speculate": False}}
    assert identity(Params(seed=4, extra_args=extra_args)) == RequestIdentity(55, content_hash([1, 2, 3]), False)
    assert identity(Params(extra_args={"specrollout": {"seed": 2**63 - 1}})).seed == 2**63 - 1


def test_indices_come_second() -> None:
    extra_args = rollout_extra_args(RolloutRequest((), 11, 3, 2))
    assert identity(Params(seed=4, extra_args=extra_args)).seed == request_seed(9, 11, 3, 2)
    assert identity(Params(extra_args={"specrollout": {"prompt_index": 11}})).seed == request_seed(9, 11, 0, 0)
    assert not identity(Params(extra_args=rollout_extra_args(RolloutRequest((), 11, 3, 2, speculate=False)))).speculate


def test_sampling_seed_comes_third() -> None:
    assert identity(Params(seed=42), engine_seed=7).seed == 0x108D88BC119CA5C6
    assert identity(Params(seed=42, extra_args={"other": 1})).seed == combine(9, 42) >> 1
    assert identity(Params(seed=0, extra_args={"specrollout": {"speculate": False}})).seed == combine(9, 0) >> 1


def test_a_greedy_request_needs_no_seed() -> None:
    assert identity(Params(temperature=0.0)) == RequestIdentity(0, content_hash([1, 2, 3]))


def test_a_sampled_request_without_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed: None.*temperature 0\.7.*SamplingParams\.seed.*-1.*prompt_index"):
        identity(Params(temperature=0.7))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("seed=1", r"\]: 'seed=1' is no mapping; send one such as .*Over HTTP.*send `seed`"),
        (None, r"\]: None is no mapping"),
        ([1], r"\]: \[1\] is no mapping"),
        ({"sead": 1}, "has no key 'sead'; did you mean 'seed'"),
        ({"seed": 1, 7: 1}, "has no key 7; known: seed, prompt_index"),
        *(({"seed": bad}, r'"seed"\]: .* is not a whole number from 0') for bad in ("x", None, -1, 2**63, 1.0, True)),
        *(({"seed": bad}, r'"seed"\]: .* is not a whole number from 0') for bad in ([1], float("nan"), b"1")),
        *(
            ({"prompt_index": 1, name: bad}, rf'"{name}"\]: .* is not a whole number of 64 bits')
            for name in ("sample_index", "policy_version", "engine_seed")
            for bad in ("3", None, 1.5, False, 2**63, [])
        ),
        *(({"prompt_index": bad}, r'"prompt_index"\]: ') for bad in ("3", None, 1.5, False, -(2**63) - 1)),
        ({"sample_index": 3}, r'"sample_index"\]: 3 without prompt_index; send both'),
        ({"policy_version": 3}, r'"policy_version"\]: 3 without prompt_index'),
        *(
            ({"seed": 1, "speculate": bad}, r'"speculate"\]: .* is not true or false; send that')
            for bad in ("no", "", 0, 1, None, [])
        ),
        *(
            ({"seed": 1, "prompt_length": bad}, r'"prompt_length"\]: .* is not a number of tokens')
            for bad in ("3", -1, 2.0, None, True, 2**31)
        ),
        *(({"seed": 1, "ahead": bad}, r'"ahead"\]: .* is not bytes of int32') for bad in ("abc", [300, 5], None, 7)),
        ({"seed": 1, "ahead": b"abc"}, "is not bytes of int32 numbers, which `requests.as_bytes` makes"),
    ],
)
def test_a_malformed_identity_is_refused(given: Any, words: str, temperature: float) -> None:
    """A greedy request is refused too: its fields mean something else than the user believes."""
    with pytest.raises(ValueError, match=r'^extra_args\["specrollout"' + r".*" + words):
        check_request(Params(temperature, seed=4, extra_args={"specrollout": given}))


@pytest.mark.parametrize("seed", [1.5, "7", True, -(2**63) - 1, 2**63, [1]])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    for temperature, extra_args in ((0.0, None), (1.0, None), (1.0, {"specrollout": {"seed": 1}})):
        with pytest.raises(ValueError, match=r"^seed: .* is not a whole number of 64 bits"):
            check_request(Params(temperature, seed, extra_args))


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    given = {"prompt_index": np.int64(3), "sample_index": np.int32(1)}
    assert identity(Params(extra_args={"specrollout": given})).seed == request_seed(9, 3, 1, 0)
    assert identity(Params(seed=np.int64(42))).seed == identity(Params(seed=42)).seed


@pytest.mark.parametrize("given", [{"seed": 1}, {"prompt_index": 1}])
def test_several_samples_of_one_seed_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"n: 3 with a seed or prompt_index.*all samples would be equal: set SamplingParams"
    ):
        check_request(Params(extra_args={"specrollout": given}, n=3))
    check_request(Params(seed=1, extra_args={"specrollout": {"engine_seed": 0}}, n=3))


@pytest.mark.parametrize("extra_args", ["specrollout", [1], 7])
def test_extra_args_that_are_no_mapping_are_refused(extra_args: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_args: .* is no mapping; send one"):
        check_request(Params(seed=1, extra_args=extra_args))


def test_a_key_that_looks_like_ours_is_refused() -> None:
    """vLLM ignores keys that nobody knows, and so would a typing error pass in silence."""
    with pytest.raises(
        ValueError, match=r'extra_args\["specrollout_speculate"\]: 0; this engine knows the key "specrollout"'
    ):
        check_request(Params(seed=1, extra_args={"specrollout_speculate": 0}))
    check_request(Params(seed=1, extra_args={"theirs": 0}))


def test_a_longer_prompt_length_means_the_whole_prompt() -> None:
    beyond, none = (identity(Params(seed=1, extra_args={"specrollout": g})) for g in ({"prompt_length": 99}, {}))
    assert beyond == none


def test_what_is_given_is_kept() -> None:
    given = {"seed": 3, "speculate": False, "prompt_length": 2, "ahead": as_bytes([5, 6])}
    expected = RequestIdentity(3, content_hash([1, 2]), False, as_bytes([5, 6]))
    assert identity(Params(extra_args={"specrollout": given})) == expected


def test_a_bad_request_that_nothing_refused_has_noise_of_its_own_and_no_drafts() -> None:
    first, again, other = map(identity_of_unchecked, ("bad-1", "bad-1", "bad-2"))
    assert first == again and first.seed != other.seed and 0 <= first.seed < 2**63
    assert not first.speculate


def test_siblings_share_a_group_and_nothing_else() -> None:
    first, second = (identity(Params(extra_args=rollout_extra_args(RolloutRequest((), 4, i)))) for i in (0, 1))
    assert first.group == second.group
    assert first.seed != second.seed
    assert identity(Params(seed=1), prompt=(1, 2)).group != first.group
