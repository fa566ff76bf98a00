# SPDX-License-Identifier: Apache-2.0
"""The draft router: all drafters of an engine in the place of vLLM's one speculator, on the device.

Shapes: B requests of the batch, D drafters, E evidence levels, K draft positions, N new requests, S request slots; a slot is
vLLM's own number for a request.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.worker.gpu import buffer_utils

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    REMOTE_DRAFTER,
    ModelDrafterConfig,
    RemoteDrafterConfig,
    TextDrafterConfig,
    shared_secret,
)
from nemo_specrollout.drafters.ahead import AHEAD_PRIORS, AheadText
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.text import build_text_drafter
from nemo_specrollout.drafters.text_drafter import TextDrafter
from nemo_specrollout.generation.draft_sampling import POSITION_PRIORS, SHARED_NOISE_PRIORS
from nemo_specrollout.generation.feature_capture import FeatureCapture
from nemo_specrollout.generation.head_monitor import HeadMonitor
from nemo_specrollout.generation.head_service import HeadService
from nemo_specrollout.generation.model_drafter import ModelDrafter, SharedCosts
from nemo_specrollout.generation.requests import NewRequest
from nemo_specrollout.generation.step_outputs import WatchedOutput, mark_paused
from nemo_specrollout.generation.transfers import copy_first_rank, is_output_rank, to_device
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest
from nemo_specrollout.remote.verifier.draft_stream import NOWHERE, DraftStream, RemoteDrafter
from nemo_specrollout.scheduling.speculation.budget import BudgetPolicy, DraftingPause, build_budget, build_pause
from nemo_specrollout.storage.model_folder import stop_token_ids, tokenizer_fingerprint
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog


class DraftRouter:
    """Replaces the proposal of vLLM's speculator. Owns the draft board, the drafters and the budget of drafts.

    Each step it observes which drafts were right, lets each drafter propose, and chooses a proposal for each request. vLLM's
    own speculator is one of the drafters if the block names a drafter with weights.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any) -> None:
        self._states, self._device, self._native_propose = runner.req_states, runner.device, runner.speculator.propose
        sizes = (runner.max_num_reqs, runner.max_model_len, runner.vocab_size, runner.device)
        text = ((i, d) for i, d in enumerate(config.drafters) if isinstance(d, TextDrafterConfig))
        self.use_text_drafters({i: build_text_drafter(d, *sizes) for i, d in text})
        self.board = _draft_board(config, runner)
        self.samples = SampleStatsLog(self.board.tables.request_S2, begins_again=config.runs_ahead)
        self.remote: RemoteDrafter | None = None
        """None without remote drafters, and on a rank whose drafts are not used."""
        self.model: ModelDrafter | None = None
        """None without a drafter with weights, like `head` and `monitor`."""
        self.head: HeadService | None = None
        self.monitor: HeadMonitor | None = None
        self.capture: FeatureCapture | None = None
        """None unless features are captured for a head's training, and on a rank whose drafts are not used."""
        if config.remote is not None and is_output_rank():
            self.remote = _remote_drafter(config.remote, runner)
        if config.model_drafter is not None:
            self.model = ModelDrafter(config, runner, self.board)
            refresh = config.draft_refresh
            self.head = HeadService(runner, self.model, self.samples, config.head_folder)
            max_age = None if refresh is None else refresh.max_age_alarm
            self.monitor = HeadMonitor(self.head, self.model, self.samples, max_age)
            if refresh is not None and is_output_rank():
                self.capture = FeatureCapture(runner, refresh.rollout_capture_share)
        self.use_budget(build_budget(config.budget), build_pause(config.budget))
        self.costs = SharedCosts()
        """Measured costs, set by `StepAccounts`."""
        self._row_price = 0.0
        """Tokens that the engine makes in the time of one more row, at the latest budget."""
        self.stands_by = False
        """True while vLLM warms up: its own speculator proposes."""
        self.is_paused = False
        """True if the next steps need no drafts."""
        self.num_idle = 0
        """Steps in a row without proposals."""
        self._step = self._most_new = 0
        self.host_s = 0.0
        """Seconds of host work in the last step, without a drafter with weights."""
        _replace_speculator(runner, self)

    def use_text_drafters(self, drafters: dict[int, TextDrafter]) -> None:
        """Lets these drafters propose, by their number on the board. They must know the requests that are open."""
        self._text = drafters
        lookups = {i: drafter.lookup(i) for i, drafter in drafters.items()}
        self._lookups = [lookup for lookup in lookups.values() if lookup is not None]
        self._without_lookup = [i for i, lookup in lookups.items() if lookup is None]

    def use_budget(self, policy: BudgetPolicy, pause: DraftingPause) -> None:
        """Lets these decide how many drafts a step verifies, and when drafting pauses."""
        self._policy, self._pause = policy, pause

    def warm_up(self) -> None:
        """Takes a step of no request, so that none of its kernels is compiled in a rollout."""
        slots_B = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        none_B = torch.zeros(1, dtype=torch.int32, device=self._device)
        texts = Texts(slots_B, self._states.total_len.gpu, self._states.all_token_ids.gpu)
        self.board.observe(texts, none_B, none_B, 0, self._lookups, max_new=1)
        batch = SimpleNamespace(num_reqs=1, idx_mapping_np=np.array([-1]))
        self._draft(texts, (batch, None, None, None, None, none_B), {})

    def open(self, requests: Sequence[NewRequest]) -> None:
        """Starts drafting for requests that took slots. Call this before the first tokens of the requests are sampled."""
        slots = [r.slot for r in requests]
        put = partial(to_device, device=self._device)
        slots_N = put(slots, np.int64)
        limits = [r.limit if r.identity.speculate else 0 for r in requests]
        self.board.open(slots_N, put(limits, np.int32))
        for drafter in self._text.values():
            drafter.open(slots_N, requests, put)
        if self.model is not None:
            self.model.open(slots, slots_N, [r.identity.speculate for r in requests])
        if self.remote is not None:
            self.remote.open([_stream_request(r, limit) for r, limit in zip(requests, limits, strict=True)])
        for r in requests:
            self.samples.open(r.slot, r.identity.seed, r.prompt_length, r.num_tokens)
        if self.capture is not None:
            self.capture.open(requests)
        self._most_new = max(self._most_new, *(r.num_tokens for r in requests))
        self._pause.requests_arrived(len(requests))

    def close(self, slots: list[int]) -> None:
        """Stops drafting for the requests in `slots`, which have ended or are preempted."""
        self.samples.close(slots)
        for part in (*self._text.values(), self.model, self.remote, self.capture):
            if part is not None:
                part.close(slots)

    def woke_up(self) -> None:
        """Goes on after the engine slept."""
        if self.capture is not None:
            self.capture.resume()
        if self.monitor is not None:
            self.monitor.began("wake")

    def policy_updated(self, version: int) -> None:
        """Notes that the policy has the weights of `version`, unless that is known."""
        if self.samples.policy_version == version:
            return
        self.samples.policy_updated(version, self._states.total_len.gpu)
        if self.capture is not None:
            self.capture.weights_updated(version)

    def allocate(self, rates_BK: np.ndarray, caps_B: np.ndarray) -> np.ndarray:
        """Returns the number of drafts of each request that the next step verifies, int64 [B].

        `rates_BK` are acceptance rates as the host knows them, and `caps_B` the drafts that vLLM has scheduled.
        """
        survival_BK = rates_BK.astype(np.float64).cumprod(axis=1)
        decision = self._policy.allocate(survival_BK, caps_B, self.costs.verifying)
        self._row_price = decision.row_price
        self._pause.drafts_decided(int(decision.counts_B.sum()))
        return decision.counts_B

    def begin_step(self, number: int, batch: Any) -> None:
        """Lets a drafter with weights plan its drafts. The tokens of step `number` are sampled now."""
        self._step = number
        if self.model is not None:
            self.model.decide(batch.idx_mapping_np, self.costs, self._row_price)

    def propose(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Returns draft tokens for the next step, int64 [B, K]. Takes the arguments of vLLM's `propose`."""
        if options.get("dummy_run") or self.stands_by:  # in a dummy run vLLM passes its inputs as keywords
            return self._native_propose(*inputs, **options)
        started = time.perf_counter()
        batch, _, _, final_hidden, aux_hidden, num_sampled_B, num_rejected_B, *_ = inputs
        board = self.board
        if self.capture is not None:
            self.capture.observe(batch, final_hidden, aux_hidden, num_rejected_B)
        self._most_new += board.num_positions + 1
        has_readers = self.model is not None and self.model.follows(batch.idx_mapping_np)
        self.is_paused = self._pause.count_step(batch.num_reqs) and not has_readers
        is_idle = options.get("num_speculative_tokens") == 0 and not has_readers
        self.num_idle = self.num_idle + 1 if is_idle else 0
        texts = Texts(batch.idx_mapping, self._states.total_len.gpu, self._states.all_token_ids.gpu)
        if self.num_idle <= 1:
            most_new = 0 if is_idle else self._most_new
            self._most_new -= most_new
            board.observe(texts, num_sampled_B, num_rejected_B, self._step, self._lookups, most_new)
        if self.num_idle == 1:
            board.tables.rates_SK.zero_()
        native_s = 0.0 if is_idle else self._draft(texts, inputs, options)
        self.host_s = time.perf_counter() - started - native_s
        return board.tables.drafts_BK[: batch.num_reqs]

    def _draft(self, texts: Texts, inputs: tuple[Any, ...], options: dict[str, Any]) -> float:
        """Lets every drafter propose, and chooses. Returns the host's seconds in a drafter with weights."""
        board, num_requests = self.board, len(texts.slots_B)
        for i in self._without_lookup:
            self._text[i].propose(texts, board.proposals_of(i))
        if self.remote is not None:
            self.remote.propose(texts, board.proposals_of(board.names.index(REMOTE_DRAFTER)))
        native_s = 0.0
        if self.model is not None:
            started = time.perf_counter()
            self.model.propose(*inputs, **options)
            native_s = time.perf_counter() - started
        board.choose(texts, self._row_price, self._lookups)
        copy_first_rank(board.tables.drafts_BK[:num_requests], board.tables.rates_SK)
        if self.model is not None:
            self.model.outlook.refresh()
        return native_s

    def end_step(self, batch: Any, output: Any) -> Any:
        """Returns a step's output, marked for the scheduler and watched for remote drafters."""
        if self.monitor is not None:
            self.monitor.step_ended()
        if self.is_paused:
            mark_paused(output)
        if self.remote is None:
            return output
        return WatchedOutput(output, self.remote.token_callback(batch.idx_mapping_np))


def _draft_board(config: SpecrolloutConfig, runner: Any) -> DraftBoard:
    drafters = config.drafters
    types = [d.type for d in drafters]
    model = None if config.model_drafter is None else drafters.index(config.model_drafter)
    remote = None if config.remote is None else drafters.index(config.remote)
    priors = {"shared_noise": SHARED_NOISE_PRIORS, "greedy": POSITION_PRIORS}
    has_weights = (ModelDrafterConfig, RemoteDrafterConfig)
    of_text = {AheadText.name: AHEAD_PRIORS}
    priors_DE = [
        priors[d.sampling] if isinstance(d, has_weights) else of_text.get(d.type, LEVEL_PRIORS) for d in drafters
    ]
    shape = BoardShape(runner.max_num_reqs, runner.num_speculative_steps)
    reference = remote if model is None else model
    return DraftBoard(types, np.array(priors_DE), shape, runner.device, model, reference=reference)


def _replace_speculator(runner: Any, router: DraftRouter) -> None:
    speculator = runner.speculator
    speculator.propose = router.propose
    speculator.draft_token_confidence_probs = router.board.tables.rates_SK
    # The board estimates acceptance here, instead of vLLM's estimator and DSpark's confidence head.
    speculator.acceptance_estimator = None
    speculator.use_confidence_head = False
    # vLLM asks the speculator whether graphs must hold any number of drafts. Its text speculator has no such attribute.
    adapts = getattr(runner.speculative_config, "enable_adaptive_verification", False)
    speculator.enable_adaptive_verification = bool(adapts)


def _remote_drafter(config: RemoteDrafterConfig, runner: Any) -> RemoteDrafter:
    """Builds the verifier's half of the drafters at the addresses of `config`.

    Drafters that another process starts have no address until it is told. Only one rank of an engine may call this: what
    arrives by network differs from rank to rank.
    """
    folder = Path(runner.model_config.model)
    model = PolicyModel(runner.vocab_size, tokenizer_fingerprint(folder), tuple(stop_token_ids(folder)))
    buffer_class = buffer_utils.UvaBuffer if is_uva_available() else buffer_utils.NonUvaBuffer
    table = buffer_class((runner.max_num_reqs, DraftStream.columns(config.most_ahead)), torch.int32)
    stream = DraftStream(table.cpu.numpy(), table.uva)
    addresses = config.addresses or (NOWHERE,) * config.workers
    return RemoteDrafter(addresses, shared_secret(config.addresses), runner.max_model_len, model, stream)


def _stream_request(request: NewRequest, limit: int) -> StreamRequest:
    """Returns a request of vLLM's for remote drafters, which may draft up to `limit` tokens of text."""
    params = request.sampling_params
    top_k = max(0, params.top_k)  # vLLM also writes -1 for no top-k
    seed, text = request.identity.seed, request.token_ids
    return StreamRequest(request.slot, seed, params.temperature, top_k, params.top_p, limit, text)
