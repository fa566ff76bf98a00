# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantages and loss against numbers worked out by hand, and what must hold for any batch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from lab.local.grpo import (
    LossInputs,
    clipped_policy_loss,
    group_normalized_advantages,
    kl_estimate,
    reference_kl,
)
from lab.local.run_sections import LossConfig

pytestmark = pytest.mark.unit

PLAIN = LossConfig()


def advantages(rewards: list[float], groups: list[int], leave_one_out: bool, normalize: bool) -> list[float]:
    return group_normalized_advantages(tensor(rewards), tensor(groups), leave_one_out, normalize).tolist()


def inputs_of(ratio_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, LossInputs]:
    """Log-probs whose ratio to those before the step is the given one; the engine agrees with the trainer."""
    prev_BT = torch.full(ratio_BT.shape, -2.0)
    mask_BT = torch.ones(ratio_BT.shape, dtype=torch.bool) if mask_BT is None else mask_BT
    return prev_BT + ratio_BT.log(), LossInputs(mask_BT, advantages_B, prev_BT, prev_BT)


def random_inputs(seed: int, num_rows: int = 4, num_positions: int = 6) -> tuple[Tensor, LossInputs]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(num_rows, num_positions, generator=generator) * 3  # noqa: E731
    mask_BT = torch.rand(num_rows, num_positions, generator=generator) < 0.7
    mask_BT[0, 1] = True
    return draw(), LossInputs(mask_BT, torch.randn(num_rows, generator=generator), draw(), draw(), draw())


def test_mean_baseline() -> None:
    assert advantages([1, 0, 0, 1, 5, 7], [0, 0, 0, 0, 1, 1], False, False) == [0.5, -0.5, -0.5, 0.5, -1, 1]


def test_leave_one_out_baseline() -> None:
    expected = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3]
    assert advantages([1, 0, 0, 1], [3, 3, 3, 3], True, False) == pytest.approx(expected)


def test_normalised_by_the_unbiased_deviation() -> None:
    """Rewards 1, 2, 3: mean 2, unbiased standard deviation 1."""
    assert advantages([1, 2, 3], [0, 0, 0], False, True) == pytest.approx([-1, 0, 1], abs=1e-5)


def test_leave_one_out_deviation_is_that_of_the_others() -> None:
    """Sample 0's others are 0, 0, 1: mean 1/3, unbiased deviation sqrt(1/3); sample 1's are 1, 0, 1."""
    high, low = (2 / 3) / math.sqrt(1 / 3), (-2 / 3) / math.sqrt(1 / 3)
    assert advantages([1, 0, 0, 1], [0] * 4, True, True) == pytest.approx([high, low, low, high], rel=1e-4)


def test_zero_deviation_leaves_the_advantage_undivided() -> None:
    """The others of sample 0 all have reward 0: no deviation to divide by."""
    result = advantages([1, 0, 0], [0, 0, 0], True, True)
    assert result == pytest.approx([1, -0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)], rel=1e-4)
    assert advantages([2, 2, 2], [0, 0, 0], False, True) == [0, 0, 0]


def test_small_groups() -> None:
    """One sample has nothing to compare with; of two, leave-one-out knows a mean but no deviation."""
    assert advantages([4.0], [9], True, True) == [0]
    assert advantages([4.0], [9], False, False) == [0]
    assert advantages([1, 0], [0, 0], True, True) == [1, -1]


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=12)


@given(rewards=REWARDS, seed=st.integers(0, 99), leave_one_out=st.booleans(), normalize=st.booleans())
@settings(deadline=None)
def test_order_and_group_names_do_not_matter(
    rewards: list[float], seed: int, leave_one_out: bool, normalize: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards_B, groups_B = tensor(rewards), torch.randint(0, 3, (len(rewards),), generator=generator)
    order = torch.randperm(len(rewards), generator=generator)
    straight_B = group_normalized_advantages(rewards_B, groups_B, leave_one_out, normalize)
    shuffled_B = group_normalized_advantages(rewards_B[order], 7 - groups_B[order], leave_one_out, normalize)
    # A deviation that is zero but for rounding divides a rounding error: with few decimals in binary there is none.
    torch.testing.assert_close(shuffled_B, straight_B[order], rtol=1e-3, atol=1e-3)


@given(rewards=REWARDS, shift=st.sampled_from([-4.0, 1.0, 8.0]))
@settings(deadline=None)
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards: list[float], shift: float) -> None:
    groups = [0] * len(rewards)
    plain = advantages(rewards, groups, False, False)
    assert sum(plain) == pytest.approx(0, abs=1e-4)
    assert advantages([r + shift for r in rewards], groups, False, False) == pytest.approx(plain, abs=1e-4)
    others = advantages(rewards, groups, True, False)
    scale = len(rewards) / (len(rewards) - 1)
    assert others == pytest.approx([scale * a for a in plain], abs=1e-4)


