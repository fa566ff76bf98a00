# SPDX-License-Identifier: Apache-2.0
"""The sampler inside vLLM: replaces the model runner's sampling step, drafts or none, with drafter-invariant sampling.

Shapes: B requests of the batch in vLLM's order, R logits rows (B, plus one a draft), V vocabulary, S output columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.identity import RequestIdentity, resolve_identity
from nemo_specrollout.sampling.acceptance import accept_by_equality
from nemo_specrollout.sampling.sampler import sample_tokens

_GREEDY_BELOW = 1e-5
# By how many nats a draft token beat the runner-up, in as many levels of evidence, and the rates believed of them at first.
_MARGIN_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 5.5])
MARGIN_LEVEL_PRIORS = np.linspace(0.4, 0.97, NUM_LEVELS)

# Told before each sampling: requests of the batch, logits rows, tokens of the forward pass.
StepListener = Callable[[int, int, int], Any]


def evidence_levels(margins: np.ndarray) -> np.ndarray:
    """The evidence levels of draft tokens that a model sampled, int8, from how far each was ahead of the runner-up."""
    return np.searchsorted(_MARGIN_EDGES, margins).astype(np.int8)


@dataclass(frozen=True)
class BatchKeys:
    """What sampling needs to know of a batch's requests; valid while the batch holds the same requests in order."""

    req_ids: list[str]
    seeds_B: torch.Tensor
    greedy_B: torch.Tensor
    temperature_B: torch.Tensor | None  # None where dividing would change nothing


