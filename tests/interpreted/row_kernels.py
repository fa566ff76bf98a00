# SPDX-License-Identifier: Apache-2.0
"""The kernels of `row_sampling`, interpreted, equal vLLM's: tokens and ranks exactly, log-probs up to rounding.

Shapes: B requests, S request slots, R rows, V vocabulary, K draft positions.
"""

from collections.abc import Iterator
from typing import Any

import interpreter
import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from lab.vllm_on_cpu import own_kernels
from lab.vllm_on_cpu.own_kernels import row_sampling as cpu
from nemo_specrollout.generation.step import row_sampling_triton
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn, Logits, RowKeys, TieTables
from nemo_specrollout.sampling.equality import accept_by_equality

assert interpreter.torch is torch  # imported before vllm
own_kernels.register()
K = 3
TEMPERATURES = (9.0, 0.0, 0.7, 1.0, 1.3, 1.0, 0.5)
"""The first one is not a request's: a row without a request must not read it at slot -1."""
SIZES = [(1, torch.float32), (97, torch.bfloat16), (1024, torch.float32), (4100, torch.bfloat16)]


class Step:
    """A step of seven requests with up to K drafts, and vLLM's results for it. The same for the same vocabulary."""

    def __init__(self, num_vocab: int, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(num_vocab)
        counts_B = np.array([K + 1, 1, 2, K + 1, 3, 1, K])
        self.starts_B1 = torch.from_numpy(np.concatenate([[0], np.cumsum(counts_B)])).int()
        num_rows = int(self.starts_B1[-1])
        wide_RV = torch.from_numpy(rng.standard_normal((num_rows, num_vocab + 3)) * 3)
        wide_RV[torch.from_numpy(rng.random(wide_RV.shape) < 0.1)] = -torch.inf
        wide_RV[1:4, num_vocab // 2 :] = wide_RV[1:4, :1].clamp(min=2.0)  # ties
        wide_RV[:, 0] = 1.0  # no row is without a token
        self.logits_RV = wide_RV.to(dtype)[:, :num_vocab]
        num_slots = len(TEMPERATURES) - 1
        slots_R = torch.from_numpy(np.repeat(rng.integers(0, num_slots, len(counts_B)), counts_B))
        slots_R[5] = -1
        seeds_S = torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, num_slots))
        positions_R = torch.from_numpy(rng.integers(0, 1 << 17, num_rows))
        self.keys = RowKeys(slots_R, torch.tensor(TEMPERATURES)[1:], seeds_S, positions_R)
        self.tokens_R = gumbel_sample(self.logits_RV, *self.keys, apply_temperature=True, is_drafting=False)
        is_right_R = torch.from_numpy(rng.random(num_rows) < 0.7)
        inputs_R = torch.where(is_right_R, self.tokens_R.roll(1), -1).int()
        self.drafts = Drafts(inputs_R, self.starts_B1, K)

    def divided(self) -> Tensor:
        """Returns the logits as vLLM divides them by the temperature, float32."""
        values_RV, has_request_R = self.logits_RV.to(torch.float32, copy=True), self.keys.slots_R >= 0
        own_RV = values_RV[has_request_R]
        apply_temperature(own_RV, self.keys.slots_R[has_request_R], self.keys.temperature_S)
        values_RV[has_request_R] = own_RV
        return values_RV

    def draw(self, **changes: Any) -> Drawn:
        given = {"scored": Logits(self.logits_RV, True), "keys": self.keys, "graded": None, "drafts": self.drafts}
        return row_sampling_triton.draw_rows(**{**given, **changes})

    def assert_graded(self, drawn: Drawn, values_RV: Tensor) -> None:
        """Asserts vLLM's log-probs and ranks. The interpreter compares bfloat16 by its bits, so `values_RV` are float32."""
        expected, got = compute_topk_scores(values_RV, 0, self.tokens_R), drawn.logprobs
        assert got is not None
        assert torch.equal(got.logprob_token_ids, expected.logprob_token_ids)
        assert torch.equal(got.selected_token_ranks, expected.selected_token_ranks)
        torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-6, atol=2e-6)


