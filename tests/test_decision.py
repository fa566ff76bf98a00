# SPDX-License-Identifier: Apache-2.0
"""The decision of a step, against exhaustive search.

Shapes: B requests, K draft positions, F depths, Q bins of survival.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.speculation.decision import best_depth, best_steps, likeliest
from nemo_specrollout.speculation.step_model import DraftCosts, StepCosts, padded_rows

pytestmark = pytest.mark.unit
NUM_BINS = 128
NONE = np.zeros(0)


def linear(
    fixed_s: float, row_s: float, graph_sizes: np.ndarray = NONE, launch_s: float = 0.0, **known: float
) -> StepCosts:
    """Returns costs that grow with the padded rows, and by `launch_s` beyond the largest graph."""
    padded_R = padded_rows(1000, graph_sizes)
    launch_s_R = launch_s * (padded_R > graph_sizes[-1]) if len(graph_sizes) else 0.0
    return StepCosts(fixed_s + row_s * padded_R + launch_s_R, graph_sizes, launch_s=launch_s, **known)


def spread(*survivals: float) -> np.ndarray:
    """Returns the bins of draft tokens, float64 [Q]."""
    bins = np.minimum((np.array(survivals) * NUM_BINS).astype(int), NUM_BINS - 1)
    return np.bincount(bins, minlength=NUM_BINS).astype(np.float64)


def drafts(count_Q: np.ndarray, num_requests: int, costs: StepCosts, margin: float = 0.0) -> int:
    return int(best_steps(count_Q[None], num_requests, costs, margin, np.zeros(1)).num_drafts_F[0])


def test_drafts_whose_rows_cost_nothing_are_all_verified() -> None:
    assert drafts(spread(0.9, 0.5, 0.1), 4, linear(0.01, 0.0)) == 3


def test_only_drafts_that_win_their_row_are_verified() -> None:
    """A plain step makes 100 tokens a second, so a row of 2 ms must win 0.2 tokens."""
    assert drafts(spread(0.9, 0.9, 0.15, 0.1), 1, linear(0.008, 0.002)) == 2
    assert drafts(spread(0.15, 0.1), 1, linear(0.008, 0.002)) == 0


def test_the_margin_must_be_exceeded() -> None:
    costs = linear(0.01, 1e-4)
    assert drafts(spread(0.1), 4, costs, margin=0.01) == 1
    assert drafts(spread(0.1), 4, costs, margin=0.03) == 0


def test_a_constant_of_drafts_must_be_won_by_all_of_them() -> None:
    costs = linear(0.01, 0.0, verify_s=0.003)
    assert drafts(spread(0.5), 2, costs) == 0
    assert drafts(spread(*[0.5] * 4), 2, costs) == 4


def test_a_graph_is_filled() -> None:
    """Bins hold many drafts, and the number that fills a graph lies within one."""
    costs = linear(0.001, 1e-3, np.array([8.0, 16.0, 32.0]))
    assert drafts(spread(*[0.9] * 20), 8, costs) == 8


GRAPHS = np.array([8.0, 16.0, 32.0])


def test_the_graphs_are_left_exactly_when_that_makes_more_tokens_a_second() -> None:
    """A full graph makes 29.6 tokens in 100 ms. All 100 drafts make 98.2, which may take 332 ms and no longer."""
    sure = spread(*[0.9] * 100)
    full = linear(0.1, 0.0, GRAPHS)
    limit_s = 0.1 * float((8 + 100 * 115.5 / 128) / (8 + 24 * 115.5 / 128)) - 0.1
    assert drafts(sure, 8, full._replace(seconds_R=linear(0.1, 0.0, GRAPHS, limit_s + 1e-4).seconds_R)) == 24
    assert drafts(sure, 8, full._replace(seconds_R=linear(0.1, 0.0, GRAPHS, limit_s - 1e-4).seconds_R)) == 100
    assert drafts(spread(*[0.9] * 30), 8, linear(0.1, 0.0, GRAPHS, 0.05)) == 24, "six more drafts are too few"


def test_beyond_the_graphs_a_step_ends_where_rows_become_dear() -> None:
    """The host launches for 300 ms, in which the GPU computes 128 rows. All drafts lie in one bin."""
    rows_R = np.arange(1001)
    seconds_R = np.where(rows_R <= 32, 0.1, np.maximum(0.3, 0.3 + 0.01 * (rows_R - 128)))
    costs = StepCosts(seconds_R, GRAPHS, corners=np.array([64.0, 128.0, 256.0]))
    assert drafts(spread(*[0.9] * 900), 8, costs) == 120


@given(
    st.lists(st.floats(0.0, 1.0), max_size=40), st.integers(1, 8), st.floats(1e-4, 0.01), st.floats(0.0, 1e-3),
    st.sampled_from([NONE, np.array([4.0, 8.0, 16.0, 24.0])]), st.floats(0.0, 0.03),
)  # fmt: skip
def test_no_number_of_drafts_is_faster(
    survivals: list[float], num_requests: int, fixed_s: float, row_s: float, graph_sizes: np.ndarray, launch_s: float
) -> None:
    costs = linear(fixed_s, row_s, graph_sizes, launch_s, verify_s=fixed_s / 20)
    steps = best_steps(spread(*survivals)[None], num_requests, costs, 0.0, np.zeros(1))
    falling = np.sort((np.floor(np.minimum(np.array(survivals), 0.9999) * NUM_BINS) + 0.5) / NUM_BINS)[::-1]
    options = np.arange(min(len(survivals), costs.most_drafts(num_requests)) + 1)
    rates = (num_requests + np.array([falling[:n].sum() for n in options])) / costs.seconds(num_requests, options)
    assert steps.rate_F[0] >= rates.max() * (1 - 1e-9)
    assert steps.rate_F[0] == pytest.approx(rates[int(steps.num_drafts_F[0])])


# Depth


def of_depths(*survivals_K: float, num_requests: int = 1, text: tuple[float, ...] = ()) -> np.ndarray:
    """Returns the draft tokens of requests whose model drafts these, at each depth, float64 [F, Q]."""
    depths = [text, *(survivals_K[: k + 1] for k in range(len(survivals_K)))]
    return num_requests * np.stack([spread(*survivals) for survivals in depths])


def test_a_free_model_drafts_all_that_helps() -> None:
    costs = linear(0.01, 0.0, drafting=DraftCosts())
    assert best_depth(of_depths(0.9, 0.8, 0.7), 1, costs, 0.03).depth == 3


def test_depth_falls_as_passes_get_dearer() -> None:
    depths = [
        best_depth(
            of_depths(0.9, 0.8, 0.7, 0.6), 1, linear(0.01, 0.0, drafting=DraftCosts(p, 0.0, p, 0.0, p)), 0.0
        ).depth
        for p in (1e-4, 7e-3, 5e-2)
    ]
    assert depths[0] > depths[1] > depths[2] == 0


def test_what_reading_costs_is_lost_and_drafting_is_won() -> None:
    costs = linear(0.01, 0.0, drafting=DraftCosts(0.001, 0.0, 0.001))
    reading = best_depth(of_depths(0.01, 0.01), 1, costs, 0.03)
    assert reading.depth == 0 and reading.won_s == pytest.approx(-0.001)
    drafting = best_depth(of_depths(0.9, 0.8), 1, costs, 0.0)
    tokens = 1 + 115.5 / 128 + 102.5 / 128
    assert drafting.depth == 2
    assert drafting.won_s == pytest.approx(tokens * 0.01 - 0.012)


def test_a_model_no_better_than_text_is_not_asked() -> None:
    costs = linear(0.01, 0.0, drafting=DraftCosts(0.001, 0.0, 0.001))
    as_good = np.stack([spread(0.8, 0.6)] * 3)
    assert best_depth(as_good, 1, costs, 0.0).depth == 0


def test_sure_tokens_alone_may_pay_although_the_mean_does_not() -> None:
    """Rows are dear. Half of the first drafts are sure, the others are wrong."""
    costs = linear(0.004, 0.002, drafting=DraftCosts(1e-4, 0.0, 1e-4))
    sure = 16 * np.stack([spread(), spread(0.99, 0.01)])
    mean = 32 * np.stack([spread(), spread(0.5)])
    assert (
        best_depth(sure, 32, costs, 0.03).depth
        == 0
        < best_depth(sure, 32, linear(0.02, 3e-4, drafting=DraftCosts(1e-4)), 0.03).depth
    )
    price_s = linear(0.02, 9e-4, drafting=DraftCosts(1e-4, 0.0, 1e-4))
    assert best_depth(sure, 32, price_s, 0.03).depth == 1 and best_depth(mean, 32, price_s, 0.03).depth == 0


# The host's choice


@given(st.integers(0, 12), st.integers(0, 1_000_000))
def test_the_likeliest_drafts_are_prefixes_within_caps(most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates_BK = rng.uniform(0.0, 1.0, (3, 4)) * (rng.random((3, 4)) < 0.8)
    caps_B = rng.integers(0, 5, 3)
    if seed % 2:
        rates_BK = np.round(rates_BK)  # many drafts are as likely as each other
    survival_BK = rates_BK.cumprod(axis=1)
    counts_B = likeliest(survival_BK, caps_B, most)
    available_B = np.minimum(np.count_nonzero(survival_BK, axis=1), caps_B)
    assert (counts_B <= available_B).all() and counts_B.sum() == min(most, available_B.sum())
    best = max(
        sum(survival_BK[b, : n[b]].sum() for b in range(3))
        for n in itertools.product(*(range(a + 1) for a in available_B))
        if sum(n) == counts_B.sum()
    )
    assert sum(survival_BK[b, : counts_B[b]].sum() for b in range(3)) == pytest.approx(best)


@pytest.mark.parametrize("most", [-(10**9), -1, 0, 1, 5, 12, 2**40])
def test_without_room_no_draft_is_chosen(most: int) -> None:
    counts_B = likeliest(np.full((3, 4), 0.5), np.array([4, 0, 99]), most)
    assert counts_B.sum() == min(max(most, 0), 8) and counts_B[1] == 0
