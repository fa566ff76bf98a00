# SPDX-License-Identifier: Apache-2.0
"""Histogram of survival, with which the draft board tells the speculation policy how sure an engine step's draft tokens are.

The drafting depth of an engine step is the number of tokens that the drafter with weights drafts for each request.

Shapes: F drafting depths from 0 to K, Q bins of survival between 0 and 1.
"""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Counts of draft tokens by their survival, over all requests of an engine step."""

    tokens_FQ: np.ndarray
    """For each drafting depth and bin of survival, the number of draft tokens that would have been submitted for verification
    if the drafter with weights had drafted to this depth.

    For depths that this drafter did not reach, the draft board assumes that the missing tokens are as likely to be accepted as
    the last token that it drafted."""
    requests_F: np.ndarray
    """For each drafting depth, the number of requests whose tokens in `tokens_FQ` were all really drafted, and none was
    assumed."""
    submitted_Q: np.ndarray
    """For each bin of survival, the number of draft tokens that were really submitted for verification."""
    num_requests: int
    """Number of requests in the engine step, including those for which no draft token was submitted."""

    @classmethod
    def of_table(cls, table: np.ndarray) -> "Spread":
        """Splits the draft board's table `spread_FQ`, shape [F + 1, Q + 1], into its named parts.

        The table's last row counts the submitted tokens, and its last column counts requests (`drafters/board.py`).
        """
        return cls(table[:-1, :-1], table[:-1, -1], table[-1, :-1], int(table[-1, -1]))
