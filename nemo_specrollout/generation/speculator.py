# SPDX-License-Identifier: Apache-2.0
"""Who drafts: all drafters of an engine behind vLLM's one speculator, on the device.

Shapes: S request slots, B requests of the batch, K draft positions; a slot is vLLM's own number for a request.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import ModelDrafterConfig, RemoteDrafterConfig, TextDrafterConfig
from nemo_specrollout.drafters import build_text_drafter
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Texts
from nemo_specrollout.drafters.board import DraftBoard
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.compat import to_device
from nemo_specrollout.generation.draft_sampling import POSITION_PRIORS, SHARED_NOISE_PRIORS
from nemo_specrollout.generation.head_rope import head_context
from nemo_specrollout.generation.identity import RequestIdentity
from nemo_specrollout.generation.model_drafter import ModelDrafter
from nemo_specrollout.generation.remote_drafts import build_remote_drafter, stream_request
from nemo_specrollout.scheduling.heads.context_canary import context_edges
from nemo_specrollout.scheduling.speculation.drafting_pause import build_pause


@dataclass(frozen=True)
class NewRequest:
    """A request that has just taken a slot. `prompt_length`: of its text, `token_ids`. `limit`: how long it may get.
    `stop_token_ids`: tokens that end it. `sampling_params`: vLLM's."""

    slot: int
    identity: RequestIdentity
    prompt_length: int
    token_ids: Sequence[int]
    limit: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling_params: Any = None

    @property
    def num_tokens(self) -> int:
        """How much is known of its text."""
        return len(self.token_ids)


