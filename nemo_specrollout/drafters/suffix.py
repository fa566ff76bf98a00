# SPDX-License-Identifier: Apache-2.0
"""Suffix drafting from siblings and past rollouts of the same prompt (after SuffixDecoding, arXiv 2411.04975)."""

from nemo_specrollout.drafters.base import DraftRequest
from nemo_specrollout.drafters.context_drafter import ContextDrafter


class SuffixDrafter(ContextDrafter):
    """Proposes what the request's siblings, and earlier rollouts of its prompt, wrote after the same last tokens.

    A group shares its contexts, filled as tokens arrive, so that a straggler drafts from those that ran ahead. The
    group's key is its prompt, so past epochs are remembered until the table needs their room.
    """

    name = "suffix"
    shortest_context = 1

    def open(self, lane: int, request: DraftRequest) -> None:
        self._salts[lane] = request.group
