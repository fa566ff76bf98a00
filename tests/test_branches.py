# SPDX-License-Identifier: Apache-2.0
"""Branches of texts that are made ahead: how probable flips are, and which branch is decoded first."""

from collections.abc import Iterator

import numpy as np
import pytest

from nemo_specrollout.run_ahead.decisions.branches import Branch, BranchChoice
from nemo_specrollout.run_ahead.decisions.flips import FlipModel, counts_of_gaps

pytestmark = pytest.mark.unit
LENGTH = 400
SCALE = 2e-3
"""Of the changes of an update, in nats."""


def gaps_after(history: tuple[int, ...]) -> np.ndarray:
    """Returns the gaps of a text's tokens, which depend on the positions at which it has flipped so far."""
    return np.random.default_rng([LENGTH, *history]).exponential(1.0, LENGTH)


def flips_of(seed: int) -> tuple[int, ...]:
    """Returns the positions at which an update makes the runner-up the token, of the text that the new weights sample."""
    rng = np.random.default_rng([seed, 17])
    history: tuple[int, ...] = ()
    first = 0
    while True:
        gap_P = gaps_after((seed, *history))[first:]
        flips_P = np.flatnonzero(rng.logistic(0.0, SCALE, len(gap_P)) > gap_P)
        if not len(flips_P):
            return history
        history += (first + int(flips_P[0]),)
        first = history[-1] + 1


def test_the_scale_of_an_update_is_found_from_flips_and_gaps() -> None:
    rng = np.random.default_rng(0)
    for scale in (2e-4, 5e-3, 0.1):
        model = FlipModel()
        for _ in range(4):
            gap_P = rng.exponential(1.0, 400_000)
            model.observe(gap_P, int((rng.logistic(0.0, scale, len(gap_P)) > gap_P).sum()))
        assert model.scale == pytest.approx(scale, rel=0.2)


def test_texts_that_met_the_same_update_count_as_if_they_had_come_at_once() -> None:
    """While those of an earlier update count less."""
    gap_P = np.full(1_000, 0.01)
    together, in_parts, later = FlipModel(), FlipModel(), FlipModel()
    for model in (together, in_parts, later):
        model.observe(gap_P, 100)
    together.observe_counts(counts_of_gaps(np.tile(gap_P, 2)), 300)
    in_parts.observe_counts(counts_of_gaps(gap_P), 100)
    in_parts.observe_counts(counts_of_gaps(gap_P), 200, is_same_update=True)
    later.observe_counts(counts_of_gaps(gap_P), 100)
    later.observe_counts(counts_of_gaps(gap_P), 200)
    assert in_parts.scale == together.scale < later.scale


def test_a_run_without_flips_keeps_expecting_a_few() -> None:
    model = FlipModel()
    model.observe(np.full(1_000, 1.0), 0)
    assert 0.01 < model.probability(np.array([1.0]))[0] * 1_000 < 2.0
    assert model.probability(np.zeros(1))[0] == 0.5


def test_the_likeliest_branch_comes_first_and_a_flip_hides_what_is_behind_it() -> None:
    choice = BranchChoice(FlipModel(0.01), most_paths=4)
    choice.open("a")
    choice.open("b")
    choice.grow("a", 0, np.array([5.0, 0.02, 0.0, 0.02]), [10, 11, 12, 13])
    choice.grow("b", 0, np.array([0.03]), [20])
    first, second, third = choice.next(3)
    assert (first.request, first.parent, first.position, first.token_id) == ("a", 0, 2, 12)
    assert (second.position, third.position) == (1, 3), "the tie behind is less probable by the tie's own half"
    assert first.probability > second.probability > third.probability
    assert choice.survival("a", 0) == pytest.approx(1 - sum(b.probability for b in (first, second, third)), abs=1e-3)
    assert choice.next(9)[0].request == "b", "a request has at most four paths"


def test_branches_of_branches_begin_behind_the_token_that_has_flipped() -> None:
    choice = BranchChoice(FlipModel(0.01), most_paths=4)
    choice.open("a")
    choice.grow("a", 0, np.array([5.0, 0.0, 5.0]), [1, 2, 3])
    assert choice.next(1) == [Branch("a", 1, 0, 1, 2, pytest.approx(0.5))]
    choice.grow("a", 1, np.array([5.0, 0.0]), [4, 5])
    assert choice.next(1) == [Branch("a", 2, 1, 3, 5, pytest.approx(0.25))]
    choice.close("a")
    assert choice.next(1) == []


def paths_of(seed: int, num_branches: int) -> Iterator[tuple[int, ...]]:
    """Yields the positions of the flips of each path that is made for a text, the text itself first."""
    choice = BranchChoice(FlipModel(SCALE), most_paths=num_branches + 1)
    choice.open(seed)
    history: list[tuple[int, ...]] = [()]
    yield ()
    choice.grow(seed, 0, gaps_after((seed,)), range(LENGTH))
    while branches := choice.next(1):
        (branch,) = branches
        history.append((*history[branch.parent], branch.position))
        yield history[-1]
        choice.grow(seed, branch.path, gaps_after((seed, *history[-1]))[branch.position + 1 :], range(LENGTH))


def test_a_few_branches_hold_the_texts_of_the_new_weights() -> None:
    """Texts of 400 tokens of which most part, some more than once, as with a large learning rate."""
    seeds = range(200)
    found = {n: np.mean([flips_of(s) in set(paths_of(s, n)) for s in seeds]) for n in (0, 1, 2, 8)}
    assert found[0] < 0.65
    assert found[0] + 0.15 < found[1] < found[2]
    assert found[8] > 0.95
