# SPDX-License-Identifier: Apache-2.0
"""Verification budgets, step times, and the counterfactual."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.local.random_budgets import RandomBudget
from lab.local.statistics import plain_batch_sizes, plain_estimate_s
from nemo_specrollout.config.block import BUDGET_POLICIES, BudgetConfig
from nemo_specrollout.scheduling.speculation.budget import (
    AutoBudget,
    BudgetDecision,
    BudgetPolicy,
    build_budget,
)
from nemo_specrollout.scheduling.speculation.step_time import StepCosts, StepTimeTable

pytestmark = pytest.mark.unit

MAX_ROWS = 600


def costs(fixed_s: float = 1.0, row_s: float = 0.0, overhead_s: float = 0.0, discount_s: float = 0.0) -> StepCosts:
    return StepCosts(fixed_s + row_s * np.arange(MAX_ROWS + 1), overhead_s, discount_s)


def survival(rates: list[float], num_positions: int = 4) -> np.ndarray:
    return np.array([[r ** (k + 1) for k in range(num_positions)] for r in rates])


@dataclass(frozen=True)
class Observed:
    """Drafts of one step, and the cost of verifying them."""

    survival_BK: np.ndarray
    caps_B: np.ndarray
    costs: StepCosts | None

    def decide(self, policy: BudgetPolicy) -> BudgetDecision:
        return policy.allocate(self.survival_BK, self.caps_B, self.costs)


def observe(rates: list[float], table: StepCosts | None, num_positions: int = 4) -> Observed:
    """Returns requests whose draft tokens have these acceptance rates, without caps."""
    return Observed(survival(rates, num_positions), np.full(len(rates), 99), table)


def learned(table: StepTimeTable) -> StepCosts:
    costs = table.costs()
    assert costs is not None
    return costs


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    rates = draw(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=12))
    caps = draw(st.lists(st.integers(0, 6), min_size=len(rates), max_size=len(rates)))
    row_s = draw(st.floats(0.0, 0.5))
    table = costs(1.0, row_s, draw(st.floats(0.0, 0.5)), row_s * draw(st.floats(0.0, 1.0)))
    return Observed(survival(rates), np.array(caps), table)


BUDGETS = {**{name: build_budget(BudgetConfig(policy=name)) for name in BUDGET_POLICIES}, "random": RandomBudget()}


@pytest.mark.parametrize("name", BUDGETS)
@given(observed=observations())
def test_budgets_respect_caps_and_proposals(name: str, observed: Observed) -> None:
    available = np.count_nonzero(observed.survival_BK, axis=1)
    counts = observed.decide(BUDGETS[name]).counts_B
    assert (counts >= 0).all()
    assert (counts <= np.minimum(observed.caps_B, available)).all()


@given(observations())
def test_no_other_number_of_the_likeliest_tokens_is_faster(observed: Observed) -> None:
    decision = observed.decide(AutoBudget(0.0))
    counts = decision.counts_B
    num_requests = len(counts)
    allowed = np.arange(observed.survival_BK.shape[1]) < observed.caps_B[:, None]
    gains = np.cumsum(np.sort((observed.survival_BK * allowed).ravel())[::-1])

    def rate(n: int) -> float:
        return (num_requests + (gains[n - 1] if n else 0.0)) / observed.costs.step_s(num_requests, n)

    assert rate(int(counts.sum())) >= max(map(rate, range(len(gains) + 1))) * (1 - 1e-9)
    handed_out = (observed.survival_BK * allowed)[np.arange(observed.survival_BK.shape[1]) < counts[:, None]]
    assert decision.least_survival == (handed_out.min() if len(handed_out) else 0.0)


def test_the_likelier_drafts_are_verified_first() -> None:
    counts = observe([0.9, 0.2], costs(1.0, 0.15)).decide(AutoBudget(0.0)).counts_B
    assert counts[0] > counts[1]


@pytest.mark.parametrize(
    ("rate", "table", "num_drafts"),
    [(0.5, costs(1.0, 0.0), 32), (0.5, costs(0.0, 1.0), 0), (0.001, costs(1.0, 0.0), 0), (0.9, None, 0)],
    ids=["free rows", "expensive rows", "useless drafts", "nothing measured"],
)
def test_drafts_are_verified_as_far_as_they_pay(rate: float, table: StepCosts | None, num_drafts: int) -> None:
    assert observe([rate] * 8, table).decide(AutoBudget(0.03)).counts_B.sum() == num_drafts


@pytest.mark.parametrize(("requests", "num_drafts"), [(4, 16), (8, 12), (20, 0), (24, 96)])
def test_drafts_keep_a_step_in_its_cuda_graph(requests: int, num_drafts: int) -> None:
    """The largest graph has 20 rows. 24 requests do not fit in it, with or without drafts."""
    table = costs(1.0, 0.0)._replace(graph_rows=20)
    assert observe([0.5] * requests, table).decide(AutoBudget(0.03)).counts_B.sum() == num_drafts


def test_the_row_price_is_the_worth_of_a_row_s_time() -> None:
    """A draft row takes 0.02 s: its price is the number of tokens that the engine produces in that time."""
    observed = observe([0.5] * 8, costs(1.0, 0.02))
    decision = observed.decide(AutoBudget(0.0))
    counts = decision.counts_B
    tokens = 8 + sum(observed.survival_BK[b, : counts[b]].sum() for b in range(8))
    assert observed.costs is not None
    seconds = observed.costs.step_s(8, int(counts.sum()))
    assert counts.sum() and decision.row_price == pytest.approx(0.02 * tokens / seconds)
    assert observe([0.5] * 8, costs(1.0, 0.0)).decide(AutoBudget(0.0)).row_price == 0.0
    nothing = observe([0.0] * 8, costs(1.0, 0.02)).decide(AutoBudget(0.0))
    assert nothing.counts_B.sum() == 0 and nothing.row_price > 0.0


def test_the_overhead_of_drafts_counts() -> None:
    assert observe([0.3], costs(1.0, 0.0, overhead_s=0.5), 1).decide(AutoBudget(0.0)).counts_B.sum() == 0


@given(st.floats(4e-3, 1e-1), st.floats(1e-5, 1e-3), st.floats(0.0, 1e-3), st.floats(0.1, 1.5))
@settings(max_examples=30)
def test_the_table_learns_requests_rows_and_overhead(
    fixed_s: float, request_s: float, overhead_s: float, row_share: float
) -> None:
    """A draft row costs less or more than a request's row. Drafts add a constant to a step."""
    table, rng = StepTimeTable(MAX_ROWS), np.random.default_rng(0)

    def true_s(requests: int, drafts: int) -> float:
        return fixed_s + request_s * (requests + row_share * drafts) + overhead_s * (drafts > 0)

    for _ in range(900):
        requests, drafts = int(rng.integers(1, 65)), int(rng.integers(1, 65)) * int(rng.integers(0, 2))
        table.observe(requests, requests + drafts, true_s(requests, drafts), requests + drafts)
    known = learned(table)
    for requests, drafts in ((1, 0), (8, 0), (64, 0), (1, 4), (8, 40), (40, 20), (64, 60)):
        assert known.step_s(requests, drafts) == pytest.approx(true_s(requests, drafts), rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 99), st.floats(0.0, 10.0)), min_size=1, max_size=60))
