# SPDX-License-Identifier: Apache-2.0
"""Samples the rows of an engine step, accepts drafts, and computes the log-prob and rank of each sampled token.

Two kernels do this in two passes over the logits (`row_sampling_triton.py`), while vLLM reads the logits four times. Engine
steps with and without drafts run the same code. So a token's log-prob never depends on whether its step had drafts.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from nemo_specrollout.generation.step.near_ties import NearTies
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn, Logits, RowKeys, TieTables
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

_SAMPLE = inspect.signature(Sampler.sample)
_RAW = "raw_logprobs"
_PROCESSED = "processed_logprobs"


def draw_rows(
    scored: Logits, keys: RowKeys, graded: Logits | None, drafts: Drafts | None, ties: TieTables | None = None
) -> Drawn:
    """Samples each row as vLLM's `gumbel_sample` does, and accepts drafts that equal the sampled tokens.

    Args:
        scored: Logits from which tokens are sampled.
        keys: The values on which the noise of each row depends.
        graded: Logits from which log-probs and ranks are computed as by vLLM's `compute_topk_scores`. None for no log-probs.
        drafts: The drafts of the engine step, or None if it has none.
        ties: Tables to which near-ties are written, or None if no request asks for them.
    """
    kernels: Any = kernels_for(scored.values_RV.device.type, KernelModule.ROW_SAMPLING)
    drawn: Drawn = kernels.draw_rows(scored, keys, graded, drafts, ties)
    return drawn


class RowSampler(Sampler):
    """vLLM's sampler, in which `draw_rows` replaces vLLM's kernels.

    It takes over the state of vLLM's own sampler, and that sampler must not be used afterwards. vLLM's code still handles the
    rare requests that want log-probs of other tokens than the sampled ones.
    """

    near_ties: NearTies | None = None
    """Keeps the near-ties of early requests. None if there are no early requests, and on ranks other than the output rank."""

    def __init__(self, native: Sampler) -> None:
        # vLLM's runner has made its sampler before we can replace it, and does not keep the constructor's arguments, which
        # differ between versions. So this object calls no constructor of vLLM but takes over all attributes. The device
        # tensors among them thus exist only once.
        for name, value in vars(native).items():
            setattr(self, name, value)
        num_slots = len(self.sampling_states.temperature.np)
        self._is_processed_S = np.zeros(num_slots, np.bool_)
        """Whether the logits of each request need vLLM's processing for another sampling parameter than the temperature."""
        self._divides_S = np.zeros(num_slots, np.bool_)
        """Whether the logits of each request must be divided by its temperature."""
        self._follow_filters()

    def _follow_filters(self) -> None:
        """Replaces the method by which vLLM's sampling states add a request, by `_add_filters`.

        Its result then says whether the request has top-k, top-p or min-p.
        """
        sampling: Any = self.sampling_states
        self._add_state = sampling.add_request
        sampling.add_request = self._add_filters

    @staticmethod
    def fits(sampler: Any) -> bool:
        """Returns whether `sampler` is vLLM's own and has no option that needs vLLM's kernels."""
        return (
            type(sampler) is Sampler
            and sampler.logprobs_mode in (_RAW, _PROCESSED)
            and not (sampler.use_fp64_gumbel or getattr(sampler, "return_sampling_mask", False))
            and getattr(sampler, "trace_replay_state", None) is None
        )

    @torch.inference_mode()
    def warm_up(self, runner: Any) -> None:
        """Launches each variant of the kernels on two rows without requests, so that none is compiled during a rollout.

        Variants differ in the type of the logits, and in whether there are drafts, log-probs and near-ties. `runner` is vLLM's
        model runner.
        """
        config = runner.model_config
        device = runner.device
        hidden_2 = torch.zeros(2, config.get_hidden_size(), dtype=config.dtype, device=device)
        if runner.lora_config is None:
            raw_2V = runner.model.compute_logits(hidden_2)
        else:  # the model cannot be called, because only vLLM's own engine steps map adapters to rows
            raw_2V = hidden_2.new_zeros(2, runner.vocab_size)
        slots_2 = torch.full((2,), -1, dtype=torch.int64, device=device)
        keys = RowKeys(slots_2, self.sampling_states.temperature.gpu, self.sampling_states.seeds.gpu, slots_2 + 1)
        starts_2 = torch.arange(0, 3, 2, dtype=torch.int32, device=device)
        drafts = Drafts(starts_2, starts_2, runner.num_speculative_steps)
        all_drafts = (None,) if runner.rejection_sampler is None else (None, drafts)
        all_ties = (None,) if self.near_ties is None else (None, self.near_ties.tables)
        processed_2V = torch.zeros_like(raw_2V, dtype=torch.float32)  # as vLLM processes logits
        for values_2V, some_drafts, ties in product((raw_2V, processed_2V), all_drafts, all_ties):
            logits = Logits(values_2V, False)
            for graded in (None, logits):
                draw_rows(logits, keys, graded, some_drafts, ties)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Adds a request as vLLM does, and notes how its logits must be processed before tokens are sampled."""
        super().add_request(req_idx, sampling_params)
        self._is_processed_S[req_idx] = self.needs_logits_processing[req_idx]
        self._divides_S[req_idx] = sampling_params.temperature not in (0.0, 1.0)
        self.needs_logits_processing[req_idx] |= self._divides_S[req_idx]

    def _add_filters(self, req_idx: int, sampling_params: Any) -> bool:
        """Adds a request to vLLM's `SamplingStates`. Returns whether it is sampled with top-k, top-p or min-p.

        vLLM's own method also returns true if the logits must be divided by a temperature, and this one does not.
        """
        sampling = self.sampling_states
        is_changed = self._add_state(req_idx, sampling_params)
        is_cut = sampling.top_k.np[req_idx] != sampling.vocab_size or sampling.top_p.np[req_idx] != 1.0
        return is_changed and bool(is_cut or sampling.min_p.np[req_idx] != 0.0)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """Samples the tokens of an engine step without drafts, which has one row for each request."""
        dims = self.get_logprobs_dims(input_batch.idx_mapping_np)
        if dims not in (None, (0, 0)) or len(logits) != input_batch.num_reqs:
            return super().__call__(logits, input_batch)
        num_nans = get_num_nans(logits) if self.compute_nans else None
        rows = input_batch.logits_indices
        drawn = self.draw(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[rows],
            lambda: input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            has_logprobs=dims is not None,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(drawn.tokens_R.view(-1, 1), drawn.logprobs, num_nans, num_sampled, num_rejected)

    def draw(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: Callable[[], torch.Tensor],
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray | None,
        has_logprobs: bool,
        drafts: Drafts | None = None,
    ) -> Drawn:
        """Samples the rows of an engine step, and accepts those of its `drafts` that equal the sampled tokens.

        Most arguments are as for vLLM's `apply_sampling_params`. But `input_ids` is a function that returns the tokens read by
        the rows. It is called only if a request of the batch has other sampling parameters than a temperature. So other engine
        steps save the time to gather these tokens.
        """
        sampling = self.sampling_states
        graded = None
        if self._is_processed_S[idx_mapping_np].any():
            processed = self._processed(
                logits,
                expanded_idx_mapping=expanded_idx_mapping,
                idx_mapping=idx_mapping,
                idx_mapping_np=idx_mapping_np,
                pos=pos,
                input_ids=input_ids(),
                expanded_local_pos=expanded_local_pos,
                seq_lens_upper_bound_np=seq_lens_upper_bound_np,
            )
            scored = Logits(processed, False)
        else:
            scored = Logits(logits, bool(self._divides_S[idx_mapping_np].any()))
        if has_logprobs:
            graded = scored if self.logprobs_mode == _PROCESSED else Logits(logits, False)
        keys = RowKeys(expanded_idx_mapping, sampling.temperature.gpu, sampling.seeds.gpu, pos)
        ties = None if self.near_ties is None else self.near_ties.tables_for(idx_mapping_np)
        return draw_rows(scored, keys, graded, drafts, ties)

    def sample(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples rows by vLLM's code, in an engine step that `draw_rows` cannot handle, and keeps their near-ties.

        The arguments are those of vLLM's method, whose order differs between versions, and the results are those of vLLM's
        method too.
        """
        sampled, processed = super().sample(*arguments, **options)
        if self.near_ties is not None:
            given = _SAMPLE.bind(self, *arguments, **options).arguments
            self.keep_ties(processed, given["expanded_idx_mapping"], given["idx_mapping_np"], given["pos"])
        return sampled, processed

    def keep_ties(self, processed: torch.Tensor, slots_R: torch.Tensor, slots_B: np.ndarray, pos: torch.Tensor) -> None:
        """Keeps the near-ties of rows that vLLM's code samples, in an engine step of the requests in `slots_B`.

        `processed` are the logits after all sampling parameters, and the other arguments are as for `draw`. The rows are
        sampled a second time for this, because vLLM's kernel returns only the token.
        """
        ties = None if self.near_ties is None else self.near_ties.tables_for(slots_B)
        if ties is not None:
            sampling = self.sampling_states
            keys = RowKeys(slots_R, sampling.temperature.gpu, sampling.seeds.gpu, pos)
            draw_rows(Logits(processed, False), keys, None, None, ties)

    def _processed(self, logits: torch.Tensor, **rows: Any) -> torch.Tensor:
        """Returns the logits after all sampling parameters. `rows` are the arguments of vLLM's `apply_sampling_params`."""
        return self.apply_sampling_params(logits, **rows)
