# SPDX-License-Identifier: Apache-2.0
"""The acceptance rule of this package, by which a draft is accepted if and only if the policy samples the same token.

vLLM's V2 model runner samples by Gumbel-max with noise that is a function of (seed, position, token). So an accepted draft is
the token that the runner would have sampled without drafts. Source: Daliri, Musco, Suresh, arXiv 2408.07978.

Shapes: B requests of the batch, K draft positions.
"""

from typing import Any

import torch

from nemo_specrollout.generation.engine import compat
from nemo_specrollout.sampling.equality import accept_by_equality


def verify_asked(was_asked: bool) -> None:
    """Raises RuntimeError unless vLLM has called this package's acceptance rule (`was_asked`) when it verified drafts."""
    if not was_asked:
        raise RuntimeError(
            f"specrollout's verification is not in force: the rejection sampler of vLLM {compat.VLLM_VERSION} accepts "
            "drafts by a rule of its own"
        )


def sample_and_compare(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    use_fp64: bool = False,
    **_others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples each row, and accepts drafts that equal the sampled tokens.

    Returns the tokens that each request emits, and their number, as `accept_by_equality` does. The arguments are those of
    vLLM's `rejection_sample`, which this function replaces.

    Args:
        target_logits: The policy's logits of all rows, after all sampling parameters including the temperature.
        draft_sampled: The token that each row's forward pass has read, or -1 for a draft that must not be accepted.
    """
    sampled = compat.draw(
        target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False, use_fp64=use_fp64
    )
    return accept_by_equality(sampled, draft_sampled, cu_num_logits, num_speculative_steps)
