# SPDX-License-Identifier: Apache-2.0
"""A drafter with weights: vLLM's own speculator (EAGLE-3, draft model, MTP, DFlash, DSpark), asked only where that pays.

Networks, weights and KV cache are vLLM's. This module decides which noise they sample with, how deep they draft, and in which
steps they run at all.

Shapes: B requests of the batch, K draft positions, N new requests, S request slots.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import BlockDrafterConfig
from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.drafters.board import DraftBoard
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.compat import to_device
from nemo_specrollout.generation.device_reads import HostCopy, StageTimer
from nemo_specrollout.generation.ranks import agreed
from nemo_specrollout.generation.speculator_patches import (
    draft_only_on_demand,
    norm_context_by_layer,
    share_noise,
    share_noise_of_block,
    verify_block_speculator,
)
from nemo_specrollout.scheduling.speculation.best_depth import SurvivalSpread
from nemo_specrollout.scheduling.speculation.draft_plan import DraftPlan, PlanObservation, build_planner
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts, DraftTimes
from nemo_specrollout.scheduling.speculation.step_time import StepCosts


class ModelDrafter:
    """Lets vLLM's speculator draft, or only read, according to a plan. Owns the plan and the measured times of drafting.

    The speculator follows a request from its first token on, or not at all: text that it has not read leaves a gap in its KV
    cache. It does not run in steps in which it follows no request.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any, board: DraftBoard, index: int) -> None:
        """`index`: the drafter's place on the board."""
        self._board, self._index, self._speculator = board, index, runner.speculator
        self._propose = runner.speculator.propose
        drafter = config.model_drafter
        assert drafter is not None
        self._only_reads = False
        self._patch_sampling(isinstance(drafter, BlockDrafterConfig), shares_noise=drafter.sampling == "shared_noise")
        self._has_score_gaps = drafter.sampling == "shared_noise" and compat.HAS_SCORE_GAPS
        num_slots, num_positions = board.tables.limit_S.shape[0], board.num_positions
        self._positions_K = torch.arange(num_positions, device=runner.device).clamp(max=NUM_LEVELS - 1).to(torch.int8)
        self._follows_S = torch.zeros(num_slots, dtype=torch.bool, device=runner.device)
        self._is_followed = np.zeros(num_slots, np.bool_)
        self._outlook = HostCopy(board.tables.outlook_S4K)
        self._spread = SurvivalSpread(num_positions)
        self._timer, self.times = StageTimer(runner.device), DraftTimes()
        self._planner = build_planner(config.budget)
        self.plan = DraftPlan(0)
        self.is_allowed = True
        """True if the drafter may draft; a canary that finds it broken forbids it."""
        self.seconds = 0.0
        """Seconds of the latest drafting whose time is known."""

    def _patch_sampling(self, drafts_blocks: bool, *, shares_noise: bool) -> None:
        levels_BK = self._board.tables.levels_DBK[self._index]
        if drafts_blocks:
            verify_block_speculator(self._speculator)
            norm_context_by_layer(self._speculator)
            draft_only_on_demand(self._speculator, lambda: self._only_reads)
        if shares_noise and drafts_blocks:
            share_noise_of_block(self._speculator, levels_BK)
        elif shares_noise:
            share_noise(self._speculator, levels_BK, lambda: self._only_reads)

    @property
    def is_dormant(self) -> bool:
        """Whether new requests get none of the drafter's drafts, because these would not pay."""
        return not self._planner.follows

    @property
    def is_weighed(self) -> bool:
        """Whether the planner asks the speculator for drafts only where they pay."""
        return self._planner.weighs_model

    def follows(self, slots_B: np.ndarray) -> bool:
        """Returns whether the speculator follows any request in these slots. It must then read the text of each step."""
        return bool(self._is_followed[slots_B].any())

    def open(self, slots: Sequence[int], slots_N: torch.Tensor, speculate: Sequence[bool]) -> None:
        """Decides whether to follow the new requests in `slots`, which are `slots_N` on the device.

        Requests that do not `speculate` are never followed.
        """
        may_follow = self._planner.follows and self.is_allowed
        follows_N = [may_follow and speculates for speculates in speculate]
        self._is_followed[list(slots)] = follows_N
        self._follows_S[slots_N] = to_device(follows_N, np.bool_, self._follows_S.device)

    def close(self, slots: Sequence[int]) -> None:
        """Tells the planner that the requests in `slots` have ended or are preempted."""
        self._planner.observe_ended(int(self._is_followed[list(slots)].sum()))

    def forbid(self) -> None:
        """Stops all drafting: the speculator follows no request any more."""
        self.is_allowed = False
        self._stop_following()

    def begin_again(self) -> None:
        """Forgets what was learned about the speculator, and allows it to draft, as if it were new."""
        self._forget()
        self._planner.model_changed()
        self.is_allowed = True

    def decide(
        self,
        slots_B: np.ndarray,
        costs: StepCosts | None,
        draft_costs: DraftCosts | None,
        row_price: float,
        now_s: float,
    ) -> None:
        """Plans for the batch's requests, if the previous plan has expired.

        All tensor-parallel ranks must be given the same costs and the same clock.

        Args:
            slots_B: Slots of the batch's requests.
            costs: Measured costs of verifying; None while unknown.
            draft_costs: Measured costs of drafting; None while unknown.
            row_price: Tokens that the engine makes in the time of one more row.
            now_s: Seconds that the engine has worked.
        """
        was_dormant = self.is_dormant
        self._planner.observe_step(self.plan, len(slots_B), now_s)
        if was_dormant and not self.is_dormant:
            self._forget()  # the tasks may have changed meanwhile
        if self._planner.gives_up:
            self._stop_following()
        if not self.follows(slots_B):
            self.plan = DraftPlan(0)
            return
        outlook_4BK = np.ascontiguousarray(self._outlook.values[slots_B].astype(np.float64).transpose(1, 0, 2))
        self._spread.observe(outlook_4BK[2:])
        if not self._planner.should_plan(len(slots_B)):
            return
        found_BK, forecast_BK = outlook_4BK[0], outlook_4BK[1] * self._is_followed[slots_B, None]
        observed = PlanObservation(found_BK, forecast_BK, costs, draft_costs, row_price, self._spread.share_PKQ)
        self.plan = agreed(self._planner.plan(observed))

    def propose(self, *inputs: Any, **options: Any) -> None:
        """Drafts as deep as planned, or only reads. Takes the arguments of vLLM's `propose`."""
        batch, _, _, _, _, num_sampled_B, *_ = inputs
        found_B = self._board.tables.found_DB[self._index]
        num_requests, depth = batch.num_reqs, self.plan.depth
        self.seconds = 0.0
        if not self.follows(batch.idx_mapping_np):
            found_B[:num_requests] = 0
            return
        if compat.CHOOSES_ON_DEVICE:
            options["num_speculative_tokens"] = depth
        elif depth:
            depth = self._board.num_positions  # older versions draft all positions or none
        self._timer.start()
        self._only_reads = depth == 0  # false between steps, because CUDA graphs are captured with sampling
        drafts_BK = self._propose(*inputs, **options)
        self._only_reads = False
        self._timer.stop((batch.num_tokens, num_requests, depth))
        self._learn_times()
        self._board.tables.tokens_DBK[self._index, :num_requests] = drafts_BK
        if not self._has_score_gaps:
            self._board.tables.levels_DBK[self._index, :num_requests] = self._positions_K
        found_B[:num_requests] = ((num_sampled_B > 0) & self._follows_S[batch.idx_mapping]) * depth

    def refresh(self) -> None:
        """Brings what the next plan needs to the host. Call this after each choice of the board."""
        self._outlook.refresh()

    def _learn_times(self) -> None:
        """Learns from draftings that the device has completed: this one on a CPU, an earlier one on a GPU."""
        for (rows, requests, depth), seconds in self._timer.finished():
            self.seconds = seconds
            if depth:
                self.times.observe(rows, requests, depth, seconds)
            else:
                self.times.observe_reading(rows, seconds)

    def _stop_following(self) -> None:
        self._is_followed[:] = False
        self._follows_S.zero_()

    def _forget(self) -> None:
        """Forgets which of the speculator's drafts were right."""
        self._board.forget_drafter(self._index)
        self._spread.forget(1)
