# SPDX-License-Identifier: Apache-2.0
"""Drafter-invariant sampling in vLLM's V2 model runner: verification by equality.

vLLM's V2 runner samples by Gumbel-max with noise that is a function of (seed, position, token). So a draft is right if and
only if it is the token that the runner would have sampled without it. Source: Daliri, Musco, Suresh, arXiv 2408.07978.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from nemo_specrollout.sampling.equality import accept_by_equality


class EqualityVerifier(RejectionSampler):
    """vLLM's verification of drafts, with another rule: a draft stands if and only if the target samples it.

    Log-probs, chunks of rows and counts of rejected drafts are vLLM's. The log-prob of a token is of the row that sampled it.
    """

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of all rows after sampling parameters, the tokens emitted [B, K + 1], and how many they are [B]."""
        states = self.sampler.sampling_states
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos,
            seq_lens_upper_bound_np,
        )  # fmt: skip
        sampled = gumbel_sample(
            processed, expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, pos,
            apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
        )  # fmt: skip
        emitted, counts = accept_by_equality(sampled, verify_draft_sampled, cu_num_logits, self.num_speculative_steps)
        return processed, emitted, counts
