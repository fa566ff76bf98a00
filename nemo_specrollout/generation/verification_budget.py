# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step verifies: our policy in vLLM's adaptive verification.

vLLM lets each request have all its draft rows scheduled, then keeps the best of the batch's: how many is chosen on the host
by figures of a step before, which ones on the device by the latest. So nothing waits for the device.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from nemo_specrollout.generation.host_copy import HostCopy
from nemo_specrollout.generation.speculator import Drafting
from nemo_specrollout.scheduling.speculation.budget import BudgetObservation, BudgetPolicy
from nemo_specrollout.scheduling.speculation.step_time import StepCosts


class VerificationBudget(AdaptiveVerificationManager):
    """vLLM's manager, with the budget by `policy` and the step costs that were measured while running."""

    def __init__(
        self,
        runner: Any,
        policy: BudgetPolicy,
        costs: Callable[[], StepCosts | None],
        drafting: Drafting,
    ) -> None:
        """`costs` tells what steps take by now, None while nothing is known; `drafting` hears how many drafts a step gets."""
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            get_max_chunk_logits(runner.vocab_size),
        )
        self._policy, self._costs, self._drafting = policy, costs, drafting
        self._confidence_probs.zero_()
        self._known = HostCopy(self._confidence_probs)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """None: costs are measured while running."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Leaves vLLM's curves, which our policy does not read, unset."""

    def add_request(self, req_idx: int) -> None:
        """A request takes a slot: it has no drafts until some are proposed."""
        self._confidence_probs[req_idx].fill_(0.0)
        self._known.forget(req_idx)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """The drafts that were just proposed come true at these rates; the host hears of it a step later. While drafting is
        idle, the rates stay as they are: zero."""
        if self._drafting.num_idle > 1:
            return
        self._confidence_probs[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]
        self._known.refresh()

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Tokens of the step's forward pass, drafts within the budget included; remembers the budget for the step."""
        num_drafts = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
        num_others = {name: num_tokens_per_req[name] - count for name, count in num_drafts.items()}
        slots_B = [self.req_states.req_id_to_index[name] for name in num_tokens_per_req]
        survival_BK = self._known.values[slots_B].astype(np.float64).cumprod(axis=1)
        caps_B = np.fromiter(num_drafts.values(), np.int64, len(num_drafts))
        total = int(caps_B.sum())
        decision = self._policy.allocate(BudgetObservation(survival_BK, caps_B, self._costs()))
        room = self._max_total_logits - len(slots_B) * self.num_bonus_tokens
        budget = max(min(int(decision.counts_B.sum()), total, room), 0)
        self._batch_budget = (num_drafts, num_others, budget)
        self._drafting.budgeted(budget, decision.row_price)
        return sum(num_others.values()) + budget
