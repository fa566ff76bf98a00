# SPDX-License-Identifier: Apache-2.0
"""What drafting with a model costs: seconds by how much it must read and how deep it drafts, learned while running."""

from dataclasses import dataclass

import numpy as np

DECAY = 0.99
WARM_UP = 4
"""Draftings that are not learned from: kernels compile."""
ENOUGH = 16
"""Draftings after which the prediction is believed; from then on it is made anew as often."""
CLIP = 3.0
SWEEPS = 25


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of one drafting: a first pass over what the model has not read yet, then a short pass a further token."""

    fixed_s: float = 0.0
    row_s: float = 0.0
    pass_s: float = 0.0
    pass_request_s: float = 0.0

    def draft_s(self, num_rows: int, num_requests: int, depth: int) -> float:
        """Seconds to read `num_rows` tokens and draft `depth` (at least one) tokens of each request."""
        return self.fixed_s + num_rows * self.row_s + (depth - 1) * (self.pass_s + num_requests * self.pass_request_s)


class DraftTimes:
    """Decayed non-negative least squares over what draftings took.

    Example: `observe(num_rows=8, num_requests=8, depth=3, seconds=0.002)`, then `costs().draft_s(8, 8, 5)`.
    """

    def __init__(self) -> None:
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._num_samples = 0
        self._costs: DraftCosts | None = None

    def observe(self, num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        """One drafting took so long. A sample counts for at most three times what was predicted of it."""
        self._num_samples += 1
        if self._num_samples <= WARM_UP:
            return
        if self._costs is not None:
            seconds = min(seconds, CLIP * self._costs.draft_s(num_rows, num_requests, depth))
        terms = np.array([1.0, num_rows, depth - 1, (depth - 1) * num_requests])
        self._gram = DECAY * self._gram + np.outer(terms, terms)
        self._moment = DECAY * self._moment + seconds * terms
        if self._num_samples % ENOUGH == 0:
            self._costs = DraftCosts(*_non_negative_solution(self._gram, self._moment))

    def costs(self) -> DraftCosts | None:
        """The prediction; None until enough was measured."""
        return self._costs


def _non_negative_solution(gram: np.ndarray, moment: np.ndarray) -> list[float]:
    """The x >= 0 that minimises x G x / 2 - m x, by coordinate descent, leaning on zero where samples do not tell."""
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-12))
    g = (gram / np.outer(scale, scale) + 1e-4 * np.eye(len(moment))).tolist()
    m = (moment / scale).tolist()
    x = [0.0] * len(m)
    for _ in range(SWEEPS):
        for i, row in enumerate(g):
            rest = m[i] - sum(row[j] * x[j] for j in range(len(x)) if j != i)
            x[i] = max(0.0, rest / row[i])
    return [float(v) for v in np.array(x) / scale]
