# SPDX-License-Identifier: Apache-2.0
"""Histograms of survival, with which the draft board tells the speculation policy how sure a step's draft tokens are.

Shapes: F depths of drafting from 0 to K, Q bins of survival between 0 and 1.
"""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Numbers of draft tokens by survival, summed over all requests of an engine step."""

    tokens_FQ: np.ndarray
    """For each depth, the draft tokens that would have been submitted if the drafter with weights had drafted that deep.

    Beyond the depth to which it has drafted, the board foresees these tokens."""
    requests_F: np.ndarray
    """For each depth, the number of requests for which these tokens are known, and not only foreseen."""
    submitted_Q: np.ndarray
    """Draft tokens that were submitted."""
    num_requests: int
    """Number of requests that could submit tokens."""

    @classmethod
    def of_table(cls, table: np.ndarray) -> "Spread":
        """Splits the board's table `spread_FQ`, shape [F + 1, Q + 1], into its named parts.

        The table's last row is about submitted tokens, and its last column counts requests (`drafters/board.py`).
        """
        return cls(table[:-1, :-1], table[:-1, -1], table[-1, :-1], int(table[-1, -1]))
