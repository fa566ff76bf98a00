# SPDX-License-Identifier: Apache-2.0
"""The step trace, with a clock that the tests set."""

import numpy as np
import pytest

from nemo_specrollout.telemetry import engine_stats as trace_module
from nemo_specrollout.telemetry.engine_stats import StepTrace

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trace_module, "time", clock)
    return clock


def step(trace: StepTrace, clock: Clock, forward_s: float, num_rows: int = 4, **end: float) -> tuple | None:
    """Records a decode step of four requests that samples after `forward_s` seconds and ends a second later."""
    clock.now += forward_s
    trace.begin_step(4, num_rows, num_rows)
    clock.now += 1.0
    return trace.end_step(**end)


def test_a_step_lasts_from_the_end_of_the_one_before(clock: Clock) -> None:
    trace = StepTrace([])
    assert step(trace, clock, 5.0) is None  # its start is unknown
    assert step(trace, clock, 5.0) == (4, 4, 6.0)
    assert step(trace, clock, 7.0, num_rows=9) == (4, 9, 8.0)


def test_our_host_time_is_noted_and_counts(clock: Clock) -> None:
    trace = StepTrace([])
    step(trace, clock, 5.0)
    assert step(trace, clock, 5.0, host_s=0.5) == (4, 4, 6.0)
    assert step(trace, clock, 5.0, num_rows=9, host_s=0.5) == (4, 9, 6.0)
    seconds, host_s = (trace.columns.index(name) for name in ("seconds", "host_s"))
    assert [(row[seconds], row[host_s]) for row in trace.since(1).rows] == [(6.0, 0.5), (6.0, 0.5)]


def test_time_without_steps_counts_for_no_step(clock: Clock) -> None:
    trace = StepTrace([])
    step(trace, clock, 5.0)
    clock.now += 40.0
    trace.stood_still(40.0)
    assert step(trace, clock, 5.0) == (4, 4, 6.0)


def test_prefill_and_steps_without_an_end_are_not_timed(clock: Clock) -> None:
    trace = StepTrace([])
    step(trace, clock, 5.0)
    trace.begin_step(4, 4, 20)
    assert trace.end_step() is None
    clock.now += 3.0
    trace.begin_step(4, 4, 4)  # vLLM asked for no drafts after this one
    assert step(trace, clock, 5.0) is None
    assert step(trace, clock, 5.0) == (4, 4, 6.0)


def test_drafts_are_recorded_by_drafter(clock: Clock) -> None:
    counts_TC = np.array([[0, 0, 0, 0], [3, 2, 2, 0], [1, 1, 0, 0]])
    trace = StepTrace(["a", "b"], lambda first, num: counts_TC[first : first + num])
    step(trace, clock, 5.0)
    trace.begin_step(4, 9, 9)
    trace.end_step()
    steps = trace.since(1)
    assert dict(zip(steps.columns[7:], steps.rows[0][7:], strict=True)) == {
        "drafted_a": 3, "accepted_a": 2, "drafted_b": 2, "accepted_b": 0,
    }  # fmt: skip
