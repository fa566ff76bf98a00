# SPDX-License-Identifier: Apache-2.0
"""Bodies for the kernels of vLLM's drafter with several modules for multi-token prediction, one a draft position.

A later module has stale keys for the drafts that were rejected: their last tokens pass through it again, from a cache.
"""

from numba import njit

from vllm_v2_cpu.kernels.kernel_launch import as_kernel


@njit(cache=True)
def _copy(source_H, target_H, hidden_size):  # type: ignore[no-untyped-def]
    for h in range(hidden_size):
        target_H[h] = source_H[h]


@as_kernel
@njit(cache=True)
def prepare_input_buffers(  # type: ignore[no-untyped-def]
    last_token_indices_ptr, draft_input_ids_ptr, draft_positions_ptr, draft_seq_lens_ptr, target_input_ids_ptr,
    target_positions_ptr, cached_draft_input_ids_ptr, cached_draft_input_ids_stride0, draft_input_id_overrides_ptr,
    draft_input_id_overrides_stride0, idx_mapping_ptr, last_sampled_ptr, next_prefill_tokens_ptr,
    next_prefill_tokens_stride0, num_sampled_ptr, num_rejected_ptr, target_seq_lens_ptr, query_start_loc_ptr,
    max_num_reqs, num_speculative_steps, BLOCK_SIZE,
):  # fmt: skip
    num_reqs = len(idx_mapping_ptr)
    for b in range(num_reqs):
        slot, start = idx_mapping_ptr[b], query_start_loc_ptr[b]
        num_inputs = query_start_loc_ptr[b + 1] - start - num_rejected_ptr[b]
        num_again = max(0, num_rejected_ptr[b] - 1)
        for i in range(num_again):
            cached = cached_draft_input_ids_ptr[slot, num_speculative_steps - 1 - num_again + i]
            draft_input_ids_ptr[start + i] = cached
            draft_positions_ptr[start + i] = target_positions_ptr[start] - num_again + i
        for i in range(num_inputs):
            draft_positions_ptr[start + num_again + i] = target_positions_ptr[start + i]
        for i in range(num_inputs - 1):
            draft_input_ids_ptr[start + num_again + i] = target_input_ids_ptr[start + i + 1]
        last = start + num_again + num_inputs - 1
        has_sampled = num_sampled_ptr[b] > 0
        draft_input_ids_ptr[last] = last_sampled_ptr.flat[slot] if has_sampled else next_prefill_tokens_ptr[0, slot]
        for i in range(1, num_speculative_steps):
            draft_input_id_overrides_ptr[b, i - 1] = -1 if has_sampled else next_prefill_tokens_ptr[i, slot]
        last_token_indices_ptr[b] = last
        draft_seq_lens_ptr[b] = target_seq_lens_ptr[b] - num_again
    query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs]
    draft_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


