# SPDX-License-Identifier: Apache-2.0
"""Drafting rests where drafts do not pay, longer and longer, and is looked at again at any sign of use."""

import pytest

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.drafting_pause import (
    LOOKS,
    PATIENCE,
    REST_SHARE,
    Pacer,
    Pacing,
    build_pacer,
)

pytestmark = pytest.mark.unit


def steps(pacer: Pacing, num_steps: int, num_requests: int = 8, num_drafts: int = 0) -> list[bool]:
    """Whether each step rests, where every budget gives `num_drafts` drafts; a step that rests has no budget."""
    rested, rests = [], False
    for _ in range(num_steps):
        if not rests:
            pacer.decided(num_drafts)
        rests = pacer.rests(num_requests)
        rested.append(rests)
    return rested


def runs(rested: list[bool], of: bool) -> list[int]:
    """Lengths of the runs of steps that rest, or do not."""
    return [len(run) for run in "".join("r" if r else "." for r in rested).split(".r"[not of]) if run]


def test_while_drafts_pay_no_step_rests() -> None:
    assert not any(steps(Pacer(), 200, num_drafts=3))


def test_rests_begin_after_some_patience_and_grow_with_the_time_that_drafts_did_not_pay() -> None:
    rested = steps(Pacer(), 1200)
    assert not any(rested[: PATIENCE - 1])
    lengths = runs(rested, True)[:-1]
    assert lengths == sorted(lengths) and lengths[0] < 5 < lengths[-1] <= 1200 * REST_SHARE
    assert sum(rested[600:]) > 0.95 * 600, "drafters that never pay are asked in few steps"


def test_a_rest_ends_with_steps_in_which_the_budget_sees_drafts() -> None:
    """A budget is a step late: it takes two consultations in a row to be seen."""
    assert min(runs(steps(Pacer(), 600)[100:], False)[1:-1]) >= LOOKS


def rested_long() -> Pacer:
    pacer = Pacer()
    steps(pacer, 1000)
    while not pacer.rests(8):
        pacer.decided(0)
    return pacer


def test_drafts_that_pay_end_a_rest_and_begin_the_count_again() -> None:
    pacer = rested_long()
    pacer.decided(1)
    rested = steps(pacer, 40)
    assert not any(rested[: PATIENCE - 1]) and max(runs(rested, True)) < 10


@pytest.mark.parametrize(("num_new", "looks"), [(4, True), (3, False)])
def test_a_batch_of_which_half_is_new_is_looked_at(num_new: int, looks: bool) -> None:
    pacer = rested_long()
    pacer.opened(num_new)
    assert pacer.rests(8) != looks


def test_each_size_of_batch_has_rests_of_its_own() -> None:
    pacer = rested_long()
    few = steps(pacer, 20, num_requests=2)
    assert not any(few[: PATIENCE - 1]) and max(runs(few, True)) < 5
    assert not pacer.rests(8), "another size is looked at first"
    assert max(runs(steps(pacer, 300), True)) > 50, "what was learned of a size stays"


def test_budgets_that_do_not_weigh_never_rest() -> None:
    assert not any(steps(build_pacer(BudgetConfig(policy="fixed")), 100))


def test_random_rests_begin_and_end() -> None:
    rested = steps(build_pacer(BudgetConfig(policy="random")), 200)
    assert len(runs(rested, True)) > 10 and len(runs(rested, False)) > 10
