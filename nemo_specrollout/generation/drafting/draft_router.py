# SPDX-License-Identifier: Apache-2.0
"""The draft router, which runs all drafters of an engine on the device in the place of vLLM's one speculator.

Shapes: B requests of the batch, D drafters, E evidence levels, K draft positions, N new requests, S request slots. A slot is
the number that vLLM's model runner gives a request.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    HistoryDrafterConfig,
    ModelDrafterConfig,
    RemoteDrafterConfig,
    TextDrafterConfig,
)
from nemo_specrollout.drafters.ahead import AHEAD_PRIORS, AheadText
from nemo_specrollout.drafters.base import LEVEL_PRIORS, RowPrice, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.participant import Drafter, DraftStep, Participant
from nemo_specrollout.drafters.text import LookupDrafter, build_text_drafter
from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_sampling import POSITION_PRIORS, SHARED_NOISE_PRIORS
from nemo_specrollout.generation.drafting.drafting_graphs import DraftingGraphs, Part, StepInputs
from nemo_specrollout.generation.drafting.history_drafter import HistoryDrafter
from nemo_specrollout.generation.drafting.model_drafter import ModelDrafter
from nemo_specrollout.generation.drafting.remote_participant import RemoteParticipant, remote_drafter
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.step_outputs import mark_paused
from nemo_specrollout.generation.engine.transfers import HostCopy, copy_first_rank, is_output_rank, to_device
from nemo_specrollout.heads.serving.feature_capture import FeatureCapture
from nemo_specrollout.heads.serving.head_monitor import HeadMonitor
from nemo_specrollout.heads.serving.head_service import HeadService
from nemo_specrollout.remote.verifier.draft_stream import RemoteDrafter
from nemo_specrollout.speculation.policy import SpeculationPolicy, build_policy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog

Outcomes = tuple[torch.Tensor, torch.Tensor]
"""For each request of an engine step, the number of tokens that were sampled, and the number of its drafts that were rejected,
int32 [B] each."""
OBSERVE, CHOOSE, ALL, ALL_ASKED = "observe", "choose", "observe and choose", "observe, ask and choose"
"""Names of those parts of an engine step's drafting that CUDA graphs replay.

