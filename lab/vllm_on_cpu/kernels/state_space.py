# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels of hybrid policies.

The kernels clear new KV cache blocks and look after the requests' recurrent states.
"""

import numpy as np
from numba import carray, njit

from lab.vllm_on_cpu.kernels.kernel_launch import int32_array, numba_body, void_pointer


@numba_body("worker.utils._zero_kv_blocks_kernel")
def zero_kv_blocks(  # type: ignore[no-untyped-def]
    seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE
):
    """Zeroes the given KV cache blocks in all segments of memory. Strides and sizes count 32-bit elements."""
    for segment in range(len(seg_addrs_ptr)):
        for block in block_ids_ptr:
            offset = np.uint64(4 * block * seg_block_strides_ptr[segment])
            int32_array(seg_addrs_ptr[segment] + offset, seg_page_sizes_ptr[segment])[:] = 0


@numba_body("worker.gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel")
def scatter_num_accepted(idx_mapping_ptr, num_sampled_ptr, num_accepted_ptr):  # type: ignore[no-untyped-def]
    for row in range(len(idx_mapping_ptr)):
        if idx_mapping_ptr[row] >= 0:
            num_accepted_ptr[idx_mapping_ptr[row]] = max(num_sampled_ptr[row], 1)


@numba_body("worker.gpu.model_states.mamba_hybrid._fill_num_accepted_kernel")
def fill_num_accepted(idx_mapping_ptr, num_accepted_ptr, num_sampled):  # type: ignore[no-untyped-def]
    for slot in idx_mapping_ptr:
        if slot >= 0:
            num_accepted_ptr[slot] = num_sampled


@numba_body("worker.mamba_utils.preprocess_mamba_align_fused_kernel")
def advance_state_columns(  # type: ignore[no-untyped-def]
    idx_mapping_ptr, state_idx_ptr, num_computed_tokens_ptr, query_start_loc_ptr, num_accepted_tokens_ptr, src_col_ptr,
    src_off_ptr, num_reqs, BLOCK_SIZE, MAMBA_BLOCK_SIZE,
):  # fmt: skip
    """Sets the block of each request's recurrent state to the one into which the request's last row falls.

    A request that enters another block has its number of accepted tokens set to 1, so that the state is next read from the
    first row of the new block.
    """
    for b in range(num_reqs):
        slot = idx_mapping_ptr[b]
        column = src_col_ptr[slot] = state_idx_ptr[slot]
        src_off_ptr[slot] = max(num_accepted_tokens_ptr[slot] - 1, 0)
        end = num_computed_tokens_ptr[slot] + query_start_loc_ptr[b + 1] - query_start_loc_ptr[b]
        state_idx_ptr[slot] = (end + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
        if 0 <= column != state_idx_ptr[slot]:
            num_accepted_tokens_ptr[slot] = 1


@njit(cache=True)
def _copy_states(  # type: ignore[no-untyped-def]
    slot,
    source,
    target,
    bias,
    block_table_ptrs,
    stride,
    bases,
    block_strides,
    element_sizes,
    inner_sizes,
    widths,
    groups,
):
    """Copies all states of a request to the block in column `target` of its block table.

    The window of a convolution comes from column `source`, without its first `bias` rows. Any other state comes from column
    `source + bias`.
    """
    for i in range(len(bases)):
        table = int32_array(block_table_ptrs[groups[i]] + 4 * slot * stride, stride)
        row_bytes = inner_sizes[i] * element_sizes[i]
        if widths[i] > 0:
            begin, length = table[source] * block_strides[i] + bias * row_bytes, (widths[i] - bias) * row_bytes
        else:
            begin, length = table[source + bias] * block_strides[i], row_bytes
        old = carray(void_pointer(bases[i] + begin), (length,), np.uint8).copy()
        carray(void_pointer(bases[i] + table[target] * block_strides[i]), (length,), np.uint8)[:] = old


@numba_body("worker.mamba_utils.precopy_mamba_align_fused_kernel")
def copy_states_to_new_blocks(  # type: ignore[no-untyped-def]
    mamba_state_idx_ptr, src_col_ptr, token_bias_ptr, block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr,
    state_block_strides_ptr, state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
    state_dim_row_count_ptr, state_dim_row_stride_ptr, idx_mapping_ptr, num_reqs, COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST,
    HAS_IDX_MAPPING, TEMPORAL_TILES,
):  # fmt: skip
    """Copies the states of requests that enter a new block. Convolution windows must have their channels last."""
    for b in range(num_reqs):
        slot = idx_mapping_ptr[b]
        source, target = src_col_ptr[slot], mamba_state_idx_ptr[slot]
        if 0 <= source != target:
            _copy_states(
                slot, source, target, token_bias_ptr[slot], block_table_ptrs_ptr, block_table_stride_req,
                state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr, state_inner_sizes_ptr,
                state_conv_widths_ptr, state_group_indices_ptr,
            )  # fmt: skip


@numba_body("worker.mamba_utils.postprocess_mamba_fused_kernel")
def keep_aligned_states(  # type: ignore[no-untyped-def]
    num_accepted_tokens_ptr, mamba_state_idx_ptr, num_scheduled_tokens_ptr, num_computed_tokens_ptr, num_draft_tokens_ptr,
    block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr,
    state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr, state_dim_row_count_ptr,
    state_dim_row_stride_ptr, num_accepted_tokens_out_ptr, idx_mapping_ptr, num_reqs, block_size, COPY_BLOCK_SIZE,
    CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING, PRECOMPUTED_NEW_COMPUTED, TEMPORAL_TILES,
):  # fmt: skip
    """Copies the state at the end of a block that accepted drafts have filled, so that later requests can begin from it."""
    for b in range(num_reqs):
        slot = idx_mapping_ptr[b]
        if slot < 0:
            continue
        end, source = num_computed_tokens_ptr[slot], mamba_state_idx_ptr[slot]
        first, aligned = end - num_accepted_tokens_ptr[slot] + 1, end // block_size * block_size
        if aligned < first:
            continue
        target = aligned // block_size - 1
        if source != target or aligned != first:
            _copy_states(
                slot, source, target, aligned - first, block_table_ptrs_ptr, block_table_stride_req,
                state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr, state_inner_sizes_ptr,
                state_conv_widths_ptr, state_group_indices_ptr,
            )  # fmt: skip
        if source == target:
            num_accepted_tokens_out_ptr[slot] = 1