def test_loss_by_hand() -> None:
    """Advantage 1: ratios 1.5 and 0.5 give min(1.5, 1.2) and 0.5. Advantage -2: 1.5 and 0.5 give 3 and 1.6."""
    logprobs_BT, inputs = inputs_of(tensor([[1.5, 0.5], [1.5, 0.5]]), tensor([1.0, -2.0]))
    loss, metrics = clipped_policy_loss(logprobs_BT, inputs, PLAIN)
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 3.0 + 1.6) / 4)
    assert metrics["loss"] == loss.item()
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics["probs_ratio_clamped"] == pytest.approx(1.0)
    assert metrics["clip_fraction"] == 1.0
    assert metrics["approx_kl"] == pytest.approx((0.5 - math.log(1.5) + -0.5 - math.log(0.5)) / 2)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0)
    assert metrics["gen_kl_error"] == 0.0


def test_asymmetric_clip_and_dual_clip() -> None:
    logprobs_BT, inputs = inputs_of(tensor([[1.5], [9.0]]), tensor([1.0, -1.0]))
    wide = replace(PLAIN, ratio_clip_max=0.28)
    assert clipped_policy_loss(logprobs_BT, inputs, wide)[0].item() == pytest.approx((-1.28 + 9.0) / 2)
    dual = replace(wide, ratio_clip_c=3.0)
    assert clipped_policy_loss(logprobs_BT, inputs, dual)[0].item() == pytest.approx((-1.28 + 3.0) / 2)


def test_token_level_and_sequence_level_means() -> None:
    mask_BT = tensor([[True, False, False], [True, True, True]])
    logprobs_BT, inputs = inputs_of(torch.ones(2, 3), tensor([1.0, -1.0]), mask_BT)
    assert clipped_policy_loss(logprobs_BT, inputs, PLAIN)[0].item() == pytest.approx((-1 + 3) / 4)
    by_sequence = replace(PLAIN, token_level_loss=False)
    assert clipped_policy_loss(logprobs_BT, inputs, by_sequence)[0].item() == pytest.approx(0)


def test_entropy_estimate_weighs_the_engines_samples() -> None:
    now_BT, engine_BT = tensor([[-1.0, -2.0]]), tensor([[-1.5, -2.0]])
    inputs = LossInputs(torch.ones(1, 2, dtype=torch.bool), tensor([0.0]), now_BT, engine_BT)
    _, metrics = clipped_policy_loss(now_BT, inputs, PLAIN)
    assert metrics["approx_entropy"] == pytest.approx((math.exp(0.5) * 1 + 2) / 2)
    assert metrics["sampling_importance_ratio"] == pytest.approx((math.exp(0.5) + 1) / 2)
    assert metrics["token_mult_prob_error"] == pytest.approx((math.exp(0.5) + 1) / 2)
    assert metrics["gen_kl_error"] == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)


def test_importance_correction_weighs_each_token() -> None:
    now_BT = tensor([[-1.0, -2.0]])
    inputs = LossInputs(torch.ones(1, 2, dtype=torch.bool), tensor([1.0]), now_BT, tensor([[-1.5, -2.0]]))
    corrected = replace(PLAIN, use_importance_sampling_correction=True)
    assert clipped_policy_loss(now_BT, inputs, corrected)[0].item() == pytest.approx(-(math.exp(0.5) + 1) / 2)


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators(kl_type: str, expected: float) -> None:
    assert kl_estimate(tensor(-0.5), kl_type).item() == pytest.approx(expected)


def test_reference_kl_clamps_and_their_gradient() -> None:
    """Log ratios 1, 25 (input clamp 20) and 5 (k3 gives 142, output clamp 10), without and with clamps."""
    logprobs = tensor([[-2.0, -26.0, -6.0]], requires_grad=True)
    kl = reference_kl(logprobs, torch.full((1, 3), -1.0), PLAIN)
    assert kl.tolist()[0] == pytest.approx([math.e - 2, 10.0, 10.0])
    kl.sum().backward()
    # The estimator's own slope is 1 - e; the score function adds its value, e - 2.
    assert logprobs.grad.tolist()[0] == pytest.approx([(1 - math.e) + (math.e - 2), 0.0, 0.0])
    unclamped = replace(PLAIN, kl_input_clamp_value=None, kl_output_clamp_value=None)
    assert reference_kl(logprobs, torch.full((1, 3), -1.0), unclamped)[0, 2].item() == pytest.approx(math.exp(5) - 6)