def test_predicted_steps_never_get_shorter_by_more_rows(samples: list[tuple[int, int, float]]) -> None:
    table = StepTimeTable(MAX_ROWS)
    for requests, drafts, seconds in [*samples, *samples]:
        table.observe(requests, requests + drafts, seconds, requests + drafts)
    known = learned(table)
    assert (np.diff(known.plain_s) >= -1e-12).all()
    assert known.overhead_s >= 0
    assert all(known.step_s(8, n) >= known.plain_s[8] for n in range(100))


def test_plain_steps_are_inferred_from_steps_with_drafts() -> None:
    """A draft row costs 1.3 times a request's row. Plain steps were measured only from 25 requests on."""
    table, rng = StepTimeTable(MAX_ROWS), np.random.default_rng(0)
    for _ in range(2000):
        drafts = int(rng.integers(0, 2)) * int(rng.integers(4, 60))
        requests = int(rng.integers(1, 33)) if drafts else int(rng.integers(25, 33))
        table.observe(requests, requests + drafts, 0.020 + 0.001 * (requests + 1.3 * drafts), requests + drafts)
    known = learned(table)
    for requests in (8, 16, 32):
        assert known.plain_s[requests] == pytest.approx(0.020 + 0.001 * requests, rel=0.06)


def test_one_stall_does_not_move_the_table() -> None:
    table = StepTimeTable(MAX_ROWS)
    for _ in range(50):
        table.observe(8, 8, 0.01, 8)
    table.observe(8, 8, 30.0, 8)
    for _ in range(8):
        table.observe(8, 8, 0.01, 8)
    assert learned(table).plain_s[8] < 0.011


def test_a_plain_step_counts_only_if_it_repeats_the_last_size() -> None:
    table = StepTimeTable(MAX_ROWS)
    table.observe(8, 8, 0.5, 20)
    assert table.costs() is None
    table.observe(8, 8, 0.01, 8)
    assert learned(table).plain_s[8] == pytest.approx(0.01)


def test_the_first_step_with_drafts_of_a_size_is_ignored() -> None:
    table = StepTimeTable(MAX_ROWS)
    table.observe(8, 20, 0.5, 20)
    assert table.costs() is None
    table.observe(4, 20, 0.01, 12)
    assert learned(table).plain_s[20] == pytest.approx(0.01)


def test_a_stall_in_the_first_drafted_step_is_soon_forgotten() -> None:
    """At 8 requests drafts pay by far. At 64 a row costs nearly its worth, so the stall must be forgotten first."""
    for requests, num_plain in ((8, 0), (64, 250)):
        table = StepTimeTable(MAX_ROWS)
        for batch in (8, 16, 64) * 10:
            table.observe(batch, batch, 0.008 + 0.00015 * batch, batch)
        for _ in range(2):  # The first step of a size does not count.
            table.observe(requests, requests + 8, 0.3, requests)
        for _ in range(num_plain):
            table.observe(requests, requests, 0.008 + 0.00015 * requests, requests)
        known = learned(table)
        observed = observe([0.7] * requests, known)
        assert observed.decide(AutoBudget(0.03)).counts_B.sum() > 0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 8))
def test_plain_batches_contain_every_decode_token_once(lengths: list[int], slots: int) -> None:
    sizes = plain_batch_sizes(lengths, slots)
    assert sizes.sum() == sum(n - 1 for n in lengths)
    assert (sizes <= slots).all()


def test_plain_estimate_by_hand() -> None:
    # Three responses of 1, 2 and 4 tokens: decode batches of 2, 1, 1.
    assert plain_estimate_s([1, 2, 4], 8, [0.0, 1.0, 1.5, 1.7], other_s=0.25) == pytest.approx(0.25 + 1.5 + 1.0 + 1.0)
