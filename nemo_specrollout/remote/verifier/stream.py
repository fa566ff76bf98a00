# SPDX-License-Identifier: Apache-2.0
"""The draft stream: what drafters elsewhere wrote beyond each request's text as the host knows it, and the kernel that finds,
on the device, where the text has got to since then.

Tokens reach the host steps after the device has them, and drafts reach the device late. So a row of the table is the draft
tokens that were there at some time, and the length of the text then, its base. If the text has gone on as the stream has it,
the rest of the stream goes on from there. Host and kernel do not wait for each other: a row that is half written is a wrong
guess at the worst.

Shapes: S request slots, B requests of the batch, K draft positions, L longest sequence, W room of a stream; X = 2 + 2 W
columns of the table: base, count, tokens, evidence levels.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from nemo_specrollout.remote.protocol.draft_buffers import BASE, COUNT, TOKENS
from nemo_specrollout.sampling.on_tensors import on_tensors


class DraftStream:
    """Owns the table's use: the host writes `table_SX`, `propose` reads it on the device.

    Example: `stream.table_SX[slot] = ...` at any time; in each step `stream.propose(...)`.
    """

    def __init__(self, table_SX: np.ndarray, on_device: Callable[[], torch.Tensor]) -> None:
        """`on_device` gives the int32 table as the device reads it: the same memory, or a copy that it starts."""
        self.table_SX, self._on_device = table_SX, on_device
        table_SX[:] = 0
        self.counts_3 = torch.zeros(3, dtype=torch.int64, device=on_device().device)
        """On the device: request steps, those that had drafts, draft tokens at hand in them."""

    @staticmethod
    def columns(most_ahead: int) -> int:
        """Columns of a table whose streams are up to `most_ahead` tokens long."""
        return TOKENS + 2 * most_ahead

    def propose(
        self,
        slots_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        """Writes up to K draft tokens of each request, int32, their evidence levels, int8, and how many they are, int32."""
        arguments = (
            slots_B, total_len_S, token_ids_SL, self._on_device(), tokens_BK, levels_BK, found_B, self.counts_3
        )  # fmt: skip
        if slots_B.is_cuda:
            from nemo_specrollout.remote.verifier.stream_triton import align

            align(*arguments)
        else:
            _align(*arguments)


@on_tensors
@njit(cache=True, nogil=True)
def _align(slots_B, total_len_S, token_ids_SL, table_SX, tokens_BK, levels_BK, found_B, counts_3):  # type: ignore[no-untyped-def]
    room = (table_SX.shape[1] - TOKENS) // 2
    for b in range(len(slots_B)):
        slot = slots_B[b]
        found_B[b] = 0
        if slot < 0:
            continue
        counts_3[0] += 1
        base, count = table_SX[slot, BASE], min(table_SX[slot, COUNT], room)
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
            levels_BK[b, k] = table_SX[slot, TOKENS + room + offset + k]
        counts_3[1] += 1
        counts_3[2] += found_B[b]