def test_reference_kl_enters_the_loss_with_its_weight() -> None:
    logprobs_BT, inputs = inputs_of(torch.ones(1, 2), tensor([0.0]))
    inputs = replace(inputs, reference_logprobs_BT=tensor([[-3.0, -2.0]]))
    loss, metrics = clipped_policy_loss(logprobs_BT, inputs, replace(PLAIN, reference_policy_kl_penalty=0.1))
    assert metrics["kl_penalty"] == pytest.approx(math.exp(-1) / 2)
    assert loss.item() == pytest.approx(0.1 * math.exp(-1) / 2)


def test_a_penalty_without_a_reference_is_refused() -> None:
    logprobs_BT, inputs = inputs_of(torch.ones(1, 1), tensor([0.0]))
    with pytest.raises(ValueError, match="reference_logprobs_BT"):
        clipped_policy_loss(logprobs_BT, inputs, replace(PLAIN, reference_policy_kl_penalty=0.1))


CONFIGS = st.builds(
    LossConfig,
    ratio_clip_c=st.sampled_from([None, 3.0]),
    reference_policy_kl_penalty=st.sampled_from([0.0, 0.1]),
    reference_policy_kl_type=st.sampled_from(["k1", "k2", "k3"]),
    token_level_loss=st.booleans(),
    use_importance_sampling_correction=st.booleans(),
)


@given(seed=st.integers(0, 10**6), cfg=CONFIGS)
@settings(deadline=None)
def test_micro_batches_add_up_to_the_batch(seed: int, cfg: LossConfig) -> None:
    logprobs_BT, inputs = random_inputs(seed)
    parts = [
        clipped_policy_loss(logprobs_BT[rows], inputs.rows(rows), cfg, inputs.mask_BT)[1]
        for rows in (tensor([2, 0]), tensor([3]), tensor([1]))
    ]
    _, whole = clipped_policy_loss(logprobs_BT, inputs, cfg)
    assert {name: sum(p[name] for p in parts) for name in whole} == pytest.approx(whole, rel=1e-4, abs=1e-5)


@given(seed=st.integers(0, 10**6), cfg=CONFIGS, junk=st.sampled_from([math.nan, math.inf, -math.inf, 50.0]))
@settings(deadline=None)
def test_nothing_outside_the_mask_matters(seed: int, cfg: LossConfig, junk: float) -> None:
    logprobs_BT, inputs = random_inputs(seed)
    spoil = lambda x: x.where(inputs.mask_BT, junk)  # noqa: E731
    spoiled = LossInputs(
        inputs.mask_BT,
        inputs.advantages_B,
        spoil(inputs.prev_logprobs_BT),
        spoil(inputs.generation_logprobs_BT),
        spoil(inputs.reference_logprobs_BT),
    )
    clean, dirty = logprobs_BT.clone().requires_grad_(), spoil(logprobs_BT).requires_grad_()
    results = [clipped_policy_loss(clean, inputs, cfg), clipped_policy_loss(dirty, spoiled, cfg)]
    for loss, _ in results:
        loss.backward()
    assert results[0][1] == results[1][1]
    assert torch.equal(clean.grad, dirty.grad)
    assert not clean.grad[~inputs.mask_BT].any()


@given(seed=st.integers(0, 10**6), is_forced=st.booleans())
@settings(deadline=None)
def test_on_policy_gradient_is_reinforce(seed: int, is_forced: bool) -> None:
    """With unchanged weights, the gradient is -advantage / number of tokens, whatever the clip."""
    logprobs_BT, inputs = random_inputs(seed)
    now_BT = logprobs_BT.clone().requires_grad_()
    loss, metrics = clipped_policy_loss(
        now_BT, replace(inputs, prev_logprobs_BT=None if is_forced else logprobs_BT), PLAIN
    )
    loss.backward()
    expected_BT = -inputs.advantages_B[:, None] * inputs.mask_BT / inputs.mask_BT.sum()
    torch.testing.assert_close(now_BT.grad, expected_BT)
    assert metrics["clip_fraction"] == 0
    assert metrics["probs_ratio"] == pytest.approx(1.0)
