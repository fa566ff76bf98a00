# SPDX-License-Identifier: Apache-2.0
"""What our part of a decode step costs the host, by state of the drafters: launches, operations of torch, calls of Python.

`PYTHONPATH=. python tests/fake_gpu/step_counts.py` prints the table of docs/developing/step-costs.md. Times depend on the
machine, counts do not. The worker's own methods run, on a runner whose methods do what vLLM 0.32's do with our objects.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from decode_step import HEAD, NAMES, TEXT, B, DecodeStep, K, row_sampler, sampling_states, zeros
from device import GPU, FakeGpu, fake_gpu

from nemo_specrollout.config.drafter_configs import AheadDrafterConfig, DrafterConfig
from nemo_specrollout.drafters.ahead import AheadText
from nemo_specrollout.drafters.base import Texts
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.step.near_ties import NearTies
from nemo_specrollout.generation.step.step_accounts import StepAccounts
from nemo_specrollout.speculation.forecast import WINDOW
from nemo_specrollout.speculation.policy import AutoPolicy

with mock.patch.object(compat, "device_type", lambda: "cuda"):  # a CPU's worker copies nothing to a device
    from nemo_specrollout.generation.vllm_worker import VllmWorkerMixin

NUM_STEPS = 64
"""Steps that are counted: as many as there are between two agreements on costs while drafters rest."""
AHEAD = (AheadDrafterConfig(), *TEXT)
STATES: dict[str, tuple[tuple[DrafterConfig, ...], int]] = {
    "no drafters": ((), 0),
    "resting": (TEXT, 0),
    "resting head": ((*TEXT, HEAD), 0),
    "text": (TEXT, K),
    "ahead": (AHEAD, K),
    "early requests": (AHEAD, K),
    "head": ((HEAD,), K),
}
"""Drafters, and drafts that vLLM schedules for each request."""
OWN = "/nemo_specrollout/"


def plain_batch() -> Any:
    """Returns a batch of a step without drafts."""
    slots_B = zeros(B, dtype=torch.int64)
    return SimpleNamespace(
        idx_mapping=slots_B, idx_mapping_np=np.arange(B), num_reqs=B, num_tokens=B, num_draft_tokens=0, input_ids=zeros(B),
        positions=slots_B, logits_indices=slots_B, expanded_idx_mapping=slots_B, expanded_local_pos=zeros(B),
        cu_num_logits=zeros(B + 1), seq_lens=zeros(B), seq_lens_cpu_upper_bound=torch.zeros(B),
        query_start_loc=zeros(B + 1), num_scheduled_tokens=np.ones(B, np.int32),
    )  # fmt: skip


class Engine(DecodeStep, VllmWorkerMixin):
    """Our worker in an engine whose drafters are in one of the states, and whose steps are all alike."""

    def __init__(self, state: str) -> None:
        drafters, self.num_drafts = STATES[state]
        super().__init__(drafters or TEXT)
        states = sampling_states()
        self._sampler: Any = row_sampler(states)
        self._sampler.get_logprobs_dims = lambda _: (0, 0)
        self.runner.req_states.draft_tokens = zeros(32, K, dtype=torch.int64)
        self.runner.execute_model_state = None
        self._execute_model, self._sample_tokens = self.execute_as_vllm, self.sample_as_vllm
        self.model_runner = self.runner
        if drafters:
            self.drafting.warm_up()
            self.specrollout_router = self.drafting
        if AheadDrafterConfig() in drafters:
            self.bring_texts()
        if self.drafting.model is not None and not self.num_drafts:
            self.drafting.model._stop_following()
        if state == "early requests":
            self.keep_ties()
        self.specrollout_accounts = StepAccounts(self.runner, self.specrollout_router)
        self.logits_BV = self.logits_RV[:B]
        self.batch.num_draft_tokens = B * self.num_drafts
        if not self.num_drafts:
            self.batch = plain_batch()
        self._scheduled = SimpleNamespace(
            scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=NAMES), finished_req_ids=set(),
            preempted_req_ids=None,
        )  # fmt: skip

    def bring_texts(self) -> None:
        """Lets every request bring a text, as after a step that ran ahead."""
        drafter: Any = self.drafting._drafters[0]
        assert isinstance(drafter, AheadText)
        drafter._with_text.update(range(B))

    def keep_ties(self) -> None:
        """Lets every request ask for its near-ties, as a request of a step to come does."""
        ties = NearTies(self.runner.max_num_reqs, self.runner.max_model_len, GPU)
        ties.open([NewRequest(b, RequestIdentity(1, 2, ties=b), 10, range(12), 100) for b in range(B)])
        self.verifier.sampler.near_ties = ties

    def execute_as_vllm(self, scheduled: Any) -> None:
        """Does what vLLM's `execute_model` does with our objects."""
        if self.num_drafts:
            self.plan_tokens()
        self.runner.execute_model_state = SimpleNamespace(
            input_batch=self.batch, num_spec_tokens_to_schedule=self.num_drafts
        )

    def sample_as_vllm(self, _: Any) -> Any:
        """Does what vLLM's `sample_tokens` does with our objects, and with the drafts that they return."""
        runner = self.runner
        verified = self.num_drafts > 0
        output = self.verifier(self.logits_RV, self.batch) if verified else self._sampler(self.logits_BV, self.batch)
        if runner.speculator is not None and self.specrollout_router is not None:
            drafts_BK = runner.speculator.propose(
                self.batch, None, None, self._hidden_BH, [self._hidden_BH] * 3, output.num_sampled, self._num_rejected,
                *self._keys, num_speculative_tokens=self.num_drafts,
            )  # fmt: skip
            if self.num_drafts < K:
                drafts_BK[:, self.num_drafts :] = -1
            runner.req_states.draft_tokens[self.batch.idx_mapping] = drafts_BK
            self.budget.record_confidences(runner.speculator.draft_token_confidence_probs, self.batch)
        return SimpleNamespace()

    def step(self) -> None:
        """Runs a step of the engine."""
        self._execute_step(self._scheduled)
        self._sample_step(None)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of functions of this package by name."""
    calls = Counter[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and OWN in frame.f_code.co_filename:
            calls[f"{frame.f_code.co_filename.rpartition(OWN)[2]}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class Counts:
    """Counts of a steady step, as means of `NUM_STEPS`."""

    def __init__(self, state: str, spoil: Callable[[Engine], None] = lambda engine: None) -> None:
        """`spoil` may change the engine before its steps are counted."""
        ticks = itertools.count()
        with fake_gpu() as gpu, mock.patch("time.perf_counter", lambda: 1e-3 * next(ticks)):
            engine = Engine(state)
            for _ in range(NUM_STEPS):  # the first steps open requests, and read what is behind
                engine.step()
            # No kernel runs, so no draft is ever seen. In a steady step of an engine they are well known, and good ones.
            policy = getattr(engine.specrollout_router, "policy", None)
            if isinstance(policy, AutoPolicy) and policy._forecast._change_FQ is not None:
                policy._forecast._weight_F[1:] = WINDOW
                policy._forecast._change_FQ[1:, -1] = 1.0
            spoil(engine)
            self._count(gpu, engine)

    def _count(self, gpu: FakeGpu, engine: Engine) -> None:
        self.done = Counter[str]()
        self.own_launches = 0.0
        self.vllm_launches = 0.0
        self.replayed = 0.0
        self.calls = Counter[str]()
        for _ in range(NUM_STEPS):
            with gpu.step():
                engine.step()
            self.done.update(gpu.done)
            own = sum(launch.kernel.fn.__module__.startswith("nemo_specrollout") for launch in gpu.launches)
            self.own_launches += own / NUM_STEPS
            self.vllm_launches += (len(gpu.launches) - own) / NUM_STEPS
            self.replayed += len(gpu.replayed) / NUM_STEPS
        with counted_calls() as calls:
            for _ in range(NUM_STEPS):
                engine.step()
        self.calls = calls

    @property
    def replays(self) -> float:
        return self.done["replay"] / NUM_STEPS

    @property
    def operations(self) -> float:
        """Operations of torch on the device, copies among them."""
        return self.done.total() / NUM_STEPS - self.own_launches - self.vllm_launches - self.replays

    @property
    def python_calls(self) -> float:
        return self.calls.total() / NUM_STEPS

    def row(self) -> tuple[float, ...]:
        return (self.own_launches, self.replays, self.operations, self.vllm_launches, self.python_calls)


MOST = {
    "no drafters": (2, 0, 2, 1, 18),
    "resting": (2, 0, 2, 1, 37.1),
    "resting head": (2, 0, 2.2, 1, 50),
    "text": (2, 1, 15, 2, 77.4),
    "ahead": (2, 1, 15, 2, 80.4),
    "early requests": (2, 1, 15, 2, 81.4),
    "head": (2, 2, 21.2, 2, 113.5),
}
"""Launches of our kernels, replays of graphs, operations of torch, launches of vLLM's kernels in our place, and calls of our
functions, in a step. If a change saves some, lower the number."""


@pytest.mark.parametrize("state", STATES)
def test_a_step_costs_the_host_no_more_than_recorded(state: str) -> None:
    counts = Counts(state)
    for name, found, most in zip(HEADINGS, counts.row(), MOST[state], strict=True):
        assert found <= most, f"{name}: {found}, {most} so far; {counts.done} {counts.calls}"


def test_one_more_launch_operation_or_call_is_noticed() -> None:
    """The test above fails then."""

    def spoil(engine: Engine) -> None:
        begin_step = engine.drafting.begin_step
        states = engine.runner.req_states
        texts = Texts(engine.batch.idx_mapping, states.total_len.gpu, states.all_token_ids.gpu)

        def begin(number: int, batch: Any) -> None:
            engine.drafting.board.tables.rates_SK.zero_()
            engine.drafting.board.choose(texts)
            begin_step(number, batch)

        engine.drafting.begin_step = begin

    spoilt, counts = Counts("resting", spoil), Counts("resting")
    more = [a - b for a, b in zip(spoilt.row(), counts.row(), strict=True)]
    assert more[0] == 1 and more[2] == 1 and more[4] > 1
    assert sum(found > most for found, most in zip(spoilt.row(), MOST["resting"], strict=True)) == 3


HEADINGS = ("launches of ours", "replays", "operations of torch", "launches of vLLM", "calls of our functions")


if __name__ == "__main__":
    print("| state | " + " | ".join(HEADINGS) + " | kernels replayed |")
    print("|---|" + "---|" * (len(HEADINGS) + 1))
    for state in STATES:
        counts = Counts(state)
        print(f"| {state} | " + " | ".join(f"{value:.4g}" for value in (*counts.row(), counts.replayed)) + " |")
        if "-v" in sys.argv:
            for name, count in [*counts.done.items(), *counts.calls.most_common()]:
                print(f"    {count / NUM_STEPS:8.3f} {name}")
