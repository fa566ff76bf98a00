# SPDX-License-Identifier: Apache-2.0
"""The row sampler for vLLM before 0.32, which samples rows, accepts drafts and computes log-probs in two passes.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

import inspect
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.step.row_sampling import RowSampler
from nemo_specrollout.generation.step.sampled_rows import Drafts

_PARAMETERS = inspect.signature(Sampler.apply_sampling_params).parameters
_STATES = ("sampling_states", "logit_bias_state", "penalties_state", "bad_words_state", "logprob_token_ids_state")
_CHANGES_LOGITS = hasattr(Sampler, "returns_logprobs")
"""Whether vLLM's `apply_sampling_params` changes the logits in place and keeps their type, as in vLLM 0.26."""


class OlderRowSampler(RowSampler):
    """A row sampler that reads from vLLM's sampler states whether the logits of a request need more than a temperature."""

    def _follow_filters(self) -> None:
        """Checks that vLLM's sampler has all states that `add_request` reads. Raises RuntimeError if it lacks one."""
        compat.require(self, _STATES, "the sampler")

    def add_request(self, req_idx: int, *arguments: Any) -> None:
        """Adds a request as vLLM does, and notes how its logits must be processed. Takes the arguments of vLLM's method."""
        Sampler.add_request(self, req_idx, *arguments)
        sampler: Any = self
        sampling = sampler.sampling_states
        thinking = getattr(self, "thinking_budget_state", None)
        self._divides_S[req_idx] = arguments[-1].temperature not in (0.0, 1.0)
        self._is_processed_S[req_idx] = (
            sampler.logit_bias_state.use_logit_bias[req_idx]
            or sampler.penalties_state.use_penalty[req_idx]
            or sampler.bad_words_state.num_bad_words.np[req_idx] > 0
            or (thinking is not None and thinking.enabled and thinking.use_thinking_budget[req_idx])
            or sampling.min_p.np[req_idx] != 0.0
            or sampling.top_k.np[req_idx] != sampling.vocab_size
            or sampling.top_p.np[req_idx] != 1.0
        )

    def get_logprobs_dims(self, idx_mapping_np: np.ndarray, include_token_ids: bool = True) -> tuple[int, int] | None:
        """Returns how many log-probs an engine step needs for each row, for the best tokens and for tokens that requests name.

        Returns None if no request in the slots `idx_mapping_np` wants log-probs.
        """
        num_best = self.sampling_states.max_num_logprobs(idx_mapping_np)
        num_asked = self.logprob_token_ids_state.max_num_token_ids(idx_mapping_np) if include_token_ids else 0
        if num_best == NO_LOGPROBS and not num_asked:
            return None
        return (0 if num_best == NO_LOGPROBS else num_best), num_asked

    def verify(self, logits: torch.Tensor, batch: Any, num_positions: int, has_logprobs: bool) -> SamplerOutput:
        """Samples the rows of an engine step with drafts, and accepts drafts that equal the sampled tokens.

        A request has up to `num_positions` drafts.
        """
        num_nans = get_num_nans(logits) if self.compute_nans else None
        read_R = batch.input_ids[batch.logits_indices]
        drawn = self.draw(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.positions[batch.logits_indices],
            lambda: read_R,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
            has_logprobs,
            Drafts(read_R, batch.cu_num_logits, num_positions),
        )
        assert drawn.emitted_BK is not None and drawn.counts_B is not None
        logprobs = drawn.logprobs
        if logprobs is not None and len(logits) != batch.num_reqs:
            logprobs = logprobs._replace(cu_num_generated_tokens=batch.cu_num_logits_np.tolist())
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            drawn.counts_B, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, self.req_states.prefill_len.gpu
        )
        return SamplerOutput(drawn.emitted_BK, logprobs, num_nans, num_sampled, num_rejected)

    def _processed(self, logits: torch.Tensor, **rows: Any) -> torch.Tensor:
        """Returns the logits after all sampling parameters, in float32.

        In bfloat16, the token of a row would depend on which sampling parameters other requests have.
        """
        if _CHANGES_LOGITS:
            logits = logits.to(torch.float32, copy=True)
        return self.apply_sampling_params(
            logits, **{name: value for name, value in rows.items() if name in _PARAMETERS}
        )
