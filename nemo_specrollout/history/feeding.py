# SPDX-License-Identifier: Apache-2.0
"""Chooses which texts of a prompt are fed to a context index. The choice needs no device, although the index is on one."""

from collections.abc import Iterable, Sequence

from nemo_specrollout.history.segments import Place

PIECE = 1008
"""Most new tokens that are fed at a time. A longer text is fed in several pieces."""


class Feeding:
    """Chooses texts such that those of all active prompts fit into the index together, the newest of each prompt first.

    A prompt is active while the engine has requests of it, and its texts are a group. An index forgets texts that later ones
    displace. So a text counts as known only until half of the index's capacity was fed after it. Owns the number of tokens
    that were fed so far, and for each text the value of this number when it was fed.
    """

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens` is the number of tokens of texts that the index can hold at once."""
        self._most_tokens = most_tokens
        self._num_fed = 0
        self._fed_at: dict[Place, int] = {}

    def chosen(self, texts: Iterable[tuple[Place, int]], num_groups: int) -> tuple[list[Place], bool]:
        """Returns which texts of a group to feed, and whether the index already knows another text of the group.

        `texts` are all texts of the group with their numbers of tokens, the newest first, and `num_groups` is the number of
        active groups.
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
        """Notes that a text of `num_tokens` tokens is fed."""
        self._num_fed += num_tokens
        self._fed_at.pop(place, None)
        self._fed_at[place] = self._num_fed
        while self._fed_at and not self._knows(oldest := next(iter(self._fed_at))):
            del self._fed_at[oldest]

    def _knows(self, place: Place) -> bool:
        fed_at = self._fed_at.get(place)
        return fed_at is not None and 2 * (self._num_fed - fed_at) <= self._most_tokens


def tokens_of_index(num_slots: int, orders: Sequence[int]) -> int:
    """Returns how many tokens of texts an index with room for `num_slots` contexts can hold if no two texts share contexts.

    `orders` are the lengths of the contexts. Each token adds one context of each length.
    """
    return num_slots // len(orders)
