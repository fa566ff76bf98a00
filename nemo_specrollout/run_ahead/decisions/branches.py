# SPDX-License-Identifier: Apache-2.0
"""Which branches of the texts that are made ahead get a slot: the likeliest first.

A text is made by older weights under the noise of the step to come. It parts from the text of the new weights where a near-tie
flips, and the new token there is then the runner-up. A branch is the text that goes on with the runner-up, so it is the new
text if that tie flips and no earlier one does. Branches have branches of their own.

All paths of a request have as many tokens before them as they need, so a slot makes about as many tokens whichever path it
gets. The path that is likeliest to be the text is therefore worth the most.

Shapes: P positions of a path.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_specrollout.run_ahead.decisions.flips import FlipModel

Array = np.ndarray[Any, Any]
LEAST_PROBABILITY = 1e-4
"""A branch that is less probable than this is not worth the memory of its text."""


@dataclass(frozen=True)
class Branch:
    """A branch to be decoded."""

    request: Hashable
    """Name of the request."""
    path: int
    """Number of the path that it makes, counted for each request from 0, which is the text without any flip."""
    parent: int
    """Number of the path that it leaves."""
    position: int
    """Number of the token of the response with which it begins, from 0. Tokens before it are the parent's."""
    token_id: int
    """That token, which is the runner-up of the parent's."""
    probability: float
    """Probability that the new weights sample the text up to this token."""


@dataclass
class _Path:
    """A path, with what is known of the tokens that are its own: those from `first` on."""

    first: int
    probability: float
    """Probability that the new weights sample the text up to and including its first own token."""
    survival: float
    """Probability that the new weights sample all that is known of it."""
    flips_P: list[float] = field(default_factory=list)
    """Probability for each own token that the path is the text up to there and parts at it."""
    runner_up_P: list[int] = field(default_factory=list)


class BranchChoice:
    """Owns the paths of each request of an engine, and says which branch is decoded next. Knows no clock and no engine."""

    def __init__(self, flips: FlipModel, most_paths: int) -> None:
        """`most_paths` bounds the paths of one request, whose texts take memory."""
        self._flips = flips
        self._most_paths = most_paths
        self._paths: dict[Hashable, list[_Path]] = {}
        self._candidates: list[tuple[float, int, Hashable, list[_Path], int, int]] = []
        """A heap of branches not yet begun: negative probability, order of arrival, request, its paths, path and index in it.

        Those of a request that was closed stay until their turn comes. Its paths are no longer the request's then."""
        self._arrivals = 0

    def open(self, request: Hashable, probability: float = 1.0) -> None:
        """Begins with the text of a request, whose path is 0.

        `probability` is that of new weights sampling the request at all. They do not if it ends before they come.
        """
        self._paths[request] = [_Path(0, probability, probability)]

    def grow(self, request: Hashable, path: int, gap_P: Array, runner_up_P: Sequence[int]) -> None:
        """Takes further tokens of a path: the gap between the two best tokens of each, and the runner-up.

        The first token of a branch is the runner-up already, and it cannot flip back. So its gap is not told.
        """
        paths = self._paths[request]
        grown = paths[path]
        flip_P = self._flips.probability(gap_P)
        survival_P = grown.survival * np.concatenate([[1.0], np.cumprod(1.0 - flip_P)])
        parts_P = survival_P[:-1] * flip_P
        first = len(grown.flips_P)
        grown.flips_P.extend(parts_P.tolist())
        grown.runner_up_P.extend(runner_up_P)
        grown.survival = float(survival_P[-1])
        for index in np.flatnonzero(parts_P >= LEAST_PROBABILITY).tolist():
            self._arrivals += 1
            heapq.heappush(self._candidates, (-parts_P[index], self._arrivals, request, paths, path, first + index))

    def survival(self, request: Hashable, path: int) -> float:
        """Returns the probability that the new weights sample all of a path that is known."""
        return self._paths[request][path].survival

    def best(self) -> float:
        """Returns the probability of the likeliest branch that is not begun; 0 if there is none."""
        while self._candidates:
            negative, _, request, paths, _, _ = self._candidates[0]
            if self._may_branch(request, paths):
                return -negative
            heapq.heappop(self._candidates)
        return 0.0

    def next(self, num_free: int) -> list[Branch]:
        """Returns the likeliest branches for as many free slots, and counts them as begun."""
        chosen: list[Branch] = []
        while self._candidates and len(chosen) < num_free:
            negative, _, request, paths, parent, index = heapq.heappop(self._candidates)
            if not self._may_branch(request, paths):
                continue
            grown = paths[parent]
            first = grown.first + index + (parent > 0)
            branch = Branch(request, len(paths), parent, first, grown.runner_up_P[index], -negative)
            paths.append(_Path(first, branch.probability, branch.probability))
            chosen.append(branch)
        return chosen

    def close(self, request: Hashable) -> None:
        """Forgets a request, with its branches that were not begun."""
        self._paths.pop(request, None)

    def _may_branch(self, request: Hashable, paths: list[_Path]) -> bool:
        return self._paths.get(request) is paths and len(paths) < self._most_paths
