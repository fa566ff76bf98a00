# SPDX-License-Identifier: Apache-2.0
"""A decode step of this package on the simulated GPU: verification, drafting, the budget.

Shapes: B requests, S request slots, K draft positions, R rows of logits, V vocabulary, L longest text, H hidden.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from device import GPU

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.verification import VerificationBudget, sample_and_compare
from nemo_specrollout.scheduling.speculation.draft_plan import DraftPlan

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


class DecodeStep:
    """A step of a batch whose requests are all decoding."""

    def __init__(self, drafters: tuple[DrafterConfig, ...], budget: str = "auto") -> None:
        self.config = SpecrolloutConfig(num_speculative_tokens=K, drafters=drafters, budget=BudgetConfig(budget, k=K))
        states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=zeros(S)), all_token_ids=SimpleNamespace(gpu=zeros(S, L)), device=GPU,
            req_id_to_index={name: b for b, name in enumerate(NAMES)}, max_num_reqs=S, num_speculative_steps=K,
        )  # fmt: skip
        self.runner = SimpleNamespace(
            speculator=Speculator(), req_states=states, device=GPU, num_speculative_steps=K, max_num_reqs=S, vocab_size=V,
            max_model_len=L, input_buffers=SimpleNamespace(query_start_loc=zeros(S + 1)),
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            speculative_config=SimpleNamespace(enable_adaptive_verification=True),
        )  # fmt: skip
        self.drafting = Drafting(self.config, self.runner)
        self.budget = VerificationBudget(self.runner, self.drafting)
        self.budget._known_rates._buffers = [torch.ones(S, K) for _ in range(2)]
        sampling = SimpleNamespace(
            temperature=SimpleNamespace(gpu=zeros(S, dtype=torch.float32)),
            seeds=SimpleNamespace(gpu=zeros(S, dtype=torch.int64)),
        )
        self._sampling = sampling
        self.batch = SimpleNamespace(
            idx_mapping=zeros(B, dtype=torch.int64), idx_mapping_np=np.arange(B), num_reqs=B, num_tokens=B * (K + 1)
        )
        self._rows = (
            zeros(B * (K + 1), V, dtype=torch.float32), None, zeros(B * (K + 1)), zeros(B + 1),
            zeros(B * (K + 1), dtype=torch.int64), self.batch.idx_mapping, zeros(B * (K + 1), dtype=torch.int64),
            zeros(B * (K + 1)),
        )  # fmt: skip
        self._hidden_BH, self._num_rejected = zeros(B, H, dtype=torch.bfloat16), zeros(B)
        self._keys = (zeros(S, 1, dtype=torch.int64), zeros(1, S), zeros(S), zeros(S))
        self._draft_step = zeros(dtype=torch.int64)
        self.open()
        if self.drafting.model is not None:
            self.drafting.model.plan = DraftPlan(K)
        self.draft(self.verify())  # The first step reads whole prompts.

    def open(self) -> None:
        """Gives all requests their slots."""
        identity = RequestIdentity(1, 2)
        self.drafting.open([NewRequest(b, identity, 10, range(12), 100) for b in range(B)])
        for b in range(B):
            self.budget.add_request(b)

    def plan_tokens(self) -> None:
        """Chooses how many and which drafts are verified, by vLLM's code with our number."""
        self.budget.get_num_tokens(dict.fromkeys(NAMES, K + 1), dict.fromkeys(NAMES, [-1] * K))
        self.budget.reallocate_drafts(NAMES, self.batch.idx_mapping)

    def verify(self) -> torch.Tensor:
        """Verifies drafts. Returns the number of tokens that each request emitted, int32 [B]."""
        states = self._sampling
        return sample_and_compare(*self._rows, states.temperature.gpu, states.seeds.gpu, K)[1]

    def draft(self, num_sampled_B: torch.Tensor, num_drafts: int = K) -> None:
        """Proposes drafts for the next step, at most `num_drafts` for each request."""
        self.runner.speculator.propose(
            self.batch, None, None, self._hidden_BH, None, num_sampled_B, self._num_rejected, *self._keys,
            num_speculative_tokens=num_drafts,
        )  # fmt: skip
        self.budget.record_confidences(self.runner.speculator.draft_token_confidence_probs, self.batch)

    def sample_drafts(self) -> None:
        """Samples as the network of a drafter with weights does at each draft position."""
        states = self._sampling
        self.runner.speculator.sample_draft(
            self._hidden_BH, self._rows[4][:B], self.batch.idx_mapping, states.temperature.gpu, states.seeds.gpu,
            self._draft_step, None,
        )  # fmt: skip
