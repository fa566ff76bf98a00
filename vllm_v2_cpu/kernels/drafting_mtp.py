# SPDX-License-Identifier: Apache-2.0
"""Bodies for vLLM's drafter with several modules for multi-token prediction, one for each draft position.

A later module has stale keys for rejected drafts, so their last tokens pass through the module again, from a cache.
"""

from vllm_v2_cpu.kernels.kernel_launch import numba_body


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._prepare_input_buffers_kernel")
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
        first, last = start + num_again, start + num_again + num_inputs - 1
        draft_positions_ptr[first : last + 1] = target_positions_ptr[start : start + num_inputs]
        draft_input_ids_ptr[first:last] = target_input_ids_ptr[start + 1 : start + num_inputs]
        has_sampled = num_sampled_ptr[b] > 0
        draft_input_ids_ptr[last] = last_sampled_ptr.flat[slot] if has_sampled else next_prefill_tokens_ptr[0, slot]
        for i in range(1, num_speculative_steps):
            draft_input_id_overrides_ptr[b, i - 1] = -1 if has_sampled else next_prefill_tokens_ptr[i, slot]
        last_token_indices_ptr[b] = last
        draft_seq_lens_ptr[b] = target_seq_lens_ptr[b] - num_again
    query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs]
    draft_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._prepare_input_hidden_states_and_embeddings_kernel")
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
        first, num_inputs = start + num_again, query_start_loc_ptr[b + 1] - start - num_rejected_ptr[b]
        target_NH = target_hidden_states_ptr[start : start + num_inputs, :hidden_size]
        draft_input_hidden_states_ptr[first : first + num_inputs, :hidden_size] = target_NH
        if cached_target_hidden_states_ptr is None:
            continue
        last_cached = num_speculative_steps - 1
        cached_NH = cached_target_hidden_states_ptr[slot, last_cached - num_again : last_cached, :hidden_size]
        draft_input_hidden_states_ptr[start:first, :hidden_size] = cached_NH
        if input_embeds_ptr is not None:
            cached_NH = cached_draft_input_embeds_ptr[slot, last_cached - num_again : last_cached, :hidden_size]
            input_embeds_ptr[start:first, :hidden_size] = cached_NH


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._pad_trailing_draft_slots_kernel")
def pad_trailing_draft_slots(  # type: ignore[no-untyped-def]
    slot_mappings_ptr, slot_mappings_stride0, query_start_loc_ptr, last_token_indices_ptr, PAD_ID, BLOCK_SIZE
):
    for b in range(len(last_token_indices_ptr)):
        slot_mappings_ptr[:, last_token_indices_ptr[b] + 1 : query_start_loc_ptr[b + 1]] = PAD_ID


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._cache_inputs_kernel")
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
            at = i - first
            cached_draft_input_ids_ptr[slot, at] = draft_input_ids_ptr[i]
            if draft_input_embeds_ptr is not None:
                cached_draft_input_embeds_ptr[slot, at, :hidden_size] = draft_input_embeds_ptr[i, :hidden_size]
            cached_target_hidden_states_ptr[slot, at, :hidden_size] = draft_input_hidden_states_ptr[i, :hidden_size]


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._shift_input_ids_kernel")
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


@numba_body("worker.gpu.spec_decode.multi_module_mtp.speculator._shift_input_embeds_kernel")
def shift_input_embeds(  # type: ignore[no-untyped-def]
    input_embeds_ptr, input_embeds_stride0, draft_embeds_ptr, draft_embeds_stride0, idx_mapping_ptr,
    query_start_loc_ptr, last_token_indices_ptr, hidden_size, BLOCK_SIZE_Q, BLOCK_SIZE_H,
):  # fmt: skip
    for b in range(len(idx_mapping_ptr)):
        if idx_mapping_ptr[b] < 0:
            continue
        last = last_token_indices_ptr[b]
        for i in range(query_start_loc_ptr[b], last):
            input_embeds_ptr[i, :hidden_size] = input_embeds_ptr[i + 1, :hidden_size]
        input_embeds_ptr[last, :hidden_size] = draft_embeds_ptr[b, :hidden_size]
