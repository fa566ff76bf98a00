# SPDX-License-Identifier: Apache-2.0
"""The kernel that aligns a draft stream with the requests' texts, on a CPU (`remote/verifier/draft_stream.py`)."""

from numba import njit

from lab.vllm_on_cpu.own_kernels.tensors import on_tensors
from nemo_specrollout.remote.protocol.draft_buffers import BASE, COUNT, TOKENS


@on_tensors
@njit(cache=True, nogil=True)
def align(slots_B, total_len_S, token_ids_SL, table_SX, tokens_BK, levels_BK, found_B, counts_3):  # type: ignore[no-untyped-def]
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
