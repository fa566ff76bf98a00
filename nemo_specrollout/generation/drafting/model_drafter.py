# SPDX-License-Identifier: Apache-2.0
"""The drafter with weights, which runs vLLM's own speculator (EAGLE-3, draft model, MTP, DFlash or DSpark) if it pays.

The network, its weights and its KV cache are vLLM's. This module decides with which noise the network samples, how many tokens
it drafts, and in which engine steps it runs at all. EAGLE-3, draft models and MTP draft one position after another. DFlash and
DSpark draft a block of positions in one forward pass. DFlash samples all positions of a block at once. DSpark samples them in
sequence, because each one depends on the token before it.

Shapes: B requests of the batch, K draft positions, N new requests, R rows of logits, S request slots, V vocabulary of the
drafter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import BlockDrafterConfig
from nemo_specrollout.drafters.base import NOT_FOLLOWED, NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.board import DraftBoard
from nemo_specrollout.drafters.participant import Drafter, DraftStep, Put
from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.transfers import StageTimer
from nemo_specrollout.speculation.policy import SpeculationPolicy

_POSITION_OFFSET = 0 if compat.takes(DraftModelSpeculator.sample_draft, "sample_src_positions") else 1
"""Number to add to the position that vLLM passes to `sample_draft`, to get the position on which the noise depends."""


class ModelDrafter(Drafter):
    """Lets vLLM's speculator draft, or only read the new tokens, as the `SpeculationPolicy` plans.

    Owns the record of which requests the speculator follows. The speculator follows a request from the first token on or not
    at all, because tokens that it has not read would leave a gap in its KV cache. It runs only in engine steps in which it
    follows a request.
    """

    has_weights = True

    def __init__(
        self,
        config: SpecrolloutConfig,
        runner: Any,
        board: DraftBoard,
        policy: Callable[[], SpeculationPolicy],
        depth: DraftDepth,
    ) -> None:
        """`policy` returns the engine's present `SpeculationPolicy`. `depth` asks vLLM's speculator for drafts."""
        self.board = board
        self._index = board.model
        self._speculator = runner.speculator
        self._depth = depth
        drafter = config.model_drafter
        assert drafter is not None
        shares_noise = drafter.sampling == "shared_noise"
        self._only_reads = False
        levels_BK = board.tables.levels_DBK[self._index]
        if isinstance(drafter, BlockDrafterConfig):
            patch_block_speculator(self._speculator, lambda: self._only_reads)
            if shares_noise:
                share_noise_of_block(self._speculator, levels_BK)
        elif shares_noise:
            share_noise(self._speculator, levels_BK, lambda: self._only_reads)
        self._has_score_gaps = shares_noise
        num_slots = board.tables.limit_S.shape[0]
        num_positions = board.num_positions
        self._positions_K = torch.arange(num_positions, device=runner.device).clamp(max=NUM_LEVELS - 1).to(torch.int8)
        self._is_unfollowed_S = torch.ones(num_slots, dtype=torch.bool, device=runner.device)
        """On the device, true for each slot whose request the speculator does not follow."""
        self._is_followed = np.zeros(num_slots, np.bool_)
        """On the host, true for each slot whose request the speculator follows."""
        self._policy = policy
        self._timer = StageTimer(runner.device)
        self.depth = 0
        """Number of tokens that are to be drafted for each request. It is 0 if the speculator should only read the new
        tokens."""
        self._was_dormant = False
        self.is_allowed = True
        """Whether the drafter may draft. If a canary finds that the drafter is broken, it calls `forbid`, which sets this to
        false."""

    @property
    def least_depth(self) -> int:
        """The smallest number of tokens above zero that the speculator can draft for each request."""
        return self._depth.least

    @property
    def is_dormant(self) -> bool:
        """Whether the drafter follows no new requests, because its drafts would not pay."""
        return self._policy().is_dormant

    def num_followed(self, slots_B: np.ndarray) -> int:
        """Returns how many of the requests in these slots the speculator follows, so that it must read their new tokens."""
        return int(np.count_nonzero(self._is_followed[slots_B]))

    def open(self, slots: torch.Tensor, requests: Sequence[NewRequest], put: Put) -> None:
        """Starts to follow new requests that may have drafts, unless the drafter is dormant or was stopped by `forbid`."""
        if self._was_dormant and not self.is_dormant:
            self.board.forget_drafter(self._index)  # the tasks may have changed in the meantime
        self._was_dormant = self.is_dormant
        follows_N = [self.is_allowed and not self.is_dormant and r.identity.speculate for r in requests]
        self._is_followed[[r.slot for r in requests]] = follows_N
        self._is_unfollowed_S[slots] = put([not follows for follows in follows_N], np.bool_)

    def forbid(self) -> None:
        """Stops the drafter. The speculator follows no request any more until `begin_again` is called."""
        self.is_allowed = False
        self._stop_following()

    def begin_again(self) -> None:
        """Lets the drafter draft again, as if it were new. What was learned about its drafts is forgotten."""
        self.board.forget_drafter(self._index)
        self._policy().model_changed()
        self.is_allowed = True

    def timed(self) -> list[tuple[tuple[int, int, int], float]]:
        """Returns the times of the speculator's passes in pure decode steps that became known since the last call.

        Each entry has a tuple and the seconds of the pass. The tuple has the number of tokens that the speculator has read,
        the number of requests, and the number of tokens that were drafted for each request.
        """
        return self._timer.finished()

    def plan(self, depth: int) -> None:
        """Sets how many tokens the speculator drafts for each request.

        If the drafter has become dormant, it also stops following all requests.
        """
        self.depth = depth
        if self.is_dormant:
            self._was_dormant = True
            if self._is_followed.any():
                self._stop_following()

    def observe(self, step: DraftStep) -> None:
        """Keeps the inputs that vLLM passes to its speculator in this engine step, because `propose` needs them."""
        self._step = step

    def propose(self, texts: Texts, out: Proposals) -> None:
        """Lets the speculator draft the planned number of tokens. If that is 0, the speculator only reads the new tokens."""
        inputs = self._step.inputs
        batch, _, _, _, _, num_sampled_B, *_ = inputs
        found_B = out.found_B
        num_requests = batch.num_reqs
        if not self._is_followed[batch.idx_mapping_np].any():
            found_B[:num_requests] = NOT_FOLLOWED
            return
        self._timer.start()
        self._only_reads = self.depth == 0  # false at other times, so that vLLM captures CUDA graphs with the sampling
        drafts_BK, depth = self._depth.propose(inputs, self._step.options, self.depth)
        self._only_reads = False
        if batch.num_tokens == len(batch.logits_indices):  # a pure decode step
            self._timer.stop((batch.num_tokens, num_requests, depth))
        out.tokens_BK[:num_requests] = drafts_BK
        if not self._has_score_gaps:
            out.levels_BK[:num_requests] = self._positions_K
        drafted_B = (num_sampled_B > 0) * depth  # nothing is drafted in the middle of a prompt
        found_B[:num_requests] = drafted_B.masked_fill_(self._is_unfollowed_S[batch.idx_mapping], NOT_FOLLOWED)

    def _stop_following(self) -> None:
        self._is_followed[:] = False
        self._is_unfollowed_S.fill_(True)


# Patch points of vLLM's speculators. They let the speculators sample with shared noise and draft only on demand.


def share_noise(
    speculator: Any, levels_RK: torch.Tensor, only_reads: Callable[[], bool], column: torch.Tensor | None = None
) -> None:
    """Makes a speculator sample draft tokens with the noise with which the policy will sample at the same positions.

    The speculator then also writes the evidence levels of its drafts to `levels_RK`. It writes to the column with the index
    `column`, or by default to the column of the draft position. It samples nothing while `only_reads()` is true.
    """

    def sample_draft(
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        if only_reads():
            return torch.zeros(len(hidden_states), dtype=torch.int64, device=hidden_states.device)
        logits, token_ids = _draft_logits(speculator, hidden_states, spec_step_idx)
        noise_positions = positions + _POSITION_OFFSET if _POSITION_OFFSET else positions
        rows = (logits, idx_mapping, temperature, seeds, noise_positions)
        return sample_with_score_gap(*rows, levels_RK, draft_step if column is None else column, token_ids)

    speculator.sample_draft = sample_draft


def share_noise_of_block(speculator: Any, levels_BK: torch.Tensor) -> None:
    """Makes a DFlash or DSpark speculator sample with the noise of the policy, and write evidence levels to `levels_BK`."""
    if not isinstance(speculator, DSparkSpeculator):
        # Row b * K + k of what DFlash samples is draft k of request b.
        first_column = torch.zeros((), dtype=torch.int32, device=levels_BK.device)
        share_noise(speculator, levels_BK.view(-1, 1), lambda: False, first_column)
        return
    dspark: Any = speculator

    # DSpark passes the position of the token to be drafted, but the noise depends on the position before it.
    def sample_logits(logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int) -> torch.Tensor:
        return sample_with_score_gap(
            logits,
            idx_map,
            dspark.temperature,
            dspark.seeds,
            sample_pos - 1,
            levels_BK,
            dspark._step_cols[step],
            _reduced_vocabulary(dspark.model),
        )

    if not hasattr(dspark, "_sample_logits"):  # before 0.28
        dspark._sample_sequential = lambda *inputs: sample_in_sequence(dspark, sample_logits, *inputs)
    dspark._sample_logits = sample_logits
    dspark.model.sample_sequential = None  # vLLM 0.33 lets a model sample in kernels of its own, with other noise


def sample_in_sequence(
    dspark: Any, sample_logits: Callable[..., torch.Tensor], num_reqs: int, head_hidden: torch.Tensor
) -> None:
    """Samples the positions of a DSpark block one after another, as vLLM did before 0.28, but with `sample_logits`.

    DSpark's Markov head makes each token's logits depend on the token before it. `head_hidden` has the outputs of the forward
    pass over the block.
    """
    model = dspark.model
    num_rows = num_reqs * dspark.num_speculative_steps
    logits_BKV = model.compute_draft_logits(head_hidden[dspark.sample_indices[:num_rows]]).view(
        num_reqs, dspark.num_speculative_steps, -1
    )
    slots_BK = dspark.sample_idx_mapping[:num_rows].view(num_reqs, -1)
    positions_BK = dspark.sample_pos[:num_rows].view(num_reqs, -1)
    last_B = dspark.input_buffers.input_ids[dspark._anchor_idx[:num_reqs]]
    for k in range(dspark.num_speculative_steps):
        logits_BV = logits_BKV[:, k] + model.markov_bias(model.markov_embed(last_B))
        last_B = sample_logits(logits_BV, slots_BK[:, k], positions_BK[:, k], k)
        dspark.draft_tokens[:num_reqs, k] = last_B


def patch_block_speculator(dflash: Any, only_reads: Callable[[], bool]) -> None:
    """Makes a DFlash or DSpark speculator skip its forward pass over the block while `only_reads()` is true.

    The speculator stores the keys and values of the context before that pass, so it still follows the requests. A pass that is
    replayed as a CUDA graph is not skipped.

    Raises ValueError for variants of DFlash that sample in kernels of their own.
    """
    if type(dflash)._generate_draft not in (DFlashSpeculator._generate_draft, DSparkSpeculator._generate_draft):
        raise ValueError(
            f"specrollout.drafters: vLLM {compat.VLLM_VERSION} drafts with {type(dflash).__name__} for this checkpoint, "
            "which samples in kernels of its own; name the checkpoint of a plain DFlash or DSpark"
        )
    generate = dflash._generate_draft

    def generate_on_demand(*args: Any, **kwargs: Any) -> None:
        if not only_reads():
            generate(*args, **kwargs)

    dflash._generate_draft = generate_on_demand


def _draft_logits(speculator: Any, hidden_states: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the logits for draft tokens, and the policy's token id for each column of the logits.

    The ids are None if the drafter has the policy's whole vocabulary, so that column v is token v.
    """
    model: Any = getattr(speculator, "model", None)
    token_ids = _reduced_vocabulary(model)
    if token_ids is not None:
        return model.logits_processor(model.lm_head, hidden_states), token_ids
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden_states, step), None
    return speculator.model.compute_logits(hidden_states), None


def _reduced_vocabulary(model: Any) -> torch.Tensor | None:
    """Returns the policy's token id for each token of the drafter, int64 [V], ascending. None if the ids are the same."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets
