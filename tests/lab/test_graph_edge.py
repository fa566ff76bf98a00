# SPDX-License-Identifier: Apache-2.0
"""Drafts beyond the largest CUDA graph, with the step times that two GPUs have shown: the policy against fixed numbers."""

import pytest

from lab.simulation.graph_edge import BATCHES, RUNS, Drafts, StepTimes, auto, best_fixed, main, play

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("gpu", RUNS)
def test_the_measured_times_have_an_edge(gpu: str) -> None:
    machine = StepTimes.of(gpu)
    assert machine.step_s(32, 512) < 0.02 < 2 * machine.step_s(32, 512) < machine.step_s(32, 513)
    larger = machine.with_larger_graphs(32)
    assert larger.graph_sizes[-1] == 1056
    assert machine.step_s(32, 512) < larger.step_s(32, 1024) < 0.04
    assert larger.step_s(32, 512) == machine.step_s(32, 512)


@pytest.mark.parametrize("gpu", RUNS)
@pytest.mark.parametrize("has_larger", [False, True])
def test_the_policy_is_near_the_best_fixed_number(gpu: str, has_larger: bool) -> None:
    """It begins without any knowledge of the machine. Noise of 5 % and learning are within its 500 steps."""
    for num_requests in BATCHES[::2]:
        machine = StepTimes.of(gpu)
        machine = machine.with_larger_graphs(num_requests) if has_larger else machine
        for rate in (0.8, 0.95, 1.0):
            drafts = Drafts(num_requests, rate)
            share = play(drafts, machine, auto(), 500).rate / best_fixed(drafts, machine)[1]
            assert share > 0.93, (num_requests, rate, share)


def test_right_drafts_leave_the_graphs_only_where_that_pays() -> None:
    """With 32 requests a graph of 512 rows makes more tokens a second than 1,056 rows without one. With 128 it does not."""
    machine = StepTimes.of("h200")
    for num_requests, pays in ((32, False), (128, True)):
        drafts = Drafts(num_requests, 1.0)
        played = play(drafts, machine, auto(), 500)
        assert (played.steps_without_graph > 250) == pays
        k, _ = best_fixed(drafts, machine)
        assert (num_requests * (1 + k) > 512) == pays


def test_larger_graphs_bring_what_the_page_says() -> None:
    """32 requests whose texts are all right gain a ninth. Where one draft in 20 is wrong, few rows beyond 512 pay."""
    machine = StepTimes.of("h200")
    gains = []
    for rate in (1.0, 0.95):
        drafts = Drafts(32, rate)
        rates = [play(drafts, one, auto(), 500).rate for one in (machine, machine.with_larger_graphs(32))]
        gains.append(rates[1] / rates[0])
    assert gains[0] == pytest.approx(1.12, abs=0.03) and gains[1] == pytest.approx(1.0, abs=0.03)


def test_the_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.simulation.graph_edge.BATCHES", (32,))
    monkeypatch.setattr("lab.simulation.graph_edge.RATES", (1.0,))
    main(["--gpu", "h100"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["32", "1"] and len(row.split()) == 11
