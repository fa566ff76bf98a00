# SPDX-License-Identifier: Apache-2.0
"""The router: after each step, asks the drafters, weighs their proposals, and hands vLLM the drafts that pay.

vLLM knows it as a proposer of method `custom_class`. Shapes: B requests of the batch, K draft positions, D drafters,
L longest sequence; a lane is a request's own small number, from its first draft to its last.
"""

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numba import njit

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.drafters import build_drafter
from nemo_specrollout.drafters.base import LEVEL_PRIORS, Batch, Demand, Proposal
from nemo_specrollout.generation.lanes import Lanes
from nemo_specrollout.generation.sampler import CoupledSampler
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.scheduling.acceptance import AcceptanceEstimator, count_outcomes
from nemo_specrollout.scheduling.budget import BudgetObservation, build_budget
from nemo_specrollout.scheduling.pacing import build_pacer
from nemo_specrollout.scheduling.step_time import StepTimeTable


class Router:
    """Chooses, for every request and step, who drafts and how much; owns drafters, estimates and the step-time table.

    Invariant: what it returns changes when tokens arrive, never which. A step reads: observe, judge, propose, allocate.
    On a tensor-parallel rank whose drafts vLLM does not ask for it is passive: its own clock would decide otherwise.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = build(SpecrolloutConfig, vllm_config.additional_config["specrollout"], BLOCK_PATH)
        scheduler = vllm_config.scheduler_config
        num_lanes, self._num_tokens = scheduler.max_num_seqs, config.num_speculative_tokens
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.names = [d.type for d in config.drafters]
        self._drafters = [build_drafter(d, num_lanes, vocab_size) for d in config.drafters]
        self._lanes = Lanes(num_lanes, vllm_config.model_config.max_model_len)
        self._buffers = Proposals.buffers(len(self._drafters), num_lanes, self._num_tokens)
        self._estimator = AcceptanceEstimator(num_lanes, len(self._drafters), self._num_tokens, LEVEL_PRIORS)
        self._budget = build_budget(config.budget)
        self._pacer = build_pacer(config.budget.policy, self._num_tokens)
        self.table = StepTimeTable(min(num_lanes * (self._num_tokens + 1), scheduler.max_num_batched_tokens))
        self.trace = StepTrace(self.names)
        self.proposed_DK = np.zeros((len(self._drafters), self._num_tokens), np.int64)
        self.accepted_DK = np.zeros((len(self._drafters), self._num_tokens), np.int64)
        self._last_step: tuple[int, int, float, int] | None = None
        self._runner: Any = None
        self.is_passive = False
        self._has_proposed = False
        self._sampler: CoupledSampler | None = None

    def load_model(self, target_model: Any) -> None:
        """vLLM's hook for drafters with weights; these have none."""

    def bind(self, runner: Any, sampler: CoupledSampler) -> None:
        """Gives access to the batch: vLLM passes a proposer neither request ids nor identities."""
        self._runner, self._sampler = runner, sampler

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
        drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._last_step = self.trace.end_step(time.perf_counter() - started)
        return drafts

    def _propose(self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray) -> list[list[int]]:
        num_requests = len(sampled)
        if self.is_passive:
            return [[] for _ in range(num_requests)]
        if not self._lanes.has_submitted and not self._pacer.should_consult(num_requests):
            return [[] for _ in range(num_requests)]
        if self._last_step is not None:
            self.table.observe(*self._last_step)
        emitted_B = np.fromiter(map(len, sampled), np.int64, num_requests)
        self._sync_lanes(token_ids)
        self._record_outcome(emitted_B)
        batch, caps_B = self._lanes.batch(token_ids, num_tokens, emitted_B)
        self._estimator.score(batch.lanes_B, batch.token_ids_BL, batch.lengths_B)
        proposals = self._collect(batch)
        chosen_B, survival_BK = self._estimator.choose(batch.lanes_B, proposals.levels_DBK, proposals.lengths_DB)
        decision = self._budget.allocate(BudgetObservation(survival_BK, caps_B, self.table.costs()))
        counts_B = decision.counts_B
        self._pacer.decided(num_requests, int(counts_B.max()), decision.least_survival)
        if self._pacer.should_probe(self.table.num_plain_samples(num_requests)):
            counts_B[:] = 0
        self._estimator.remember(batch.lanes_B, batch.lengths_B, proposals.arrays, chosen_B, counts_B)
        return self._submit(proposals, chosen_B, counts_B)

    def _sync_lanes(self, token_ids: np.ndarray) -> None:
        """Opens and closes lanes when the batch has changed."""
        req_ids = self._runner.input_batch.req_ids
        if self._lanes.matches(req_ids):
            return
        for lane in self._lanes.release_absent(req_ids, self._runner.requests):
            for drafter in self._drafters:
                drafter.close(lane)
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
        for drafter in self._drafters:
            drafter.open(lane, identity.seed, identity.group, token_ids[row, :prompt_length])

    def _collect(self, batch: Batch) -> "Proposals":
        proposals = self._buffers.view(len(batch.lanes_B), self._pacer.depth)
        rates, floor = self._estimator.level_rates, self._pacer.floor
        for index, drafter in enumerate(self._drafters):
            drafter.propose(batch, Demand(rates[index], floor), proposals.of(index))
        return proposals

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
        if submitted is not None:
            verified_B = self._sampler.num_drafts_B
            self.trace.add_drafts(count_outcomes(*submitted, verified_B, emitted_B, self.proposed_DK, self.accepted_DK))


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
