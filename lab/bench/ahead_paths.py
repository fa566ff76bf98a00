# SPDX-License-Identifier: Apache-2.0
"""Computes how much of a newer text is drafted right by an older text with branches at its near-ties. Needs no engine.

The older text is sampled by weights before an update, and the newer text by those after it. A forward pass of the older
weights over the *newer* text tells which token they would sample at each position. Where this is not the newer text's token,
the update has changed the token. Such a position is called a flip. A branch that begins with the newer text's token at a flip
continues like the newer text up to the next flip, because both have the same noise at the same position. So no branch has to
be decoded.

Shapes: P tokens of the older text, N tokens of the newer one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lab.bench.near_ties import Ties
from nemo_specrollout.run_ahead.decisions.branches import BranchChoice
from nemo_specrollout.run_ahead.decisions.flips import FlipModel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TextPair:
    """The texts that older and newer weights sample for a request, and the near-ties of both under the older weights."""

    older_P: Array
    newer_N: Array
    of_older: Ties
    of_newer: Ties

    def cut(self, length: int | None) -> "TextPair":
        """Returns the first `length` tokens of both texts, or all if `length` is None."""
        return TextPair(
            self.older_P[:length], self.newer_N[:length], self.of_older.cut(length), self.of_newer.cut(length)
        )

    @cached_property
    def flips(self) -> list[int]:
        """Returns the positions at which older weights sample another token than the newer text has there."""
        return list(np.flatnonzero(self.of_newer.token_P != self.newer_N).tolist())

    @property
    def parting(self) -> int | None:
        """Returns the position of the first flip, where the two texts part, or None if there is no flip."""
        return self.flips[0] if self.flips else None

    @property
    def compared_P(self) -> Array:
        """Returns the score gaps at the positions up to and with the first flip.

        Up to there both texts have the same prefix.
        """
        return self.of_newer.gap_P[: None if self.parting is None else self.parting + 1]

    def flips_to_runner_up(self, flips: Sequence[int]) -> int:
        """Returns at how many of the positions `flips` the newer text has the runner-up of the older weights."""
        return int((self.of_newer.runner_up_P[flips] == self.newer_N[flips]).sum()) if flips else 0

    def drafted_N(self, num_flips: int) -> Array:
        """Returns which tokens of the newer text are drafted right, bool [N], if its first `num_flips` flips have branches.

        The branch of a flip begins with the newer text's token. It is used only after the policy has sampled this token, for
        which the draft was wrong. So up to the first flip without a branch, all tokens are right except those at flips. From
        there on, a token is right if the older text has the same token at the same position.
        """
        right_N = np.zeros(len(self.newer_N), bool)
        first = self.flips[num_flips] if num_flips < len(self.flips) else len(self.newer_N)
        right_N[:first] = True
        right_N[self.flips] = False
        end = min(len(self.older_P), len(self.newer_N))
        right_N[first:end] = self.older_P[first:end] == self.newer_N[first:end]
        return right_N

    def after(self, position: int, num_flips: int) -> tuple[Array, list[int]]:
        """Returns the score gaps and the runners-up of a branch at the positions after `position`, where the branch begins.

        `num_flips` is the number of the newer text's flips that have a branch, with this one as the last. The branch equals
        the newer text up to the next flip, so the values up to and including that flip are the newer text's. Later values are
        unknown, because no branch is decoded. The older text's values take their place, and affect only which further branches
        are chosen. `num_flips` is -1 if the newer text does not continue like this branch. Then all values are the older
        text's.
        """
        known = position + 1
        if num_flips >= 0:
            known = 1 + (self.flips[num_flips] if num_flips < len(self.flips) else len(self.newer_N) - 1)
        begin, end = slice(position + 1, known), slice(max(known, position + 1), None)
        gap_P = np.concatenate([self.of_newer.gap_P[begin], self.of_older.gap_P[end]])
        runner_up_P = np.concatenate([self.of_newer.runner_up_P[begin], self.of_older.runner_up_P[end]])
        return gap_P, runner_up_P.tolist()


def num_followed(pairs: Sequence[TextPair], flips: FlipModel, num_branches: int, most_paths: int) -> list[int]:
    """Returns for each pair the number of flips before the first one without a branch.

    A flip has a branch if one begins there with the newer text's token, on the path that follows the flips before it.

    Branches are chosen in `num_branches` rounds. A round chooses as many branches as there are pairs, and the next round knows
    all gaps of these branches. `most_paths` bounds the number of paths of a text, which are the text itself and its branches.
    """
    choice = BranchChoice(flips, most_paths)
    followed = [0] * len(pairs)
    path = [0] * len(pairs)
    for first, pair in enumerate(pairs):
        choice.open(first)
        choice.grow(first, 0, pair.of_older.gap_P, pair.of_older.runner_up_P.tolist())
    for _ in range(num_branches):
        for branch in choice.next(len(pairs)):
            assert isinstance(branch.request, int)
            number = branch.request
            pair = pairs[number]
            wanted = pair.flips[followed[number]] if followed[number] < len(pair.flips) else None
            is_newer = branch.parent == path[number] and branch.position == wanted
            is_newer = is_newer and branch.token_id == pair.newer_N[branch.position]
            if is_newer:
                followed[number] += 1
                path[number] = branch.path
            choice.grow(number, branch.path, *pair.after(branch.position, followed[number] if is_newer else -1))
    return followed


def num_steps(drafted_N: Array, k: int) -> int:
    """Returns the number of engine steps that make a text of which the tokens `drafted_N` are drafted right.

    Each step verifies up to `k` draft tokens.
    """
    at = steps = 0
    while at < len(drafted_N):
        wrong = np.flatnonzero(~drafted_N[at : at + k])
        at += (int(wrong[0]) if len(wrong) else min(k, len(drafted_N) - at)) + 1
        steps += 1
    return steps


def learn(flips: FlipModel, pairs: Sequence[TextPair]) -> None:
    """Lets a flip model learn from an update of the weights. `pairs` has the texts of the weights before and after it."""
    flips.observe(np.concatenate([pair.compared_P for pair in pairs]), sum(bool(pair.flips) for pair in pairs))
