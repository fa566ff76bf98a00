# SPDX-License-Identifier: Apache-2.0
"""Removes drafts from an engine step on the host, if the model or the version of vLLM does not let the device choose them.

Shapes: B requests with drafts, K draft positions, S request slots.
"""

import dataclasses
from collections.abc import Sequence
from itertools import compress
from operator import getitem
from typing import Any

import numpy as np

from nemo_specrollout.drafters.ahead import AHEAD_PRIORS
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.transfers import HostCopy
from nemo_specrollout.speculation.decision import likeliest, survival_of
from nemo_specrollout.speculation.foresight import Foresight, Kind


class HostBudget:
    """Decides which drafts an engine step verifies, and removes the others from the step before it runs.

    The `SpeculationPolicy` decides how many drafts the step verifies, and this class chooses the ones that are most probably
    accepted. The scheduler treats removed drafts as rejected. Draft tokens stay on the device.

    The host decides on an engine step while the device still computes the previous one. The drafts are made only at the end of
    the previous step. So the acceptance rates that the host knows without waiting are one step old. `Foresight` estimates from
    them how good the present drafts are. On a CPU, which has no queue of work, the rates are those of the present drafts.

    All tensor-parallel ranks must remove the same drafts. They do so without messages, because all of them decide from the
    same values. All ranks have the acceptance rates and the histogram of survival of the first rank (`copy_first_rank`), and
    its step times (`agreed`). No decision depends on a clock.
    """

    def __init__(self, runner: Any, router: Any) -> None:
        self._router = router
        self._slot_of = runner.req_states.req_id_to_index
        # If vLLM returns the experts of each row, a step's rows must stay where the scheduler placed them.
        options = compat.output_options(runner.vllm_config)
        self._keeps_all = bool(getattr(options, "enable_return_routed_experts", False))
        num_slots, num_positions = router.board.tables.rates_SK.shape
        self._prefixes = [slice(count) for count in range(num_positions + 1)]
        self.foresight = Foresight(num_slots, num_positions, float(AHEAD_PRIORS[-1]))
        self.read(HostCopy(router.board.tables.rates_SK))

    def read(self, known_rates: HostCopy) -> None:
        """Makes `known_rates` the copy from which the host reads the acceptance rates of drafts from now on.

        Tests pass a copy that is one engine step late, so that a CPU behaves like a GPU.
        """
        self._known_rates = known_rates

    def opened(self, requests: Sequence[NewRequest]) -> None:
        """Notes requests that have just taken slots."""
        self.foresight.opened([request.slot for request in requests], [_kind_of(request) for request in requests])

    def record(self) -> None:
        """Starts to copy the acceptance rates of the latest drafts to the host. With a GPU, they are used one step later."""
        self._known_rates.refresh()

    def trimmed(self, scheduled: Any) -> Any:
        """Returns a copy of the scheduler's output without the drafts that this engine step should not verify.

        If no draft is removed, it returns `scheduled` itself. It never changes `scheduled`, which the scheduler reads later.
        With structured output no draft may be removed, because the scheduler has made a mask for each draft. If vLLM returns
        the experts of each row, no draft may be removed either, because all rows must stay in their places.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts or scheduled.has_structured_output_requests:
            return scheduled
        num_requests = len(drafts)
        caps_B = np.fromiter(map(len, drafts.values()), np.int64, num_requests)
        num_scheduled = int(caps_B.sum())
        budget = self._router.num_drafts(len(scheduled.num_scheduled_tokens), num_scheduled)
        if self._keeps_all:
            return scheduled
        slots_B = np.fromiter(map(self._slot_of.__getitem__, drafts), np.int64, num_requests)
        counts_B = likeliest(self._survival(slots_B, int(caps_B.max())), caps_B, budget)
        num_left_out = num_scheduled - int(counts_B.sum())
        return self._without(scheduled, caps_B, counts_B, num_left_out) if num_left_out else scheduled

    def _survival(self, slots_B: np.ndarray, num_scheduled: int) -> np.ndarray:
        """Returns the survival that the host expects of each request's first drafts, float32 [B, num_scheduled]."""
        rates_SK = self._known_rates.values[:, :num_scheduled]
        if self._known_rates.is_late:
            return self.foresight.survival(rates_SK, slots_B)
        return survival_of(rates_SK[slots_B])

    def _without(self, scheduled: Any, caps_B: np.ndarray, counts_B: np.ndarray, num_left_out: int) -> Any:
        """Returns a copy of the scheduler's output in which each request keeps the first `counts_B` of its `caps_B` drafts.

        vLLM keeps the numbers of tokens in dictionaries by request id. These are built by `map` and `zip`, to avoid a loop in
        Python.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        tokens = dict(scheduled.num_scheduled_tokens)
        tokens_B = np.fromiter(map(tokens.__getitem__, drafts), np.int64, len(caps_B))
        tokens.update(zip(drafts, (tokens_B - caps_B + counts_B).tolist(), strict=True))
        counts = counts_B.tolist()
        prefixes = map(self._prefixes.__getitem__, filter(None, counts))
        kept = map(getitem, compress(drafts.values(), counts), prefixes)
        return dataclasses.replace(
            scheduled,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=scheduled.total_num_scheduled_tokens - num_left_out,
            scheduled_spec_decode_tokens=dict(zip(compress(drafts, counts), kept, strict=True)),
        )


def _kind_of(request: NewRequest) -> Kind:
    if not request.identity.speculate:
        return Kind.SILENT
    return Kind.NEW_WITH_TEXT if request.identity.ahead else Kind.NEW
