# SPDX-License-Identifier: Apache-2.0
"""N-gram drafting from a request's own text, prompt included (prompt lookup, Saxena 2023)."""

import numpy as np

from nemo_specrollout.drafters.base import DraftRequest
from nemo_specrollout.drafters.context_drafter import ContextDrafter


class NgramDrafter(ContextDrafter):
    """Proposes what followed the request's current last tokens where it wrote them before.

    Each request sees only its own contexts. vLLM's own n-gram scans every request's whole text anew each step; this one
    costs the same however long the text is.
    """

    name = "ngram"
    shortest_context = 2

    def open(self, lane: int, request: DraftRequest) -> None:
        self._salts[lane] = request.key
        text = np.ascontiguousarray(request.prompt, np.int32)[None, :]
        self._index.learn(self._salts[lane : lane + 1], text, np.array([0]), np.array([text.shape[1]]))
