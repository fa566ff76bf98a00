# SPDX-License-Identifier: Apache-2.0
"""Chooses which branches of the texts that are made ahead get a slot, the most likely ones first.

A text is made by older weights with the noise of the coming step. It diverges from the text of the new weights where a
near-tie flips, and the new token there is nearly always the runner-up. A branch is the text that continues with the runner-up,
so it is the new text if that tie flips and no earlier one does. Branches can have branches of their own.

A path is the text of a request or one of its branches. A slot makes about the same number of tokens whichever path it decodes.
So the path that is most likely to be the text of the new weights is worth the most.

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
"""Probability below which a branch is not worth the memory of its text."""


@dataclass(frozen=True)
class Branch:
    """A branch to be decoded."""

    request: Hashable
    """Name of the request."""
    path: int
    """Number of this branch among the paths of its request. They are counted from 0, which is the text without any flip."""
    parent: int
    """Number of the path that it leaves."""
    position: int
    """Index in the response of its first own token, from 0. Tokens before it are the parent's."""
    token_id: int
    """Its first own token, which is the runner-up of the parent's token."""
    probability: float
    """Probability that the new weights sample the text up to this token."""


@dataclass
class _Path:
    """A path, with what is known about its own tokens, which are those from `first` on."""

    first: int
    probability: float
    """Probability that the new weights sample the text up to and including its first own token."""
    survival: float
    """Probability that the new weights sample the whole known part of it."""
    flips_P: list[float] = field(default_factory=list)
    """For each own token, the probability that the new weights sample the path up to there and another token in its place."""
    runner_up_P: list[int] = field(default_factory=list)


class BranchChoice:
    """Owns the paths of each request of an engine, and chooses which branch is decoded next. Uses no clock and no engine."""

    def __init__(self, flips: FlipModel, most_paths: int) -> None:
        """`most_paths` bounds the paths of one request, whose texts take memory."""
        self._flips = flips
        self._most_paths = most_paths
        self._paths: dict[Hashable, list[_Path]] = {}
        self._candidates: list[tuple[float, int, Hashable, list[_Path], int, int]] = []
        """A heap of branches not yet started, as (negative probability, order of arrival, request, its paths, path, index).

        Entries of a closed request stay until their turn comes. They are recognized because their paths are no longer the
        request's."""
        self._arrivals = 0

    def open(self, request: Hashable, probability: float = 1.0) -> None:
        """Adds a request with its text, which is path 0.

        `probability` is the probability that new weights decode the request at all, which they do not if it ends before.
        """
        self._paths[request] = [_Path(0, probability, probability)]

    def grow(self, request: Hashable, path: int, gap_P: Array, runner_up_P: Sequence[int]) -> None:
        """Adds further tokens of a path, each with the gap between its two best tokens and the runner-up.

        The first token of a branch is not passed, because it is already the runner-up and cannot flip back.
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
        """Returns the probability that the new weights sample the whole known part of a path."""
        return self._paths[request][path].survival

    def best(self) -> float:
        """Returns the probability of the most likely branch that was not started, or 0 if there is none."""
        while self._candidates:
            negative, _, request, paths, _, _ = self._candidates[0]
            if self._may_branch(request, paths):
                return -negative
            heapq.heappop(self._candidates)
        return 0.0

    def next(self, num_free: int) -> list[Branch]:
        """Returns the `num_free` most likely branches, and counts them as started."""
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
        """Forgets a request and its branches that were not started."""
        self._paths.pop(request, None)

    def _may_branch(self, request: Hashable, paths: list[_Path]) -> bool:
        return self._paths.get(request) is paths and len(paths) < self._most_paths
