# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels in `lab.vllm_on_cpu/kernels/drafting.py`."""

from functools import partial

import torch
from interpreter import Launch, by_kernel
from world import PAD, World

LONG = torch.int64


def last_token_indices(w: World) -> torch.Tensor:
    return (w.query_start_loc[1:] - w.num_rejected - 1).long()


def prepare_head_prefill(w: World) -> Launch:
    extra = w.num_tokens + 3
    args = (w.ints(w.max_reqs, dtype=LONG), torch.tensor(2), w.ints(extra), w.ints(extra, dtype=LONG),
            w.ints(w.max_reqs + 1), w.ints(w.max_reqs), w.ints(extra), w.positions, w.idx(),
            w.ints(w.max_reqs, 1, dtype=LONG), w.ints(2, w.max_reqs), w.num_sampled, w.num_rejected, w.query_start_loc,
            w.seq_lens, w.max_reqs)  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024})


def prepare_head_decode(w: World, advances: bool = True) -> Launch:
    drafts = w.ints(w.max_reqs, w.num_steps, dtype=LONG)
    args = (drafts[: w.num_reqs, 0], drafts.stride(0), w.seq_lens, w.num_rejected, w.ints(w.max_reqs),
            w.ints(w.max_reqs, dtype=LONG), w.ints(w.max_reqs, dtype=LONG), w.ints(w.max_reqs + 1), w.ints(w.max_reqs),
            35, w.max_reqs)  # fmt: skip
    return Launch((w.num_reqs + 1,), args, {"BLOCK_SIZE": 1024, "ADVANCE_DRAFT_POSITIONS": advances})


def update_head_inputs(w: World, is_last: bool = False, advances: bool = True) -> Launch:
    drafts, dtype = w.ints(w.max_reqs, w.num_steps, dtype=LONG), w.size.dtype
    states, outputs = w.floats(w.max_reqs, w.hidden_size, dtype=dtype), w.floats(w.num_reqs, w.hidden_size, dtype=dtype)
    step = torch.tensor(w.num_steps - 1 if is_last else 0)
    args = (drafts, drafts.stride(0), states, states.stride(0), w.ints(w.max_reqs), w.ints(w.max_reqs, dtype=LONG),
            w.ints(w.max_reqs, dtype=LONG), w.ints(w.max_reqs), w.ints(w.num_reqs, dtype=LONG), step,
            outputs, outputs.stride(0), w.hidden_size, 20, w.num_steps)  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024, "ADVANCE_DRAFT_POSITIONS": advances})


def prepare_draft_model_prefill(w: World) -> Launch:
    extra = w.num_tokens + w.max_reqs
    args = (w.ints(extra), w.positions, w.ints(w.max_reqs), w.idx(), w.ints(extra), w.ints(extra, dtype=LONG),
            w.ints(w.max_reqs, dtype=LONG), w.ints(w.max_reqs + 1), w.ints(w.max_reqs), w.query_start_loc, w.seq_lens,
            w.num_rejected, w.max_reqs, 36)  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 512})