class Drafting:
    """Stands in for the proposal of vLLM's speculator; owns the draft board and the drafters.

    A step reads: observe what came true, let each drafter propose, choose. A drafter with weights is vLLM's own speculator,
    whose tokens are one proposal among others.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any) -> None:
        speculator, device = runner.speculator, runner.device
        self._states, self._device = runner.req_states, device
        drafters = config.drafters
        model = next((i for i, d in enumerate(drafters) if isinstance(d, ModelDrafterConfig)), None)
        self._text = {
            i: build_text_drafter(d, runner.max_num_reqs, runner.max_model_len, runner.vocab_size, device)
            for i, d in enumerate(drafters)
            if isinstance(d, TextDrafterConfig)
        }
        self._remote = next((i for i, d in enumerate(drafters) if isinstance(d, RemoteDrafterConfig)), None)
        self.remote = None
        if config.remote is not None and compat.is_output_rank():
            self.remote = build_remote_drafter(config.remote, runner)
        priors = {"shared_noise": SHARED_NOISE_PRIORS, "greedy": POSITION_PRIORS}
        graded = (ModelDrafterConfig, RemoteDrafterConfig)
        priors_DE = np.array([priors[d.sampling] if isinstance(d, graded) else LEVEL_PRIORS for d in drafters])
        self.board = DraftBoard(
            [d.type for d in drafters], priors_DE, runner.max_num_reqs, runner.num_speculative_steps,
            _context_edges(config, runner.max_model_len), device, model, self._remote if model is None else model,
        )  # fmt: skip
        self._native_propose = speculator.propose
        self.model = None if model is None else ModelDrafter(config, runner, self.board, model)
        self.pause, self.rests = build_pause(config.budget), False
        self.num_idle = 0
        """Steps in a row without proposals."""
        self.row_price = 0.0
        """Tokens that the engine makes in the time of one more row, as of the last budget."""
        self._most_new, self.host_s, self.step = 0, 0.0, 0
        self.on_step: list[Callable[..., None]] = []
        """Told of each step: the batch, hidden states for the LM head, those of auxiliary layers, tokens rejected [B]."""
        speculator.propose = self.propose
        speculator.draft_token_confidence_probs = self.board.rates_BK
        # The board is what estimates here, not vLLM's estimator nor DSpark's confidence head. vLLM asks the speculator whether
        # its graphs are to hold drafts of any number; its speculator for text does not say.
        speculator.acceptance_estimator = None
        speculator.use_confidence_head = False
        speculator.enable_adaptive_verification = compat.adapts(runner)

    @property
    def draft_s(self) -> float:
        """Seconds of the last drafting with weights of which the time is known."""
        return 0.0 if self.model is None else self.model.seconds

    def open(self, requests: Sequence[NewRequest]) -> None:
        """Requests take their slots; called before the step that computes their first tokens."""
        slots = [r.slot for r in requests]
        slots_N = to_device(slots, np.int64, self._device)
        limits = [r.limit if r.identity.speculate else 0 for r in requests]
        self.board.open(slots_N, to_device(limits, np.int32, self._device))
        for drafter in self._text.values():
            starts = [drafter.start_of(r.identity, r.prompt_length, r.num_tokens) for r in requests]
            salts, learned = zip(*starts, strict=True)
            drafter.open(slots_N, to_device(salts, np.int64, self._device), to_device(learned, np.int32, self._device))
        if self.model is not None:
            self.model.open(slots, slots_N, [r.identity.speculate for r in requests])
        if self.remote is not None:
            self.remote.open(
                [
                    stream_request(r.slot, r.identity, r.sampling_params, limit, r.token_ids)
                    for r, limit in zip(requests, limits, strict=True)
                ]
            )
        self._most_new = max(self._most_new, *(r.num_tokens for r in requests))
        self.pause.requests_arrived(len(requests))

    def budgeted(self, num_drafts: int, row_price: float) -> None:
        """The step verifies `num_drafts`; in the time of one more row the engine makes `row_price` tokens."""
        self.pause.drafts_decided(num_drafts)
        self.row_price = row_price

    def close(self, slots: Sequence[int]) -> None:
        """The requests of `slots` are done, or put aside."""
        if self.model is not None:
            self.model.close(slots)
        if self.remote is not None:
            self.remote.close(slots)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """vLLM's hook: draft tokens for the next step, int64 [B, K]."""
        inputs = (
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
            *args,
        )  # fmt: skip
        if kwargs.get("dummy_run"):
            return self._native_propose(*inputs, **kwargs)
        started = time.perf_counter()
        slots_B, states, board = input_batch.idx_mapping, self._states, self.board
        num_requests = input_batch.num_reqs
        total_len_S, token_ids_SL = states.total_len.gpu, states.all_token_ids.gpu
        for listener in self.on_step:
            listener(input_batch, last_hidden_states, aux_hidden_states, num_rejected)
        self._most_new += board.num_positions + 1
        has_readers = self.model is not None and self.model.follows(input_batch.idx_mapping_np)
        self.rests = self.pause.should_pause(num_requests) and not has_readers
        is_idle = kwargs.get("num_speculative_tokens") == 0 and not has_readers
        self.num_idle = self.num_idle + 1 if is_idle else 0
        if self.num_idle <= 1:
            board.observe(slots_B, num_sampled, num_rejected, total_len_S, token_ids_SL, self.step)
        if is_idle:
            if self.num_idle == 1:
                board.rates_BK.zero_()
            self.host_s = time.perf_counter() - started
            return board.drafts_BK[:num_requests]
        most_new, self._most_new = self._most_new, 0
        rates_of = list(board.level_rates_DE) if self._text else []
        for i, drafter in self._text.items():
            drafter.propose(Texts(slots_B, total_len_S, token_ids_SL), most_new, rates_of[i], board.proposals_of(i))
        if self.remote is not None:
            assert self._remote is not None
            self.remote.propose(slots_B, total_len_S, token_ids_SL, *board.proposals_of(self._remote))
        native_s = 0.0
        if self.model is not None:
            asked = time.perf_counter()
            self.model.propose(input_batch, num_sampled, *inputs, **kwargs)
            native_s = time.perf_counter() - asked
        board.choose(slots_B, total_len_S, self.row_price)
        compat.as_the_first_rank(board.drafts_BK[:num_requests], board.rates_BK[:num_requests])
        if self.model is not None:
            self.model.refresh()
        self.host_s = time.perf_counter() - started - native_s
        return board.drafts_BK[:num_requests]


def _context_edges(config: SpecrolloutConfig, longest: int) -> list[int]:
    return context_edges(longest, head_context(config.head_folder, longest)).tolist()
