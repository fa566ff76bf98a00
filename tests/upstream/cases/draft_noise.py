# SPDX-License-Identifier: Apache-2.0
"""draft_noise.py: first tokens of vLLM's V2 kernels after one sampled draft, by chi-square against the distribution.

vLLM 0.28's own `sample_draft` and `rejection_sample`, in Triton's interpreter: no engine and no model.
Shapes: B requests, V vocabulary.
"""

import interpreting  # noqa: F401  # what the interpreter lacks, before vLLM
import torch
from outcome import report
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

NUM_REQUESTS, POSITION, LIMIT = 2000, 17, 24.3
TARGET_V = torch.tensor([0.65, 0.25] + [0.1 / 6] * 6)
DRAFT_V = torch.tensor([0.45, 0.005] + [0.545 / 6] * 6)


class Drafter:
    """A stand-in for the speculator that `sample_draft` reads. The logits of its model are always DRAFT_V's."""

    use_fp64_gumbel = False

    class model:
        @staticmethod
        def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
            return DRAFT_V.log().repeat(len(hidden), 1)


def first_tokens() -> torch.Tensor:
    """The first token of each request after one draft, [B]."""
    slots_B = torch.arange(NUM_REQUESTS)
    temperature_B = torch.ones(NUM_REQUESTS)
    seeds_B = torch.randint(1 << 62, (NUM_REQUESTS,), generator=torch.Generator().manual_seed(0))
    cache = torch.empty(NUM_REQUESTS, 1, len(DRAFT_V))
    # A drafter reads the token before the one that the target's row reads, so its position is one less.
    positions_B = torch.full((NUM_REQUESTS,), POSITION - 1)
    drafts_B = DraftModelSpeculator.sample_draft(
        Drafter, torch.empty(NUM_REQUESTS, 1), positions_B, slots_B, temperature_B, seeds_B, torch.tensor(0), cache
    )
    inputs_R = torch.stack([torch.zeros_like(drafts_B), drafts_B], dim=1).flatten()
    sampled_BK, _ = rejection_sample(
        TARGET_V.log().repeat(2 * NUM_REQUESTS, 1),
        cache,
        inputs_R,
        torch.arange(0, 2 * NUM_REQUESTS + 1, 2, dtype=torch.int32),
        POSITION + torch.arange(2).repeat(NUM_REQUESTS),
        slots_B,
        slots_B.repeat_interleave(2),
        torch.arange(2).repeat(NUM_REQUESTS),
        temperature_B,
        seeds_B,
        1,
    )
    return sampled_BK[:, 0]


def main() -> None:
    tokens_B = first_tokens()
    expected_V = TARGET_V.double() * NUM_REQUESTS
    seen_V = torch.bincount(tokens_B, minlength=len(TARGET_V)).double()
    found = float(((seen_V - expected_V) ** 2 / expected_V).sum())
    report(found < LIMIT, f"chi-square {found:.1f}, 7 degrees of freedom (limit at 1 in 1,000: {LIMIT})")


if __name__ == "__main__":
    main()
