# SPDX-License-Identifier: Apache-2.0
"""The number of drafts that a step verifies: our budget policy in vLLM's adaptive verification.

vLLM schedules all draft rows of each request, then keeps the best drafts of the batch. The host chooses how many, from rates
that are a step old. The device chooses which ones, from the latest rates. So nothing waits for the device.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from nemo_specrollout.generation.device_reads import HostCopy
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.scheduling.speculation.budget import BudgetPolicy
from nemo_specrollout.scheduling.speculation.step_time import StepCosts


class VerificationBudget(AdaptiveVerificationManager):
    """vLLM's manager with our budget policy, and with step costs that are measured while the engine runs."""

    def __init__(
        self,
        runner: Any,
        policy: BudgetPolicy,
        costs: Callable[[], StepCosts | None],
        drafting: Drafting,
    ) -> None:
        """`costs` returns the step costs measured so far; `drafting` is told the budget of each step."""
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            get_max_chunk_logits(runner.vocab_size),
        )
        self._policy, self._costs, self._drafting = policy, costs, drafting
        self._confidence_probs.zero_()
        self._known_rates = HostCopy(self._confidence_probs)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Yields nothing: costs are measured while the engine runs."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Ignores vLLM's cost curves, which our policy does not read."""

    def add_request(self, req_idx: int) -> None:
        """Sets the rates of a new request to zero, until drafts are proposed for it."""
        self._confidence_probs[req_idx].fill_(0.0)
        self._known_rates.forget(req_idx)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Records the acceptance rates of the drafts that were just proposed. The host reads them a step later.

        The rates stay zero while drafting is idle.
        """
        if self._drafting.num_idle > 1:
            return
        self._confidence_probs[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]
        self._known_rates.refresh()

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Returns the tokens of the step's forward pass, including drafts within the budget. Sets the step's budget."""
        num_drafts = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
        num_others = {name: num_tokens_per_req[name] - count for name, count in num_drafts.items()}
        slots_B = [self.req_states.req_id_to_index[name] for name in num_tokens_per_req]
        survival_BK = self._known_rates.values[slots_B].astype(np.float64).cumprod(axis=1)
        caps_B = np.fromiter(num_drafts.values(), np.int64, len(num_drafts))
        decision = self._policy.allocate(survival_BK, caps_B, self._costs())
        most = min(int(caps_B.sum()), self._max_total_logits - len(slots_B) * self.num_bonus_tokens)
        budget = max(min(int(decision.counts_B.sum()), most), 0)
        self._batch_budget = (num_drafts, num_others, budget)
        self._drafting.budgeted(budget, decision.row_price)
        return sum(num_others.values()) + budget
