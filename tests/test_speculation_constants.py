# SPDX-License-Identifier: Apache-2.0
"""Each constant of the speculation package shows in a figure: a quarter or four times of it is out of the figure's bounds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nemo_specrollout.speculation import forecast, policy, step_model
from nemo_specrollout.speculation.forecast import BatchSizes, Forecast
from nemo_specrollout.speculation.policy import AutoPolicy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import DraftCosts, StepCosts, StepModel

pytestmark = pytest.mark.unit
K, NUM_BINS = 4, 128
COSTS = StepCosts(
    np.full(1025, 0.01), np.zeros(0), verify_s=2e-4, text_s=3e-4,
    drafting=DraftCosts(0.002, 0.0, 0.002),
)  # fmt: skip


def predicted(model: StepModel, num_rows: int = 8) -> float:
    """Returns the seconds of a step with drafters."""
    costs = model.costs()
    assert costs is not None
    return float(costs.seconds(num_rows, np.zeros(1))[0])


def steady(seconds: float = 0.01, num_steps: int = 200, num_rows: int = 8) -> StepModel:
    model = StepModel(256)
    for _ in range(num_steps):
        model.observe(num_rows, num_rows, seconds)
    return model


def spread(survivals: list[float], num_requests: int, depth: int = 0, is_foreseen: bool = False) -> Spread:
    """Returns a spread in which each request has drafts of these survivals at `depth`, and none at others."""
    spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
    spread_FQ[: depth + 1, -1] = num_requests
    spread_FQ[-1, -1] = num_requests
    for survival in survivals:
        spread_FQ[depth, int(survival * NUM_BINS)] += num_requests
    if is_foreseen:
        spread_FQ[depth, -1] = 0
    return Spread.of_table(spread_FQ)


def cold_sample() -> float:
    """Returns how far the first sample of another size moves its prediction, relative to its difference."""
    model = steady()
    before_s = predicted(model, 16)
    model.observe(16, 16, 0.9 * before_s)
    return (before_s - predicted(model, 16)) / (0.1 * before_s)


def steps_to_follow() -> float:
    """Returns the steps after which half of a slowdown of 10 % is believed."""
    model = steady(num_steps=400)
    for n in range(10_000):
        if predicted(model) > 0.0105:
            return n
        model.observe(8, 8, 0.011)
    return np.inf


def stall() -> float:
    """Returns how far a stall moves the prediction, in per cent of it."""
    model = steady()
    model.observe(8, 8, 5.0)
    return 100.0 * (predicted(model) / 0.01 - 1.0)


def context_guess() -> float:
    """Returns the share of a step's surplus that is ascribed to contexts, which have grown from none to 4,096 tokens."""
    model = steady(num_steps=1)
    model.observe(8, 8, 0.012, context=4096.0)
    costs = model.costs()
    assert costs is not None
    return (costs.at(4096.0).plain_s(8) - costs.plain_s(8)) / 0.002


def guess() -> float:
    """Returns the share by which a step of twice the rows of the only sample is expected to take longer."""
    return predicted(steady(num_steps=1), 16) / 0.01 - 1.0


def steps_to_forecast(is_foreseen: bool = False) -> float:
    """Returns the steps of four requests after which half of a change of their drafts is believed."""
    drafts, depth = Forecast(K), 2 if is_foreseen else 0
    for _ in range(100):
        drafts.observe(spread([0.5], 4, depth))
    for n in range(10_000):
        if drafts.counts(1, 1)[depth, 64] < 0.5:
            return n
        known = spread([], 4, 1)
        drafts.observe(known if is_foreseen else spread([], 4, depth))
    return np.inf


def awake(text: bool = False) -> AutoPolicy:
    chosen = AutoPolicy(0.03, K, K)
    chosen.costs = COSTS if not text else COSTS._replace(drafting=None)
    return chosen


def look_steps() -> float:
    """Returns the steps of four requests until a useless model lies dormant."""
    chosen = awake()
    chosen.requests_arrived(4)
    for n in range(1000):
        depth = chosen.plan(4, 4)
        if chosen.is_dormant:
            return n
        chosen.observe(spread([], 4, depth))
    return np.inf


