# SPDX-License-Identifier: Apache-2.0
"""Verifies drafts in vLLM 0.28 and later, whose rejection sampler has a method for the acceptance rule.

Shapes: B requests of the batch, K draft positions.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation.step.equality_rule import sample_and_compare, verify_asked
from nemo_specrollout.generation.step.row_sampling import RowSampler
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn


class EqualityVerifier(rejection_sampler.RejectionSampler):
    """vLLM's rejection sampler with this package's rule. It accepts a draft if and only if the policy samples the same token.

    With a `RowSampler`, the same kernels sample the rows, accept drafts and compute log-probs. Otherwise vLLM computes the
    log-probs. A token's log-prob comes from the row that sampled it. vLLM still splits rows into chunks and counts rejected
    drafts.
    """

    _drawn: Drawn | None = None
    """Results of the row sampler, between vLLM's calls of `_verify` and of `_get_logprobs_tensors`. None at other times."""
    _num_logprobs = NO_LOGPROBS
    """Largest number of log-probs that a request of the engine step wants, as vLLM counts them."""
    _num_token_ids = 0
    """Largest number of `logprob_token_ids` that a request of the engine step has."""
    _has_verified = False
    """True if vLLM has called this package's acceptance rule, as it must in an engine step with drafts."""
    enable_adaptive_verification = False
    """Whether only the device knows how many drafts each request has. Before vLLM 0.32 the host always knows it."""

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **options: Any) -> Any:
        """Verifies the drafts of an engine step. All rows get as many log-probs as the request that wants the most of them."""
        self._num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        if self._num_logprobs > 0:
            self._num_token_ids = self.sampler.logprob_token_ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        output = super().__call__(logits, input_batch, *args, **options)
        verify_asked(self._has_verified or not len(logits))
        return output

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
        seq_lens_upper_bound_np: np.ndarray | None = None,
        verify_draft_sampled: torch.Tensor | None = None,
    ) -> tuple[Any, Any, Any]:
        """Returns the logits for log-probs, the tokens that each request emits, and the number of these tokens.

        It takes the arguments of vLLM's method. Versions before 0.32 do not pass the last two.
        """
        self._has_verified = True
        if verify_draft_sampled is None:
            verify_draft_sampled = draft_sampled
        self._slots_R = expanded_idx_mapping
        sampler = self.sampler
        sampling = self.sampler.sampling_states
        num_positions = self.num_speculative_steps
        rows = (logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos)
        bounds = () if seq_lens_upper_bound_np is None else (seq_lens_upper_bound_np,)
        if isinstance(sampler, RowSampler) and self._num_logprobs <= 0:
            drafts = Drafts(verify_draft_sampled, cu_num_logits, num_positions)
            has_logprobs = self._num_logprobs != NO_LOGPROBS
            others = (expanded_local_pos, seq_lens_upper_bound_np, has_logprobs, drafts)
            drawn = sampler.draw(*rows, lambda: draft_sampled, *others)
            self._drawn = drawn
            return logits, drawn.emitted_BK, drawn.counts_B
        self._drawn = None
        processed = sampler.apply_sampling_params(*rows, draft_sampled, expanded_local_pos, *bounds)
        if isinstance(sampler, RowSampler):
            sampler.keep_ties(processed, expanded_idx_mapping, idx_mapping_np, pos)
        emitted_BK, counts_B = sample_and_compare(
            processed,
            draft_logits,
            verify_draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            sampling.temperature.gpu,
            sampling.seeds.gpu,
            num_positions,
            use_fp64=sampler.use_fp64_gumbel,
        )
        return processed, emitted_BK, counts_B

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if self._drawn is None:
            found = super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
            return found if found is None or not self._num_token_ids else self._of_asked_ids(logits, found)
        logprobs = self._drawn.logprobs
        self._drawn = None
        if logprobs is None or len(logits) == len(sampled):
            return logprobs
        if self.enable_adaptive_verification:  # then only the device knows where each request's rows begin
            return logprobs._replace(cu_num_generated_tokens_tensor=cu_num_logits)
        return logprobs._replace(cu_num_generated_tokens=cu_num_logits_np.tolist())

    def _of_asked_ids(self, logits: torch.Tensor, best: LogprobsTensors) -> LogprobsTensors:
        """Returns the log-probs of the sampled tokens and of the token ids for which requests ask.

        `best` is the result of vLLM's own method, which has log-probs of the sampled and of the best tokens.
        """
        starts = best.cu_num_generated_tokens_tensor
        return compute_topk_scores(
            logits,
            best.logprob_token_ids.shape[1] - 1,
            best.logprob_token_ids[:, 0],
            best.cu_num_generated_tokens if starts is None else starts,
            self.sampler.logprob_token_ids_state,
            self._slots_R,
            self._num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