@pytest.fixture(autouse=True, scope="module")
def filled_memory() -> Iterator[None]:
    """Fills new tensors with NaN and large numbers, so that a kernel cannot find there what an earlier launch wrote."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=SIZES, ids=str, scope="module")
def step(request: pytest.FixtureRequest) -> Step:
    return Step(*request.param)


def test_tokens_and_acceptance_are_those_of_two_calls(step: Step) -> None:
    emitted_BK, counts_B = accept_by_equality(step.tokens_R, *step.drafts)
    for graded in (None, Logits(step.logits_RV, False)):
        drawn = step.draw(graded=graded)
        assert torch.equal(drawn.tokens_R, step.tokens_R)
        assert torch.equal(drawn.emitted_BK, emitted_BK)
        assert torch.equal(drawn.counts_B, counts_B)
    assert step.logits_RV.shape[1] == 1 or len(set(counts_B.tolist())) > 2


def test_raw_log_probs_are_before_the_temperature(step: Step) -> None:
    step.assert_graded(step.draw(graded=Logits(step.logits_RV, False)), step.logits_RV.float())


def test_processed_log_probs_are_after_the_temperature(step: Step) -> None:
    step.assert_graded(step.draw(graded=Logits(step.logits_RV, True)), step.divided())


def test_processed_logits_are_not_divided_again(step: Step) -> None:
    processed = Logits(step.divided(), False)
    drawn = step.draw(scored=processed, graded=processed)
    assert torch.equal(drawn.tokens_R, step.tokens_R)
    step.assert_graded(drawn, processed.values_RV)
    raw = step.draw(scored=processed, graded=Logits(step.logits_RV, False))
    step.assert_graded(raw, step.logits_RV.float())


def test_a_row_is_graded_alike_with_and_without_drafts(step: Step) -> None:
    graded = Logits(step.logits_RV, True)
    together, alone = step.draw(graded=graded), step.draw(graded=graded, drafts=None)
    assert alone.emitted_BK is None
    for a, b in zip(together.logprobs[:3], alone.logprobs[:3], strict=True):
        assert torch.equal(a, b)
    keys = step.keys._replace(slots_R=step.keys.slots_R[-1:], positions_R=step.keys.positions_R[-1:])
    last = Logits(step.logits_RV[-1:], True)
    one = step.draw(scored=last, keys=keys, graded=last, drafts=None)
    assert torch.equal(one.logprobs.logprobs[0], alone.logprobs.logprobs[-1])


def test_a_row_of_minus_infinity_changes_no_other() -> None:
    step = Step(4097, torch.float32)
    step.logits_RV[0] = -torch.inf
    drawn = step.draw(graded=Logits(step.logits_RV, False))
    assert drawn.tokens_R.tolist() == [0, *step.tokens_R[1:]]
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprobs.isnan().flatten().nonzero().tolist() == [[0]]


@pytest.mark.parametrize("divides", [True, False])
def test_near_ties_are_recorded_for_requests_that_ask(step: Step, divides: bool) -> None:
    """The gap and the runner-up are those of the perturbed scores; tokens do not depend on the recording."""
    scored = Logits(step.logits_RV, True) if divides else Logits(step.divided(), False)
    num_slots = len(TEMPERATURES) - 1
    keys = step.keys._replace(positions_R=step.keys.positions_R % 50)
    longest = 50  # the last positions have no place
    wanted_S = torch.arange(num_slots) % 3 != 1
    worlds = []
    for draw in (row_sampling_triton.draw_rows, cpu.draw_rows):
        gaps = torch.full((num_slots, longest), -9.0)
        ties = TieTables(gaps, torch.full(gaps.shape, -9, dtype=torch.int32), wanted_S)
        with_ties = draw(scored, keys, None, step.drafts, ties)
        assert torch.equal(with_ties.tokens_R, draw(scored, keys, None, step.drafts).tokens_R)
        worlds.append(ties)
    got, expected = worlds
    is_written_SL = expected.gap_SL != -9
    assert is_written_SL.any() and not is_written_SL[~wanted_S].any()
    assert torch.equal(got.gap_SL != -9, is_written_SL)
    torch.testing.assert_close(got.gap_SL, expected.gap_SL, rtol=1e-5, atol=1e-5)
    is_clear_SL = is_written_SL & (expected.gap_SL > 1e-4) & (expected.gap_SL < torch.inf)
    if step.logits_RV.shape[1] > 1:
        assert is_clear_SL.sum() > 3
        others = is_clear_SL & (got.runner_up_SL != expected.runner_up_SL)
        assert others.sum() <= 1, "the second and the third may differ by less than rounding"