def calls(name: str) -> float:
    """Returns the calls of a method in 240 steps with a useful model."""
    chosen, found = awake(), []
    method = getattr(chosen, name)
    setattr(chosen, name, lambda *args: found.append(1) or method(*args))
    chosen.requests_arrived(4)
    for _ in range(240):
        depth = chosen.plan(4, 4)
        chosen.observe(spread([0.99] * depth, 4, depth))
    return len(found)


def judgements() -> float:
    return calls("_judge")


def plans() -> float:
    """Returns the plans of depth. A judgement plans once more for each of three sizes of the batch."""
    return calls("_best") - 3 * judgements()


def wakes() -> float:
    """Returns the share of the engine's time, in per mille, that looks at a useless model take."""
    chosen, looked_s = awake(), 0.0
    drafting = COSTS.drafting
    assert drafting is not None
    for _ in range(400):
        chosen.requests_arrived(32)
        followed = 0 if chosen.is_dormant else 32
        for _ in range(20):
            depth = chosen.plan(32, followed)
            followed = 0 if chosen.is_dormant else followed
            looked_s += drafting.seconds(32, depth) if followed else 0.0
            chosen.observe(spread([], 32, depth if followed else 0))
    return 1e3 * looked_s / (400 * 20 * 0.01)


def looks_at_rest() -> float:
    """Returns the share of steps, in per cent, in which drafters without weights are looked at."""
    chosen, looks = awake(text=True), 0
    for n in range(4000):
        chosen.num_drafts(8, 32)
        chosen.plan(8, 0)
        looks += not chosen.ends_step(8, 0) and n > 100
    return looks / 40.0


def steps_to_rest() -> float:
    chosen = awake(text=True)
    for n in range(1000):
        chosen.num_drafts(8, 32)
        chosen.plan(8, 0)
        if chosen.ends_step(8, 0):
            return n
    return np.inf


def steps_to_forget_sizes() -> float:
    """Returns the steps after which batches of another size are a half of the last ones."""
    sizes = BatchSizes()
    for _ in range(100_000):
        sizes.count(32)
    for n in range(100_000):
        if dict(sizes.until_the_end(32))[32] < 0.5:
            return n
        sizes.count(8)
    return np.inf


FIGURES: dict[tuple[Any, str], tuple[Callable[[], float], float, float]] = {
    (step_model, "NOISE"): (stall, 0.2, 2.0),
    (step_model, "COLD"): (cold_sample, 0.5, 0.95),
    (step_model, "MEMORY"): (steps_to_follow, 20, 60),
    (step_model, "CLIP"): (stall, 0.2, 2.0),
    (step_model, "OPTIMISM"): (guess, 0.15, 0.4),
    (step_model, "CONTEXT"): (context_guess, 0.1, 0.5),
    (forecast, "WINDOW"): (steps_to_forecast, 15, 40),
    (forecast, "FORESEEN"): (lambda: steps_to_forecast(True), 60, 130),
    (policy, "ENOUGH"): (look_steps, 12, 30),
    (forecast, "GENERATION"): (steps_to_forget_sizes, 400, 1200),
    (policy, "PLANNED_STEPS"): (plans, 50, 120),
    (policy, "JUDGED_STEPS"): (judgements, 15, 40),
    (policy, "LOOK_SHARE"): (wakes, 2.0, 6.0),
    (policy, "REST_SHARE"): (looks_at_rest, 1.0, 4.0),
    (policy, "PATIENCE"): (steps_to_rest, 3, 8),
}


@pytest.mark.parametrize(("module", "name"), FIGURES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_constant_four_times_off_shows(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, least, most = FIGURES[module, name]
    found = {1.0: figure()}
    for factor in (0.25, 4.0):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, type(getattr(module, name))(factor * getattr(module, name)))
            found[factor] = figure()
    assert least <= found[1.0] <= most, found
    assert not least <= found[0.25] <= most and not least <= found[4.0] <= most, found


def test_every_constant_is_here() -> None:
    constants = {
        (m, name)
        for m in (policy, forecast, step_model)
        for name in vars(m)
        if isinstance(vars(m)[name], (int, float)) and name.isupper()
    }
    assert constants == set(FIGURES) and len(constants) <= 15
