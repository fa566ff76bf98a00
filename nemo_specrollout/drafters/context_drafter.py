# SPDX-License-Identifier: Apache-2.0
"""What the drafters that look contexts up have in common: one index for all requests, parted by salts."""

import numpy as np

from nemo_specrollout.drafters.base import Batch, Demand, Drafter, Proposal
from nemo_specrollout.drafters.context_index import ContextIndex, context_orders


class ContextDrafter(Drafter):
    """Proposes what followed the request's last tokens before, where texts of its salt are concerned; owns the index.

    A subclass chooses in `open` which salt a request reads and writes under.
    """

    shortest_context: int

    def __init__(self, num_lanes: int, max_order: int, num_slots: int) -> None:
        self._index = ContextIndex(num_slots, context_orders(self.shortest_context, max_order))
        self._salts = np.zeros(num_lanes, np.uint64)

    def propose(self, batch: Batch, demand: Demand, out: Proposal) -> None:
        self._index.learn_and_walk(
            self._salts[batch.lanes_B], batch.token_ids_BL, batch.seen_B, batch.lengths_B,
            demand.level_rates, demand.floor, out.tokens_BK, out.levels_BK, out.lengths_B,
        )  # fmt: skip
