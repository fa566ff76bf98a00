# SPDX-License-Identifier: Apache-2.0
"""The router: after each step, asks the drafters, weighs their proposals, and hands vLLM the drafts that pay.

vLLM knows it as a proposer of method `custom_class`. Shapes: B requests of the batch, K draft positions, D drafters,
L longest sequence; a lane is a request's own small number, from its first draft to its last.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from nemo_specrollout.config.addresses import shared_secret
from nemo_specrollout.config.block import (
    BLOCK_PATH,
    MODEL_DRAFTERS,
    REMOTE_DRAFTER,
    TEXT_DRAFTERS,
    DrafterConfig,
    SpecrolloutConfig,
)
from nemo_specrollout.config.model_folder import stop_token_ids, tokenizer_fingerprint
from nemo_specrollout.config.strict import build
from nemo_specrollout.decoupled.remote_drafter import NOWHERE, RemoteDrafter
from nemo_specrollout.decoupled.verifier_side import PolicyModel
from nemo_specrollout.drafters import build_drafter
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Batch, Demand, DraftRequest, Proposal
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.feature_capture import FeatureCapture
from nemo_specrollout.generation.lanes import Lanes
from nemo_specrollout.generation.model_drafter import ModelDrafter
from nemo_specrollout.generation.row_buffer import StepRows
from nemo_specrollout.generation.sampler import MARGIN_LEVEL_PRIORS, CoupledSampler
from nemo_specrollout.generation.stamps import Stamps
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.scheduling.acceptance import AcceptanceEstimator, count_outcomes
from nemo_specrollout.scheduling.budget import BudgetObservation, build_budget
from nemo_specrollout.scheduling.draft_plan import (
    ALONE,
    BESIDE_TEXT,
    NO_PLAN,
    DraftPlan,
    PlanObservation,
    build_planner,
)
from nemo_specrollout.scheduling.going_rate import GoingRate
from nemo_specrollout.scheduling.pacing import build_pacer
from nemo_specrollout.scheduling.run_ahead import PERIOD_STEPS, windows
from nemo_specrollout.scheduling.step_time import StepTimeTable


class Router:
    """Chooses, for every request and step, who drafts and how much; owns drafters, estimates and the step-time table.

    Invariant: what it returns changes when tokens arrive, never which. A step reads: observe, judge, propose, plan, draft,
    allocate. Drafters that read text propose to all, for it costs next to nothing; one with weights is asked where that pays.
    On a tensor-parallel rank whose drafts vLLM does not ask for it is passive: its own clock would decide otherwise.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.config = config = build(SpecrolloutConfig, vllm_config.additional_config["specrollout"], BLOCK_PATH)
        scheduler = vllm_config.scheduler_config
        num_lanes, self._num_tokens = scheduler.max_num_seqs, config.num_speculative_tokens
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.names = [d.type for d in config.drafters]
        is_text = [d.type in TEXT_DRAFTERS for d in config.drafters]
        self._drafters = {
            i: build_drafter(d, num_lanes, vocab_size) for i, d in enumerate(config.drafters) if is_text[i]
        }
        self.remote: RemoteDrafter | None = None
        if config.remote is not None:
            self.remote = _remote_drafter(config.remote, vllm_config, num_lanes)
            self._drafters[self.names.index(REMOTE_DRAFTER)] = self.remote
        self.model: ModelDrafter | None = None
        self.capture: FeatureCapture | None = None
        answers_at_once = [d.type not in MODEL_DRAFTERS for d in config.drafters]
        self._model_index = -1 if all(answers_at_once) else answers_at_once.index(False)
        self._model_config = config.model_drafter
        self._planner = build_planner(config.budget, BESIDE_TEXT if any(answers_at_once) else ALONE)
        self._going_rate = GoingRate()
        self._plans = (NO_PLAN, NO_PLAN)  # of the step before, and of this one
        self._drafted_s = self._followed_s = self._worked_s = 0.0
        self._follows = True
        self._lanes = Lanes(num_lanes, vllm_config.model_config.max_model_len)
        self._buffers = Proposals.buffers(len(self.names), num_lanes, self._num_tokens)
        priors = np.array([LEVEL_PRIORS if text else MARGIN_LEVEL_PRIORS for text in is_text])
        self._estimator = AcceptanceEstimator(num_lanes, self._num_tokens, priors)
        self._budget = build_budget(config.budget)
        self._pacer = build_pacer(
            config.budget.policy,
            self._num_tokens,
            reads_text=any(answers_at_once),
            drafts_come=self.remote is not None,
        )
        self.table = StepTimeTable(min(num_lanes * (self._num_tokens + 1), scheduler.max_num_batched_tokens))
        self.trace = StepTrace(self.names)
        self.proposed_DK = np.zeros((len(self.names), self._num_tokens), np.int64)
        self.accepted_DK = np.zeros((len(self.names), self._num_tokens), np.int64)
        self.stamps = Stamps(num_lanes)
        self._last_step: tuple[int, int, float, int] | None = None
        self._num_consulted = 0
        self._runner: Any = None
        self.is_passive = False
        self.may_ask_model = True
        self.on_model_outcome: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None] | None = None
        self._has_proposed = False
        self._sampler: CoupledSampler | None = None

    def load_model(self, target_model: Any) -> None:
        """vLLM's hook for drafters with weights, which these are not."""

    def bind(self, runner: Any, sampler: CoupledSampler) -> None:
        """Gives access to the batch, of which vLLM tells a proposer too little, and to vLLM's own drafter, if one is
        wanted: from then on vLLM asks us where it would have asked that one."""
        self._runner, self._sampler = runner, sampler
        if self._model_config is not None:
            greedy = self._model_config.sampling == "greedy"
            self.model = ModelDrafter(runner, runner.drafter, len(self._buffers.lengths_DB[0]), greedy=greedy)
            compat.draft_after_bookkeeping(runner)
            runner.propose_draft_token_ids = self.propose_after_step

    def drafter_replaced(self) -> None:
        """The drafter with weights has new ones: what was learned of it no longer holds, and it may draft again."""
        self._estimator.forget_drafter(self._model_index)
        self._planner.model_changed()
        self.may_ask_model = True

    @property
    def model_is_dormant(self) -> bool | None:
        """Whether requests that come get none of the drafts of the drafter with weights; None if there is none."""
        return None if self.model is None else not self._follows

    def policy_updated(self, version: int) -> None:
        """The policy has new weights from now on; requests may be under way."""
        batch, lanes_B = self._runner.input_batch, self._lanes.lanes_B
        is_same_batch = self._lanes.matches(batch.req_ids)
        lanes_B = lanes_B if is_same_batch else lanes_B[:0]
        self.stamps.policy_updated(version, lanes_B, batch.num_tokens_no_spec[: len(lanes_B)])

    def take_has_drafts(self) -> bool:
        """Whether this step's proposal gave any request a draft; asked once a step.

        Near the context's end vLLM asks for no proposal, and would hand out zeros as drafts.
        """
        has_proposed, self._has_proposed = self._has_proposed, False
        return has_proposed and self._lanes.has_submitted

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's hook: the draft tokens of each request of the batch, none to `num_speculative_tokens` of them."""
        started, self._has_proposed = time.perf_counter(), True
        num_sampled_B = count_tokens(sampled_token_ids)
        drafts = self._propose(num_sampled_B, num_tokens_no_spec, token_ids_cpu)
        self._last_step = self.trace.end_step(time.perf_counter() - started)
        return drafts

    def propose_after_step(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        """vLLM's hook where it has a drafter with weights: the same answer, from all drafters."""
        started, self._has_proposed = time.perf_counter(), True
        assert self.model is not None
        self.model.follow(self._follows)
        batch = self._runner.input_batch
        self._sync_lanes(batch.token_ids_cpu)
        num_sampled_B = count_tokens(sampled_token_ids)
        self._followed_s = 0.0
        self._keep(num_sampled_B, common_attn_metadata, hidden_states, aux_hidden_states)
        drafts = self._propose(num_sampled_B, batch.num_tokens_no_spec, batch.token_ids_cpu)
        self.model.read_prompts(self._lanes.lanes_B, batch.token_ids_cpu)
        draft_s = self.model.take_seconds()
        self._last_step = self.trace.end_step(time.perf_counter() - started - draft_s, draft_s)
        if self._last_step is not None:
            num_tokens, seconds = int(num_sampled_B.sum()), self._last_step[2] + self._drafted_s
            self._worked_s += seconds
            self._planner.came_true(self._plans[0], num_tokens, seconds)
            self._planner.followed(self._plans[1], self._last_step[0], self._followed_s, self._worked_s)
            self._going_rate.observe(
                self._last_step[0], num_tokens, seconds, self.table.costs(), asked_model=self._plans[0].depth > 0
            )
        self._drafted_s = draft_s
        return drafts

    def _keep(
        self, num_sampled_B: np.ndarray, attention: Any, hidden: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> None:
        """Hands the step's hidden states to those who want them."""
        started = time.perf_counter()
        assert self.model is not None and self._sampler is not None
        if self.capture is None and not self.model.follows_any and not compat.computes_prompt(self._runner).any():
            self.model.skip()
            return
        num_drafts_B, lanes_B = self._sampler.num_drafts_B, self._lanes.lanes_B
        step = compat.step_output(self._runner, num_drafts_B, attention, hidden, aux)
        is_kept, token_ids = self.model.begin(step, lanes_B), self._runner.input_batch.token_ids_cpu
        if is_kept or self.capture is not None:
            new = StepRows.of(step.num_rows_B, num_drafts_B, num_sampled_B, step.first_positions_B, token_ids, lanes_B)
            if is_kept:
                self.model.keep(new, lanes_B, token_ids)
            if self.capture is not None:
                self.capture.observe(step, new)
        self._followed_s += time.perf_counter() - started

    def _propose(self, emitted_B: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> list[list[int]]:
        num_requests = len(emitted_B)
        self._plans = (self._plans[1], NO_PLAN)
        if self.is_passive:
            self._obey(token_ids)
            return [[] for _ in range(num_requests)]
        if not self._lanes.has_submitted and not self._pacer.should_consult(num_requests):
            self._lead(NO_PLAN)
            return [[] for _ in range(num_requests)]
        if self._last_step is not None:
            self.table.observe(*self._last_step)
        self._sync_lanes(token_ids)
        self._record_outcome(emitted_B)
        batch, caps_B = self._lanes.batch(token_ids, num_tokens, emitted_B)
        self._estimator.score(batch.lanes_B, batch.token_ids_BL, batch.lengths_B)
        self._limit_run_ahead(batch.lanes_B)
        proposals = self._collect(batch)
        should_be_plain = self._pacer.should_probe(self.table.num_plain_samples(num_requests))
        chosen_B, survival_BK = self._estimator.choose(batch.lanes_B, proposals.levels_DBK, proposals.lengths_DB)
        if self.model is not None:
            may_ask = self.may_ask_model and self.model.follows_any and not should_be_plain
            is_planned = may_ask and self._planner.should_plan(num_requests)
            plan = self._plan(batch, caps_B, survival_BK) if is_planned else NO_PLAN
            self._plans = (self._plans[0], plan)
            self._lead(plan)
            if plan.depth > 0:
                self._draft(plan, batch, proposals)
                chosen_B, survival_BK = self._estimator.choose(
                    batch.lanes_B, proposals.levels_DBK, proposals.lengths_DB
                )
        decision = self._budget.allocate(BudgetObservation(survival_BK, caps_B, self.table.costs()))
        counts_B = decision.counts_B
        if should_be_plain:
            counts_B[:] = 0
        else:
            longest = int(proposals.lengths_DB.max()), int(counts_B.max())
            self._pacer.decided(num_requests, *longest, decision.least_survival)
        self._estimator.remember(batch.lanes_B, batch.lengths_B, proposals.arrays, chosen_B, counts_B)
        return self._submit(proposals, chosen_B, counts_B)

    def _limit_run_ahead(self, lanes_B: np.ndarray) -> None:
        """Says now and then how far drafters elsewhere may be ahead of each request."""
        if self.remote is None:
            return
        self._num_consulted += 1
        if self._num_consulted % PERIOD_STEPS == 0:
            forecast_BK = self._estimator.forecast(lanes_B, self.names.index(REMOTE_DRAFTER))
            self.remote.side.limit(lanes_B, windows(forecast_BK, self.remote.side.most_ahead))

    def _plan(self, batch: Batch, caps_B: np.ndarray, found_BK: np.ndarray) -> DraftPlan:
        """Whom the drafter with weights drafts for, and how deep."""
        started = time.perf_counter()
        assert self.model is not None
        forecast_BK = self._estimator.forecast(batch.lanes_B, self._model_index)
        unread_B = self.model.unread_counts(batch.lanes_B)
        costs = self.table.costs()
        rate = self._going_rate.of(len(caps_B), costs)
        observed = PlanObservation(
            found_BK, forecast_BK, caps_B, unread_B, costs, self.model.times.costs(), self._worked_s, rate
        )
        plan = self._planner.plan(observed)
        self._followed_s += time.perf_counter() - started
        return plan

    def _draft(self, plan: DraftPlan, batch: Batch, proposals: "Proposals") -> None:
        """Lets the drafter with weights write its proposals."""
        assert self.model is not None and self._sampler is not None
        rows_b = np.flatnonzero(plan.asked_B)
        out = proposals.of(self._model_index)
        tokens_bK, levels_bK = self.model.draft(
            rows_b, batch.lanes_B, batch.token_ids_BL, self._sampler.keys, plan.depth
        )
        out.tokens_BK[rows_b, : plan.depth] = tokens_bK
        out.levels_BK[rows_b, : plan.depth] = levels_bK
        out.lengths_B[rows_b] = plan.depth

    def _lead(self, plan: DraftPlan) -> None:
        """What the drafter with weights is to do, told to the other tensor-parallel ranks, which hold a part of it each."""
        if self.model is None:
            return
        self._follows = self.may_ask_model and self._planner.follows
        if compat.num_ranks() > 1:
            compat.broadcast_plan(self._follows, plan.depth, plan.asked_B, len(self._lanes.lanes_B))

    def _obey(self, token_ids: np.ndarray) -> None:
        """Does what the leading rank tells."""
        if self.model is None:
            return
        assert self._sampler is not None
        self._follows, depth, asked_B = compat.receive_plan(len(self._lanes.lanes_B))
        if depth > 0:
            self.model.draft(np.flatnonzero(asked_B), self._lanes.lanes_B, token_ids, self._sampler.keys, depth)

    def _sync_lanes(self, token_ids: np.ndarray) -> None:
        """Opens and closes lanes when the batch has changed."""
        req_ids = self._runner.input_batch.req_ids
        if self._lanes.matches(req_ids):
            return
        released = self._lanes.release_absent(req_ids, self._runner.requests)
        self.stamps.close(list(released.values()))
        for req_id, lane in released.items():
            for drafter in self._drafters.values():
                drafter.close(lane)
            if self.model is not None:
                is_done = self.model.close(lane, req_id, is_parked=self._lanes.is_parked(req_id))
                self._planner.ended(int(is_done))
        if self.model is not None:
            self.model.forget_parked(self._lanes.is_parked)
        if self.capture is not None:
            self.capture.close(list(released.values()))
        for row, req_id in enumerate(req_ids):
            if not self._lanes.has(req_id):
                self._open(req_id, row, token_ids)
        self._lanes.reorder(req_ids)

    def _open(self, req_id: str, row: int, token_ids: np.ndarray) -> None:
        assert self._sampler is not None
        state, identity = self._runner.requests[req_id], self._sampler.identity(req_id)
        prompt_length = len(state.prompt_token_ids)
        lane = self._lanes.assign(req_id, prompt_length, state.sampling_params.max_tokens, identity.speculate)
        self._estimator.reset(lane)
        num_tokens = int(self._runner.input_batch.num_tokens_no_spec[row])
        self.stamps.open(lane, identity.seed, prompt_length, num_tokens)
        if self.model is not None:
            self.model.open(lane, req_id, int(self._runner.input_batch.num_computed_tokens_cpu[row]))
        if self.capture is not None:
            self.capture.open(lane, identity.seed, prompt_length)
        params = state.sampling_params
        request = DraftRequest(
            identity.seed,
            identity.group,
            token_ids[row, :prompt_length],
            params.temperature,
            params.top_k,
            params.top_p,
            self._lanes.limit(lane),
        )
        for drafter in self._drafters.values():
            drafter.open(lane, request)

    def _collect(self, batch: Batch) -> "Proposals":
        """What the drafters that read text propose, and room for one with weights."""
        found = self._buffers.view(len(batch.lanes_B), self._pacer.depth)
        rates, floor = self._estimator.level_rates, self._pacer.floor
        for index, drafter in self._drafters.items():
            drafter.propose(batch, Demand(rates[index], floor), found.of(index))
        if self.model is None:
            return found
        found.lengths_DB[self._model_index] = 0
        return self._buffers.view(len(batch.lanes_B), self._num_tokens)

    def _submit(self, proposals: "Proposals", chosen_B: np.ndarray, counts_B: np.ndarray) -> list[list[int]]:
        """The drafts as vLLM wants them, a list of token ids for each request; remembers whose they are."""
        self._lanes.submit(chosen_B, counts_B)
        if not self._lanes.has_submitted:
            return [[] for _ in range(len(counts_B))]
        tokens = take_tokens(proposals.tokens_DBK, chosen_B, counts_B).tolist()
        counts = counts_B.tolist()
        return [tokens[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]

    def _record_outcome(self, emitted_B: np.ndarray) -> None:
        """Counts, by drafter and position, which of the drafts verified in this step were accepted."""
        assert self._sampler is not None
        submitted = self._lanes.take_submitted()
        if submitted is None:
            return
        d, verified_B = self._model_index, self._sampler.num_drafts_B
        drafted_B = np.minimum(submitted[1], verified_B)
        self.stamps.count(self._lanes.lanes_B, drafted_B, emitted_B)
        before = None if self.on_model_outcome is None else (self.proposed_DK[d].copy(), self.accepted_DK[d].copy())
        totals_D2 = count_outcomes(*submitted, verified_B, emitted_B, self.proposed_DK, self.accepted_DK)
        self.trace.add_drafts(totals_D2)
        if self.on_model_outcome is not None and before is not None and totals_D2[d, 0] > 0:
            by_model_B = drafted_B * (submitted[0] == d)
            self.on_model_outcome(
                self.proposed_DK[d] - before[0], self.accepted_DK[d] - before[1], by_model_B, emitted_B
            )


@dataclass(frozen=True)
class Proposals:
    """What all drafters propose in a step: tokens int32 [D, B, K], evidence levels int8 [D, B, K], lengths int64 [D, B]."""

    tokens_DBK: np.ndarray
    levels_DBK: np.ndarray
    lengths_DB: np.ndarray

    @classmethod
    def buffers(cls, num_drafters: int, num_lanes: int, max_tokens: int) -> "Proposals":
        """Room for the largest step."""
        shape = (num_drafters, num_lanes, max_tokens)
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.int8), np.zeros(shape[:2], np.int64))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.tokens_DBK, self.levels_DBK, self.lengths_DB

    def view(self, num_requests: int, depth: int) -> "Proposals":
        """The part that a step of `num_requests` requests uses, `depth` tokens deep."""
        return Proposals(
            self.tokens_DBK[:, :num_requests, :depth],
            self.levels_DBK[:, :num_requests, :depth],
            self.lengths_DB[:, :num_requests],
        )

    def of(self, drafter: int) -> Proposal:
        """Where one drafter writes."""
        return Proposal(self.tokens_DBK[drafter], self.levels_DBK[drafter], self.lengths_DB[drafter])


def _remote_drafter(config: DrafterConfig, vllm_config: Any, num_lanes: int) -> RemoteDrafter:
    """The drafters at the addresses of `config`; `workers` that somebody else starts are nowhere until one tells."""
    folder = Path(vllm_config.model_config.model)
    model = PolicyModel(
        vllm_config.model_config.get_vocab_size(), tokenizer_fingerprint(folder), tuple(stop_token_ids(folder))
    )
    addresses = config.addresses or (NOWHERE,) * config.workers
    return RemoteDrafter(addresses, shared_secret(config.addresses), num_lanes, config.most_ahead, model)


def count_tokens(sampled: list[list[int]]) -> np.ndarray:
    """How many tokens each request sampled, int64 [B]."""
    return np.fromiter(map(len, sampled), np.int64, len(sampled))


def take_tokens(tokens_DBK: np.ndarray, drafters_B: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    """The first `counts_B` tokens that each request's drafter proposes, one request after the other, int32."""
    tokens = np.empty(int(counts_B.sum()), np.int32)
    _take_tokens(tokens_DBK, drafters_B, counts_B, tokens)
    return tokens


@njit("void(int32[:,:,:], int64[:], int64[:], int32[:])", cache=True)
def _take_tokens(tokens_DBK, drafters_B, counts_B, tokens):  # type: ignore[no-untyped-def]
    n = 0
    for b in range(len(counts_B)):
        for k in range(counts_B[b]):
            tokens[n] = tokens_DBK[drafters_B[b], b, k]
            n += 1
