# SPDX-License-Identifier: Apache-2.0
"""A budget of drafts that the host chooses, for policies and versions of vLLM where the device must not choose.

Shapes: B requests of the batch, K draft positions, S request slots.
"""

import dataclasses
from typing import Any

import numpy as np

from nemo_specrollout.generation.engine.transfers import HostCopy
from nemo_specrollout.speculation.decision import likeliest


class HostBudget:
    """Keeps a step's drafts within the budget where the device must not choose them: other drafts are left out of the step.

    The scheduler treats drafts that were left out as rejected. The host chooses the number for each request from acceptance
    rates that are a step old. Draft tokens stay on the device.

    All tensor-parallel ranks must leave out the same drafts. They need no message for that, because they decide from the
    same values: the rates and the histogram of survival are the first rank's (`copy_first_rank`), so are the costs
    (`agreed`), and neither the policy nor `likeliest` reads a clock.
    """

    def __init__(self, runner: Any, router: Any) -> None:
        self._router = router
        self._slot_of = runner.req_states.req_id_to_index
        # vLLM's records of experts must find a step's rows where the scheduler placed them.
        holder = getattr(runner.vllm_config, "aux_output_config", runner.model_config)  # before 0.32 in the latter
        self._keeps_all = bool(getattr(holder, "enable_return_routed_experts", False))
        self._known_rates = HostCopy(router.board.tables.rates_SK)

    def record(self) -> None:
        """Starts a copy of the acceptance rates of the latest drafts. The host reads it a step later."""
        self._known_rates.refresh()

    def trimmed(self, scheduled: Any) -> Any:
        """Returns a copy of the scheduler's output with as many drafts as the policy wants.

        The original stays as it is, because the scheduler reads it later. It is returned where all of its drafts must stay: in
        a step with structured output, for which the scheduler made masks of all drafts, and where vLLM returns experts.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts or scheduled.has_structured_output_requests:
            return scheduled
        names = [name for name in scheduled.num_scheduled_tokens if name in self._slot_of]
        rates_BK = self._known_rates.values[[self._slot_of[name] for name in names]]
        caps_B = np.array([len(drafts.get(name, ())) for name in names], np.int64)
        num_drafts = self._router.num_drafts(len(names), int(caps_B.sum()))
        if self._keeps_all:
            return scheduled
        counts_B = likeliest(rates_BK, caps_B, num_drafts)
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
