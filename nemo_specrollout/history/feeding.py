# SPDX-License-Identifier: Apache-2.0
"""Chooses which earlier responses to a prompt are fed to a context index. The host makes the choice without the device.

A context index is a table on the device. It maps the last tokens of a text to the tokens that followed them in earlier texts
(`drafters/device_index.py`).
"""

from collections.abc import Iterable, Sequence

from nemo_specrollout.history.segments import Place

PIECE = 1008
"""Largest number of new tokens that are fed to the index at once. A longer text is fed in several pieces."""


class Feeding:
    """Chooses which texts to feed to the context index, so that the texts of all active prompts fit into it together.

    A text is an earlier response. All texts of one prompt are a group. A group is active while the engine has requests with
    its prompt. The newest texts of a group are chosen first. The index overwrites old texts with new ones. Therefore a text no
    longer counts as known to the index once later texts have filled half of it.

    Owns a count of the tokens that were fed so far, and the value of this count when each text was fed.
    """

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens` is the number of tokens of texts that the index can hold at once."""
        self._most_tokens = most_tokens
        self._num_fed = 0
        self._fed_at: dict[Place, int] = {}

    def chosen(self, texts: Iterable[tuple[Place, int]], num_groups: int) -> tuple[list[Place], bool]:
        """Returns the locations of a group's texts to feed, and whether the index already knows another text of the group.

        A group is all texts of one prompt. `texts` has the location and the number of tokens of each of them, the newest text
        first. `num_groups` is the number of prompts of which the engine has requests. Half of the index is divided equally
        among these prompts. The chosen texts and the known ones together must fit into the prompt's share. A text that does
        not fit is left out.
        """
        room = self._most_tokens // (2 * max(num_groups, 1))
        chosen = []
        is_known = False
        for place, num_tokens in texts:
            if num_tokens > room:
                continue
            room -= num_tokens
            if self._knows(place):
                is_known = True
            else:
                chosen.append(place)
        return chosen, is_known

    def fed(self, place: Place, num_tokens: int) -> None:
        """Notes that the text of `num_tokens` tokens at `place` is being fed to the index."""
        self._num_fed += num_tokens
        self._fed_at.pop(place, None)
        self._fed_at[place] = self._num_fed
        while self._fed_at and not self._knows(oldest := next(iter(self._fed_at))):
            del self._fed_at[oldest]

    def _knows(self, place: Place) -> bool:
        fed_at = self._fed_at.get(place)
        return fed_at is not None and 2 * (self._num_fed - fed_at) <= self._most_tokens


def tokens_of_index(num_slots: int, orders: Sequence[int]) -> int:
    """Returns the number of tokens of texts that a context index with room for `num_slots` contexts can hold.

    `orders` are the context lengths, in tokens, that the index counts. Each token of a text adds one context of each length.
    The result assumes that no two texts share contexts.
    """
    return num_slots // len(orders)
