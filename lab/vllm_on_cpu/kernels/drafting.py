# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels of vLLM's drafters.

The drafters are EAGLE heads, a draft model, DFlash, n-grams and multi-token prediction.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.kernel_launch import numba_body


@numba_body("worker.gpu.spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel")
def prepare_head_prefill(  # type: ignore[no-untyped-def]
    last_token_indices_ptr, draft_current_step_ptr, draft_input_ids_ptr, draft_positions_ptr, draft_query_start_loc_ptr,
    draft_seq_lens_ptr, target_input_ids_ptr, target_positions_ptr, idx_mapping_ptr, last_sampled_ptr,
    next_prefill_tokens_ptr, num_sampled_ptr, num_rejected_ptr, query_start_loc_ptr, seq_lens_ptr, max_num_reqs,
    BLOCK_SIZE,
):  # fmt: skip
    """Prepares the inputs of a head. They are the target model's inputs without the rejected drafts.

    The tokens are shifted by one, because a head reads token i + 1 together with hidden state i.
    """
    num_reqs = len(idx_mapping_ptr)
    for b in range(num_reqs):
        slot, start = idx_mapping_ptr[b], query_start_loc_ptr[b]
        last = query_start_loc_ptr[b + 1] - num_rejected_ptr[b] - 1
        draft_input_ids_ptr[start:last] = target_input_ids_ptr[start + 1 : last + 1]
        if num_sampled_ptr[b] > 0:
            draft_input_ids_ptr[last] = last_sampled_ptr.flat[slot]
        else:
            draft_input_ids_ptr[last] = next_prefill_tokens_ptr.flat[slot]
        draft_positions_ptr[start : last + 1] = target_positions_ptr[start : last + 1]
        last_token_indices_ptr[b] = last
        draft_query_start_loc_ptr[b] = start
        draft_seq_lens_ptr[b] = seq_lens_ptr[b]
    draft_current_step_ptr[()] = 0
    draft_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs]
    draft_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


