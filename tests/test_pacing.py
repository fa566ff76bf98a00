# SPDX-License-Identifier: Apache-2.0
"""Drafters that read text rest where their drafts do not pay, longer and longer, and wake at any sign of use."""

import pytest

from nemo_specrollout.scheduling.pacing import LONGEST_REST, PATIENCE, Pacer

pytestmark = pytest.mark.unit


def steps(pacer: Pacer, num_steps: int, num_requests: int = 8, num_drafts: int = 0) -> list[bool]:
    """Whether each step rests, where every budget gives so many drafts."""
    rested = []
    for _ in range(num_steps):
        pacer.decided(num_drafts)
        rested.append(pacer.rests(num_requests))
    return rested


def longest_run(rested: list[bool]) -> int:
    return max(map(len, "".join("r" if r else "." for r in rested).split(".")))


def test_while_drafts_pay_no_step_rests() -> None:
    assert not any(steps(Pacer(True), 200, num_drafts=3))


def test_rests_begin_after_some_patience_and_grow_up_to_a_limit() -> None:
    rested = steps(Pacer(True), 600)
    assert not any(rested[: PATIENCE - 1]) and longest_run(rested[:40]) < longest_run(rested) <= LONGEST_REST
    assert sum(rested[300:]) > 0.85 * 300, "drafters that never pay are asked in few steps"


def test_a_rest_ends_with_steps_in_which_the_budget_sees_drafts() -> None:
    """A budget is a step late: it takes two consultations in a row to be seen."""
    rested = steps(Pacer(True), 600)
    awake = [len(run) for run in "".join("r" if r else "." for r in rested[100:]).strip(".").split("r") if run]
    assert awake and min(awake) >= 2


@pytest.mark.parametrize("sign", ["drafts", "more requests", "a new request"])
def test_any_sign_of_use_wakes(sign: str) -> None:
    pacer = Pacer(True)
    while not pacer.rests(8):
        pacer.decided(0)
    if sign == "drafts":
        pacer.decided(1)
    elif sign == "a new request":
        pacer.wake()
    assert not pacer.rests(16 if sign == "more requests" else 8)


def test_budgets_that_do_not_weigh_never_rest() -> None:
    assert not any(steps(Pacer(False), 100))
