# SPDX-License-Identifier: Apache-2.0
"""Drafting: all drafters of an engine in the place of vLLM's one speculator, on the device.

Shapes: B requests of the batch, D drafters, E evidence levels, K draft positions, L longest text, N new requests, S request
slots; a slot is vLLM's own number for a request.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import ModelDrafterConfig, RemoteDrafterConfig, TextDrafterConfig
from nemo_specrollout.drafters import build_text_drafter
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.compat import to_device
from nemo_specrollout.generation.draft_sampling import POSITION_PRIORS, SHARED_NOISE_PRIORS
from nemo_specrollout.generation.head_rope import head_context
from nemo_specrollout.generation.model_drafter import ModelDrafter
from nemo_specrollout.generation.ranks import copy_first_rank, is_output_rank
from nemo_specrollout.generation.remote_drafts import build_remote_drafter, stream_request
from nemo_specrollout.generation.runner_binding import NewRequest
from nemo_specrollout.scheduling.heads.canary import context_edges
from nemo_specrollout.scheduling.speculation.budget import build_pause

StepListener = Callable[[Any, torch.Tensor, list[torch.Tensor] | None, torch.Tensor], None]
"""Is told about each step: batch, hidden states for the LM head, hidden states of auxiliary layers, tokens rejected [B]."""


class Drafting:
    """Replaces the proposal of vLLM's speculator. Owns the draft board and the drafters.

    In each step it observes which drafts were right, lets each drafter propose, and chooses a proposal for each request. A
    drafter with weights is vLLM's own speculator, whose proposal is one among others.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any) -> None:
        self._states, self._device = runner.req_states, runner.device
        drafters = config.drafters
        model = next((i for i, d in enumerate(drafters) if isinstance(d, ModelDrafterConfig)), None)
        self._remote_index = next((i for i, d in enumerate(drafters) if isinstance(d, RemoteDrafterConfig)), None)
        self._text = {
            i: build_text_drafter(d, runner.max_num_reqs, runner.max_model_len, runner.vocab_size, runner.device)
            for i, d in enumerate(drafters)
            if isinstance(d, TextDrafterConfig)
        }
        self.remote = None
        """The remote drafters; None without them, and on a rank whose drafts are not used."""
        if config.remote is not None and is_output_rank():
            self.remote = build_remote_drafter(config.remote, runner)
        edges = _context_edges(config, runner.max_model_len)
        self.board = DraftBoard(
            [d.type for d in drafters],
            _level_priors(config),
            BoardShape(runner.max_num_reqs, runner.num_speculative_steps, edges),
            runner.device,
            model,
            witness=self._remote_index if model is None else model,
        )
        self._native_propose = runner.speculator.propose
        self.model = None if model is None else ModelDrafter(config, runner, self.board, model)
        """The drafter with weights; None without one."""
        self._pause = build_pause(config.budget)
        self.is_paused = False
        """True if the next steps need no drafts."""
        self.num_idle = 0
        """Steps in a row without proposals."""
        self.row_price = 0.0
        """Tokens that the engine makes in the time of one more row, as of the last budget."""
        self.step = 0
        """Number of the engine's step, set by `StepAccounts`."""
        self.host_s = 0.0
        """Seconds of host work in the last step, without a drafter with weights."""
        self._most_new = 0
        self.on_step: list[StepListener] = []
        self._replace_speculator(runner)

    def _replace_speculator(self, runner: Any) -> None:
        speculator = runner.speculator
        speculator.propose = self.propose
        speculator.draft_token_confidence_probs = self.board.tables.rates_BK
        # The board estimates acceptance here, instead of vLLM's estimator and DSpark's confidence head.
        speculator.acceptance_estimator = None
        speculator.use_confidence_head = False
        # vLLM asks the speculator whether graphs must hold any number of drafts. Its text speculator has no such attribute.
        speculator.enable_adaptive_verification = compat.adapts(runner)

    @property
    def draft_s(self) -> float:
        """Seconds of the latest drafting with weights whose time is known."""
        return 0.0 if self.model is None else self.model.seconds

    def open(self, requests: Sequence[NewRequest]) -> None:
        """Starts drafting for requests that took slots. Call this before the step that computes their first tokens."""
        slots = [r.slot for r in requests]
        slots_N = to_device(slots, np.int64, self._device)
        limits = [r.limit if r.identity.speculate else 0 for r in requests]
        self.board.open(slots_N, to_device(limits, np.int32, self._device))
        for drafter in self._text.values():
            starts = [drafter.start_of(r.identity, r.num_tokens) for r in requests]
            salts, learned = zip(*starts, strict=True)
            drafter.open(slots_N, to_device(salts, np.int64, self._device), to_device(learned, np.int32, self._device))
        if self.model is not None:
            self.model.open(slots, slots_N, [r.identity.speculate for r in requests])
        if self.remote is not None:
            self.remote.open([stream_request(r, limit) for r, limit in zip(requests, limits, strict=True)])
        self._most_new = max(self._most_new, *(r.num_tokens for r in requests))
        self._pause.requests_arrived(len(requests))

    def close(self, slots: Sequence[int]) -> None:
        """Stops drafting for the requests in `slots`, which have ended or are preempted."""
        if self.model is not None:
            self.model.close(slots)
        if self.remote is not None:
            self.remote.close(slots)

    def budgeted(self, num_drafts: int, row_price: float) -> None:
        """Notes the budget of a step: drafts verified, and tokens that the engine makes in the time of one more row."""
        self._pause.drafts_decided(num_drafts)
        self.row_price = row_price

    def propose(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Returns draft tokens for the next step, int64 [B, K]. Takes the arguments of vLLM's `propose`."""
        if options.get("dummy_run"):  # only then does vLLM pass its inputs as keywords
            return self._native_propose(*inputs, **options)
        started = time.perf_counter()
        batch, _, _, final_hidden, aux_hidden, num_sampled_B, num_rejected_B, *_ = inputs
        board = self.board
        for listener in self.on_step:
            listener(batch, final_hidden, aux_hidden, num_rejected_B)
        self._most_new += board.num_positions + 1
        has_readers = self.model is not None and self.model.follows(batch.idx_mapping_np)
        self.is_paused = self._pause.should_pause(batch.num_reqs) and not has_readers
        is_idle = options.get("num_speculative_tokens") == 0 and not has_readers
        self.num_idle = self.num_idle + 1 if is_idle else 0
        if self.num_idle <= 1:
            board.observe(self._texts_of(batch), num_sampled_B, num_rejected_B, self.step)
        if self.num_idle == 1:
            board.tables.rates_BK.zero_()
        native_s = 0.0 if is_idle else self._draft(batch, inputs, options)
        self.host_s = time.perf_counter() - started - native_s
        return board.tables.drafts_BK[: batch.num_reqs]

    def _texts_of(self, batch: Any) -> Texts:
        return Texts(batch.idx_mapping, self._states.total_len.gpu, self._states.all_token_ids.gpu)

    def _draft(self, batch: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> float:
        """Lets every drafter propose, and chooses. Returns the host's seconds in a drafter with weights."""
        board, texts = self.board, self._texts_of(batch)
        most_new, self._most_new = self._most_new, 0
        rates = list(board.level_rates_DL) if self._text else []
        for i, drafter in self._text.items():
            drafter.propose(texts, most_new, rates[i], board.proposals_of(i))
        if self.remote is not None:
            assert self._remote_index is not None
            self.remote.propose(texts, board.proposals_of(self._remote_index))
        native_s = 0.0
        if self.model is not None:
            started = time.perf_counter()
            self.model.propose(*inputs, **options)
            native_s = time.perf_counter() - started
        board.choose(texts, self.row_price)
        copy_first_rank(board.tables.drafts_BK[: batch.num_reqs], board.tables.rates_BK[: batch.num_reqs])
        if self.model is not None:
            self.model.refresh()
        return native_s


def _level_priors(config: SpecrolloutConfig) -> np.ndarray:
    """Returns the acceptance rates assumed for the evidence levels of each drafter, [D, E]."""
    priors = {"shared_noise": SHARED_NOISE_PRIORS, "greedy": POSITION_PRIORS}
    has_weights = (ModelDrafterConfig, RemoteDrafterConfig)
    return np.array([priors[d.sampling] if isinstance(d, has_weights) else LEVEL_PRIORS for d in config.drafters])


def _context_edges(config: SpecrolloutConfig, longest: int) -> list[int]:
    return context_edges(longest, head_context(config.head_folder, longest)).tolist()
