# SPDX-License-Identifier: Apache-2.0
"""Placement planner: its pipelines against simulations, its choices against brute force, and its files."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.pipeline import coupled_tokens, steady_state, streamed_rates
from lab.placement.planner import (
    COUPLED,
    DECOUPLED,
    DRAFTER,
    LONGEST_WINDOW,
    PLAIN,
    VERIFIER,
    place,
)
from nemo_specrollout.config.strict import ConfigError

pytestmark = pytest.mark.unit

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


# Pipelines


def jittered(m: float, rng: random.Random) -> Callable[[], int]:
    """Returns a function that draws the draft tokens of a step, with clock jitter."""
    return lambda: math.floor(m) + (rng.random() < m % 1)


def even(m: float, rng: random.Random) -> Callable[[], int]:
    """Returns the same without jitter."""
    clock = rng.random()

    def beat() -> int:
        nonlocal clock
        before, clock = math.floor(clock), clock + m
        return math.floor(clock) - before

    return beat


def simulated(p: float, k: int, window: int, num_drafted: Callable[[], int], rng: random.Random) -> tuple[float, ...]:
    """Simulates the pipeline token by token. Returns emitted tokens, submitted drafts and the share of steps with a draft.

    Each draft token is drawn as right or wrong when it is made, which counts if all tokens before it are right.
    """
    num_steps, buffer = 150_000, []
    tokens = submitted = supplied = 0
    for _ in range(num_steps):
        verified = buffer[:k]
        for _ in range(num_drafted()):
            if len(buffer) < window:
                buffer.append(rng.random() < p)
        submitted, supplied = submitted + len(verified), supplied + bool(verified)
        num_right = verified.index(False) if False in verified else len(verified)
        tokens += num_right + 1
        buffer = buffer[num_right:]
        buffer = buffer[1:] if buffer and buffer[0] else []
    return tokens / num_steps, submitted / num_steps, supplied / num_steps


PIPELINES = [
    (0.8, 3, 6, 0.7), (0.8, 3, 6, 2.0), (0.9, 8, 12, 1.5), (0.6, 3, 6, 2.5), (0.95, 4, 12, 4.3), (0.8, 8, 12, 3.5),
    (0.7, 2, 2, 3.0), (0.9, 8, 4, 2.2), (0.97, 2, 32, 2.4), (0.5, 6, 16, 40.0), (0.95, 3, 6, 3.5),
]  # fmt: skip


@pytest.mark.parametrize(("p", "k", "window", "m"), PIPELINES)
def test_the_streamed_pipeline_agrees_with_its_simulation(p: float, k: int, window: int, m: float) -> None:
    rng = random.Random(f"{p} {k} {window} {m}")
    rates = streamed_rates(p, k, window, m)
    tokens, submitted, supplied = simulated(p, k, window, jittered(m, rng), rng)
    assert rates.num_tokens == pytest.approx(tokens, rel=0.02)
    assert rates.num_submitted == pytest.approx(submitted, rel=0.02)
    assert rates.occupancy == pytest.approx(supplied, rel=0.02)
    evenly, _, _ = simulated(p, k, window, even(m, rng), rng)
    assert 0.99 * rates.num_tokens < evenly < 1.045 * rates.num_tokens


def test_a_drafter_as_slow_as_the_verifier_is_useless() -> None:
    """Its only token in a step is for the position that the step samples itself."""
    assert streamed_rates(0.9, 4, 8, 1.0).num_tokens == pytest.approx(1.0)


def test_sure_drafts_and_no_drafts() -> None:
    assert streamed_rates(1.0, 3, 6, 2.0).num_tokens == pytest.approx(2.0)
    assert streamed_rates(1.0, 3, 16, 9.0).num_tokens == pytest.approx(4.0)
    assert streamed_rates(0.0, 3, 6, 5.0).num_tokens == pytest.approx(1.0)


@pytest.mark.parametrize(("p", "k", "tokens"), [(0.6, 3, 2.18), (0.8, 3, 2.95), (0.8, 6, 3.95), (0.9, 8, 6.13)])
def test_coupled_tokens_match_hand_calculations(p: float, k: int, tokens: float) -> None:
    assert coupled_tokens(p, k) == pytest.approx(tokens, abs=0.006)


@pytest.mark.parametrize("row_s", [0.0, 0.0001, 0.002])
def test_the_steady_state_is_a_fixed_point(row_s: float) -> None:
    steady = steady_state(0.8, 4, 12, 0.003, lambda rows: 0.01 + row_s * rows, 16)
    rates = streamed_rates(0.8, 4, 12, steady.step_s / 0.003)
    assert astuple(steady.rates) == pytest.approx(astuple(rates), rel=1e-6)
    assert steady.step_s == pytest.approx(0.01 + row_s * 16 * (1 + steady.rates.num_submitted), rel=1e-5)


# Planner


def curve(size: int, fixed_s: float, row_s: float) -> CostCurve:
    """Returns a curve on which twice the size takes 0.6 of the time."""
    factor = 0.6 ** math.log2(size)
    return CostCurve(size, COUNTS, tuple(factor * (fixed_s + row_s * n) for n in COUNTS))


def tables(fixed_s: float = 0.01, row_s: float = 0.0001, draft: float = 0.2, drafter_sizes: int = 2) -> CostTables:
    """Returns devices on which a draft token costs the share `draft` of a verifier's row."""
    return CostTables(
        "made up", "policy", "draft model",
        tuple(curve(s, fixed_s, row_s) for s in (1, 2, 4)), "GPU",
        tuple(curve(s, draft * fixed_s, draft * row_s) for s in (1, 2)[:drafter_sizes]),
        tuple(curve(s, 0.9 * draft * fixed_s, draft * row_s) for s in (1, 2, 4)),
    )  # fmt: skip


