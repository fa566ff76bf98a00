# SPDX-License-Identifier: Apache-2.0
"""The profile of a step by stages."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import STEP_ADDER

from lab.bench.step_profile import (
    HEAD,
    HEAD_SAMPLING,
    LM_HEAD,
    NETWORK,
    OUR_WORK,
    REST,
    SAMPLING,
    STAGES,
    StageClock,
    profile,
    watch,
)
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig, NgramDrafterConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest


@pytest.mark.unit
def test_a_stage_within_another_counts_for_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    inner = SimpleNamespace(work=lambda: 7)
    outer = SimpleNamespace(work=lambda: inner.work() + inner.work())
    clock = StageClock()
    clock.wrap(inner, "work", "inner")
    clock.wrap(outer, "work", "outer")
    assert outer.work() == 14
    # The clock is read at each entry and exit: outer runs before, between and after the calls of inner.
    assert clock.take() == {"outer": 3.0, "inner": 2.0} and clock.take() == {}


def test_stages_of_an_engine_add_up_to_its_steps(start_engine: Callable[..., Any]) -> None:
    head: Path = STEP_ADDER.with_name("step_adder_eagle3")
    drafters = (NgramDrafterConfig(), Eagle3DrafterConfig(model=str(head)))
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=BudgetConfig("fixed", k=3)))
    requests = [RolloutRequest([1 + i, 2, 3], i, 0, exact_length=24) for i in range(5)]
    expected = engine.generate(requests)
    clock = watch(engine)
    assert engine.generate(requests) == expected, "a watched engine makes the same tokens"
    found = profile(engine, clock, requests, batch=2)
    assert found.num_steps > 10 and found.num_tokens >= 2 * found.num_steps
    assert set(found.stages) == set(STAGES) and sum(found.stages.values()) == pytest.approx(found.seconds)
    for stage in (NETWORK, LM_HEAD, SAMPLING, HEAD, HEAD_SAMPLING, OUR_WORK, REST):
        assert 0 < found.stages[stage] < found.seconds, stage
