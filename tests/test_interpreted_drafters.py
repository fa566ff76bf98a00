# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the context index and of the draft stream, in Triton's interpreter, equal their numba bodies."""

import pytest
from test_device_index import run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.unit

CONTEXT_INDEX = """
from tests.test_device_index import check_bodies_agree
check_bodies_agree()
"""
DRAFT_STREAM = """
import numpy as np
import torch
from lab.vllm_on_cpu.own_kernels import draft_stream as bodies
from nemo_specrollout.remote.verifier import draft_stream, draft_stream_triton

rng, seen = np.random.default_rng(0), 0
for num_requests, room, width in ((1, 1, 1), (9, 5, 3), (30, 24, 8)):
    num_slots, longest = num_requests + 3, 60
    for _ in range(8):
        ints = lambda low, high, *shape: torch.from_numpy(rng.integers(low, high, shape)).int()
        token_ids_SL = ints(0, 2, num_slots, longest + 9)[:, :longest]
        total_len_S = ints(1, longest, num_slots)
        table_SX = ints(0, 2, num_slots, draft_stream.DraftStream.columns(room))
        table_SX[:, 0] = total_len_S - ints(-2, 5, num_slots)
        table_SX[:, 1] = ints(-1, room + 3, num_slots)
        for s in range(num_slots):
            base, room_left = int(table_SX[s, 0]), max(0, min(room, longest - int(table_SX[s, 0])))
            if rng.random() < 0.7 and base >= 0:
                table_SX[s, 2 : 2 + room_left] = token_ids_SL[s, base : base + room_left]
        slots_B = torch.from_numpy(rng.permutation(num_slots)[:num_requests])
        slots_B[rng.random(num_requests) < 0.1] = -1
        results = []
        for align in (bodies.align, draft_stream_triton.align):
            out = [torch.full((num_requests, width + 2), 77, dtype=t) for t in (torch.int32, torch.int8)]
            found_B, counts_3 = torch.full((num_requests,), 77).int(), torch.zeros(3, dtype=torch.int64)
            align(slots_B, total_len_S, token_ids_SL, table_SX, out[0][:, :width], out[1][:, :width], found_B, counts_3)
            results.append([*out, found_B, counts_3])
        assert all(map(torch.equal, *results)), results
        seen += int(results[0][3][1])
assert seen > 30
"""


@pytest.mark.parametrize("script", [CONTEXT_INDEX, DRAFT_STREAM], ids=["context index", "draft stream"])
def test_interpreted_triton_bodies_equal_numba(script: str) -> None:
    run_script(script, TRITON_INTERPRET="1")