def brute_force(known: CostTables, num_requests: int, num_devices: int, p: float, max_k: int) -> float:
    """Returns the tokens a second of the best placement, with the longest window."""
    coupled_s = {c.size: c for c in known.coupled_draft_s}
    found = []
    for v in known.verify_s:
        for size, drafter in [(v.size, None), *((v.size + d.size, d) for d in known.draft_s)]:
            groups = min(num_devices // size, num_requests)
            if groups == 0:
                continue
            b = -(-num_requests // groups)
            for k in range(max_k + 1):
                if drafter is None:
                    found.append(coupled_tokens(p, k) / (v.at(b * (k + 1)) + k * coupled_s[v.size].at(b)))
                elif k:
                    steady = steady_state(p, k, LONGEST_WINDOW, drafter.at(b), v.at, b)
                    found.append(steady.rates.num_tokens / steady.step_s)
    return num_requests * max(found)


@pytest.mark.parametrize("num_requests", [1, 7, 64, 500])
@pytest.mark.parametrize("num_devices", [1, 3, 8])
@pytest.mark.parametrize(("p", "row_s", "draft"), [(0.8, 0.0001, 0.2), (0.95, 0.00001, 0.1), (0.5, 0.001, 0.5)])
def test_the_planner_agrees_with_brute_force(
    num_requests: int, num_devices: int, p: float, row_s: float, draft: float
) -> None:
    known = tables(row_s=row_s, draft=draft)
    best = place(known, num_requests, num_devices, p, 8).best
    expected = brute_force(known, num_requests, num_devices, p, 8)
    assert 0.9949 * expected <= best.tokens_per_s <= 1.0001 * expected


def test_options_are_consistent_and_ranked() -> None:
    placement = place(tables(), 64, 8, 0.8, 8)
    assert {o.mode for o in placement.options} == {PLAIN, COUPLED, DECOUPLED}
    rates = [o.tokens_per_s for o in placement.options]
    assert rates == sorted(rates, reverse=True)
    for o in placement.options:
        assert o.num_groups * (o.verifier_size + o.drafter_size) <= 8 and o.num_groups * o.batch >= 64
        assert o.num_groups * o.group_tokens_per_s >= 0.999 * o.tokens_per_s
        assert o.speedup == pytest.approx(o.tokens_per_s / placement.plain.tokens_per_s)
    assert len(placement.layouts) == 3 + 3 + 6 and placement.layouts[0] == placement.best
    assert max(o.num_groups for o in place(tables(), 64, 8, 0.8, 8, max_groups=1).options) == 1


def test_the_bottleneck_is_the_slower_side() -> None:
    slow, quick = (
        next(o for o in place(tables(draft=d), 16, 2, 0.9, 8).options if o.mode == DECOUPLED) for d in (0.7, 0.02)
    )
    assert (slow.bottleneck, quick.bottleneck) == (DRAFTER, VERIFIER)


def test_windows_beyond_the_longest_gain_nothing() -> None:
    for p in (0.8, 0.95):
        short, far = (streamed_rates(p, 8, w, 9.5).num_tokens for w in (LONGEST_WINDOW, 4 * LONGEST_WINDOW))
        assert far < 1.005 * short


KNOWN = st.builds(tables, st.floats(1e-4, 0.1), st.floats(1e-7, 1e-2), st.floats(0.01, 2.0), st.integers(0, 2))


@given(KNOWN, st.integers(1, 300), st.integers(1, 9), st.floats(0.0, 1.0))
@example(tables(0.0625, 0.009327110368503169, 0.75, 1), 2, 5, 0.75)  # No draft of this drafter is in time.
def test_the_best_option_is_never_worse_than_plain(
    known: CostTables, num_requests: int, devices: int, p: float
) -> None:
    placement = place(known, num_requests, devices, p, 5)
    assert placement.best.speedup >= 1.0 and placement.plain.speedup == 1.0
    assert all(0.0 <= o.state.rates.occupancy <= 1.0 for o in placement.options)
    assert all(1.0 <= o.state.rates.num_tokens <= o.k + 1 + 1e-6 for o in placement.options)


@given(KNOWN, st.integers(1, 300), st.integers(1, 9), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_better_drafts_never_promise_less(
    known: CostTables, num_requests: int, devices: int, p: float, q: float
) -> None:
    worse, better = (place(known, num_requests, devices, x, 5).best.tokens_per_s for x in sorted((p, q)))
    assert better >= 0.995 * worse  # A small window may cost that much.


def test_too_few_devices_are_refused() -> None:
    large = replace(tables(), verify_s=(curve(4, 0.01, 0.0001),))
    with pytest.raises(ConfigError, match="devices: 2; the smallest verifier that was measured has 4"):
        place(large, 8, 2, 0.8, 4)


# Files


def test_a_curve_interpolates_and_extrapolates_linearly() -> None:
    points = CostCurve(1, (2, 4, 8), (1.0, 2.0, 6.0))
    assert [points.at(n) for n in (1, 2, 3, 6, 8, 10)] == pytest.approx([1.0, 1.0, 1.5, 4.0, 6.0, 8.0])
    falling = CostCurve(1, (1, 2, 4), (1.0, 3.0, 2.0))
    assert [falling.at(n) for n in (1, 2, 4, 8)] == pytest.approx([1.0, 2.5, 2.5, 2.5])
    assert CostCurve(1, (4,), (0.5,)).at(100) == 0.5


def test_a_cost_file_round_trips(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(tables().to_json())
    assert CostTables.read(tmp_path / "x.json", "--profile") == tables()


def written(**changes: object) -> str:
    return json.dumps({**json.loads(tables().to_json()), **changes})


ONE = {"size": 1, "counts": [1, 2], "seconds": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"x.json is not a profile \(not JSON"),
        ("[]", r"x.json is not a profile \(config: expected a block of keys"),
        (written(verfy_s=[]), "verfy_s: unknown key; did you mean 'verify_s'"),
        (json.dumps({"device": "x"}), "policy: missing"),
        (written(verify_s=[]), "verify_s: empty"),
        (written(verify_s=[ONE, ONE]), r"verify_s: sizes \[1, 1\]; keep one curve a size"),
        (written(verify_s=[{**ONE, "seconds": [0.1]}]), r"verify_s\[0\]: 2 counts, 1 seconds"),
        (written(draft_s=[{**ONE, "counts": [2, 1]}]), r"draft_s\[0\].counts: \[2, 1\]; write them from small to large"),
        (written(draft_s=[{**ONE, "seconds": [0.1, 0.0]}]), r"draft_s\[0\].seconds\[1\]: 0.0 is out of range"),
        (written(draft_s=[{**ONE, "seconds": [0.1, "soon"]}]), r"draft_s\[0\].seconds\[1\]: expected float, got 'soon'"),
        (written(coupled_draft_s=[{**ONE, "size": 0}]), r"coupled_draft_s\[0\].size: 0 is out of range"),
        (written(unit="TPU"), "unit: 'TPU' is not available; did you mean 'GPU'"),
        (written(format=2), "format: 2 is out of range"),
    ],
)  # fmt: skip
def test_bad_cost_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        CostTables.read(tmp_path / "x.json", "--profile")
