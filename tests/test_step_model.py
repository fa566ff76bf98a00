# SPDX-License-Identifier: Apache-2.0
"""The step model: seconds of steps and of drafting, learned from noisy samples.

Shapes: J knots of rows.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrollout.speculation.step_model import DraftCosts, StepCosts, StepModel, padded_rows

pytestmark = pytest.mark.unit
MAX_ROWS = 1024
Seconds = Callable[[int, int], float]


def learned(model: StepModel) -> StepCosts:
    costs = model.costs()
    assert costs is not None
    return costs


def predicted(model: StepModel, num_requests: int, num_drafts: int) -> float:
    """Returns the predicted seconds of a step with drafters."""
    return float(learned(model).seconds(num_requests, np.array([num_drafts]))[0])


def taught(
    seconds: Seconds, num_steps: int, noise: float = 0.05, model: StepModel | None = None, most: int = 32
) -> StepModel:
    """Returns a model that has seen steps of 1 to `most` requests, with and without drafts."""
    model, rng = model or StepModel(MAX_ROWS), np.random.default_rng(0)
    for _ in range(num_steps):
        num_requests = int(rng.integers(1, most + 1))
        num_drafts = int(rng.integers(0, 4 * num_requests)) if rng.random() < 0.7 else 0
        true_s = seconds(num_requests, num_drafts)
        model.observe(num_requests, num_requests + num_drafts, true_s * float(np.exp(noise * rng.standard_normal())))
    return model


def cpu(num_requests: int, num_drafts: int) -> float:
    """Returns seconds that grow with the rows, more beyond 16, and a constant for drafts."""
    rows = num_requests + num_drafts
    return 0.01 + 1e-4 * rows + 4e-4 * max(rows - 16, 0) + 0.001 * (num_drafts > 0)


def test_nothing_is_predicted_before_the_first_step() -> None:
    assert StepModel(MAX_ROWS).costs() is None


def test_steps_with_and_without_drafts_are_learned() -> None:
    model = taught(cpu, 400)
    for num_requests, num_drafts in ((1, 0), (8, 0), (32, 0), (4, 8), (16, 40), (32, 90)):
        true_s = cpu(num_requests, num_drafts)
        assert predicted(model, num_requests, num_drafts) == pytest.approx(true_s, rel=0.08), (num_requests, num_drafts)


def test_one_step_predicts_all_others_with_optimism() -> None:
    """A low guess is tried and corrected; a high one never is."""
    model = StepModel(MAX_ROWS)
    model.observe(8, 8, 0.01)
    assert predicted(model, 8, 0) == pytest.approx(0.01)
    assert 0.01 < predicted(model, 8, 24) < 0.02


def test_a_stall_counts_little_and_a_first_stall_is_forgotten() -> None:
    model = taught(cpu, 200)
    before_s = predicted(model, 8, 16)
    model.observe(8, 24, 3.0)
    assert predicted(model, 8, 16) < 1.2 * before_s
    stalled = StepModel(MAX_ROWS)
    stalled.observe(8, 8, 5.0)
    for _ in range(4):
        stalled.observe(8, 8, 0.01)
    assert predicted(stalled, 8, 0) == pytest.approx(0.01, rel=0.1)


def test_a_machine_that_slows_down_or_speeds_up_is_followed() -> None:
    model = taught(cpu, 300)
    for factor in (1.3, 0.8):
        taught(lambda b, n, f=factor: f * cpu(b, n), 400, model=model)
        assert predicted(model, 16, 32) == pytest.approx(factor * cpu(16, 32), rel=0.1)


def test_steps_are_padded_to_the_next_graph() -> None:
    graph_sizes = np.array([8.0, 16.0, 64.0])
    costs = StepCosts(0.01 + 2e-5 * padded_rows(512, graph_sizes), graph_sizes)
    seconds = costs.seconds(8, np.array([0, 1, 8, 9]))
    assert seconds[1] == seconds[2] < seconds[3] and seconds[0] < seconds[1]
    assert costs.most_drafts(8) == 504 and costs.most_graph_rows == 64
    assert costs._replace(graph_sizes=np.array([1.0, 512.0])).most_graph_rows == 0, "no step leaves such a graph"
    assert costs.plain_s(5) == costs.plain_s(8)


@pytest.mark.parametrize("graph_sizes", [(), (8, 16, 32, 64, 128, 256)])
def test_the_staircase_of_graphs_is_learned(graph_sizes: tuple[int, ...]) -> None:
    """Only the padding explains these steps."""

    def padded(num_requests: int, num_drafts: int) -> float:
        rows = num_requests + num_drafts
        return 0.005 + 5e-5 * next((size for size in graph_sizes if size >= rows), rows)

    model = taught(padded, 400, model=StepModel(MAX_ROWS, graph_sizes))
    for num_requests, num_drafts in ((8, 0), (8, 1), (32, 31), (32, 33)):
        assert predicted(model, num_requests, num_drafts) == pytest.approx(padded(num_requests, num_drafts), rel=0.06)


GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


def launched(num_requests: int, num_drafts: int) -> float:
    """Returns about the seconds of Qwen3-8B on an H200, where the host takes 50 ms to launch a step without a graph."""
    rows = num_requests + num_drafts
    gpu_s = 0.005 + 3e-5 * next((size for size in GRAPHS if size >= rows), rows)
    return gpu_s if rows <= GRAPHS[-1] else max(gpu_s, 0.05)


def test_steps_without_a_graph_are_a_regime_of_their_own() -> None:
    """Most of them take equally long, which must not make the steps within the graphs look flat."""
    model = taught(launched, 300, most=64, model=StepModel(4096, GRAPHS))
    unknown = learned(model)
    assert unknown.seconds_R[513] == pytest.approx(2 * unknown.seconds_R[512], rel=0.02), "a guess until one was seen"
    for num_drafts in (600, 900, 1100, 1400, 1900) * 20:
        model.observe(32, 32 + num_drafts, launched(32, num_drafts))
    for num_requests, num_drafts in ((32, 0), (32, 224), (32, 480), (32, 700), (32, 1500)):
        true_s = launched(num_requests, num_drafts)
        assert predicted(model, num_requests, num_drafts) == pytest.approx(true_s, rel=0.12), num_drafts
    costs = learned(model)
    assert costs.launch_s == pytest.approx(0.05 - launched(32, 480), rel=0.2)
    endless = costs.with_graphs_of_any_size()
    assert endless.seconds_R[513] < costs.seconds_R[513] - 0.8 * costs.launch_s and endless.launch_s == 0.0
    assert (endless.seconds_R[:513] == costs.seconds_R[:513]).all()


def test_one_step_without_a_graph_tells_most_of_what_it_costs() -> None:
    model = taught(launched, 300, most=64, model=StepModel(4096, GRAPHS))
    model.observe(32, 1056, launched(32, 1024))
    assert predicted(model, 32, 1024) > 0.8 * launched(32, 1024)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 80), st.floats(1e-4, 0.5)), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_predictions_never_fall_as_requests_grow(steps: list[tuple[int, int, float]]) -> None:
    model = StepModel(MAX_ROWS)
    for num_requests, num_drafts, seconds in steps:
        model.observe(num_requests, num_requests + num_drafts, seconds)
    costs = learned(model)
    assert (costs.seconds_R > 0.0).all() and (np.diff(costs.seconds_R) >= -1e-12).all()
    assert (costs.seconds(8, np.arange(100)) >= costs.plain_s(8)).all()


def test_resting_drafters_show_what_they_cost() -> None:
    model, rng = StepModel(MAX_ROWS), np.random.default_rng(0)
    for n in range(200):
        works = n % 8 < 2
        model.observe(8, 8, (0.0104 if works else 0.01) * float(np.exp(0.01 * rng.standard_normal())), works)
    costs = learned(model)
    assert costs.text_s == pytest.approx(4e-4, rel=0.5) and costs.plain_s(8) == pytest.approx(0.01, rel=0.02)


# Contexts


def reading(num_requests: int, num_drafts: int, context: float, draft_share: float) -> float:
    """Returns seconds of which each token of context takes 20 ns for a request, and a share of that for each draft row."""
    rows = num_requests + num_drafts
    return 0.01 + 1e-4 * rows + 2e-8 * context * (num_requests + draft_share * num_drafts)


@pytest.mark.parametrize("draft_share", [0.0, 0.3, 1.0])
def test_what_contexts_cost_is_learned(draft_share: float) -> None:
    """Some kernels read a context once for all of its rows, others once for each row. Batches begin short and end long."""
    model, rng = StepModel(MAX_ROWS), np.random.default_rng(0)
    for n in range(600):
        num_requests, context = int(rng.integers(4, 17)), 500.0 + 40.0 * (n % 200)
        num_drafts = int(rng.integers(0, 4 * num_requests))
        true_s = reading(num_requests, num_drafts, context, draft_share)
        noisy_s = true_s * float(np.exp(0.05 * rng.standard_normal()))
        model.observe(num_requests, num_requests + num_drafts, noisy_s, context=context)
    costs = learned(model)
    assert costs.context_s == pytest.approx(2e-8, rel=0.3) and costs.draft_context_s >= 0.0
    for context in (1000.0, 8000.0, 16000.0):
        found_2 = costs.at(context).seconds(8, np.array([0, 32]))
        true_2 = [reading(8, num_drafts, context, draft_share) for num_drafts in (0, 32)]
        assert found_2 == pytest.approx(true_2, rel=0.12), context


def test_short_contexts_change_no_prediction() -> None:
    """Contexts that grow to 250 tokens explain nothing of a step whose seconds do not depend on them."""
    models, rng = [StepModel(MAX_ROWS), StepModel(MAX_ROWS)], np.random.default_rng(0)
    for n in range(400):
        num_drafts = int(rng.integers(0, 32))
        noisy_s = cpu(8, num_drafts) * float(np.exp(0.05 * rng.standard_normal()))
        for model, context in zip(models, (0.0, 50.0 + n % 200), strict=True):
            model.observe(8, 8 + num_drafts, noisy_s, context=context)
    drafts = np.arange(0, 64, 8)
    blind, seeing = (learned(model).at(250.0).seconds(8, drafts) for model in models)
    assert seeing == pytest.approx(blind, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 80), st.floats(1e-4, 0.5), st.floats(0, 1e6)), min_size=1))
@settings(max_examples=50, deadline=None)
def test_contexts_never_make_a_step_shorter(steps: list[tuple[int, int, float, float]]) -> None:
    model = StepModel(MAX_ROWS)
    for num_requests, num_drafts, seconds, context in steps:
        model.observe(num_requests, num_requests + num_drafts, seconds, context=context)
    costs = learned(model)
    assert costs.context_s >= 0.0 and costs.draft_context_s >= 0.0
    short, long = costs.at(100.0), costs.at(20_000.0)
    drafts = np.arange(100)
    assert np.isfinite(long.seconds(8, drafts)).all() and (short.seconds(8, drafts) > 0.0).all()
    assert (long.seconds(8, drafts) >= short.seconds(8, drafts)).all() and long.plain_s(8) >= short.plain_s(8)
    assert long.plain_steps_s(9)[8] == pytest.approx(long.plain_s(8)) and len(long.plain_steps_s(10**6)) == MAX_ROWS + 1


def test_a_coefficient_that_would_be_negative_leaves_its_part_to_the_others() -> None:
    """Steps of one context whose drafts cost nothing: what the terms of drafts explain together stays the same."""
    model = StepModel(MAX_ROWS)
    for num_drafts in (0, 24, 8, 16) * 50:
        model.observe(8, 8 + num_drafts, 0.01, context=8192.0)
    costs = learned(model).at(8192.0)
    assert costs.seconds(8, np.array([0, 8, 16, 24])) == pytest.approx([0.01] * 4, rel=0.03)


# Drafting with weights

TRUE = DraftCosts(0.002, 2e-5, 0.0015, 4e-5, 5e-4)


def test_drafting_is_learned() -> None:
    model, rng = StepModel(MAX_ROWS), np.random.default_rng(0)
    model.observe(8, 8, 0.01)
    assert learned(model).drafting is None
    for _ in range(300):
        num_requests, depth = int(rng.integers(1, 33)), int(rng.integers(0, 9))
        seconds = TRUE.seconds(num_requests, depth)
        model.observe_drafting(num_requests, num_requests, depth, seconds * float(np.exp(0.05 * rng.standard_normal())))
    found = learned(model).drafting
    assert found is not None
    for num_requests, depth in ((1, 0), (1, 1), (32, 0), (32, 1), (32, 8), (8, 4)):
        assert found.seconds(num_requests, depth) == pytest.approx(TRUE.seconds(num_requests, depth), rel=0.12)


def test_a_model_that_drafts_all_or_nothing_costs_all() -> None:
    costs = TRUE._replace(least_depth=8)
    assert costs.seconds(4, 1) == costs.seconds(4, 8) == TRUE.seconds(4, 8) > costs.seconds(4, 0)


@pytest.mark.parametrize("max_rows", [0, 1, 2, 100_000])
@pytest.mark.parametrize("graph_sizes", [(), (1, 8, 512)])
def test_steps_of_any_size_leave_finite_predictions(max_rows: int, graph_sizes: tuple[int, ...]) -> None:
    """Also the first step, whose number of rows is the unit of all others."""
    model = StepModel(max_rows, graph_sizes)
    for num_requests, num_rows in ((0, 0), (1, 1), (4, 40), (10**6, 10**7)):
        model.observe(num_requests, num_rows, 0.01)
        costs = learned(model)
        for asked in (0, 1, 10**6):
            assert np.isfinite(costs.seconds(asked, np.array([0, 1, 10**6]))).all()
            assert costs.most_drafts(asked) >= 0
