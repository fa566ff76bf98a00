# SPDX-License-Identifier: Apache-2.0
"""Suffix drafting from siblings and past rollouts of the same prompt (after SuffixDecoding, arXiv 2411.04975)."""

import numpy as np

from nemo_specrollout.drafters.base import Batch, Drafter, Proposal
from nemo_specrollout.drafters.context_index import ContextIndex, context_orders


class SuffixDrafter(Drafter):
    """Proposes what the request's siblings, and earlier rollouts of its prompt, wrote after the same last tokens.

    Owns an index shared by a group, filled as tokens arrive, so that a straggler drafts from those that ran ahead. The
    group's key is its prompt, so past epochs are remembered until the table needs their room.
    """

    name = "suffix"

    def __init__(self, num_lanes: int, max_order: int, num_slots: int) -> None:
        self._index = ContextIndex(num_slots, context_orders(1, max_order))
        self._salts = np.zeros(num_lanes, np.uint64)

    def open(self, lane: int, request_key: int, group_key: int, prompt: np.ndarray) -> None:
        self._salts[lane] = group_key

    def observe(self, batch: Batch) -> None:
        self._index.learn(self._salts[batch.lanes_B], batch.token_ids_BL, batch.seen_B, batch.lengths_B)

    def propose(self, batch: Batch, out: Proposal) -> None:
        salts_B = self._salts[batch.lanes_B]
        self._index.walk(salts_B, batch.token_ids_BL, batch.lengths_B, out.tokens_BK, out.levels_BK, out.lengths_B)
