# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels in `lab.vllm_on_cpu/kernels/batch.py`."""

from functools import partial

import torch
from interpreter import Launch, by_kernel
from torch import Tensor
from world import PAD, VOCAB, World

BLOCK_SIZES = (16, 4)
"""Block sizes of two groups of layers, in tokens."""


def pointers(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def block_tables(w: World) -> tuple[list[Tensor], Tensor]:
    tables = [w.ints(w.max_reqs, w.max_len // size + 1, high=1000) for size in BLOCK_SIZES]
    return tables, torch.tensor([t.stride(0) for t in tables])


def gather_block_tables(w: World) -> Launch:
    sources, strides = block_tables(w)
    targets, _ = block_tables(w)
    num_blocks = torch.stack([w.ints(w.max_reqs, high=t.shape[1] + 1) for t in sources])
    args = (w.idx(), pointers(sources), pointers(targets), strides, num_blocks, num_blocks.stride(0), w.num_reqs)
    return Launch((2, w.num_reqs), args, {"BLOCK_SIZE": 1024}, lambda: [*sources, *targets])


def compute_slot_mappings(w: World) -> Launch:
    tables, strides = block_tables(w)
    slots = w.ints(2, w.num_tokens + 1500, dtype=torch.int64)
    enabled = torch.tensor([True, w.size.num_drafts != 4])
    args = (slots.shape[1], w.idx(may_be_gone=True), w.query_start_loc, w.positions, pointers(tables), strides,
            torch.tensor(BLOCK_SIZES).int(), enabled, torch.tensor([True, True]), slots, slots.stride(0), 0)  # fmt: skip
    constexprs = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": PAD, "TRITON_BLOCK_SIZE": 1024}
    return Launch((2, w.num_reqs + 1), args, constexprs, lambda: [slots, *tables])


def staged_writes(w: World, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns rows, first columns, contents and ends of one write for each request."""
    lengths = torch.from_numpy(w.rng.integers(1, width // 2 + 1, w.num_reqs))
    starts = w.ints(w.num_reqs, high=width // 2)
    contents = w.ints(int(lengths.sum()), dtype=dtype)
    return w.idx().int(), starts, contents, lengths.cumsum(0).int()


def apply_write(w: World, to: str = "rows", dtype: torch.dtype = torch.int32) -> Launch:
    """Writes `to` the "rows" of a tensor, to its "elements", or to the rows of two "groups" of tensors."""
    if to == "groups":
        tables, strides = block_tables(w)
        groups = (torch.arange(w.num_reqs) % 2).int()
        args = (pointers(tables), strides, *staged_writes(w, tables[0].shape[1], torch.int32), groups)
        return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024, "MULTI_GROUP": True}, lambda: tables)
    if to == "elements":
        target, ends = w.ints(w.max_reqs), torch.arange(1, w.num_reqs + 1).int()
        writes = (w.idx().int(), torch.zeros(w.num_reqs).int(), w.ints(w.num_reqs), ends)
        return Launch((w.num_reqs,), (target, 1, *writes, None), {"BLOCK_SIZE": 1024, "MULTI_GROUP": False})
    target = w.ints(w.max_reqs, w.max_len).to(dtype)
    args = (target, target.stride(0), *staged_writes(w, w.max_len, dtype), None)
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024, "MULTI_GROUP": False}, lambda: [target])


def prepare_prefill_inputs(w: World) -> Launch:
    ahead, tokens = w.ints(2, w.max_reqs), w.ints(w.max_reqs, w.max_len)
    if w.size.longest == 1:
        w.prefill_len += 50
    args = (w.ints(w.num_tokens + 5), ahead, ahead.stride(0), len(ahead), w.idx(), w.query_start_loc, tokens,
            tokens.stride(0), w.prefill_len, w.num_computed)  # fmt: skip
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 1024, "LOOKAHEAD_BLOCK": 2})


def prepare_pos_seq_lens(w: World) -> Launch:
    seq_lens = w.ints(w.max_reqs)
    args = (
        w.ints(w.num_tokens + 5, dtype=torch.int64),
        seq_lens,
        w.idx(),
        w.query_start_loc,
        w.num_computed,
        w.max_reqs,
    )
    return Launch((w.num_reqs + 1,), args, {"BLOCK_SIZE": 1024})


def combine_sampled_and_draft_tokens(w: World, num_new: int = 1) -> Launch:
    drafts = w.ints(w.max_reqs, w.num_steps, dtype=torch.int64)
    cu_num_logits = w.cu_num_logits if num_new else w.cumulative(w.num_drafts)
    args = (w.ints(w.num_tokens + 5), w.idx(), w.ints(w.max_reqs, 1, dtype=torch.int64), w.query_start_loc, w.seq_lens,
            w.prefill_len, drafts, drafts.stride(0), cu_num_logits, w.ints(w.num_rows, dtype=torch.int64))  # fmt: skip
    return Launch((w.num_reqs,), args, {"NUM_NEW_SAMPLED_TOKENS": num_new, "BLOCK_SIZE": 8})


def get_num_sampled_and_rejected(w: World) -> Launch:
    args = (w.num_sampled, w.ints(w.num_reqs), w.seq_lens, w.cu_num_logits, w.idx(), w.prefill_len)
    return Launch((w.num_reqs,), args)


def post_update(w: World, counts: bool = True, computed: bool = True) -> Launch:
    bins = w.ints(w.max_reqs, VOCAB) if counts else None
    sampled, tokens = w.ints(w.num_reqs, w.num_steps + 1, dtype=torch.int64), w.ints(w.max_reqs, w.max_len)
    args = (w.idx(may_be_gone=True), w.num_computed, w.ints(w.max_reqs, 1, dtype=torch.int64), bins, VOCAB, sampled,
            sampled.stride(0), w.num_sampled, w.num_rejected, w.query_start_loc if computed else None, tokens,
            tokens.stride(0), w.total_len)  # fmt: skip
    return Launch((w.num_reqs,), args, {"num_warps": 1})


def post_update_num_computed_tokens(w: World) -> Launch:
    return Launch((w.num_reqs,), (w.idx(), w.num_computed, w.query_start_loc))


def expand_idx_mapping(w: World) -> Launch:
    args = (w.idx(), w.ints(w.num_rows, high=9, dtype=torch.int64), w.ints(w.num_rows) + 9, w.cu_num_logits)
    return Launch((w.num_reqs,), args, {"BLOCK_SIZE": 8})


MAKERS = by_kernel(
    gather_block_tables, compute_slot_mappings, apply_write, partial(apply_write, dtype=torch.float32),
    partial(apply_write, to="elements"), partial(apply_write, to="groups"), prepare_prefill_inputs, prepare_pos_seq_lens,
    combine_sampled_and_draft_tokens, partial(combine_sampled_and_draft_tokens, num_new=0), get_num_sampled_and_rejected,
    post_update, partial(post_update, counts=False, computed=False), post_update_num_computed_tokens, expand_idx_mapping,
)  # fmt: skip
