# SPDX-License-Identifier: Apache-2.0
"""A bound on the tokens that a context index has not read yet, which the host computes without waiting for the device.

Shapes: S request slots, B requests of the batch.
"""

from collections.abc import Sequence

import numpy as np

from nemo_specrollout.drafters.device_index import MAX_LISTED


class UnreadTokens:
    """Owns an upper bound on the number of tokens that a context index has not read, for the text in each request slot.

    The launch that reads new tokens needs an upper bound on the new tokens per text. The lengths of texts are on the device,
    and the host must not wait for them, so the host counts how much texts can have grown. An index reads at most `MAX_LISTED`
    tokens in a step, in the order of the batch's rows. When many long texts arrive at once, the later ones therefore wait,
    and their tokens stay in the bound until the host can be sure that they were read.

    Invariant: after `read` or `skip`, `_unread_S[s]` is never less than the number of tokens of slot s that the index has yet
    to read. As long as the index has read all texts, all of these numbers are 0, and a step costs the host one comparison.
    """

    def __init__(self, num_slots: int) -> None:
        self._unread_S = np.zeros(num_slots, np.int64)
        self._is_any_behind = False

    def open(self, slots: Sequence[int], num_unread: Sequence[int]) -> None:
        """Notes new requests, and how many tokens of each text the index has to read."""
        self._unread_S[list(slots)] = num_unread
        self._is_any_behind = bool(self._unread_S.any())

    def close(self, slots: Sequence[int]) -> None:
        """Forgets requests that have ended or are preempted."""
        if self._is_any_behind:
            self._unread_S[list(slots)] = 0
            self._is_any_behind = bool(self._unread_S.any())

    def skip(self, slots_B: np.ndarray, most_sampled: int) -> None:
        """Notes a step whose tokens the index does not read yet. There are at most `most_sampled` per request."""
        self._unread_S[slots_B] += most_sampled
        self._is_any_behind = True

    def read(self, slots_B: np.ndarray, most_sampled: int) -> int:
        """Returns the bound on new tokens per text that the index must be given in this step.

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