@numba_body("worker.gpu.spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel")
def prepare_head_decode(  # type: ignore[no-untyped-def]
    draft_tokens_ptr, draft_tokens_stride, target_seq_lens_ptr, num_rejected_ptr, input_ids_ptr, positions_ptr,
    sample_src_positions_ptr, query_start_loc_ptr, seq_lens_ptr, max_model_len, max_num_reqs, BLOCK_SIZE,
    ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    num_reqs = len(draft_tokens_ptr)
    for b in range(num_reqs):
        input_ids_ptr[b] = draft_tokens_ptr[b]
        sample_src_positions_ptr[b] += 1
        seq_len = target_seq_lens_ptr[b] - num_rejected_ptr[b]
        if ADVANCE_DRAFT_POSITIONS:
            positions_ptr[b] = min(positions_ptr[b] + 1, max_model_len - 1)
            seq_len = min(seq_len + 1, max_model_len)
        seq_lens_ptr[b] = seq_len
        query_start_loc_ptr[b] = b
    query_start_loc_ptr[num_reqs : max_num_reqs + 1] = num_reqs
    seq_lens_ptr[num_reqs:max_num_reqs] = 0


@numba_body("worker.gpu.spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel")
def update_head_inputs(  # type: ignore[no-untyped-def]
    output_draft_tokens_ptr, output_draft_tokens_stride, next_input_hidden_states_ptr, next_input_hidden_states_stride,
    input_ids_ptr, positions_ptr, sample_src_positions_ptr, seq_lens_ptr, draft_tokens_ptr, current_draft_step_ptr,
    hidden_states_ptr, hidden_states_stride, hidden_size, max_model_len, num_speculative_steps, BLOCK_SIZE,
    ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    step = current_draft_step_ptr[()]
    num_reqs = len(draft_tokens_ptr)
    output_draft_tokens_ptr[:num_reqs, step] = draft_tokens_ptr
    if step >= num_speculative_steps - 1:
        return
    for b in range(num_reqs):
        sample_src_positions_ptr[b] += 1
        input_ids_ptr[b] = draft_tokens_ptr[b]
        next_input_hidden_states_ptr[b, :hidden_size] = hidden_states_ptr[b, :hidden_size]
        if ADVANCE_DRAFT_POSITIONS:
            positions_ptr[b] = min(positions_ptr[b] + 1, max_model_len - 1)
            seq_lens_ptr[b] = min(seq_lens_ptr[b] + 1, max_model_len)


@numba_body("worker.gpu.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel")
def prepare_draft_model_prefill(  # type: ignore[no-untyped-def]
    target_input_ids_ptr, target_positions_ptr, last_sampled_ptr, idx_mapping_ptr, out_input_ids_ptr, out_positions_ptr,
    last_token_indices_ptr, out_query_start_loc_ptr, out_seq_lens_ptr, query_start_loc_ptr, seq_lens_ptr,
    num_rejected_ptr, max_num_reqs, max_model_len, BLOCK_SIZE,
):  # fmt: skip
    """Prepares the inputs of a draft model. They are the target model's inputs without the rejected drafts.

    The last sampled token is appended to each request's accepted tokens.
    """
    num_reqs = len(idx_mapping_ptr)
    for b in range(num_reqs):
        start, end = query_start_loc_ptr[b], query_start_loc_ptr[b + 1]
        num_valid = end - start - num_rejected_ptr[b]
        first_position = target_positions_ptr[start]
        for i in range(end - start + 1):
            token = target_input_ids_ptr[start + i] if i < num_valid else 0
            out_input_ids_ptr[start + b + i] = token
            out_positions_ptr[start + b + i] = min(first_position + i, max_model_len - 1)
        out_input_ids_ptr[start + b + num_valid] = last_sampled_ptr.flat[idx_mapping_ptr[b]]
        last_token_indices_ptr[b] = start + b + num_valid
        out_query_start_loc_ptr[b] = start + b
        out_seq_lens_ptr[b] = min(seq_lens_ptr[b] + 1, max_model_len)
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs] + num_reqs
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


@njit(cache=True, inline="always")
def _cache_slot(position, blocks, block_size, pad):  # type: ignore[no-untyped-def]
    """Returns the slot of a position in the KV cache, or `pad` if the position is in the null block."""
    block = np.int64(blocks[min(position // block_size, len(blocks) - 1)])
    return pad if block == 0 else block * block_size + position % block_size


@numba_body("worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel")
def prepare_dflash_inputs(  # type: ignore[no-untyped-def]
    out_input_ids_ptr, out_query_positions_ptr, out_query_start_loc_ptr, out_seq_lens_ptr, out_query_slot_mapping_ptr,
    out_context_positions_ptr, out_context_slot_mapping_ptr, out_sample_indices_ptr, out_sample_pos_ptr,
    out_sample_idx_mapping_ptr, out_temperature_ptr, out_seeds_ptr, target_positions_ptr, target_query_start_loc_ptr,
    idx_mapping_ptr, last_sampled_ptr, next_prefill_tokens_ptr, num_sampled_ptr, num_rejected_ptr, temperature_ptr,
    seeds_ptr, block_table_ptr, block_table_stride, parallel_drafting_token_id, block_size, num_query_per_req,
    num_speculative_steps, max_num_reqs, max_num_tokens, max_model_len, cp_rank, SAMPLE_FROM_ANCHOR, PAD_SLOT_ID, CP_SIZE,
    CP_INTERLEAVE, BLOCK_SIZE,
):  # fmt: skip
    """Prepares the inputs of DFlash, which are each request's new context, the last sampled token, and masks.

    DFlash fills in all masks in one forward pass.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism has no body for a CPU")
    num_reqs = len(idx_mapping_ptr)
    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    for b in range(num_reqs):
        slot, blocks = idx_mapping_ptr[b], block_table_ptr[b]
        start, end = target_query_start_loc_ptr[b], target_query_start_loc_ptr[b + 1]
        valid_end = end - num_rejected_ptr[b]
        for i in range(start, valid_end):
            position = target_positions_ptr[i]
            out_context_positions_ptr[i] = position
            out_context_slot_mapping_ptr[i] = _cache_slot(position, blocks, block_size, PAD_SLOT_ID)
        out_context_positions_ptr[valid_end:end] = 0
        out_context_slot_mapping_ptr[valid_end:end] = PAD_SLOT_ID

        first_position, row = target_positions_ptr[valid_end - 1] + 1, b * num_query_per_req
        for q in range(num_query_per_req):
            position = first_position + q
            out_input_ids_ptr[row + q] = parallel_drafting_token_id
            out_query_positions_ptr[row + q] = min(position, max_model_len - 1)
            out_query_slot_mapping_ptr[row + q] = _cache_slot(position, blocks, block_size, PAD_SLOT_ID)
            if q >= skipped:
                sample = b * num_speculative_steps + q - skipped
                out_sample_indices_ptr[sample] = row + q
                out_sample_pos_ptr[sample] = position + 1 - skipped
                out_sample_idx_mapping_ptr[sample] = slot
        if num_sampled_ptr[b] > 0:
            out_input_ids_ptr[row] = last_sampled_ptr.flat[slot]
        else:
            out_input_ids_ptr[row] = next_prefill_tokens_ptr.flat[slot]
        out_query_start_loc_ptr[b] = row
        out_seq_lens_ptr[b] = min(first_position + num_query_per_req, max_model_len)
        out_temperature_ptr[slot] = temperature_ptr[slot]
        out_seeds_ptr[slot] = seeds_ptr[slot]

    num_rows, first_pad = num_reqs * num_query_per_req, num_reqs * num_speculative_steps
    end_pad = max_num_reqs * num_speculative_steps
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = num_rows
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    out_sample_indices_ptr[first_pad:end_pad] = 0
    out_sample_pos_ptr[first_pad:end_pad] = 0
    out_sample_idx_mapping_ptr[first_pad:end_pad] = -1
    out_query_slot_mapping_ptr[num_rows:max_num_tokens] = PAD_SLOT_ID


@numba_body("worker.gpu.spec_decode.ngram.speculator._ngram_scan_kernel")
def scan_ngrams(  # type: ignore[no-untyped-def]
    token_ids_ptr, token_ids_stride, idx_mapping_ptr, total_len_ptr, num_sampled_ptr, scratch_ptr, scratch_stride, L,
    MIN_N, MAX_N, MAX_N_PO2, BLOCK_L,
):  # fmt: skip
    """Finds the longest n-gram in the text that is equal to the text's last n tokens. Of equally long ones the last is taken.

    Each block of positions gets its best n-gram, encoded as n (L + 1) + position + 1.
    """
    for b in range(len(idx_mapping_ptr)):
        slot = idx_mapping_ptr[b]
        tokens, length = token_ids_ptr[slot], total_len_ptr[slot]
        scratch_ptr[b] = 0
        if num_sampled_ptr[b] <= 0:
            continue
        for position in range(length - MIN_N):
            for n in range(min(MAX_N, length - 1 - position), MIN_N - 1, -1):
                i = 0
                while i < n and tokens[position + i] == tokens[length - n + i]:
                    i += 1
                if i == n:
                    score = n * (L + 1) + position + 1
                    scratch_ptr[b, position // BLOCK_L] = max(scratch_ptr[b, position // BLOCK_L], score)
                    break


@numba_body("worker.gpu.spec_decode.ngram.speculator._ngram_finalize_kernel")
def draft_ngrams(  # type: ignore[no-untyped-def]
    token_ids_ptr, token_ids_stride, idx_mapping_ptr, total_len_ptr, num_sampled_ptr, last_sampled_ptr, scratch_ptr,
    scratch_stride, drafts_ptr, L, N_BLOCKS, K, K_PO2, N_BLOCKS_PO2,
):  # fmt: skip
    """Drafts the tokens that followed the n-gram in the text.

    If there are fewer than K, the last sampled token fills the rest.
    """
    for b in range(len(idx_mapping_ptr)):
        slot = idx_mapping_ptr[b]
        score = scratch_ptr[b, :N_BLOCKS].max()
        start = (score - 1) // (L + 1) + (score - 1) % (L + 1)
        num_found = total_len_ptr[slot] - start if score > 0 and num_sampled_ptr[b] > 0 else 0
        for k in range(K):
            found = k < num_found
            drafts_ptr[b, k] = token_ids_ptr[slot, min(start + k, L - 1)] if found else last_sampled_ptr[slot]


# The kernels below serve policies with one multi-token prediction module for each draft position. A later module has stale
# keys for rejected drafts, so the last tokens pass through the module again, from a cache.


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