@as_kernel
@njit(cache=True)
def prepare_hidden_states_and_embeddings(  # type: ignore[no-untyped-def]
    draft_input_hidden_states_ptr, draft_input_hidden_states_stride0, target_hidden_states_ptr,
    target_hidden_states_stride0, cached_target_hidden_states_ptr, cached_target_hidden_states_stride0,
    cached_target_hidden_states_stride1, input_embeds_ptr, input_embeds_stride0, cached_draft_input_embeds_ptr,
    cached_draft_input_embeds_stride0, cached_draft_input_embeds_stride1, idx_mapping_ptr, num_rejected_ptr,
    query_start_loc_ptr, num_speculative_steps, hidden_size, BLOCK_SIZE_Q, BLOCK_SIZE_H, USE_INPUT_EMBEDS,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        slot, start = idx_mapping_ptr[b], query_start_loc_ptr[b]
        num_again = max(0, num_rejected_ptr[b] - 1)
        for i in range(query_start_loc_ptr[b + 1] - start - num_rejected_ptr[b]):
            _copy(
                target_hidden_states_ptr[start + i], draft_input_hidden_states_ptr[start + num_again + i], hidden_size
            )
        if cached_target_hidden_states_ptr is None:
            continue
        for i in range(num_again):
            kept = num_speculative_steps - 1 - num_again + i
            _copy(cached_target_hidden_states_ptr[slot, kept], draft_input_hidden_states_ptr[start + i], hidden_size)
            if input_embeds_ptr is not None:
                _copy(cached_draft_input_embeds_ptr[slot, kept], input_embeds_ptr[start + i], hidden_size)


@as_kernel
@njit(cache=True)
def pad_trailing_draft_slots(  # type: ignore[no-untyped-def]
    slot_mappings_ptr, slot_mappings_stride0, query_start_loc_ptr, last_token_indices_ptr, PAD_ID, BLOCK_SIZE
):
    for b in range(len(last_token_indices_ptr)):
        slot_mappings_ptr[:, last_token_indices_ptr[b] + 1 : query_start_loc_ptr[b + 1]] = PAD_ID


@as_kernel
@njit(cache=True)
def cache_inputs(  # type: ignore[no-untyped-def]
    draft_input_ids_ptr, draft_input_embeds_ptr, draft_input_embeds_stride0, draft_input_hidden_states_ptr,
    draft_input_hidden_states_stride0, cached_draft_input_ids_ptr, cached_draft_input_ids_stride0,
    cached_draft_input_embeds_ptr, cached_draft_input_embeds_stride0, cached_draft_input_embeds_stride1,
    cached_target_hidden_states_ptr, cached_target_hidden_states_stride0, cached_target_hidden_states_stride1,
    idx_mapping_ptr, last_token_indices_ptr, query_start_loc_ptr, num_speculative_steps, hidden_size, BLOCK_SIZE,
    USE_INPUT_EMBEDS,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        slot, last = idx_mapping_ptr[b], last_token_indices_ptr[b]
        if slot < 0:
            continue
        first = last - num_speculative_steps + 2
        for i in range(max(first, query_start_loc_ptr[b]), last + 1):
            cached_draft_input_ids_ptr[slot, i - first] = draft_input_ids_ptr[i]
            if draft_input_embeds_ptr is not None:
                _copy(draft_input_embeds_ptr[i], cached_draft_input_embeds_ptr[slot, i - first], hidden_size)
            _copy(draft_input_hidden_states_ptr[i], cached_target_hidden_states_ptr[slot, i - first], hidden_size)


@as_kernel
@njit(cache=True)
def shift_input_ids(  # type: ignore[no-untyped-def]
    input_ids_ptr, idx_mapping_ptr, query_start_loc_ptr, last_token_indices_ptr, draft_tokens_ptr, BLOCK_SIZE
):
    for b in range(len(idx_mapping_ptr)):
        if idx_mapping_ptr[b] < 0:
            continue
        last = last_token_indices_ptr[b]
        for i in range(query_start_loc_ptr[b], last):
            input_ids_ptr[i] = input_ids_ptr[i + 1]
        input_ids_ptr[last] = draft_tokens_ptr[b]


@as_kernel
@njit(cache=True)
def shift_input_embeds(  # type: ignore[no-untyped-def]
    input_embeds_ptr, input_embeds_stride0, draft_embeds_ptr, draft_embeds_stride0, idx_mapping_ptr,
    query_start_loc_ptr, last_token_indices_ptr, hidden_size, BLOCK_SIZE_Q, BLOCK_SIZE_H,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        if idx_mapping_ptr[b] < 0:
            continue
        last = last_token_indices_ptr[b]
        for i in range(query_start_loc_ptr[b], last):
            _copy(input_embeds_ptr[i + 1], input_embeds_ptr[i], hidden_size)
        _copy(draft_embeds_ptr[b], input_embeds_ptr[last], hidden_size)


_MTP = "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator."
KERNELS = {
    _MTP + "_prepare_input_buffers_kernel": prepare_input_buffers,
    _MTP + "_prepare_input_hidden_states_and_embeddings_kernel": prepare_hidden_states_and_embeddings,
    _MTP + "_pad_trailing_draft_slots_kernel": pad_trailing_draft_slots,
    _MTP + "_cache_inputs_kernel": cache_inputs,
    _MTP + "_shift_input_ids_kernel": shift_input_ids,
    _MTP + "_shift_input_embeds_kernel": shift_input_embeds,
}
