# SPDX-License-Identifier: Apache-2.0
"""Accounts of engine steps. They are a trace of the steps, the totals, and the measured costs for the `SpeculationPolicy`.

Times are measured on the host. Counts of drafts are read from the device only when a caller asks for them.

Shapes: D drafters, K draft positions, T engine steps that are kept.
"""

from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode

from nemo_specrollout.drafters.base import TRACED_STEPS
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine.arguments import DRAFT_ROWS
from nemo_specrollout.generation.engine.transfers import agreed
from nemo_specrollout.speculation.step_model import StepModel, is_due
from nemo_specrollout.telemetry.engine_stats import EngineTotals, StepTrace

AGREED_STEPS = 16
"""Number of engine steps after which all tensor-parallel ranks again take over the predicted step times of the first rank."""
RESTED_STEPS = 4
"""While the drafters rest, the step model learns from only one in this many engine steps, to save time."""


class StepAccounts:
    """Records engine steps, learns how many seconds they take, and passes this knowledge to the `SpeculationPolicy`.

    Owns the engine's trace of steps and its step model. All tensor-parallel ranks use the predictions of the first one.
    """

    def __init__(self, runner: Any, router: DraftRouter | None) -> None:
        self._router = router
        least_depth = 1 if router is None or router.model is None else router.model.least_depth
        all_drafts = runner.max_num_reqs * runner.num_speculative_steps
        draft_rows = runner.vllm_config.additional_config.get(DRAFT_ROWS, all_drafts)
        most_rows = min(runner.max_num_tokens, runner.max_num_reqs + min(draft_rows, all_drafts))
        self.step_model = StepModel(most_rows, _graph_sizes(runner.vllm_config.compilation_config), least_depth)
        names = [] if router is None else router.board.names
        self.trace = StepTrace(names, self._draft_counts, TRACED_STEPS)
        self._most_requests = runner.max_num_reqs
        self._states = runner.req_states
        self._context = 0.0
        """Mean context length of the requests of the latest engine step, in tokens."""
        self._context_sums = np.zeros(2)
        """Number of requests, and number of tokens in their contexts, both summed over the engine steps since the last call of
        `totals`."""
        self._host_s = 0.0
        self.num_weight_updates = 0

    def begin_step(self, batch: Any) -> None:
        """Records an engine step whose tokens are about to be sampled, and lets the draft router plan its drafts."""
        self.trace.begin_step(batch.num_reqs, len(batch.logits_indices), batch.num_tokens)
        router = self._router
        if router is None:
            return
        # The scheduler's numbers are the same on all ranks. With asynchronous scheduling they count drafts of the step before
        # as if all of them were accepted, so they are too high by a few tokens.
        slots_B = batch.idx_mapping_np
        tokens = int(self._states.num_computed_tokens_np[slots_B].sum())
        self._context = tokens / max(len(slots_B), 1)
        self._context_sums += len(slots_B), tokens
        policy = router.policy
        if policy.costs is not None:
            policy.costs = policy.costs._replace(context=self._context)  # the same as `costs.at`, but faster
        router.begin_step(self.trace.num_steps - 1, batch)

    def end_step(self) -> None:
        """Learns from the time that an engine step took. From time to time, all ranks take over the costs of the first rank.

        They do so most often shortly after the start. While the drafters rest, the step model learns from fewer engine steps,
        and the ranks take over costs more rarely.
        """
        router = self._router
        if router is None:
            self.trace.end_step()
            return
        timed = [] if router.model is None else router.model.timed()  # on a GPU these are draft passes of earlier steps
        host_s = router.host_s - self._host_s
        self._host_s = router.host_s
        ended = self.trace.end_step(host_s, timed[-1][1] if timed else 0.0)
        sparseness = RESTED_STEPS if router.is_idle else 1
        if ended is not None and self.trace.num_steps % sparseness == 0:
            self.step_model.observe(*ended, not router.is_idle, self._context)
        for sizes, seconds in timed:
            self.step_model.observe_drafting(*sizes, seconds)
        if router.policy.costs is None or is_due(self.trace.num_steps, AGREED_STEPS * sparseness):
            costs = agreed(self.step_model.costs())
            router.policy.costs = None if costs is None else costs._replace(context=self._context)

    def totals(self) -> EngineTotals:
        """Returns the totals of all engine steps since the engine's start."""
        known: dict[str, Any] = {"num_weight_updates": self.num_weight_updates}
        router = self._router
        if router is not None:
            for kind, counts_DK in self.verified().items():
                known[kind] = list(zip(router.board.names, counts_DK, strict=True))
        totals = self.trace.totals(self.plain_step_s(), **known)
        self._context_sums[:] = 0.0
        return totals

    def plain_step_s(self) -> np.ndarray | None:
        """Returns the seconds of engine steps without drafts, float64. Element n is for a step of n requests.

        The requests are assumed to have texts of a mean length, which is the mean over the engine steps since the last call of
        `totals`. Returns None while the times are unknown.
        """
        costs = self.step_model.costs()
        if costs is None:
            return None
        num_requests, tokens = self._context_sums.tolist()
        mean = tokens / num_requests if num_requests else self._context
        return costs.at(mean).plain_steps_s(self._most_requests)

    def step_seconds(self) -> tuple[list[float], float] | None:
        """Returns the seconds of engine steps without drafts by number of requests, and the seconds of one more draft row.

        The first value is a list. Its element n is for a step of n requests, from 0 up to the number of slots. The second
        value is for a step that is full of drafts. It is a mean over the upper half of the step's draft rows, because with
        CUDA graphs a single row either costs nothing or makes the next larger graph necessary. Returns None while the times
        are unknown.
        """
        costs = self.step_model.costs()
        if costs is None:
            return None
        costs = costs.at(self._context)
        most_requests = self._most_requests
        most_drafts = costs.most_drafts(most_requests)
        drafts_2 = np.array([most_drafts // 2, most_drafts])
        half_s, full_s = costs.seconds(most_requests, drafts_2).tolist()
        row_s = (full_s - half_s) / max(int(drafts_2[1] - drafts_2[0]), 1)
        return costs.plain_steps_s(most_requests).tolist(), row_s

    def verified(self) -> dict[str, Any]:
        """Returns counts of draft tokens by drafter and draft position, as nested lists [D, K].

        The key "proposed" has how many were verified, and "accepted" has how many of these were accepted. Call it only for an
        engine with drafters.
        """
        assert self._router is not None
        counts_DK2 = self._router.board.tables.verified_DK2.cpu()
        return {"proposed": counts_DK2[..., 0].tolist(), "accepted": counts_DK2[..., 1].tolist()}

    def _draft_counts(self, first_step: int, num_steps: int) -> np.ndarray:
        """Returns how many draft tokens of each drafter were verified and accepted in each engine step, [num_steps, D * 2]."""
        assert self._router is not None
        steps_TD2 = self._router.board.tables.steps_TD2
        index = np.arange(first_step, first_step + num_steps) % len(steps_TD2)
        return steps_TD2.cpu().numpy()[index].reshape(num_steps, -1)


def _graph_sizes(compilation: Any) -> list[int]:
    """Returns the row counts of the CUDA graphs in vLLM's compilation config. Empty if there are no graphs."""
    has_graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
    return list(compilation.cudagraph_capture_sizes or ()) if has_graphs else []
