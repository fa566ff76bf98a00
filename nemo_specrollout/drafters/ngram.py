# SPDX-License-Identifier: Apache-2.0
"""N-gram drafting from a request's own text, prompt included (prompt lookup, Saxena 2023)."""

import numpy as np

from nemo_specrollout.drafters.base import Batch, Drafter, Proposal
from nemo_specrollout.drafters.context_index import ContextIndex, context_orders


class NgramDrafter(Drafter):
    """Proposes what followed the request's current last tokens where it wrote them before.

    Owns an index in which each request sees only its own contexts. vLLM's own n-gram scans every request's whole text
    anew each step; this one costs the same however long the text is.
    """

    name = "ngram"

    def __init__(self, num_lanes: int, max_order: int, num_slots: int) -> None:
        self._index = ContextIndex(num_slots, context_orders(2, max_order))
        self._salts = np.zeros(num_lanes, np.uint64)

    def open(self, lane: int, request_key: int, group_key: int, prompt: np.ndarray) -> None:
        self._salts[lane] = request_key
        text = np.ascontiguousarray(prompt, np.int32)[None, :]
        self._index.learn(self._salts[lane : lane + 1], text, np.array([0]), np.array([text.shape[1]]))

    def observe(self, batch: Batch) -> None:
        self._index.learn(self._salts[batch.lanes_B], batch.token_ids_BL, batch.seen_B, batch.lengths_B)

    def propose(self, batch: Batch, out: Proposal) -> None:
        salts_B = self._salts[batch.lanes_B]
        self._index.walk(salts_B, batch.token_ids_BL, batch.lengths_B, out.tokens_BK, out.levels_BK, out.lengths_B)
