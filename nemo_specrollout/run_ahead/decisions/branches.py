# SPDX-License-Identifier: Apache-2.0
"""Chooses which branches of the texts made ahead get a slot, the most likely ones first.

Older weights make a text with the noise of its coming step. The new weights leave it where a near-tie flips, and there they
nearly always sample the runner-up. A branch is the text that continues with the runner-up. So it is the new text if this
near-tie flips and no earlier one does. Branches can have branches of their own.

A path is the text of a request or one of its branches. A slot makes about as many tokens for one path as for another. So the
best path to decode is the one that is most likely to be the text of the new weights.

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
    """A branch that should be decoded."""

    request: Hashable
    """Name of the request of which this is a branch."""
    path: int
    """Number of this branch among the paths of its request, which is at least 1. Path 0 is the text without any flip."""
    parent: int
    """Number of the path from which this branch starts."""
    position: int
    """Index in the response of the first own token of this branch, from 0. The tokens before it are those of the parent."""
    token_id: int
    """First own token of this branch, which is the runner-up of the parent's token at the same position."""
    probability: float
    """Probability that the new weights sample the response up to the first own token of this branch."""


@dataclass
class _Path:
    """A path, with what is known about its own tokens. These are the tokens from the position `first` on."""

    first: int
    probability: float
    """Probability that the new weights sample the path up to and including its first own token."""
    survival: float
    """Probability that the new weights sample the whole known part of the path."""
    flips_P: list[float] = field(default_factory=list)
    """For each own token, the probability that the new weights sample everything before it and then another token in its
    place."""
    runner_up_P: list[int] = field(default_factory=list)


class BranchChoice:
    """Owns the paths of each request of an engine, and chooses which branch is decoded next. Uses no clock and no engine.

    A path is the text of a request or one of its branches.
    """

    def __init__(self, flips: FlipModel, most_paths: int) -> None:
        """`most_paths` is the largest number of paths of one request. It is limited because their texts take memory."""
        self._flips = flips
        self._most_paths = most_paths
        self._paths: dict[Hashable, list[_Path]] = {}
        self._candidates: list[tuple[float, int, Hashable, list[_Path], int, int]] = []
        """A heap of branches that were not started, as tuples (negative probability, order of arrival, request, its paths,
        path, index).

        Entries of a request that was closed stay in the heap until it is their turn. They are recognized because the request
        no longer has these paths."""
        self._arrivals = 0

    def open(self, request: Hashable, probability: float = 1.0) -> None:
        """Adds a request with its text, which is path 0.

        `probability` is the probability that new weights will decode the request. It is below 1 if the request may end before.
        """
        self._paths[request] = [_Path(0, probability, probability)]

    def grow(self, request: Hashable, path: int, gap_P: Array, runner_up_P: Sequence[int]) -> None:
        """Adds further tokens of a path, each with the gap between the best two scores and with the runner-up.

        The first token of a branch is not passed. It is a runner-up already, and cannot flip back.
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
        """Returns up to `num_free` branches that were not started, and counts them as started.

        They are those which the new weights will most likely take.
        """
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
