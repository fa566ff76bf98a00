# SPDX-License-Identifier: Apache-2.0
"""Before 0.29, vLLM's V2 kernels sample another distribution than the policy's if a drafter samples. Our rule does not.

The kernels of the installed vLLM run in Triton's interpreter on fixed distributions, without an engine or a model.

Shapes: B requests, R rows, V vocabulary.
"""

import inspect
import os

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.older_vllm,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by `make test-pins`"),
]
NUM_REQUESTS, POSITION = 2000, 17
TARGET_V = torch.tensor([0.65, 0.25] + [0.1 / 6] * 6)
DRAFT_V = torch.tensor([0.45, 0.005] + [0.545 / 6] * 6)
LIMIT = 24.3
"""Chi-square with 7 degrees of freedom that is exceeded by chance once in a thousand."""


def chi_square(tokens_B: torch.Tensor) -> float:
    expected_V = TARGET_V.double() * len(tokens_B)
    seen_V = torch.bincount(tokens_B, minlength=len(TARGET_V)).double()
    return float(((seen_V - expected_V) ** 2 / expected_V).sum())


def first_tokens(*, by_equality: bool) -> tuple[torch.Tensor, float]:
    """Returns the first token of each request with one draft, and the share of accepted drafts."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    from nemo_specrollout.generation.engine import compat
    from nemo_specrollout.generation.step.equality_rule import sample_and_compare

    num_requests = NUM_REQUESTS
    slots_B = torch.arange(num_requests)
    temperature_B = torch.ones(num_requests)
    seeds_B = torch.randint(1 << 62, (num_requests,), generator=torch.Generator().manual_seed(0))
    draft_logits_BV = DRAFT_V.log().repeat(num_requests, 1)
    positions_B = torch.full((num_requests,), POSITION)
    request = (draft_logits_BV, slots_B, temperature_B, seeds_B, positions_B)
    if by_equality:
        drafts_B = compat.draw(*request, apply_temperature=True)
    else:
        is_salted = "is_drafting" in inspect.signature(gumbel_sample).parameters
        drafts_B = gumbel_sample(*request, apply_temperature=True, **({"is_drafting": True} if is_salted else {}))
    inputs_R = torch.stack([torch.zeros_like(drafts_B), drafts_B], dim=1).flatten()
    sampled_BK, counts_B = (sample_and_compare if by_equality else rejection_sample)(
        TARGET_V.log().repeat(2 * num_requests, 1), None if by_equality else draft_logits_BV[:, None].contiguous(),
        inputs_R, torch.arange(0, 2 * num_requests + 1, 2, dtype=torch.int32), POSITION + torch.arange(2).repeat(num_requests),
        slots_B, slots_B.repeat_interleave(2), torch.arange(2).repeat(num_requests), temperature_B, seeds_B, 1,
    )  # fmt: skip
    return sampled_BK[:, 0], float((counts_B - 1).float().mean())


def test_vllms_own_rule_was_inexact_before_0_29() -> None:
    import vllm

    from nemo_specrollout.installed.versions import version_numbers

    tokens_B, accepted = first_tokens(by_equality=False)
    found, numbers = chi_square(tokens_B), version_numbers(vllm.__version__)
    print(
        f"vLLM {vllm.__version__}, its own rule: chi-square {found:.0f} of {len(tokens_B)} tokens, {accepted:.3f} accepted"
    )
    assert numbers is not None
    assert found > LIMIT if numbers < (0, 29, 0) else found < LIMIT


def test_verification_by_equality_is_exact() -> None:
    tokens_B, accepted = first_tokens(by_equality=True)
    print(f"by equality: chi-square {chi_square(tokens_B):.1f} of {len(tokens_B)} tokens, {accepted:.3f} accepted")
    assert chi_square(tokens_B) < LIMIT
    assert accepted > float(torch.minimum(TARGET_V, DRAFT_V).sum()) / 2
