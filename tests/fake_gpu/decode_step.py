# SPDX-License-Identifier: Apache-2.0
"""A decode step of this package on the simulated GPU: verification, drafting, the budget.

Shapes: B requests, S request slots, K draft positions, R rows of logits, V vocabulary, L longest text, H hidden.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from device import GPU
from vllm.config import CompilationConfig

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.step.row_sampling import RowSampler
from nemo_specrollout.generation.step.verification import EqualityVerifier
from nemo_specrollout.generation.step.verification_budget import VerificationBudget

B, S, K, V, L, H = 24, 32, 5, 151_936, 4096, 64
NAMES = [f"request-{b}" for b in range(B)]
TEXT = (SuffixDrafterConfig(), NgramDrafterConfig())
HEAD = Eagle3DrafterConfig(model="a/head")


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


class Speculator:
    """Stands in for vLLM's speculator. Only its calls of `sample_draft` concern this package."""

    def compute_draft_logits(self, hidden_states: torch.Tensor, _: int) -> torch.Tensor:
        return hidden_states.new_empty(len(hidden_states), V, dtype=torch.bfloat16)

    def propose(self, batch: Any, *inputs: Any, num_speculative_tokens: int = K, **_: Any) -> torch.Tensor:
        return torch.empty(batch.num_reqs, K, dtype=torch.int64, device=GPU)


def sampling_states() -> Any:
    """Returns the sampling parameters of requests that want log-probs, at a temperature other than 1."""
    return SimpleNamespace(
        temperature=SimpleNamespace(gpu=zeros(S, dtype=torch.float32), np=np.full(S, 0.7, np.float32)),
        seeds=SimpleNamespace(gpu=zeros(S, dtype=torch.int64)), max_num_logprobs=lambda _: 0, add_request=None,
    )  # fmt: skip


def row_sampler(states: Any) -> RowSampler:
    """Returns our sampler, with what it reads of vLLM's."""
    native: Any = SimpleNamespace(
        sampling_states=states, needs_logits_processing=np.zeros(S, bool), logprobs_mode="processed_logprobs",
        compute_nans=False, return_sampling_mask=False, req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=zeros(S))),
    )  # fmt: skip
    return RowSampler(native)


class DecodeStep:
    """A step of a batch whose requests are all decoding."""

    def __init__(
        self, drafters: tuple[DrafterConfig, ...], budget: str = "auto", speculator: Any = None, **options: Any
    ) -> None:
        """`options` are further fields of the block."""
        policy = BudgetConfig(budget, k=K)
        self.config = SpecrolloutConfig(num_speculative_tokens=K, drafters=drafters, budget=policy, **options)
        states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=zeros(S)), all_token_ids=SimpleNamespace(gpu=zeros(S, L)), device=GPU,
            req_id_to_index={name: b for b, name in enumerate(NAMES)}, max_num_reqs=S, num_speculative_steps=K,
            num_computed_tokens_np=np.zeros(S, np.int32),
        )  # fmt: skip
        self.runner = SimpleNamespace(
            speculator=speculator or Speculator(), req_states=states, device=GPU, dtype=torch.bfloat16, vocab_size=V,
            num_speculative_steps=K, max_num_reqs=S, max_num_tokens=L, max_model_len=L,
            input_buffers=SimpleNamespace(query_start_loc=zeros(S + 1)),
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            model_config=SimpleNamespace(model="a/policy", get_hidden_size=lambda: H),
            get_model=lambda: SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layers=(1, 2, 3))),
            speculative_config=SimpleNamespace(
                enable_adaptive_verification=True, num_speculative_tokens=K, rejection_sample_method="standard"
            ),
            vllm_config=SimpleNamespace(
                additional_config={},
                compilation_config=CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[L])
            ),
        )  # fmt: skip
        self.drafting = DraftRouter(self.config, self.runner)
        self.budget = VerificationBudget(self.runner, self.drafting)
        self._sampling = sampling_states()
        self.verifier = EqualityVerifier(row_sampler(self._sampling), self.runner.speculative_config, GPU)
        num_rows = B * (K + 1)
        positions_R = zeros(num_rows, dtype=torch.int64)
        self.batch = SimpleNamespace(
            idx_mapping=zeros(B, dtype=torch.int64), idx_mapping_np=np.arange(B), num_reqs=B, num_tokens=num_rows,
            input_ids=zeros(num_rows), positions=positions_R, logits_indices=positions_R, expanded_idx_mapping=positions_R,
            expanded_local_pos=zeros(num_rows), cu_num_logits=zeros(B + 1), cu_num_logits_np=np.arange(B + 1) * (K + 1),
            seq_lens=zeros(B), seq_lens_cpu_upper_bound=torch.zeros(B), query_start_loc=zeros(B + 1),
            num_scheduled_tokens=np.full(B, K + 1),
        )  # fmt: skip
        self.logits_RV = zeros(num_rows, V, dtype=torch.bfloat16)
        self._hidden_BH, self._num_rejected = zeros(B, H, dtype=torch.bfloat16), zeros(B)
        self._keys = (zeros(S, 1, dtype=torch.int64), zeros(1, S), zeros(S), zeros(S))
        self._draft_step = zeros(dtype=torch.int64)
        self.open()
        if self.drafting.model is not None:
            self.drafting.model.depth = K
        self.draft(self.verify())  # The first step reads whole prompts.

    def open(self) -> None:
        """Gives all requests their slots."""
        identity = RequestIdentity(1, 2)
        params = SimpleNamespace(temperature=0.7, top_k=0, top_p=1.0)
        requests = [NewRequest(b, identity, 10, range(12), 100, sampling_params=params) for b in range(B)]
        self.drafting.open(requests)
        for b in range(B):
            self.budget.add_request(b)

    def plan_tokens(self) -> None:
        """Chooses how many and which drafts are verified, by vLLM's code with our number."""
        self.budget.get_num_tokens(dict.fromkeys(NAMES, K + 1), dict.fromkeys(NAMES, [-1] * K))
        self.budget.reallocate_drafts(NAMES, self.batch.idx_mapping)

    def verify(self) -> torch.Tensor:
        """Verifies drafts. Returns the number of tokens that each request emitted, int32 [B]."""
        output = self.verifier(self.logits_RV, self.batch)
        assert output.logprobs_tensors is not None
        return output.num_sampled

    def draft(self, num_sampled_B: torch.Tensor, num_drafts: int = K) -> None:
        """Proposes drafts for the next step, at most `num_drafts` for each request."""
        self.runner.speculator.propose(
            self.batch, None, None, self._hidden_BH, [self._hidden_BH] * 3, num_sampled_B, self._num_rejected, *self._keys,
            num_speculative_tokens=num_drafts,
        )  # fmt: skip
        self.budget.record_confidences(self.runner.speculator.draft_token_confidence_probs, self.batch)

    def sample_drafts(self) -> None:
        """Samples as the network of a drafter with weights does at each draft position."""
        states = self._sampling
        self.runner.speculator.sample_draft(
            self._hidden_BH, self.batch.positions[:B], self.batch.idx_mapping, states.temperature.gpu, states.seeds.gpu,
            self._draft_step, None,
        )  # fmt: skip