In `observe`, the draft board learns from the tokens that were sampled. In `ask`, the drafters without a context index propose.
In `choose`, the others propose, and the board submits the best proposal for each request."""


class DraftRouter:
    """Replaces the method `propose` of vLLM's speculator. Owns the draft board, the participants and the `SpeculationPolicy`.

    In each engine step, the router finds out which drafts were right, lets each drafter propose, and chooses one proposal for
    each request. If the block names a drafter with weights, vLLM's own speculator is one of the drafters. A participant is a
    drafter or an observer of engine steps.
    """

    def __init__(
        self, config: SpecrolloutConfig, runner: Any, depth_of: Callable[[Any], DraftDepth] = DraftDepth
    ) -> None:
        """`runner` is vLLM's model runner. `depth_of` makes the object that asks the speculator for a number of drafts."""
        self._depth_of = depth_of
        self._states = runner.req_states
        self._device = runner.device
        self._native_propose = runner.speculator.propose
        self.board = _draft_board(config, runner)
        self.policy: SpeculationPolicy = build_policy(
            config.budget, self.board.num_positions, config.num_speculative_tokens
        )
        """Decides how much the drafters draft. `StepAccounts` tells it the measured costs."""
        put = partial(to_device, dtype=np.int64, device=self._device)
        self.samples = SampleStatsLog(self.board.tables.request_S2, begins_again=config.runs_ahead, put=put)
        """Log of the samples of all requests. The vLLM worker opens and closes its entries. It reads draft counts from the
        board."""
        self.remote: RemoteDrafter | None = None
        """This engine's side of the connections to remote drafters. None without remote drafters, and on ranks other than the
        output rank."""
        self.history: HistoryDrafter | None = None
        """The drafter `history`. None unless the block keeps a history, and on ranks other than the output rank."""
        self.model: ModelDrafter | None = None
        """The drafter with weights of this engine. If it is None, there is no such drafter, and `head` and `monitor` are None
        too."""
        self.head: HeadService | None = None
        self.monitor: HeadMonitor | None = None
        self.capture: FeatureCapture | None = None
        """Captures features for the training of a head. None if no features are wanted, and on ranks other than the output
        rank."""
        self._observers: list[Participant] = []
        drafters = [self._build(drafter, config, runner) for drafter in config.drafters]
        if config.draft_refresh is not None and self.model is not None and is_output_rank():
            self.capture = FeatureCapture(runner, config.draft_refresh.rollout_capture_share)
            self._observers.append(self.capture)
        self.use_drafters(drafters)
        self._spread = HostCopy(self.board.tables.spread_FQ)
        self._graphs: DraftingGraphs | None = None
        """CUDA graphs of drafting. None if kernels are launched one by one, because graphs are not used or not recorded
        yet."""
        compilation = runner.vllm_config.compilation_config
        self._uses_graphs = self._device.type == "cuda" and compilation.cudagraph_mode != CUDAGraphMode.NONE
        self.stands_by = False
        """True while vLLM warms up. During that time vLLM's own speculator proposes."""
        self.is_paused = False
        """True during a drafting pause, in which the next engine steps need no drafts."""
        self.is_idle = False
        """True if no drafter was asked for drafts in the latest engine step, because the drafters rest."""
        self._step = 0
        self.host_s = 0.0
        """Seconds that the host has spent on drafting since the engine's start, without the time of drafters with weights."""
        _replace_speculator(runner, self)

    def _build(self, drafter: Any, config: SpecrolloutConfig, runner: Any) -> Drafter:
        """Returns the drafter that the block's entry `drafter` describes.

        Some kinds of drafters are also called by the vLLM worker. They are then kept in an attribute of the router as well.
        """
        if isinstance(drafter, HistoryDrafterConfig):
            if not is_output_rank() or not config.learned.history or config.learned.folder is None:
                return Drafter()
            self.history = HistoryDrafter(drafter, config.learned, runner)
            return self.history
        if isinstance(drafter, TextDrafterConfig):
            sizes = (runner.max_num_reqs, runner.max_model_len, runner.vocab_size, runner.device)
            return build_text_drafter(drafter, *sizes, most_paths=config.most_paths)
        if isinstance(drafter, RemoteDrafterConfig):
            if not is_output_rank():
                return Drafter()
            self.remote = remote_drafter(drafter, runner)
            return RemoteParticipant(self.remote)
        depth = self._depth_of(runner.speculator)
        self.model = ModelDrafter(config, runner, self.board, lambda: self.policy, depth)
        self.head = HeadService(runner, self.model, self.samples, config.head_folder)
        max_age = None if config.draft_refresh is None else config.draft_refresh.max_age_alarm
        self.monitor = HeadMonitor(self.head, self.model, self.samples, max_age)
        self._observers.append(self.monitor)
        return self.model

    def use_drafters(self, drafters: Sequence[Drafter]) -> None:
        """Lets these drafters propose from now on.

        They must be in the order of the board, and must already know the running requests. CUDA graphs that were recorded for
        other drafters are dropped.
        """
        self._graphs = None
        self._drafters = list(drafters)
        self._participants = [*drafters, *self._observers]
        lookups = [drafter.lookup(i) for i, drafter in enumerate(drafters)]
        self._lookups = [lookup for lookup in lookups if lookup is not None]
        self._learning = [lookup for lookup in self._lookups if lookup.learns]
        self._asked = [i for i, lookup in enumerate(lookups) if lookup is None]
        self._is_recordable = all(drafters[i].is_recordable for i in self._asked)
        """Whether a CUDA graph can hold everything that is launched for drafting in an engine step."""
        self._proposals = [self.board.proposals_of(i) for i in range(len(drafters))]
        # To save time in every step, a method is called only for the participants that override it.
        self._observing = [p for p in self._participants if type(p).observe is not Participant.observe]
        """Participants whose `observe` is called in every engine step in which the drafters do not rest."""
        self._watching = [p for p in self._observing if p is not self.model]
        """Participants that must see an engine step even if the drafters rest in it. A drafter with weights need not see such
        steps."""
        self._seeing_ends = [p for p in self._participants if type(p).ended is not Participant.ended]
        self._ending = [p for p in self._participants if type(p).end_step is not Participant.end_step]
        self._planned = [d for d in drafters if type(d).plan is not Drafter.plan]
        self._following = [d for d in drafters if type(d).num_followed is not Drafter.num_followed]
        self._unread = [drafter.unread for drafter in drafters if isinstance(drafter, LookupDrafter)]

    def warm_up(self) -> None:
        """Runs the drafting of an engine step without requests, so that none of its kernels is compiled during a rollout."""
        slots_B = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        none_B = torch.zeros(1, dtype=torch.int32, device=self._device)
        texts = Texts(slots_B, self._states.total_len.gpu, self._states.all_token_ids.gpu)
        self.board.observe(texts, none_B, none_B, 0, self._learning, max_new=1)
        if self.history is not None:
            self.history.warm_up()
        batch = SimpleNamespace(num_reqs=1, idx_mapping_np=np.array([-1]))
        step = DraftStep((batch, None, None, None, None, none_B), {})
        for drafter in self._drafters:
            drafter.observe(step)
        self._draft(texts)
        self.record_graphs()

    def record_graphs(self) -> None:
        """Records drafting as CUDA graphs, if vLLM uses CUDA graphs too."""
        if self._uses_graphs:
            max_new = self.board.num_positions + 1 if self._learning else 0
            graphs = DraftingGraphs(self._parts(max_new), self._states, len(self.board.tables.limit_S), max_new)
            self._graphs = graphs if graphs.capture() else None

    def _parts(self, max_new: int) -> dict[str, Part]:
        """Returns the parts of drafting that CUDA graphs replay. They are functions that launch the kernels, by name.

        Some drafters cannot be recorded in a CUDA graph. If the engine has one of these, there are two parts, and the drafters
        propose between the parts. `max_new` is the largest number of new tokens of a text that a graph can read.
        """
        asked = [(self._drafters[i], self._proposals[i]) for i in self._asked]

        def observe(inputs: StepInputs) -> None:
            outcomes = (inputs.num_sampled_B, inputs.num_rejected_B)
            self.board.observe(inputs.texts, *outcomes, inputs.step, self._learning, max_new)

        def ask(inputs: StepInputs) -> None:
            for drafter, out in asked:
                drafter.launch(inputs.texts, out)

        def choose(inputs: StepInputs) -> None:
            self.board.choose(inputs.texts, inputs.price, self._lookups, inputs.most_drafts)

        if not self._is_recordable:
            return {OBSERVE: observe, CHOOSE: choose}
        parts: dict[str, Part] = {ALL: _in_order(observe, choose)}
        return parts | {ALL_ASKED: _in_order(observe, ask, choose)} if asked else parts

    def open(self, requests: Sequence[NewRequest]) -> None:
        """Starts drafting for requests that have just taken slots. Call it before their first tokens are sampled."""
        put = partial(to_device, device=self._device)
        slots_N = put([r.slot for r in requests], np.int64)
        limits_N = put([r.limit if r.identity.speculate else 0 for r in requests], np.int32)
        is_early = [r.identity.is_early for r in requests]
        self.board.open(slots_N, limits_N, put(is_early, np.bool_) if any(is_early) else None)
        self.policy.requests_arrived(len(requests), sum(r.num_tokens - r.num_cached for r in requests))
        for participant in self._participants:
            participant.open(slots_N, requests, put)

    def ended(self, slots: Sequence[int]) -> None:
        """Tells the participants which requests have ended, before `close` is called for their slots."""
        for participant in self._seeing_ends:
            participant.ended(slots)

    def close(self, slots: list[int]) -> None:
        """Stops drafting for the requests in `slots`, which have ended or were preempted."""
        for participant in self._participants:
            participant.close(slots)

    def woke_up(self) -> None:
        """Prepares the participants for further engine steps after the engine has slept."""
        for participant in self._participants:
            participant.woke_up()

    def policy_updated(self, version: int) -> None:
        """Notes that the RL policy has new weights, which are those of policy version `version`."""
        for participant in self._participants:
            participant.weights_updated(version)

    def begin_step(self, number: int, batch: Any) -> None:
        """Plans the drafts to be made in engine step number `number`, whose tokens are about to be sampled."""
        started = time.perf_counter()
        self._step = number
        slots_B = batch.idx_mapping_np
        depth = self.policy.plan(batch.num_reqs, self._num_followed(slots_B))
        for drafter in self._planned:
            drafter.plan(depth)
        if self.history is not None:
            self.history.feed()
        self.host_s += time.perf_counter() - started

    def num_drafts(self, num_requests: int, most: int) -> int:
        """Returns how many draft tokens of all requests together the next engine step verifies, at most `most`."""
        started = time.perf_counter()
        num_drafts = self.policy.num_drafts(num_requests, most)
        self.host_s += time.perf_counter() - started
        return num_drafts

    def propose(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Returns draft tokens for the next engine step, int64 [B, K]. Takes the arguments of vLLM's `propose`."""
        if options.get("dummy_run") or self.stands_by:  # in a dummy run vLLM passes its inputs as keywords
            return self._native_propose(*inputs, **options)
        started = time.perf_counter()
        step = DraftStep(inputs, options)
        batch, _, _, _, _, num_sampled_B, num_rejected_B, *_ = inputs
        outcomes = (num_sampled_B, num_rejected_B)
        for participant in self._observing:
            participant.observe(step)
        board = self.board
        num_followed = self._num_followed(batch.idx_mapping_np)
        self.is_paused = self.policy.ends_step(batch.num_reqs, num_followed)
        was_idle = self.is_idle
        self.is_idle = options.get("num_speculative_tokens") == 0 and num_followed == 0
        texts = Texts(batch.idx_mapping, self._states.total_len.gpu, self._states.all_token_ids.gpu)
        if self.is_idle:
            native_s = 0.0
            self._rest(texts, outcomes, batch.idx_mapping_np, was_idle)
        else:
            native_s = self._observe_and_draft(texts, outcomes, batch.idx_mapping_np)
        self.host_s += time.perf_counter() - started - native_s
        return board.tables.drafts_BK[: batch.num_reqs]

    def _rest(self, texts: Texts, outcomes: Outcomes, slots_B: np.ndarray, was_idle: bool) -> None:
        """Lets the drafters rest in this engine step, so that nothing is proposed.

        Even so, the first step of a rest learns which drafts of the step before were accepted. `was_idle` tells that the
        drafters rested already in the step before.
        """
        if not was_idle:
            self.board.observe(texts, *outcomes, self._step, self._learning, 0)
            self.board.tables.rates_SK.zero_()
        for unread in self._unread:
            unread.skip(slots_B, self.board.num_positions + 1)

    def can_skip(self, batch: Any, num_scheduled: int | None) -> bool:
        """Returns whether an engine step can run without vLLM's speculator, because the drafters rest and go on resting.

        Such a step has no drafts to verify and makes none for the next step. No participant needs to see the tokens that the
        step samples. `num_scheduled` is the number of draft tokens that vLLM wants for each request of the next step, or None
        if vLLM does not say.
        """
        if num_scheduled != 0 or not self.is_idle or self._watching or batch.num_draft_tokens:
            return False
        return self._num_followed(batch.idx_mapping_np) == 0

    def skip(self, batch: Any) -> None:
        """Counts an engine step that runs without vLLM's speculator, after `can_skip` has allowed it. Launches no kernel."""
        started = time.perf_counter()
        self.is_paused = self.policy.ends_step(batch.num_reqs, 0)
        for unread in self._unread:
            unread.skip(batch.idx_mapping_np, self.board.num_positions + 1)
        self.host_s += time.perf_counter() - started

    def _observe_and_draft(self, texts: Texts, outcomes: Outcomes, slots_B: np.ndarray) -> float:
        """Learns from the tokens of an engine step and then drafts, by CUDA graphs if they fit the step.

        Returns the seconds that the host has spent in drafters with weights.
        """
        max_new = self._most_to_read(slots_B)
        graphs = self._graphs
        if graphs is None or max_new != graphs.max_new:  # long new texts take more programs than a graph launches
            self.board.observe(texts, *outcomes, self._step, self._learning, max_new)
            return self._draft(texts)
        policy = self.policy
        price = RowPrice(policy.row_price, policy.context_price, policy.mean_price)
        graphs.load(slots_B, outcomes, self._step, policy.most_drafts, price)
        native_s = 0.0
        if self._is_recordable:
            graphs.replay(ALL_ASKED if self._asked and self._prepare() else ALL)
        else:
            graphs.replay(OBSERVE)
            native_s = self._ask(texts)
            graphs.replay(CHOOSE)
        self._publish()
        return native_s

    def _prepare(self) -> bool:
        """Calls `prepare` of the drafters that CUDA graphs ask, and returns whether any of them has something to propose."""
        needed = [self._drafters[i].prepare(self._proposals[i]) for i in self._asked]
        return any(needed)

    def _draft(self, texts: Texts) -> float:
        """Lets every drafter propose, and chooses among their proposals, without CUDA graphs.

        Returns the seconds that the host has spent in drafters with weights.
        """
        native_s = self._ask(texts)
        policy = self.policy
        price = RowPrice(policy.row_price, policy.context_price, policy.mean_price)
        self.board.choose(texts, price, self._lookups, policy.most_drafts)
        self._publish()
        return native_s

    def _ask(self, texts: Texts) -> float:
        """Calls `propose` of all drafters that have no context index on the board.

        Returns the seconds that the host has spent in drafters with weights.
        """
        native_s = 0.0
        for i in self._asked:
            drafter = self._drafters[i]
            started = time.perf_counter()
            drafter.propose(texts, self._proposals[i])
            native_s += time.perf_counter() - started if drafter.has_weights else 0.0
        return native_s

    def _publish(self) -> None:
        """Copies the drafts of the first tensor-parallel rank to all ranks.

        Also tells the `SpeculationPolicy` how probably the newest drafts are accepted (`Spread`).
        """
        copy_first_rank(self.board.shared)
        self._spread.refresh()
        self.policy.observe(Spread.of_table(self._spread.values))

    def _most_to_read(self, slots_B: np.ndarray) -> int:
        """Returns an upper bound on the new tokens of a text that the context indexes read in this engine step."""
        most_sampled = self.board.num_positions + 1
        return max((unread.read(slots_B, most_sampled) for unread in self._unread), default=0)

    def _num_followed(self, slots_B: np.ndarray) -> int:
        """Returns the number of requests whose text a drafter must read in every engine step, summed over the drafters."""
        return sum(drafter.num_followed(slots_B) for drafter in self._following) if self._following else 0

    def end_step(self, batch: Any, output: Any) -> Any:
        """Returns vLLM's `output` of an engine step, which participants may have extended.

        In a drafting pause, the output is marked, so that the scheduler schedules no drafts.
        """
        if self.is_paused:
            mark_paused(output)
        for participant in self._ending:
            output = participant.end_step(batch.idx_mapping_np, output)
        return output


def _in_order(*parts: Part) -> Part:
    """Returns a part of drafting that launches the given parts one after another."""

    def launch(inputs: StepInputs) -> None:
        for part in parts:
            part(inputs)

    return launch


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
    # In this engine the board estimates acceptance, instead of vLLM's estimator and DSpark's confidence head.
    speculator.acceptance_estimator = None
    speculator.use_confidence_head = False
    # vLLM asks the speculator whether graphs must support any number of drafts. Its text speculator lacks the attribute.
    adapts = getattr(runner.speculative_config, "enable_adaptive_verification", False)
    speculator.enable_adaptive_verification = bool(adapts)
