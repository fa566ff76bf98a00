# SPDX-License-Identifier: Apache-2.0
"""The number of drafts that a step verifies on vLLM before 0.32, which has no adaptive verification.

Shapes: B requests of the batch, K draft positions, S request slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nemo_specrollout.generation.device_reads import HostCopy
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.ranks import agreed
from nemo_specrollout.scheduling.speculation.budget import BudgetPolicy
from nemo_specrollout.scheduling.speculation.step_time import StepCosts


class HostBudget:
    """Keeps a step's drafts within the policy's budget: the vLLM worker leaves the other drafts out of the step.

    The scheduler treats drafts that were left out as rejected. The host chooses the number for each request from acceptance
    rates that are a step old. Draft tokens stay on the device.
    """

    def __init__(
        self,
        runner: Any,
        policy: BudgetPolicy,
        costs: Callable[[], StepCosts | None],
        drafting: Drafting,
    ) -> None:
        """Takes the arguments of `VerificationBudget`."""
        self._slot_of, self._speculator = runner.req_states.req_id_to_index, runner.speculator
        self._rates_SK = torch.zeros(runner.max_num_reqs, runner.num_speculative_steps, device=runner.device)
        self._known_rates = HostCopy(self._rates_SK)
        self._policy, self._costs, self._drafting = policy, costs, drafting

    def bind(self, runner: Any) -> None:
        """Trims the runner's steps from now on."""
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def execute_within_budget(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            return execute_model(self.trimmed(scheduler_output), *args, **kwargs)

        def sample_and_record(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            output = sample_tokens(grammar_output)
            if state is not None:
                self.record(state.input_batch)
            return output

        runner.execute_model, runner.sample_tokens = execute_within_budget, sample_and_record

    def record(self, batch: Any) -> None:
        """Records the acceptance rates of the drafts that were just proposed. The host reads them a step later."""
        rates_BK = self._speculator.draft_token_confidence_probs[: batch.num_reqs]
        self._rates_SK[batch.idx_mapping] = rates_BK
        self._known_rates.refresh()

    def trimmed(self, scheduled: Any) -> Any:
        """Returns a copy of the scheduler's output with as many drafts as the policy wants.

        The original stays as it is, because the scheduler reads it later. A step with structured output is returned untrimmed:
        the scheduler made masks for all of its drafts.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts or scheduled.has_structured_output_requests:
            return scheduled
        names = [name for name in scheduled.num_scheduled_tokens if name in self._slot_of]
        slots_B = [self._slot_of[name] for name in names]
        survival_BK = self._known_rates.values[slots_B].astype(np.float64).cumprod(axis=1)
        caps_B = np.array([len(drafts.get(name, ())) for name in names], np.int64)
        decision = agreed(self._policy.allocate(survival_BK, caps_B, self._costs()))
        counts_B = decision.counts_B
        self._drafting.budgeted(int(counts_B.sum()), decision.row_price)
        kept = {name: drafts[name][:n] for name, n in zip(names, counts_B.tolist(), strict=True) if n}
        lengths = {
            name: length - len(drafts.get(name, ())) + len(kept.get(name, ()))
            for name, length in scheduled.num_scheduled_tokens.items()
        }
        return dataclasses.replace(
            scheduled,
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens=kept,
        )
