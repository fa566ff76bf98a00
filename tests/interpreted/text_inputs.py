# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels that read texts while sampling: traces, sampling masks, thinking budgets."""

import torch
from interpreter import Launch, by_kernel
from rows import Rows
from torch import Tensor

START, NATURAL_END, END = (1, 2), (2, 0, 1), (0, 2, 0, 1)
"""Markers from three tokens; one marker may contain another."""
NUM_TOKENS = 3


def trace_replay(rows: Rows) -> Launch:
    idx, texts, R = rows.slots.clone(), rows.tokens(rows.max_reqs, 30), rows.max_reqs
    prompt, output, lengths = rows.ints(R, high=9), rows.ints(R, low=-1, high=20), rows.ints(R, high=30)
    output[idx[-1]], lengths[idx[-1]] = 3, 9
    if rows.num_reqs > 1:
        idx[0] = -1
    sampled = rows.tokens(rows.num_reqs, dtype=torch.int64)
    args = (sampled, idx, texts, texts.stride(0), lengths, prompt + output, prompt)
    return Launch((rows.num_reqs,), args)


def compact_sampling_mask(rows: Rows) -> Launch:
    logits, places, most = rows.comparable_logits(), rows.size.num_drafts + 1, 12
    logits[: rows.num_rows // 2, 9:] = -torch.inf
    num_rows = rows.cu_num_logits.diff()
    num_sampled = torch.minimum(rows.ints(rows.num_reqs, low=1, high=places + 1), num_rows)
    tokens = torch.zeros(rows.num_reqs * places, most, dtype=torch.int32)
    packed = torch.zeros(len(tokens), -(-rows.vocab_size // 8), dtype=torch.uint8)
    counts = torch.full((len(tokens),), -1, dtype=torch.int32)
    args = (logits, *logits.stride(), rows.cu_num_logits, num_sampled, tokens, tokens.stride(0), packed,
            packed.stride(0), counts, rows.vocab_size, most)  # fmt: skip
    return Launch((len(tokens),), args, {"ROWS_PER_REQUEST": places, "BLOCK_SIZE": 8192})


def thinkers(rows: Rows) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Returns budgets, texts from three tokens, their lengths, and the cached places of the markers."""
    R = rows.max_reqs
    budgets, texts = rows.ints(R, low=-1, high=6), rows.ints(R, 90, high=NUM_TOKENS)
    texts[::2, :60] = NUM_TOKENS - 1  # markers far from the end
    totals = rows.ints(R, low=5, high=80)
    budgets[rows.slots[-1]] = 0
    starts, ends = rows.ints(R, low=-1, high=5), rows.ints(R, low=-1, high=5)
    scanned = rows.ints(R, high=100)
    is_new = rows.ints(R, high=2).bool()
    is_new[rows.slots[-1]] = True
    for cached, new in ((starts, -1), (ends, -1), (scanned, 0)):
        cached[is_new] = new
    return budgets, texts, totals, (starts, ends, scanned)


def update_committed_marker_cache(rows: Rows) -> Launch:
    budgets, texts, totals, cached = thinkers(rows)
    args = (rows.slots, budgets, texts, texts.stride(0), totals, *cached, torch.tensor(START).int(),
            torch.tensor(NATURAL_END).int())  # fmt: skip
    constexprs = {"START_LEN": len(START), "NATURAL_END_LEN": len(NATURAL_END), "MAX_LEN": 3, "BLOCK": 16}
    return Launch((rows.num_reqs,), args, constexprs)


def thinking_budget(rows: Rows) -> Launch:
    budgets, texts, totals, (starts, ends, _) = thinkers(rows)
    starts[rows.slots[-1]], ends[rows.slots[-1]] = 3, 2
    texts[rows.slots[-1]] = 1
    drafts = rows.ints(rows.num_rows, high=NUM_TOKENS)
    logits = rows.processed_logits()
    args = (logits, logits.stride(0), rows.idx, budgets, texts, texts.stride(0), totals, drafts, rows.local, starts,
            ends, *(torch.tensor(marker).int() for marker in (START, NATURAL_END, END)))  # fmt: skip
    constexprs = {"START_LEN": len(START), "NATURAL_END_LEN": len(NATURAL_END), "END_LEN": len(END)}
    return Launch((rows.num_rows,), args, constexprs)


MAKERS = by_kernel(trace_replay, compact_sampling_mask, update_committed_marker_cache, thinking_budget)
