# SPDX-License-Identifier: Apache-2.0
"""Computes on the host an upper bound on the tokens that a context index on the device has yet to read.

Shapes: S request slots, B requests of the batch.
"""

from collections.abc import Sequence

import numpy as np

from nemo_specrollout.drafters.device_index import MAX_LISTED


class UnreadTokens:
    """Owns an upper bound on the number of tokens that a context index has yet to read, for the text in each request slot.

    The launch that reads new tokens must be told how many new tokens a text has at most. The lengths of texts are on the
    device, and the host must not wait for the device. So the host counts how much each text can have grown. In an engine step
    the index reads at most `MAX_LISTED` tokens in total, in the order of the batch. If many long texts arrive at once, the
    later ones must wait. Their tokens stay in the bound until the host can be sure that they were read.

    Invariant: after `read` or `skip`, `_unread_S[s]` is at least the number of tokens that the index has yet to read of the
    text in slot s. While the index has read all texts, all of these numbers are 0, and an engine step costs the host one
    comparison.
    """

    def __init__(self, num_slots: int) -> None:
        self._unread_S = np.zeros(num_slots, np.int64)
        self._is_any_behind = False

    def open(self, slots: Sequence[int], num_unread: Sequence[int]) -> None:
        """Notes new requests in `slots`. `num_unread` is the number of tokens that the index has yet to read of each text."""
        self._unread_S[list(slots)] = num_unread
        self._is_any_behind = bool(self._unread_S.any())

    def close(self, slots: Sequence[int]) -> None:
        """Forgets the requests in `slots`, which have ended or were preempted."""
        if self._is_any_behind:
            self._unread_S[list(slots)] = 0
            self._is_any_behind = bool(self._unread_S.any())

    def skip(self, slots_B: np.ndarray, most_sampled: int) -> None:
        """Notes an engine step whose new tokens the index will read later.

        Each request has sampled at most `most_sampled` tokens in this engine step.
        """
        self._unread_S[slots_B] += most_sampled
        self._is_any_behind = True

    def read(self, slots_B: np.ndarray, most_sampled: int) -> int:
        """Notes an engine step in which the index reads the texts. Returns the most tokens that it has to read of any text.

        This is an upper bound, which the launch that reads the texts needs. Each request has sampled at most `most_sampled`
        tokens in this engine step. `slots_B` are the request slots in the order in which the index reads the texts.
        """
        if not self._is_any_behind and len(slots_B) * most_sampled <= MAX_LISTED:
            return most_sampled
        unread_B = self._unread_S[slots_B] + most_sampled
        unread_before_B = unread_B.cumsum() - unread_B
        read_B = np.minimum(unread_B, np.maximum(MAX_LISTED - unread_before_B, 0))
        self._unread_S[slots_B] = unread_B - read_B
        self._is_any_behind = bool(self._unread_S.any())
        return int(unread_B.max(initial=most_sampled))
