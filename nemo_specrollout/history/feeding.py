# SPDX-License-Identifier: Apache-2.0
"""Chooses which texts of a prompt are fed to a context index. A pure object, as the index is on the engine's device."""

from collections.abc import Iterable, Sequence

from nemo_specrollout.history.segments import Place

PIECE = 1008
"""Most new tokens that are fed at a time. A longer text is fed in several pieces."""


class Feeding:
    """Chooses texts such that those of all active prompts fit into the index together, the newest of each prompt first.

    Owns the number of tokens that were fed so far, and the value of that number when each text was fed. An index forgets texts
    that later ones displace. So a text counts as known only until half of the index's capacity was fed after it.
    """

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens` is the number of tokens of texts that the index can hold at once."""
        self._most_tokens = most_tokens
        self._num_fed = 0
        self._fed_at: dict[Place, int] = {}

    def chosen(self, texts: Iterable[tuple[Place, int]], num_groups: int) -> tuple[list[Place], bool]:
        """Returns which texts of a group to feed, and whether the index already knows any other text of it.

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
        """Notes that a text is fed."""
        self._num_fed += num_tokens
        self._fed_at.pop(place, None)
        self._fed_at[place] = self._num_fed
        while self._fed_at and not self._knows(oldest := next(iter(self._fed_at))):
            del self._fed_at[oldest]

    def _knows(self, place: Place) -> bool:
        fed_at = self._fed_at.get(place)
        return fed_at is not None and 2 * (self._num_fed - fed_at) <= self._most_tokens


def tokens_of_index(num_slots: int, orders: Sequence[int]) -> int:
    """Returns how many tokens of texts an index of `num_slots` contexts can hold if no two texts share contexts."""
    return num_slots // len(orders)