class CoupledSampler:
    """Samples every row of a step from the policy with the request's own noise; owns the requests' identities.

    Invariant: the token at a position depends on that row's logits, the request's seed, sampling parameters and
    preceding tokens alone. `runner` is vLLM's V1 model runner.
    """

    def __init__(self, runner: Any, engine_seed: int, on_step: StepListener) -> None:
        self.runner = runner
        self.engine_seed = engine_seed
        self.on_step = on_step
        self.num_drafts_B = np.zeros(0, np.int64)
        self._no_drafts = np.zeros(runner.max_num_reqs, np.int64)
        self._keys: BatchKeys | None = None
        self._identities: dict[str, RequestIdentity] = {}

    def identity(self, req_id: str) -> RequestIdentity:
        """The identity of a request of the current batch."""
        if req_id not in self._identities:
            state = self.runner.requests[req_id]
            self._identities[req_id] = resolve_identity(
                req_id, state.sampling_params, state.prompt_token_ids, self.engine_seed
            )
        return self._identities[req_id]

    @property
    def keys(self) -> BatchKeys:
        """What the step that was sampled last sampled with."""
        assert self._keys is not None
        return self._keys

    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any | None) -> SamplerOutput:
        """Stands in for the model runner's `_sample`: same arguments, same result."""
        metadata = self.runner.input_batch.sampling_metadata
        if (feature := compat.unsupported_sampling(metadata)) is not None:
            raise NotImplementedError(f"specrollout's sampler does not support {feature}")
        keys = self._batch_keys(metadata)
        num_requests, num_rows = len(keys.req_ids), logits.shape[0]
        self.on_step(num_requests, num_rows, compat.num_scheduled_tokens(self.runner, num_requests))
        raw_RV = logits.to(torch.float32)
        if num_rows == num_requests:  # a speculating engine whose step has no drafts is a plain one
            self.num_drafts_B = self._no_drafts[:num_requests]
            return self._sample_plain(raw_RV, metadata, keys)
        self.num_drafts_B = compat.num_drafts_array(spec_decode_metadata)
        return self._sample_with_drafts(raw_RV, metadata, keys, spec_decode_metadata)

    def _sample_plain(self, raw_RV: torch.Tensor, metadata: Any, keys: BatchKeys) -> SamplerOutput:
        processed_RV = self._process(raw_RV, metadata, keys, None, None)
        positions_R = compat.next_positions(self.runner, len(keys.req_ids))
        tokens_R = sample_tokens(processed_RV, keys.seeds_B, positions_R, keys.greedy_B)
        logprobs = self._logprobs(raw_RV, processed_RV, metadata, tokens_R)
        return SamplerOutput(tokens_R.to(torch.int32).unsqueeze(-1), logprobs)

    def _sample_with_drafts(self, raw_RV: torch.Tensor, metadata: Any, keys: BatchKeys, spec: Any) -> SamplerOutput:
        num_drafts_B = torch.from_numpy(self.num_drafts_B).to(raw_RV.device, non_blocking=True)
        requests_R = torch.repeat_interleave(num_drafts_B + 1)
        processed_RV = self._process(raw_RV, metadata, keys, spec, requests_R)
        positions_R = compat.output_positions(self.runner, spec.logits_indices)
        tokens_R = sample_tokens(processed_RV, keys.seeds_B[requests_R], positions_R, keys.greedy_B[requests_R])
        emitted_BS, rows_BS = accept_by_equality(tokens_R, spec.draft_token_ids, num_drafts_B)
        logprobs = self._logprobs(raw_RV, processed_RV, metadata, tokens_R)
        if logprobs is not None:  # one row for each output column, as vLLM's own; it drops those of placeholders
            rows = rows_BS.flatten()
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows]
            )
        return SamplerOutput(emitted_BS.to(torch.int32), logprobs)

    def _batch_keys(self, metadata: Any) -> BatchKeys:
        req_ids = self.runner.input_batch.req_ids
        if self._keys is None or self._keys.req_ids != req_ids:
            self._keys = self._build_keys(list(req_ids), metadata)
        return self._keys

    def _build_keys(self, req_ids: list[str], metadata: Any) -> BatchKeys:
        self._identities = {req_id: self.identity(req_id) for req_id in req_ids}
        device = self.runner.device
        seeds_B = torch.tensor([self._identities[r].seed for r in req_ids], dtype=torch.int64, device=device)
        if metadata.all_greedy:
            return BatchKeys(req_ids, seeds_B, torch.ones(len(req_ids), dtype=torch.bool, device=device), None)
        greedy_B = metadata.temperature < _GREEDY_BELOW
        temperature_B = torch.where(greedy_B, 1.0, metadata.temperature)
        is_one = all(t == 1.0 for t in temperature_B.tolist())
        return BatchKeys(req_ids, seeds_B, greedy_B, None if is_one else temperature_B)

    def _process(
        self, raw_RV: torch.Tensor, metadata: Any, keys: BatchKeys, spec: Any | None, requests_R: torch.Tensor | None
    ) -> torch.Tensor:
        """vLLM's logits pipeline on every row: masks, bad words, processors, penalties, temperature, top-k and top-p."""
        logits_RV = self._apply_by_depth(raw_RV, metadata, spec, _before_temperature)
        if keys.temperature_B is not None:
            temperature_R = keys.temperature_B if requests_R is None else keys.temperature_B[requests_R]
            logits_RV = logits_RV / temperature_R.unsqueeze(1)
        if not metadata.all_greedy:
            logits_RV = self._apply_by_depth(logits_RV, metadata, spec, _after_temperature)
        if metadata.top_k is None and metadata.top_p is None:
            return logits_RV
        top_k, top_p = (
            None if t is None else t if requests_R is None else t[requests_R] for t in (metadata.top_k, metadata.top_p)
        )
        return compat.apply_top_k_top_p(logits_RV.clone(), top_k, top_p)

    def _apply_by_depth(self, logits_RV: torch.Tensor, metadata: Any, spec: Any | None, stage: Any) -> torch.Tensor:
        """Runs a stage of vLLM's processors, which know whole batches, once for each number of drafts before a row.

        At depth j it sees each request's j-th row and a history that ends with its first j drafts: what plain decoding
        would have seen there. Requests with fewer drafts lend their last row, whose result is dropped.
        """
        if stage(None, metadata, self.runner.sampler):
            return logits_RV
        if spec is None:
            return stage(logits_RV.clone(), metadata, self.runner.sampler)
        num_drafts = self.num_drafts_B
        drafts = torch.split(spec.draft_token_ids, num_drafts.tolist())
        histories = list(zip(metadata.output_token_ids, (d.tolist() for d in drafts), strict=False))
        num_drafts_B = torch.from_numpy(num_drafts).to(logits_RV.device)
        starts_B = (num_drafts_B + 1).cumsum(0) - num_drafts_B - 1
        result = logits_RV.clone()
        for depth in range(int(num_drafts.max()) + 1):
            outputs = [[*out, *ids[:depth]] for out, ids in histories]
            at_depth = compat.metadata_at_depth(metadata, outputs, depth)
            present_B = num_drafts_B >= depth
            rows_B = starts_B + num_drafts_B.clamp(max=depth)
            processed_BV = stage(logits_RV[rows_B], at_depth, self.runner.sampler)
            result[rows_B[present_B]] = processed_BV[present_B]
        return result

    def _logprobs(
        self, raw_RV: torch.Tensor, processed_RV: torch.Tensor, metadata: Any, tokens_R: torch.Tensor
    ) -> LogprobsTensors | None:
        if metadata.max_num_logprobs is None:
            return None
        sampler = self.runner.sampler
        which, what = sampler.logprobs_mode.split("_")
        logits = raw_RV if which == "raw" else processed_RV
        values = logits if what == "logits" else sampler.compute_logprobs(logits)
        return sampler.gather_logprobs(values, metadata.max_num_logprobs, tokens_R)


def _before_temperature(logits_BV: torch.Tensor | None, metadata: Any, sampler: Any) -> Any:
    """Stage one of vLLM's pipeline; called with None it tells whether the stage would do nothing."""
    processors = metadata.logitsprocs.non_argmax_invariant
    if logits_BV is None:
        untouched = (
            metadata.no_penalties and not metadata.bad_words_token_ids and metadata.allowed_token_ids_mask is None
        )
        return untouched and all(map(compat.is_idle, processors))
    return sampler.apply_logits_processors(logits_BV, metadata, False)


def _after_temperature(logits_BV: torch.Tensor | None, metadata: Any, sampler: Any) -> Any:
    """Stage two: the processors that never change an arg-max (min-p)."""
    processors = metadata.logitsprocs.argmax_invariant
    if logits_BV is None:
        return all(map(compat.is_idle, processors))
    for processor in processors:
        logits_BV = processor.apply(logits_BV)
    return logits_BV
