# SPDX-License-Identifier: Apache-2.0
"""How sure the draft tokens of a step are: what the draft board tells the speculation policy about its latest choice.

Shapes: F depths of drafting from 0 to K, Q bins of survival between 0 and 1.
"""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Draft tokens by their survival, summed over all requests of a step."""

    tokens_FQ: np.ndarray
    """Tokens that would have been submitted if the model had drafted to each depth, known or foreseen."""
    requests_F: np.ndarray
    """Requests for which the tokens of each depth are known, and not only foreseen."""
    submitted_Q: np.ndarray
    """Tokens that were submitted."""
    num_requests: int
    """Requests that could submit tokens."""

    @classmethod
    def of_table(cls, table: np.ndarray) -> "Spread":
        """Gives the parts of the board's table `spread_FQ` their names, shape [F + 1, Q + 1].

        The table's last row is about submitted tokens, and its last column counts requests (`drafters/board.py`).
        """
        return cls(table[:-1, :-1], table[:-1, -1], table[-1, :-1], int(table[-1, -1]))
