# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights: vLLM's own networks under the requests' noise, asked for whom and as much as the router likes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from test_equality import NGRAM, SAMPLINGS, assert_equal, requests

from nemo_specrollout.config.block import BudgetConfig, DrafterConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine import Rollout, RolloutEngine

pytestmark = pytest.mark.integration

# (request, position of the first draft, depth): the draft tokens.
Drafts = dict[tuple[str, int, int], list[int]]
ITSELF = DrafterConfig("draft_model", model=str(STEP_ADDER))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    """An EAGLE-3 head of random weights: what it drafts is nonsense, but always the same nonsense."""
    from nemo_specrollout.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "untrained"
    save_head(create_head(STEP_ADDER), folder)
    return DrafterConfig("eagle3", model=str(folder))


@pytest.fixture(scope="module")
def small_vocabulary_head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    from nemo_specrollout.training.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "small"
    save_head(create_head(STEP_ADDER, draft_token_ids=range(5, 60)), folder)
    return DrafterConfig("eagle3", model=str(folder))


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {name: plain.generate(requests(8, 4), **sampling) for name, sampling in SAMPLINGS.items()}


def router_of(engine: RolloutEngine) -> Any:
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.specrollout_router


def recorded(engine: RolloutEngine) -> Drafts:
    """Every draft that the engine's drafter with weights makes from now on."""
    router, found = router_of(engine), Drafts()
    model, draft = router.model, router.model.draft

    def record(rows_b: np.ndarray, lanes_B: np.ndarray, token_ids_BL: np.ndarray, keys: Any, depth: int) -> Any:
        lengths_b = router._runner.input_batch.num_tokens_no_spec[rows_b]
        result = draft(rows_b, lanes_B, token_ids_BL, keys, depth)
        for row, length, tokens in zip(rows_b, lengths_b, result[0].tolist(), strict=True):
            state = router._runner.requests[keys.req_ids[row]]
            name = state.sampling_params.extra_args["specrollout"]
            found[f"{name['prompt_index']}/{name['sample_index']}", int(length), depth] = tokens
        return result

    model.draft = record
    return found


@pytest.mark.parametrize("name", ["eagle3", "reduced vocabulary", "draft model", "greedy drafts"])
@pytest.mark.parametrize("budget", [BudgetConfig("fixed", k=3), BudgetConfig("random")], ids=["fixed", "random"])
def test_tokens_do_not_depend_on_a_drafter_with_weights(
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    head: DrafterConfig,
    small_vocabulary_head: DrafterConfig,
    name: str,
    budget: BudgetConfig,
) -> None:
    drafters = {
        "eagle3": (head, NGRAM),
        "reduced vocabulary": (NGRAM, small_vocabulary_head),
        "draft model": (ITSELF, NGRAM),
        "greedy drafts": (DrafterConfig("draft_model", model=str(STEP_ADDER), sampling="greedy"),),
    }[name]
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=budget))
    samplings = SAMPLINGS if budget.policy == "random" else {"T=1": SAMPLINGS["T=1"], "T=0": SAMPLINGS["T=0"]}
    for sampling in samplings:
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    index = [d.type in ("eagle3", "draft_model") for d in drafters].index(True)
    assert sum(engine.report()["proposed"][index]) > 100, "nothing was drafted with weights, so nothing was shown"


@pytest.mark.parametrize("sampling", ["T=1", "T=0", "T=0.7"])
def test_a_drafter_equal_to_the_policy_is_always_right(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], sampling: str
) -> None:
    """Which needs the very noise of request and position, and a KV cache without gaps, however it was asked."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("random")))
    assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    report = engine.report()
    assert sum(report["proposed"][0]) > 300
    assert report["accepted"] == report["proposed"]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"kv_cache_memory_bytes": 24 << 20}, {"max_num_batched_tokens": 96}, {"enable_prefix_caching": False}],
    ids=["as usual", "preempted", "read in bits", "no prefix caching"],
)
def test_a_head_that_was_not_asked_for_a_while_is_as_good_when_it_is(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, kwargs: dict[str, Any]
) -> None:
    """Its drafts are those of a head that was asked in every step, whatever it had to catch up with."""
    asked = requests(6, 4, first=50)
    sampling = {"max_tokens": 200, "ignore_eos": True, "stop_token_ids": []}
    drafts = {}
    for policy in ("fixed", "random"):
        block = SpecrolloutConfig(drafters=(head,), budget=BudgetConfig(policy, k=3))
        engine = start_engine(STEP_ADDER, block, max_new_tokens=200, **(kwargs if policy == "random" else {}))
        drafts[policy] = recorded(engine)
        engine.generate(asked, **sampling)
    wanted = {(request, position): tokens for (request, position, _), tokens in drafts["fixed"].items()}
    pairs = [
        (wanted[request, position], tokens[:3])
        for (request, position, _), tokens in drafts["random"].items()
        if (request, position) in wanted
    ]
    assert len(pairs) > 500
    different = sum(a[: len(b)] != b for a, b in pairs)
    assert different <= len(pairs) // 200, f"{different} of {len(pairs)} drafts differ"


def test_drafts_stop_at_the_end_of_the_context(start_engine: Callable[..., RolloutEngine], head: DrafterConfig) -> None:
    asked = requests(2, 4, first=80)
    sampling = {"max_tokens": 500, "ignore_eos": True, "stop_token_ids": []}
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), max_new_tokens=500)
    for drafter in (ITSELF, head):
        block = SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=8))
        engine = start_engine(STEP_ADDER, block, max_new_tokens=500)
        found, wanted = engine.generate(asked, **sampling), plain.generate(asked, **sampling)
        assert_equal(found, wanted)
        lengths = {len(r.prompt_token_ids) + len(f.token_ids) for r, f in zip(asked, found, strict=True)}
        assert max(lengths) == 512


def test_the_router_stops_asking_a_head_that_is_never_right(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, expected: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    for _ in range(3):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS["T=1"]), expected["T=1"])
    proposed = [sum(engine.report()["proposed"][0])]
    for _ in range(2):
        engine.generate(requests(8, 4), **SAMPLINGS["T=1"])
        proposed.append(sum(engine.report()["proposed"][0]))
    assert proposed[-1] - proposed[0] < 100
