# SPDX-License-Identifier: Apache-2.0
"""Drafting pauses while drafts do not pay, longer and longer, and is tried again at any sign of use."""

import pytest

from lab.local.random_budgets import RandomPause
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.budget import (
    LOOKS,
    PATIENCE,
    PAUSE_SHARE,
    AutoPause,
    DraftingPause,
    build_pause,
)

pytestmark = pytest.mark.unit


def steps(pause: DraftingPause, num_steps: int, num_requests: int = 8, num_drafts: int = 0) -> list[bool]:
    """Returns which steps pause if every budget gives `num_drafts` drafts; a paused step has no budget."""
    paused, is_paused = [], False
    for _ in range(num_steps):
        if not is_paused:
            pause.drafts_decided(num_drafts)
        is_paused = pause.count_step(num_requests)
        paused.append(is_paused)
    return paused


def lengths_of(paused: list[bool], value: bool) -> list[int]:
    """Returns the lengths of the stretches of steps that have `value`."""
    return [len(run) for run in "".join("p" if p else "." for p in paused).split(".p"[not value]) if run]


def long_paused() -> AutoPause:
    """Returns a policy within a long pause."""
    pause = AutoPause()
    steps(pause, 1000)
    while not pause.count_step(8):
        pause.drafts_decided(0)
    return pause


def test_no_step_pauses_while_drafts_pay() -> None:
    assert not any(steps(AutoPause(), 200, num_drafts=3))


def test_pauses_begin_after_some_patience_and_grow() -> None:
    paused = steps(AutoPause(), 1200)
    assert not any(paused[: PATIENCE - 1])
    lengths = lengths_of(paused, True)[:-1]
    assert lengths == sorted(lengths) and lengths[0] < 5 < lengths[-1] <= 1200 * PAUSE_SHARE
    assert sum(paused[600:]) > 0.95 * 600, "useless drafts are tried in too many steps"


def test_pauses_are_separated_by_enough_steps_to_judge_drafts() -> None:
    """A budget is a step late, so two drafted steps in a row are needed to judge drafts."""
    assert min(lengths_of(steps(AutoPause(), 600)[100:], False)[1:-1]) >= LOOKS


def test_drafts_that_pay_end_a_pause_and_reset_the_count() -> None:
    pause = long_paused()
    pause.drafts_decided(1)
    paused = steps(pause, 40)
    assert not any(paused[: PATIENCE - 1]) and max(lengths_of(paused, True)) < 10


@pytest.mark.parametrize(("num_new", "ends"), [(4, True), (3, False)])
def test_a_batch_with_half_new_requests_ends_a_pause(num_new: int, ends: bool) -> None:
    pause = long_paused()
    pause.requests_arrived(num_new)
    assert pause.count_step(8) != ends


def test_each_batch_size_class_has_its_own_pauses() -> None:
    pause = long_paused()
    few = steps(pause, 20, num_requests=2)
    assert not any(few[: PATIENCE - 1]) and max(lengths_of(few, True)) < 5
    assert not pause.count_step(8), "another size is tried first"
    assert max(lengths_of(steps(pause, 300), True)) > 50, "the history of a size is kept"


def test_budgets_that_ignore_costs_never_pause() -> None:
    assert not any(steps(build_pause(BudgetConfig(policy="fixed")), 100))


def test_random_pauses_begin_and_end() -> None:
    paused = steps(RandomPause(), 200)
    assert len(lengths_of(paused, True)) > 10 and len(lengths_of(paused, False)) > 10
