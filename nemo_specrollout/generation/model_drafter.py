# SPDX-License-Identifier: Apache-2.0
"""A drafter with weights: vLLM's own speculator (EAGLE-3, draft model, MTP, DFlash, DSpark), asked where that pays.

The networks, their weights and their KV cache are vLLM's. Ours are the noise that they sample with, how deep they draft, and
that they need not run while no request gains by it.

Shapes: S request slots, B requests of the batch, K draft positions.
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
from nemo_specrollout.generation.block_drafts import draft_only_on_demand, share_noise_of_block
from nemo_specrollout.generation.compat import agreed, to_device
from nemo_specrollout.generation.draft_sampling import share_noise
from nemo_specrollout.generation.host_copy import HostCopy
from nemo_specrollout.generation.stage_timer import StageTimer
from nemo_specrollout.scheduling.speculation.draft_plan import DraftPlan, PlanObservation, build_planner
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts, DraftTimes
from nemo_specrollout.scheduling.speculation.step_time import StepCosts
from nemo_specrollout.scheduling.speculation.survival_spread import SurvivalSpread


class ModelDrafter:
    """Lets vLLM's speculator draft or only read, by plan; owns the plan, and what drafting takes.

    A request is followed from its first token on, or never: what the speculator has not read leaves a gap in its KV cache.
    Where no request of the batch is followed, the speculator does not run.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any, board: DraftBoard, index: int) -> None:
        """`index`: the drafter's place on the board."""
        self._board, self._index, self._speculator = board, index, runner.speculator
        self._propose = runner.speculator.propose
        drafter = config.model_drafter
        assert drafter is not None
        self._shares_noise, self._only_reads = drafter.sampling == "shared_noise", False
        self._grades_tokens = self._shares_noise and compat.HAS_MARGINS
        self._set_up_sampling(isinstance(drafter, BlockDrafterConfig))
        num_slots, num_positions = board.limit_S.shape[0], board.num_positions
        self._positions_K = torch.arange(num_positions, device=runner.device).clamp(max=NUM_LEVELS - 1).to(torch.int8)
        self._follows_S = torch.zeros(num_slots, dtype=torch.bool, device=runner.device)
        self._is_followed = np.zeros(num_slots, np.bool_)
        self._outlook = HostCopy(board.outlook_S4K)
        self._spread = SurvivalSpread(2, num_positions)
        self._timer, self.times = StageTimer(runner.device), DraftTimes()
        self._planner = build_planner(config.budget)
        self.plan = DraftPlan(0)
        self.is_allowed = True
        """Whether it may draft; a canary that finds it dead says no."""
        self.seconds = 0.0
        """Of the last drafting of which the time is known."""

    def _set_up_sampling(self, drafts_blocks: bool) -> None:
        levels_BK = self._board.levels_DBK[self._index]
        if drafts_blocks:
            compat.verify_block_speculator(self._speculator)
            compat.norm_context_by_layer(self._speculator)
            draft_only_on_demand(self._speculator, lambda: self._only_reads)
        if self._shares_noise and drafts_blocks:
            share_noise_of_block(self._speculator, levels_BK)
        elif self._shares_noise:
            share_noise(self._speculator, levels_BK, lambda: self._only_reads)

    @property
    def is_dormant(self) -> bool:
        """Whether requests that come get none of its drafts, because they would not pay."""
        return not self._planner.follows

    def follows(self, slots_B: np.ndarray) -> bool:
        """Whether any request in these slots is followed: the speculator must read what it is given in each step."""
        return bool(self._is_followed[slots_B].any())

    def open(self, slots: Sequence[int], slots_N: torch.Tensor, speculate: Sequence[bool]) -> None:
        """Requests take `slots`, which are `slots_N` on the device; only those that `speculate` may be followed."""
        may_follow = self._planner.follows and self.is_allowed
        follows_N = [may_follow and speculates for speculates in speculate]
        self._is_followed[list(slots)] = follows_N
        self._follows_S[slots_N] = to_device(follows_N, np.bool_, self._follows_S.device)

    def close(self, slots: Sequence[int]) -> None:
        """The requests of `slots` are done, or put aside."""
        self._planner.observe_ended(int(self._is_followed[list(slots)].sum()))

    def forbid(self) -> None:
        """Stops all drafting: the drafter follows no request any more."""
        self.is_allowed = False
        self._let_go()

    def _let_go(self) -> None:
        """Stops following the running requests."""
        self._is_followed[:] = False
        self._follows_S.zero_()

    def begin_again(self) -> None:
        """Forgets what was learned of the speculator, allows it to draft, and judges it like a new one."""
        self._forget()
        self._planner.model_changed()
        self.is_allowed = True

    @property
    def is_weighed(self) -> bool:
        """Returns whether the planner asks the speculator for drafts only where they pay."""
        return self._planner.weighs_model

    def _forget(self) -> None:
        """Forgets how the speculator's drafts came out."""
        self._board.forget_drafter(self._index)
        self._spread.forget(1)

    def decide(
        self,
        slots_B: np.ndarray,
        costs: StepCosts | None,
        draft_costs: DraftCosts | None,
        row_price: float,
        now_s: float,
    ) -> None:
        """Plans for the batch's requests in `slots_B`, where the last plan no longer holds. All tensor-parallel ranks are
        given the same costs and the same clock, `now_s`."""
        was_dormant = self.is_dormant
        self._planner.observe_step(self.plan, len(slots_B), now_s)
        if was_dormant and not self.is_dormant:
            self._forget()  # other tasks may have come
        if self._planner.gives_up:
            self._let_go()
        if not self.follows(slots_B):
            self.plan = DraftPlan(0)
            return
        outlook_4BK = np.ascontiguousarray(self._outlook.values[slots_B].astype(np.float64).transpose(1, 0, 2))
        self._spread.observe(outlook_4BK[2:])
        if not self._planner.should_plan(len(slots_B)):
            return
        found_BK, forecast_BK = outlook_4BK[0], outlook_4BK[1] * self._is_followed[slots_B, None]
        observed = PlanObservation(found_BK, forecast_BK, costs, draft_costs, now_s, row_price, self._spread.share_PKQ)
        self.plan = agreed(self._planner.plan(observed))

    def propose(self, batch: Any, num_sampled: torch.Tensor, *inputs: Any, **options: Any) -> None:
        """Drafts as deep as is planned, or only reads; `inputs` and `options` are those of vLLM's `propose`."""
        found_B = self._board.found_DB[self._index]
        num_requests, depth = batch.num_reqs, self.plan.depth
        self.seconds = 0.0
        if not self.follows(batch.idx_mapping_np):
            found_B[:num_requests] = 0
            return
        if compat.CHOOSES_ON_DEVICE:
            options["num_speculative_tokens"] = depth
        elif depth:
            depth = self._board.num_positions  # it drafts all or none
        self._timer.start()
        self._only_reads = depth == 0  # and not outside a step: CUDA graphs are captured with sampling
        drafts_BK = self._propose(*inputs, **options)
        self._only_reads = False
        self._timer.stop((batch.num_tokens, num_requests, depth))
        self._learn_times()
        self._board.tokens_DBK[self._index, :num_requests] = drafts_BK
        if not self._grades_tokens:
            self._board.levels_DBK[self._index, :num_requests] = self._positions_K
        found_B[:num_requests] = ((num_sampled > 0) & self._follows_S[batch.idx_mapping]) * depth

    def _learn_times(self) -> None:
        """What the draftings took that the device is done with by now: this one's on a CPU, an earlier one's on a GPU."""
        for (rows, requests, depth), seconds in self._timer.finished():
            self.seconds = seconds
            if depth:
                self.times.observe(rows, requests, depth, seconds)
            else:
                self.times.observe_reading(rows, seconds)

    def refresh(self) -> None:
        """Brings what the next plan is made by to the host; after each choice of the board."""
        self._outlook.refresh()
