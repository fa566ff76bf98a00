# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels that prepare the batch of an engine step.

They are for block tables, staged writes, inputs and bookkeeping.
Most of these kernels have one program for each request. So the bodies loop over `idx_mapping`, which has each request's slot.
"""

from typing import Any

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.kernel_launch import int32_array, numba_body, torch_body, view


@numba_body("worker.gpu.block_table._gather_block_tables_kernel")
def gather_block_tables(  # type: ignore[no-untyped-def]
    batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides, num_blocks_ptr,
    num_blocks_stride, num_reqs, BLOCK_SIZE,
):  # fmt: skip
    """Copies the rows of the batch's requests from the block tables.

    The kernel also zeroes padding rows, which only CUDA graphs have.
    """
    num_groups, max_num_reqs = num_blocks_ptr.shape
    for group in range(num_groups):
        stride = block_table_strides[group]
        source = int32_array(src_block_table_ptrs[group], max_num_reqs * stride)
        target = int32_array(dst_block_table_ptrs[group], max_num_reqs * stride)
        for b in range(num_reqs):
            slot = batch_idx_to_req_idx[b]
            num_blocks = num_blocks_ptr[group, slot]
            target[b * stride : b * stride + num_blocks] = source[slot * stride : slot * stride + num_blocks]


@numba_body("worker.gpu.block_table._compute_slot_mappings_kernel")
def compute_slot_mappings(  # type: ignore[no-untyped-def]
    max_num_tokens, idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes,
    slot_mapping_enabled, dcp_sharded, slot_mappings_ptr, slot_mappings_stride, cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_ID,
    TRITON_BLOCK_SIZE,
):  # fmt: skip
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism has no body for a CPU")
    num_reqs = len(idx_mapping)
    for group in range(len(block_table_ptrs)):
        slots = slot_mappings_ptr[group]
        stride = block_table_strides[group]
        block_size = np.int64(block_sizes[group])
        slots[query_start_loc[num_reqs] : max_num_tokens] = PAD_ID
        for b in range(num_reqs):
            start, end = query_start_loc[b], query_start_loc[b + 1]
            if idx_mapping[b] < 0 or not slot_mapping_enabled[group]:
                slots[start:end] = PAD_ID
                continue
            row = int32_array(block_table_ptrs[group] + np.uint64(4 * idx_mapping[b] * stride), stride)
            for i in range(start, end):
                slots[i] = row[pos[i] // block_size] * block_size + pos[i] % block_size


@njit(cache=True)
def _write_to_one(output_ptr, output_stride, rows, starts, contents, ends):  # type: ignore[no-untyped-def]
    flat, begin = output_ptr.reshape(-1), 0
    for w in range(len(rows)):
        at = rows[w] * output_stride + starts[w]
        flat[at : at + ends[w] - begin] = contents[begin : ends[w]]
        begin = ends[w]


@njit(cache=True)
def _write_to_groups(output_ptrs, output_strides, rows, starts, contents, ends, groups):  # type: ignore[no-untyped-def]
    begin = 0
    for w in range(len(rows)):
        at = rows[w] * output_strides[groups[w]] + starts[w]
        target = int32_array(output_ptrs[groups[w]] + np.uint64(4 * at), ends[w] - begin)
        target[:] = contents[begin : ends[w]]
        begin = ends[w]


@torch_body("worker.gpu.buffer_utils._apply_write_kernel")
def apply_write(
    output_ptr: Any, output_stride: Any, write_indices_ptr: Any, write_starts_ptr: Any, write_contents_ptr: Any,
    write_cu_lens_ptr: Any, write_group_ids_ptr: Any, BLOCK_SIZE: int, MULTI_GROUP: bool,
) -> None:  # fmt: skip
    """Applies staged writes to the tensor `output_ptr`.

    With `MULTI_GROUP` there are several tensors, all int32, and `output_ptr` has their addresses. Then `write_group_ids_ptr`
    says to which of them each write goes.
    """
    writes = [
        view(argument)
        for argument in (
            output_ptr, output_stride, write_indices_ptr, write_starts_ptr, write_contents_ptr, write_cu_lens_ptr
        )
    ]  # fmt: skip
    if MULTI_GROUP:
        _write_to_groups(*writes, view(write_group_ids_ptr))
    else:
        _write_to_one(*writes)


@numba_body("worker.gpu.input_batch._prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(  # type: ignore[no-untyped-def]
    input_ids_ptr, next_prefill_tokens_ptr, next_prefill_tokens_stride, num_lookahead, idx_mapping_ptr,
    query_start_loc_ptr, all_token_ids_ptr, all_token_ids_stride, prefill_lens_ptr, num_computed_tokens_ptr, BLOCK_SIZE,
    LOOKAHEAD_BLOCK,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        slot = idx_mapping_ptr[b]
        computed, prefill_len = num_computed_tokens_ptr[slot], prefill_lens_ptr[slot]
        if computed >= prefill_len:
            continue
        tokens = all_token_ids_ptr[slot]
        start, end = query_start_loc_ptr[b], query_start_loc_ptr[b + 1]
        input_ids_ptr[start:end] = tokens[computed : computed + end - start]
        for i in range(num_lookahead):
            position = computed + end - start + i
            next_prefill_tokens_ptr[i, slot] = tokens[position] if position < prefill_len else 0


@numba_body("worker.gpu.input_batch._prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(  # type: ignore[no-untyped-def]
    pos_ptr, seq_lens_ptr, idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr, max_num_reqs, BLOCK_SIZE
):
    num_reqs = len(idx_mapping_ptr)
    for b in range(num_reqs):
        computed = num_computed_tokens_ptr[idx_mapping_ptr[b]]
        start, end = query_start_loc_ptr[b], query_start_loc_ptr[b + 1]
        seq_lens_ptr[b] = computed + end - start
        for i in range(end - start):
            pos_ptr[start + i] = computed + i
    seq_lens_ptr[num_reqs:max_num_reqs] = 0


@numba_body("worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(  # type: ignore[no-untyped-def]
    input_ids_ptr, idx_mapping_ptr, last_sampled_tokens_ptr, query_start_loc_ptr, seq_lens_ptr, prefill_len_ptr,
    draft_tokens_ptr, draft_tokens_stride, cu_num_logits_ptr, logits_indices_ptr, BLOCK_SIZE, NUM_NEW_SAMPLED_TOKENS,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        slot = idx_mapping_ptr[b]
        first_row, num_rows = cu_num_logits_ptr[b], cu_num_logits_ptr[b + 1] - cu_num_logits_ptr[b]
        end, num_drafts = query_start_loc_ptr[b + 1], num_rows - NUM_NEW_SAMPLED_TOKENS
        for i in range(num_rows):
            logits_indices_ptr[first_row + i] = end - num_rows + i
        prefill_len = prefill_len_ptr[slot]
        if seq_lens_ptr[b] <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_lens_ptr[b] - num_rows >= prefill_len:
            input_ids_ptr[end - num_rows] = last_sampled_tokens_ptr.flat[slot]
        for i in range(num_drafts):
            input_ids_ptr[end - num_drafts + i] = draft_tokens_ptr[slot, i]


@numba_body("worker.gpu.input_batch._get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(  # type: ignore[no-untyped-def]
    num_sampled_ptr, num_rejected_ptr, seq_lens_ptr, cu_num_logits_ptr, idx_mapping_ptr, prefill_len_ptr
):
    for b in range(len(idx_mapping_ptr)):
        if seq_lens_ptr[b] < prefill_len_ptr[idx_mapping_ptr[b]]:
            num_sampled_ptr[b] = 0
            num_rejected_ptr[b] = 0
        else:
            num_rejected_ptr[b] = cu_num_logits_ptr[b + 1] - cu_num_logits_ptr[b] - num_sampled_ptr[b]


@numba_body("worker.gpu.input_batch._post_update_kernel")
def post_update(  # type: ignore[no-untyped-def]
    idx_mapping_ptr, num_computed_tokens_ptr, last_sampled_tokens_ptr, output_bin_counts_ptr, output_bin_counts_stride,
    sampled_tokens_ptr, sampled_tokens_stride, num_sampled_ptr, num_rejected_ptr, query_start_loc_ptr,
    all_token_ids_ptr, all_token_ids_stride, total_len_ptr,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        slot, num_sampled = idx_mapping_ptr[b], num_sampled_ptr[b]
        if slot < 0:
            continue
        for i in range(num_sampled):
            token = sampled_tokens_ptr[b, i]
            all_token_ids_ptr[slot, total_len_ptr[slot] + i] = token
            if output_bin_counts_ptr is not None:
                output_bin_counts_ptr[slot, token] += 1
        if num_sampled > 0:
            last_sampled_tokens_ptr.flat[slot] = sampled_tokens_ptr[b, num_sampled - 1]
            total_len_ptr[slot] += num_sampled
        if query_start_loc_ptr is not None:
            num_computed_tokens_ptr[slot] += query_start_loc_ptr[b + 1] - query_start_loc_ptr[b]
        num_computed_tokens_ptr[slot] -= num_rejected_ptr[b]


@numba_body("worker.gpu.input_batch._post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(  # type: ignore[no-untyped-def]
    idx_mapping_ptr, num_computed_tokens_ptr, query_start_loc_ptr
):
    for b in range(len(idx_mapping_ptr)):
        num_computed_tokens_ptr[idx_mapping_ptr[b]] += query_start_loc_ptr[b + 1] - query_start_loc_ptr[b]


@numba_body("worker.gpu.input_batch._expand_idx_mapping_kernel")
def expand_idx_mapping(  # type: ignore[no-untyped-def]
    idx_mapping_ptr, expanded_idx_mapping_ptr, expanded_local_pos_ptr, cu_num_logits_ptr, BLOCK_SIZE
):
    for b in range(len(idx_mapping_ptr)):
        start = cu_num_logits_ptr[b]
        for i in range(cu_num_logits_ptr[b + 1] - start):
            expanded_idx_mapping_ptr[start + i] = idx_mapping_ptr[b]
            expanded_local_pos_ptr[start + i] = i