def prepare_dflash_inputs(w: World, from_anchor: bool = False) -> Launch:
    num_query = w.num_steps + (0 if from_anchor else 1)
    num_rows, num_samples, extra = w.max_reqs * num_query, w.max_reqs * w.num_steps, w.num_tokens + 3
    block_size = 16
    table = w.ints(w.max_reqs, w.max_len // block_size - 2, high=5)
    span = int(w.lengths.max()) + num_query
    args = (
        w.ints(num_rows), w.ints(num_rows, dtype=LONG), w.ints(w.max_reqs + 1), w.ints(w.max_reqs),
        w.ints(num_rows + 9, dtype=LONG), w.ints(extra, dtype=LONG), w.ints(extra, dtype=LONG),
        w.ints(num_samples, dtype=LONG), w.ints(num_samples, dtype=LONG), w.ints(num_samples, dtype=LONG),
        w.floats(w.max_reqs), w.ints(w.max_reqs, dtype=LONG), w.positions, w.query_start_loc, w.idx(),
        w.ints(w.max_reqs, 1, dtype=LONG), w.ints(1, w.max_reqs), w.num_sampled, w.num_rejected, w.floats(w.max_reqs),
        w.ints(w.max_reqs, dtype=LONG), table, table.stride(0), 49, block_size, num_query, w.num_steps, w.max_reqs,
        num_rows + 9, 37, 0,
    )  # fmt: skip
    constexprs = {"SAMPLE_FROM_ANCHOR": from_anchor, "PAD_SLOT_ID": PAD, "CP_SIZE": 1, "CP_INTERLEAVE": 1}
    return Launch((w.num_reqs, -(-span // 256)), args, {**constexprs, "BLOCK_SIZE": 256})


def ngram_texts(w: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns texts from three tokens, which repeat themselves, and their lengths: one too short, one full."""
    lengths = w.at_slots(w.rng.integers(10, w.max_len, w.num_reqs))
    lengths[torch.from_numpy(w.slots)[:2]] = torch.tensor([w.max_len, 1][: w.num_reqs]).int()
    return w.ints(w.max_reqs, w.max_len, high=3), lengths


def scan_ngrams(w: World) -> Launch:
    tokens, lengths = ngram_texts(w)
    block = 256 if w.max_len > 256 else 16
    scratch = w.ints(w.max_reqs, -(-w.max_len // block), dtype=LONG)
    args = (tokens, tokens.stride(0), w.idx(), lengths, w.num_sampled, scratch, scratch.stride(0), w.max_len, 2, 5, 8,
            block)  # fmt: skip
    return Launch((w.num_reqs, scratch.shape[1]), args, {"num_warps": 4, "num_stages": 2})


def draft_ngrams(w: World) -> Launch:
    tokens, lengths = ngram_texts(w)
    places = w.ints(w.max_reqs, 3, high=w.max_len - 5, dtype=LONG)
    scratch = torch.where(w.ints(w.max_reqs, 3, high=3) > 0, 0, 2 * (w.max_len + 1) + places + 1)
    scratch[0] = 3 * (w.max_len + 1) + w.max_len - 6 + 1
    drafts = w.ints(w.max_reqs, w.num_steps, dtype=LONG)
    args = (tokens, tokens.stride(0), w.idx(), lengths, w.num_sampled, w.ints(w.max_reqs, dtype=LONG), scratch, 3,
            drafts, w.max_len, 3, w.num_steps, 8, 4)  # fmt: skip
    return Launch((w.num_reqs,), args, {"num_warps": 2, "num_stages": 1})


def prepare_input_buffers(w: World) -> Launch:
    extra, kept = w.num_tokens + 3, w.num_steps - 1
    starts = w.ints(w.max_reqs + 1)
    starts[: w.num_reqs + 1] = w.query_start_loc
    cached, ahead = w.ints(w.max_reqs, kept, dtype=LONG), w.ints(w.num_steps, w.max_reqs)
    overrides = w.ints(w.max_reqs, kept, dtype=LONG)
    args = (w.ints(w.max_reqs, dtype=LONG), w.ints(extra), w.ints(extra, dtype=LONG), w.ints(w.max_reqs), w.ints(extra),
            w.positions, cached, cached.stride(0), overrides, overrides.stride(0), w.idx(),
            w.ints(w.max_reqs, 1, dtype=LONG), ahead, ahead.stride(0), w.num_sampled, w.num_rejected, w.seq_lens,
            starts, w.max_reqs, w.num_steps)  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024})


def caches(w: World, exists: bool = True) -> tuple[torch.Tensor | None, int, int]:
    """Returns states or embeddings of each request's last steps, with their strides."""
    if not exists:
        return None, 0, 0
    cache = w.floats(w.max_reqs, w.num_steps - 1, w.hidden_size, dtype=w.size.dtype)
    return cache, cache.stride(0), cache.stride(1)


def rows(w: World, exists: bool = True) -> tuple[torch.Tensor | None, int]:
    """Returns states or embeddings of the step's tokens, with their stride."""
    if not exists:
        return None, 0
    return w.floats(w.num_tokens + 3, w.hidden_size, dtype=w.size.dtype), w.hidden_size


def prepare_hidden_states_and_embeddings(w: World, embeds: bool = True) -> Launch:
    args = (*rows(w), *rows(w), *caches(w), *rows(w, embeds), *caches(w, embeds), w.idx(), w.num_rejected,
            w.query_start_loc, w.num_steps, w.hidden_size)  # fmt: skip
    grid = (w.num_reqs, -(-w.size.longest // 16) + 1, -(-w.hidden_size // 256))
    return Launch(grid, args, {"BLOCK_SIZE_Q": 16, "BLOCK_SIZE_H": 256, "USE_INPUT_EMBEDS": embeds})


def pad_trailing_draft_slots(w: World) -> Launch:
    slots, last = w.ints(2, w.num_tokens + 3, dtype=LONG), last_token_indices(w)
    last[0] -= int(w.num_rejected[0] == 0)
    args = (slots, slots.stride(0), w.query_start_loc, last, PAD)
    return Launch((2, w.num_reqs), args, {"BLOCK_SIZE": 256})


def cache_inputs(w: World, embeds: bool = True) -> Launch:
    ids = w.ints(w.max_reqs, w.num_steps - 1, dtype=LONG)
    args = (w.ints(w.num_tokens + 3), *rows(w, embeds), *rows(w), ids, ids.stride(0), *caches(w, embeds), *caches(w),
            w.idx(may_be_gone=True), last_token_indices(w), w.query_start_loc, w.num_steps, w.hidden_size)  # fmt: skip
    grid = (w.num_reqs, -(-w.hidden_size // 1024))
    return Launch(grid, args, {"BLOCK_SIZE": 1024, "USE_INPUT_EMBEDS": embeds})


def shift_input_ids(w: World) -> Launch:
    args = (w.ints(w.num_tokens + 3), w.idx(may_be_gone=True), w.query_start_loc, last_token_indices(w),
            w.ints(w.num_reqs, dtype=LONG))  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024})


def shift_input_embeds(w: World) -> Launch:
    args = (*rows(w), *rows(w), w.idx(may_be_gone=True), w.query_start_loc, last_token_indices(w), w.hidden_size)
    return Launch((w.num_reqs, -(-w.hidden_size // 256)), args, {"BLOCK_SIZE_Q": 16, "BLOCK_SIZE_H": 256})


MAKERS = by_kernel(
    prepare_head_prefill, prepare_head_decode, partial(prepare_head_decode, advances=False),
    update_head_inputs, partial(update_head_inputs, advances=False), partial(update_head_inputs, is_last=True),
    prepare_draft_model_prefill, prepare_dflash_inputs, partial(prepare_dflash_inputs, from_anchor=True),
    scan_ngrams, draft_ngrams, prepare_input_buffers, prepare_hidden_states_and_embeddings,
    partial(prepare_hidden_states_and_embeddings, embeds=False), pad_trailing_draft_slots,
    cache_inputs, partial(cache_inputs, embeds=False), shift_input_ids, shift_input_embeds,
)  # fmt: skip
