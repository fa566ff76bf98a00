# SPDX-License-Identifier: Apache-2.0
"""The draft stream: a table of draft buffers that the host writes and the device reads, without waiting for each other.

Tokens reach the host some steps after the device has them, and drafts reach the device late. So a row holds draft tokens of
some earlier time, and the length of the text at that time: its base. A kernel compares the first of them with what the device
has sampled since then. If they are equal, the other tokens are the proposal. A half-written row is at worst a wrong draft.

Shapes: S request slots, B requests of the batch, K draft positions, L longest sequence, W most tokens of a row;
X = 2 + 2 W columns of the table: base, count, tokens, evidence levels.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.remote.protocol.draft_buffers import BASE, COUNT, TOKENS
from nemo_specrollout.sampling.numba_common import on_tensors


class DraftStream:
    """Owns the use of the table: the host writes `table_SX` at any time, and `propose` reads it on the device."""

    def __init__(self, table_SX: np.ndarray, on_device: Callable[[], torch.Tensor]) -> None:
        """`on_device` returns the int32 table as the device reads it: the same memory, or a copy that it starts."""
        self.table_SX, self._on_device = table_SX, on_device
        table_SX[:] = 0
        self.counts_3 = torch.zeros(3, dtype=torch.int64, device=on_device().device)
        """On the device: request steps, request steps with drafts, draft tokens at hand in these."""

    @staticmethod
    def columns(most_ahead: int) -> int:
        """Returns the number of columns of a table with up to `most_ahead` tokens in a row."""
        return TOKENS + 2 * most_ahead

    @property
    def most_ahead(self) -> int:
        """Largest number of draft tokens in a row."""
        return (self.table_SX.shape[1] - TOKENS) // 2

    def propose(self, texts: Texts, proposals: Proposals) -> None:
        """Writes up to K draft tokens of each request. A row without a request gets none."""
        arguments = (*texts, self._on_device(), *proposals, self.counts_3)
        if texts.slots_B.is_cuda:
            from nemo_specrollout.remote.verifier.draft_stream_triton import align

            align(*arguments)
        else:
            _align(*arguments)


@on_tensors
@njit(cache=True, nogil=True)
def _align(slots_B, total_len_S, token_ids_SL, table_SX, tokens_BK, levels_BK, found_B, counts_3):  # type: ignore[no-untyped-def]
    most_ahead = (table_SX.shape[1] - TOKENS) // 2
    for b in range(len(slots_B)):
        slot = slots_B[b]
        found_B[b] = 0
        if slot < 0:
            continue
        counts_3[0] += 1
        base, count = table_SX[slot, BASE], min(table_SX[slot, COUNT], most_ahead)
        offset = total_len_S[slot] - base
        if base < 0 or offset < 0 or offset >= count:
            continue
        i = 0
        while i < offset and table_SX[slot, TOKENS + i] == token_ids_SL[slot, base + i]:
            i += 1
        if i < offset:
            continue
        found_B[b] = min(count - offset, tokens_BK.shape[1])
        for k in range(found_B[b]):
            tokens_BK[b, k] = table_SX[slot, TOKENS + offset + k]
            levels_BK[b, k] = table_SX[slot, TOKENS + most_ahead + offset + k]
        counts_3[1] += 1
        counts_3[2] += found_B[b]
