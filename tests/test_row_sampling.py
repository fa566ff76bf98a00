# SPDX-License-Identifier: Apache-2.0
"""Sampling and grading of rows on real engines: as vLLM's own, alike with and without drafts, and in whatever batch.

`interpreted/row_kernels.py` compares the kernels for a GPU with vLLM's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from conftest import STEP_ADDER
from test_equality import SAMPLINGS, SUFFIX, WRONG, requests

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import Rollout

pytestmark = pytest.mark.integration
BLOCK = SpecrolloutConfig(drafters=(WRONG, SUFFIX), budget=RANDOM)
WAYS = ("T=1", "T=0", "T=0.7", "T=1, top-k, top-p", "T=0.7, penalties")


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def engine(start_engine: Callable[..., RolloutEngine], request: pytest.FixtureRequest) -> RolloutEngine:
    return start_engine(STEP_ADDER, BLOCK, logprobs_mode=request.param)


def worker_of(engine: RolloutEngine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.worker


def runner_of(engine: RolloutEngine) -> Any:
    return worker_of(engine).model_runner


@pytest.fixture
def vllm_sampling(engine: RolloutEngine) -> Iterator[Callable[[], None]]:
    """Returns a function that puts vLLM's own sampler back, until the test ends. Drafts are then accepted by vLLM's calls."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    runner = runner_of(engine)
    ours, state = runner.sampler, runner.sampler.sampling_states
    added = state.add_request

    def put_back() -> None:
        native = Sampler.__new__(Sampler)
        vars(native).update(vars(ours))
        del native.sampling_states.add_request  # type: ignore[attr-defined]
        runner.sampler = runner.rejection_sampler.sampler = native

    yield put_back
    state.add_request = added
    runner.sampler = runner.rejection_sampler.sampler = ours


def results(rollouts: list[Rollout]) -> list[tuple[list[int], list[float]]]:
    return [(r.token_ids, r.logprobs) for r in rollouts]


def test_our_sampler_has_the_bits_of_vllms_own(engine: RolloutEngine, vllm_sampling: Callable[[], None]) -> None:
    """Steps have drafts or none. On a CPU both samplers call the same functions."""
    ours = {way: results(engine.generate(requests(4, 3), **SAMPLINGS[way])) for way in WAYS}
    vllm_sampling()
    assert {way: results(engine.generate(requests(4, 3), **SAMPLINGS[way])) for way in WAYS} == ours


def test_vllms_own_sampler_is_refused_at_start(engine: RolloutEngine, vllm_sampling: Callable[[], None]) -> None:
    worker_of(engine)._verify_in_force()
    vllm_sampling()
    with pytest.raises(RuntimeError, match="sampling is not in force"):
        worker_of(engine)._verify_in_force()


def test_log_probs_do_not_depend_on_drafts(start_engine: Callable[..., RolloutEngine], engine: RolloutEngine) -> None:
    mode = runner_of(engine).sampler.logprobs_mode
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), logprobs_mode=mode)
    for way in WAYS:
        expected = results(plain.generate(requests(4, 3), **SAMPLINGS[way]))
        assert results(engine.generate(requests(4, 3), **SAMPLINGS[way])) == expected, way
    stats = engine.stats()
    assert stats is not None
    assert stats.num_accepted > 100


def test_requests_with_filters_change_no_others(engine: RolloutEngine) -> None:
    """vLLM processes the logits of all rows of a step if one request needs it."""
    ways = [SAMPLINGS[way] for way in WAYS]
    alone = [results(engine.generate(requests(2, 1, 10 * i), **way)) for i, way in enumerate(ways)]
    ids = [engine.submit(requests(2, 1, 10 * i), way) for i, way in enumerate(ways)]
    done: dict[str, Rollout] = {}
    while len(done) < 2 * len(ways):
        done.update(engine.step())
    assert [results([done[i] for i in some]) for some in ids] == alone


def test_more_log_probs_go_the_way_of_vllm(engine: RolloutEngine) -> None:
    asked, way = requests(4, 3), SAMPLINGS["T=0.7"]
    assert results(engine.generate(asked, **way, logprobs=5)) == results(engine.generate(asked, **way))


@pytest.mark.parametrize("budget", [RANDOM, BudgetConfig("fixed", k=4)], ids=["random", "fixed"])
def test_more_requests_than_a_chunk_has_rows(
    start_engine: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch, budget: BudgetConfig
) -> None:
    """vLLM verifies at most a gigabyte of logits at a time, and allows one such chunk where the device chooses the drafts.

    So a step with more requests verifies none of their drafts, and is sampled as a step without drafts.
    """
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    num_rows = 5
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 4 * num_rows * runner_of(plain).vocab_size)
    engine = start_engine(STEP_ADDER, replace(BLOCK, budget=budget))
    assert runner_of(engine).rejection_sampler.enable_adaptive_verification
    for asked in (requests(4, 3), requests(1, 3)):
        assert results(engine.generate(asked)) == results(plain.generate(asked))
    stats = engine.stats()
    assert stats is not None
    steps = [(int(row[2]), int(row[3])) for row in stats.trace.rows]
    assert all(rows == asked if asked > num_rows else rows <= num_rows for asked, rows in steps)
    assert any(asked > num_rows for asked, _ in steps)
    assert any(rows > asked for asked, rows in steps)
