# SPDX-License-Identifier: Apache-2.0
"""How many tokens of the texts a context index has not read yet, as far as the host can know it without asking the device.

Shapes: S request slots, B requests of the batch.
"""

from collections.abc import Sequence

import numpy as np

from nemo_specrollout.drafters.device_index import MAX_LISTED


class UnreadTokens:
    """Bounds from above how many tokens of each text an index has not read. Owns that bound for each request slot.

    The launch that reads new tokens needs an upper bound of the new tokens of a text. Lengths of texts are on the device,
    and the host must not wait for them, so the host counts what texts can have gained. An index reads at most `MAX_LISTED`
    tokens in a step, in the order of the batch's rows. When many long texts arrive at once, the later ones therefore wait,
    and they stay in the bound until the host can be sure that they were read.

    Invariant: after `read` or `skip`, `_unread_S[s]` is never less than the number of tokens of slot s that the index has yet
    to read. As long as no text is behind, all of these are 0, and a step costs one comparison.
    """

    def __init__(self, num_slots: int) -> None:
        self._unread_S = np.zeros(num_slots, np.int64)
        self._is_any_behind = False

    def open(self, slots: Sequence[int], num_unread: Sequence[int]) -> None:
        """Takes note of new requests, and of how many tokens of each text the index has to read."""
        self._unread_S[list(slots)] = num_unread
        self._is_any_behind = bool(self._unread_S.any())

    def close(self, slots: Sequence[int]) -> None:
        """Forgets requests that have ended or are preempted."""
        if self._is_any_behind:
            self._unread_S[list(slots)] = 0
            self._is_any_behind = bool(self._unread_S.any())

    def skip(self, slots_B: np.ndarray, most_sampled: int) -> None:
        """Takes note of a step whose tokens, at most `most_sampled` of each request, the index does not read yet."""
        self._unread_S[slots_B] += most_sampled
        self._is_any_behind = True

    def read(self, slots_B: np.ndarray, most_sampled: int) -> int:
        """Returns how many new tokens of a text the index must be allowed to read in this step.

        Each request has sampled at most `most_sampled` tokens in this step. `slots_B` are the rows in the order in which the
        index reads them.
        """
        if not self._is_any_behind and len(slots_B) * most_sampled <= MAX_LISTED:
            return most_sampled
        unread_B = self._unread_S[slots_B] + most_sampled
        unread_before_B = unread_B.cumsum() - unread_B
        read_B = np.minimum(unread_B, np.maximum(MAX_LISTED - unread_before_B, 0))
        self._unread_S[slots_B] = unread_B - read_B
        self._is_any_behind = bool(self._unread_S.any())
        return int(unread_B.max(initial=most_sampled))
