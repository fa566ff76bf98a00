# SPDX-License-Identifier: Apache-2.0
"""The router: after each step, asks the drafters, weighs their proposals, and hands vLLM the drafts that pay.

vLLM knows it as a proposer of method `custom_class`. Shapes: B requests of the batch, K draft positions, D drafters,
L longest sequence; a lane is a request's own small number, from its first draft to its last.
"""

import time
from typing import Any

import numpy as np

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.drafters import build_drafter
from nemo_specrollout.drafters.base import Batch, Proposal
from nemo_specrollout.generation.lanes import Lanes
from nemo_specrollout.generation.sampler import CoupledSampler
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.scheduling.acceptance import AcceptanceEstimator
from nemo_specrollout.scheduling.budget import BudgetObservation, build_budget
from nemo_specrollout.scheduling.pacing import Pacer
from nemo_specrollout.scheduling.step_time import StepTimeTable


class Router:
    """Chooses, for every request and step, who drafts and how much; owns drafters, estimates and the step-time table.

    Invariant: what it returns changes when tokens arrive, never which. A step reads: observe, judge, propose, allocate.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = build(SpecrolloutConfig, vllm_config.additional_config["specrollout"], BLOCK_PATH)
        scheduler = vllm_config.scheduler_config
        num_lanes, self._num_tokens = scheduler.max_num_seqs, config.num_speculative_tokens
        vocab_size = vllm_config.model_config.get_vocab_size()
        self.names = [d.type for d in config.drafters]
        self._drafters = [build_drafter(d, num_lanes, vocab_size) for d in config.drafters]
        self._lanes = Lanes(num_lanes, vllm_config.model_config.max_model_len)
        self._estimator = AcceptanceEstimator(num_lanes, len(self._drafters), self._num_tokens)
        self._budget = build_budget(config.budget)
        self._is_auto = config.budget.policy == "auto"
        self._pacer = Pacer(self._num_tokens)
        self.table = StepTimeTable(min(num_lanes * (self._num_tokens + 1), scheduler.max_num_batched_tokens))
        self.trace = StepTrace(self.names)
        self.proposed_DK = np.zeros((len(self._drafters), self._num_tokens), np.int64)
        self.accepted_DK = np.zeros((len(self._drafters), self._num_tokens), np.int64)
        self._runner: Any = None
        self._sampler: CoupledSampler | None = None

    def load_model(self, target_model: Any) -> None:
        """vLLM's hook for drafters with weights; these have none."""

    def bind(self, runner: Any, sampler: CoupledSampler) -> None:
        """Gives access to the batch: vLLM passes a proposer neither request ids nor identities."""
        self._runner, self._sampler = runner, sampler

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        """A step samples now; learns its time if it was a pure decode step."""
        timed = self.trace.begin(num_requests, num_rows, num_scheduled)
        if timed is not None:
            self.table.observe(*timed)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's hook: the draft tokens of each request of the batch, none to `num_speculative_tokens` of them."""
        started = time.perf_counter()
        drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self.trace.add_host_seconds(time.perf_counter() - started)
        return drafts

    def _propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray
    ) -> list[list[int]]:
        num_requests = len(sampled)
        self._sync_lanes(num_tokens, token_ids)
        self._record_outcome(sampled)
        costs = self.table.costs()
        if self._is_auto and not self._pacer.should_consult(num_requests):
            return [[] for _ in range(num_requests)]
        batch = self._lanes.batch(token_ids, num_tokens[:num_requests])
        self._observe(batch)
        proposals, survival_DBK = self._collect(batch, self._pacer.depth if self._is_auto else self._num_tokens)
        chosen_B, survival_BK = _best_drafter(survival_DBK)
        caps_B = self._lanes.draft_caps(batch.lengths_B, sampled)
        counts_B = self._budget.allocate(BudgetObservation(survival_BK, caps_B, costs))
        if self._is_auto and self._pacer.should_probe(self.table.num_plain_samples(num_requests)):
            counts_B = np.zeros_like(counts_B)
        self._pacer.decided(num_requests, int(counts_B.max()))
        self._remember(batch, proposals, chosen_B, counts_B)
        return _as_lists(proposals, chosen_B, counts_B)

    def _sync_lanes(self, num_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Opens and closes lanes when the batch has changed."""
        assert self._sampler is not None
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

    def _observe(self, batch: Batch) -> None:
        self._estimator.score(batch.lanes_B, batch.token_ids_BL, batch.lengths_B)
        for drafter in self._drafters:
            drafter.observe(batch)
        self._lanes.mark_seen(batch.lengths_B)

    def _collect(self, batch: Batch, depth: int) -> tuple[list[Proposal], np.ndarray]:
        proposals = [d.propose(batch, depth) for d in self._drafters]
        survival_DBK = np.stack(
            [self._estimator.survival(i, batch.lanes_B, p.lengths_B, p.levels_BK) for i, p in enumerate(proposals)]
        )
        return proposals, survival_DBK

    def _remember(self, batch: Batch, proposals: list[Proposal], chosen_B: np.ndarray, counts_B: np.ndarray) -> None:
        for i, p in enumerate(proposals):
            submitted_B = (chosen_B == i) & (counts_B > 0)
            parts = (p.tokens_BK, p.lengths_B, p.levels_BK)
            self._estimator.remember(i, batch.lanes_B, batch.lengths_B, parts, submitted_B)
        self._lanes.submit(chosen_B, counts_B)

    def _record_outcome(self, sampled: list[list[int]]) -> None:
        """Counts, by drafter and position, which of the drafts verified in this step were accepted."""
        assert self._sampler is not None
        drafters_B, submitted_B = self._lanes.take_submitted()
        counts_B = np.minimum(submitted_B, self._sampler.num_drafts_B)
        if not counts_B.any():
            return
        emitted_B = np.fromiter(map(len, sampled), np.int64, len(sampled))
        positions_K = np.arange(self._num_tokens)
        proposed_BK = positions_K < counts_B[:, None]
        accepted_BK = proposed_BK & (positions_K < emitted_B[:, None] - 1)
        by_drafter_DB = drafters_B == np.arange(len(self._drafters))[:, None]
        proposed_DK, accepted_DK = by_drafter_DB @ proposed_BK.astype(int), by_drafter_DB @ accepted_BK.astype(int)
        self.proposed_DK += proposed_DK
        self.accepted_DK += accepted_DK
        self.trace.add_drafts(proposed_DK.sum(axis=1), accepted_DK.sum(axis=1))


def _best_drafter(survival_DBK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per request the drafter with the most expected accepted tokens [B], and its survival [B, K]."""
    if len(survival_DBK) == 1:
        return np.zeros(survival_DBK.shape[1], np.int64), survival_DBK[0]
    chosen_B = survival_DBK.sum(axis=2).argmax(axis=0)
    return chosen_B, survival_DBK[chosen_B, np.arange(len(chosen_B))]


def _as_lists(proposals: list[Proposal], chosen_B: np.ndarray, counts_B: np.ndarray) -> list[list[int]]:
    """The drafts as vLLM wants them: a list of token ids for each request."""
    drafts: list[list[int]] = [[] for _ in range(len(counts_B))]
    for row in np.flatnonzero(counts_B):
        drafts[row] = proposals[chosen_B[row]].tokens_BK[row, : counts_B[row]].tolist()
    return drafts
