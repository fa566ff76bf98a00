# SPDX-License-Identifier: Apache-2.0
"""Estimated tokens that a request still needs, from lengths of its siblings, of past rollouts, and its own length so far.

Shapes: R requests, N remembered lengths. Siblings are samples of the same prompt, in this step or an earlier one.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NUM_REMEMBERED = 4096
"""Latest lengths remembered over all requests."""
NUM_GROUPS = 8192
"""Prompts for which sibling lengths are remembered."""
NUM_OF_GROUP = 32
"""Latest lengths remembered for each prompt."""
SIBLING_WEIGHT = 0.5
"""Weight of one sibling's length relative to all other lengths together."""


class LengthEstimator:
    """Estimates E[length - length so far | length > length so far] over remembered lengths. Owns these lengths.

    Each sibling weighs half as much as all other lengths together. If no remembered length is longer, a request is expected
    to double its length, up to `max_length` tokens.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._recent = np.zeros(NUM_REMEMBERED, np.int64)
        self._num_seen = 0
        self._sorted: np.ndarray | None = None
        self._groups: OrderedDict[int, list[int]] = OrderedDict()

    def finished(self, group: int, length: int) -> None:
        """Adds a response of `length` tokens to prompt `group`."""
        self._recent[self._num_seen % NUM_REMEMBERED] = length
        self._num_seen += 1
        self._sorted = None
        siblings = self._groups.setdefault(group, [])
        siblings.append(length)
        del siblings[:-NUM_OF_GROUP]
        self._groups.move_to_end(group)
        if len(self._groups) > NUM_GROUPS:
            self._groups.popitem(last=False)

    def remaining(self, groups_R: Sequence[int], lengths_R: np.ndarray) -> np.ndarray:
        """Returns the expected remaining tokens, float64 [R], of responses with `lengths_R` tokens so far; at least 1."""
        totals_R, weights_R = self._population(lengths_R)
        for r, group in enumerate(groups_R):
            longer = [n for n in self._groups.get(group, ()) if n > lengths_R[r]]
            totals_R[r] += SIBLING_WEIGHT * sum(n - lengths_R[r] for n in longer)
            weights_R[r] += SIBLING_WEIGHT * len(longer)
        guess_R = np.maximum(lengths_R, 1)
        mean_R = np.divide(totals_R, weights_R, out=guess_R.astype(float), where=weights_R > 0)
        return np.clip(mean_R, 1.0, np.maximum(self.max_length - lengths_R, 1))

    def _population(self, lengths_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean excess of longer remembered lengths over `lengths_R`, and 1 if there are any; both float64 [R]."""
        if self._sorted is None:
            self._sorted = np.sort(self._recent[: min(self._num_seen, NUM_REMEMBERED)])
        beyond_N = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        first_R = np.searchsorted(self._sorted, lengths_R, "right")
        num_longer_R = len(self._sorted) - first_R
        has_R = num_longer_R > 0
        means_R = np.divide(beyond_N[first_R], num_longer_R, out=np.zeros(len(lengths_R)), where=has_R)
        return np.where(has_R, means_R - lengths_R, 0.0), has_R.astype(float)
