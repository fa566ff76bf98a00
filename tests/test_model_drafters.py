# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights: vLLM's own networks, with the noise of the requests, asked only where their drafts pay.

How a head is loaded and watched: `test_served_heads.py`. Drafters that come with the policy: `test_mtp_drafters.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from model_drafters import (
    ITSELF,
    LONG,
    Drafts,
    assert_same_drafts,
    drafting_of,
    drafts_in_every_step,
    head_of_few_tokens,
    plain_rollouts,
    recorded,
    untrained_head,
    worker_of,
)
from test_equality import NGRAM, SAMPLINGS, assert_equal, requests
from vllm.config import CUDAGraphMode

from lab.local.engine import Generation, RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.vllm_on_cpu.bfloat16_head import multiplies_bfloat16
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    DraftModelDrafterConfig,
    Eagle3DrafterConfig,
)
from nemo_specrollout.generation.engine.compat import scheduler_of
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.speculation.policy import FixedPolicy

pytestmark = pytest.mark.integration

GREEDY = DraftModelDrafterConfig(model=str(STEP_ADDER), sampling="greedy")

STEP_ADDER_HEAD = STEP_ADDER.parent / "step_adder_eagle3"
# Accepted share of its drafts by position, by sampling of drafts and temperature; measured with vLLM 0.32.
GOLDEN = {
    "shared_noise": {1.0: [0.8381, 0.7493, 0.6722, 0.6257], 0.0: [0.8287, 0.7895, 0.7438, 0.7089]},
    "greedy": {1.0: [0.829, 0.6806, 0.6, 0.5375]},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    return untrained_head(tmp_path_factory.mktemp("heads") / "untrained")


@pytest.fixture(scope="module")
def small_vocabulary_head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    return head_of_few_tokens(tmp_path_factory.mktemp("heads") / "small")


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    return plain_rollouts(start_engine)


@pytest.fixture(scope="module")
def drafts_of_a_busy_head(start_engine: Callable[..., RolloutEngine], head: DrafterConfig) -> Drafts:
    return drafts_in_every_step(start_engine, head)


def test_only_decode_steps_teach_the_seconds_of_drafting(start_engine: Callable[..., RolloutEngine]) -> None:
    """After a prefill the model reads whole prompts, beside which no draft token has a price."""
    drafters = (Eagle3DrafterConfig(model=str(STEP_ADDER_HEAD)),)
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=BudgetConfig("fixed", k=3)))
    worker = worker_of(engine)
    step_model, most_rows = worker.specrollout_accounts.step_model, 1 + worker.model_runner.num_speculative_steps
    observe, seen = step_model.observe_drafting, list[tuple[int, int, int]]()

    def note(num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        seen.append((num_rows, num_requests, depth))
        observe(num_rows, num_requests, depth, seconds)

    step_model.observe_drafting = note
    engine.generate(requests(8, 4))
    assert len(seen) > 5 and all(rows <= most_rows * num_requests for rows, num_requests, _ in seen)


@pytest.mark.parametrize("name", ["eagle3 and n-gram", "reduced vocabulary"])
def test_tokens_do_not_depend_on_a_drafter_with_weights(
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    head: DrafterConfig,
    small_vocabulary_head: DrafterConfig,
    name: str,
) -> None:
    drafters, budget, samplings = {
        "eagle3 and n-gram": ((head, NGRAM), RANDOM, tuple(SAMPLINGS)),
        "reduced vocabulary": ((NGRAM, small_vocabulary_head), RANDOM, ("T=1", "T=0")),
    }[name]
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=budget))
    for sampling in samplings:
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    index = [d.type in ("eagle3", "draft_model") for d in drafters].index(True)
    assert sum(engine.stats().proposed[index]) > 100, "nothing was drafted with weights, so nothing was shown"


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ["always", "greedy drafts"])
def test_tokens_do_not_depend_on_how_a_drafter_samples(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], head: DrafterConfig, drafters: str
) -> None:
    drafter = head if drafters == "always" else GREEDY
    block = SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=3))
    engine = start_engine(STEP_ADDER, block)
    for sampling in ("T=1", "T=0.7, penalties"):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])


def test_a_drafter_equal_to_the_policy_is_always_right(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    """This needs the exact noise of request and position, and a KV cache without gaps."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF, NGRAM), budget=RANDOM))
    for sampling in ("T=1", "T=0", "T=0.7"):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    stats = engine.stats()
    assert sum(stats.proposed[0]) > 1000
    assert stats.accepted[0] == stats.proposed[0]


@pytest.mark.parametrize("sampling", GOLDEN)
def test_acceptance_of_the_shipped_pair_is_what_it_was(
    start_engine: Callable[..., RolloutEngine], sampling: str
) -> None:
    """With seeded requests, a wrong weight layout, position or noise changes the acceptance of the shipped head."""
    trained = Eagle3DrafterConfig(model=str(STEP_ADDER_HEAD), sampling=sampling)
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(trained,), budget=BudgetConfig("fixed", k=4)))
    for temperature, golden_K in GOLDEN[sampling].items():
        before = engine.stats()
        engine.generate(requests(16, 4), **{**LONG, "temperature": temperature, "max_tokens": 64})
        after = engine.stats()
        proposed_K, accepted_K = (
            np.subtract(getattr(after, k)[0], getattr(before, k)[0])[:4] for k in ("proposed", "accepted")
        )
        assert accepted_K / proposed_K == pytest.approx(golden_K, abs=0.01)


def test_each_depth_replays_a_graph_of_its_own(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM captures one graph of all positions, graphs of lesser depths are captured and replayed as well.

    A graph on this CPU does what it was captured with: as many positions as its function drafts.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as module

    replayed: list[int] = []

    class Graphs(module.SpeculatorCudaGraphManager):
        generate: Any = None

        def needs_capture(self) -> bool:
            return self.generate is not None

        def capture(self, forward_fn: Any, *_: Any, **__: Any) -> None:
            self.generate = forward_fn if self.decode_query_len == 1 else None

        def dispatch(self, num_reqs: int, *others: Any, **named: Any) -> Any:
            found = super().dispatch(num_reqs, *others, **named)
            return replace(found, cg_mode=CUDAGraphMode.FULL, num_reqs=num_reqs) if self.generate else found

        def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:
            return desc

        def run_fullgraph(self, desc: Any) -> None:
            """Counts the passes that were captured, and does as many."""
            passes: list[int] = []
            most = self.vllm_config.num_speculative_tokens
            with mock.patch.object(head, "_generate_draft", lambda *_: passes.append(1)):
                self.generate(
                    desc.num_reqs, desc.num_tokens, None, None, None, desc.cg_mode, num_speculative_steps=most
                )
            replayed.append(1 + len(passes))
            longest = torch.full((desc.num_reqs,), 512, dtype=torch.int32)
            eager = replace(desc, cg_mode=CUDAGraphMode.NONE)
            head._multi_step_decode(desc.num_reqs, False, eager, None, longest, replayed[-1])

    monkeypatch.setattr(module, "SpeculatorCudaGraphManager", Graphs)
    drafter = Eagle3DrafterConfig(model=str(STEP_ADDER_HEAD))
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(drafter,), budget=RANDOM))
    worker = worker_of(engine)
    head: Any = worker.model_runner.speculator
    depth = worker.specrollout_router.model._depth
    head.supports_decode_metadata_update = True
    head.capture()
    drafted: list[tuple[Any, int]] = []
    propose = depth.propose
    depth.propose = lambda *args: drafted.append(propose(*args)) or drafted[-1]
    assert_equal(engine.generate(requests(8, 4), **SAMPLINGS["T=1"]), expected["T=1"])
    assert replayed == [depth for _, depth in drafted if depth > 1]
    assert set(replayed) <= {2, 3, 4, 6, 8} and len(set(replayed)) > 3, "the depths that have a graph"
    stats = engine.stats()
    assert stats is not None and stats.num_accepted > 20


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"kv_cache_memory_bytes": 20 << 20}, id="preempted"),
        pytest.param({"max_num_batched_tokens": 240, "max_num_seqs": 24}, id="read in bits"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix caching", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_skipped_steps_drafts_as_well_afterwards(
    start_engine: Callable[..., RolloutEngine],
    drafts_of_a_busy_head: Drafts,
    head: DrafterConfig,
    kwargs: dict[str, Any],
) -> None:
    """The head drafts as if it were asked in every step, whatever it has to catch up with."""
    block = SpecrolloutConfig(drafters=(head,), budget=RANDOM)
    engine = start_engine(STEP_ADDER, block, 128, **kwargs)
    drafts = recorded(engine)
    engine.generate(requests(6, 4, first=50), **LONG)
    assert_same_drafts(drafts, drafts_of_a_busy_head)


def test_samples_of_a_prompt_share_all_of_its_cache_blocks(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The step that reads the prompt has as many rows as in an engine without a head."""

    def rows_read(drafters: tuple[DrafterConfig, ...]) -> int:
        engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters), block_size=32)
        scheduler, rows = scheduler_of(engine._llm.llm_engine), []
        schedule = scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            rows.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = noted
        text = list(requests(1, 1)[0].prompt_token_ids) * 40
        engine.generate([RolloutRequest(text[:100], 0, s) for s in range(4)], max_tokens=1)
        return max(rows)

    assert rows_read((head,)) == rows_read(()) == 100 + 3 * 4


def test_a_head_that_was_dormant_drafts_well_for_new_requests(
    start_engine: Callable[..., RolloutEngine],
    drafts_of_a_busy_head: Drafts,
    head: DrafterConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While dormant, it drafts for no new request, and tokens are the same."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)), 128)
    policy, drafts, asked = drafting_of(engine).policy, recorded(engine), requests(6, 4, first=50)
    generation = Generation(engine, asked, sampling=LONG)
    while engine.num_steps < 20:
        generation.advance(0.0)
    assert len(drafts) > 200
    monkeypatch.setattr(policy, "is_dormant", True)
    generation.advance()
    drafts.clear()
    assert_equal(engine.generate(asked, **LONG), generation.rollouts)
    assert engine.stats().head_is_dormant and not drafts
    monkeypatch.undo()
    engine.generate(requests(1, 1), max_tokens=2)
    assert_equal(engine.generate(asked, **LONG), generation.rollouts)
    assert not engine.stats().head_is_dormant
    assert_same_drafts(drafts, drafts_of_a_busy_head)


def test_acceptance_from_before_a_dormant_period_is_forgotten(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The tasks may have changed meanwhile."""

    class Rests(FixedPolicy):
        is_dormant = True

        def requests_arrived(self, num_new: int, num_read: int = 0) -> None:
            self.is_dormant = False

    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)))
    board, model, asked = drafting_of(engine).board, drafting_of(engine).model, requests(4, 2)
    rollouts = engine.generate(asked, **LONG)
    num_known = float(board.tables.evidence_DE2[0, :, 1].sum())
    assert num_known > 300
    drafting_of(engine).policy, num_steps = Rests(3, 8), engine.num_steps
    model.plan(3)
    generation = Generation(engine, asked, sampling=LONG)
    while engine.num_steps == num_steps:
        generation.advance(0.0)
    assert not model.is_dormant and board.tables.evidence_DE2[0, :, 1].sum() < num_known / 2
    generation.advance()
    assert_equal(generation.rollouts, rollouts)


def test_a_head_multiplies_in_bfloat16_if_the_cpu_can(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The policy's type does not matter, and a published head is treated alike."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    for _ in range(2):
        draft = drafting_of(engine).model._speculator.model
        assert draft.lm_head.weight.dtype == (torch.bfloat16 if multiplies_bfloat16() else torch.float32)
        assert draft.model.norm.weight.dtype == torch.float32
        engine.load_head(Path(head.model))


def test_a_head_reads_no_request_that_is_decoded_plainly(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """An equality check therefore costs as much as plain decoding, and does not make the head look expensive."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    model, num_read = drafting_of(engine).model, []
    propose = model._depth.propose
    model._depth.propose = lambda *args, **kwargs: num_read.append(1) or propose(*args, **kwargs)
    asked = requests(2, 2)
    plain = engine.generate([replace(request, speculate=False) for request in asked])
    assert not num_read and model.depth == 0
    assert_equal(engine.generate(asked), plain)
    assert num_read


def test_drafts_stop_at_the_end_of_the_context(start_engine: Callable[..., RolloutEngine]) -> None:
    asked = requests(1, 2, first=80)
    sampling = {"max_tokens": 500, "ignore_eos": True, "stop_token_ids": []}
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), max_new_tokens=500)
    block = SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("fixed", k=8))
    engine = start_engine(STEP_ADDER, block, max_new_tokens=500)
    found = engine.generate(asked, **sampling)
    assert_equal(found, plain.generate(asked, **sampling))
    assert {len(r.prompt_token_ids) + len(f.token_ids) for r, f in zip(asked, found, strict=True)} == {512}
    stats = engine.stats()
    assert stats.accepted == stats.proposed


@pytest.mark.slow
def test_a_head_that_is_never_right_is_no_longer_asked(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, expected: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    for _ in range(3):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS["T=1"]), expected["T=1"])
    proposed = [sum(engine.stats().proposed[0])]
    for _ in range(2):
        engine.generate(requests(8, 4), **SAMPLINGS["T=1"])
        proposed.append(sum(engine.stats().proposed[0]))
    assert proposed[-1] - proposed[0] < 100
