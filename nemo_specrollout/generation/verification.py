# SPDX-License-Identifier: Apache-2.0
"""Verification by equality in vLLM's V2 model runner: sampling that no drafter can change.

vLLM's V2 runner samples by Gumbel-max with noise that is a function of (seed, position, token). So a draft is right if and
only if it is the token that the runner would have sampled without it. Source: Daliri, Musco, Suresh, arXiv 2408.07978.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation import compat
from nemo_specrollout.sampling.equality import accept_by_equality


class EqualityVerifier(rejection_sampler.RejectionSampler):
    """vLLM's rejection sampler with another rule: a draft is accepted if and only if the target samples it.

    Log-probs, chunks of rows and counts of rejected drafts are vLLM's. A token's log-prob comes from the row that sampled it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Verifies a batch with vLLM's code and our rule."""
        with _rule_of_equality():
            return super().__call__(*args, **kwargs)


@contextmanager
def _rule_of_equality() -> Iterator[None]:
    """Replaces vLLM's rule by `sample_and_compare`. The oldest supported version has no other patch point.

    Other engines of this process keep vLLM's rule.
    """
    vllm_rule = rejection_sampler.rejection_sample
    rejection_sampler.rejection_sample = sample_and_compare
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = vllm_rule


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
    """Returns the tokens emitted [B, K + 1] and their number [B]. Takes the arguments of vLLM's `rejection_sample`.

    Args:
        target_logits: Logits of all rows, after sampling parameters including temperature.
        draft_sampled: The token that each row's forward pass read; -1 for a draft that must not be accepted.
    """
    sampled = compat.draw(
        target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False, use_fp64=use_fp64
    )
    return accept_by_equality(sampled, draft_sampled, cu_num_logits, num_speculative_steps)
