# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels that sample, score and change logits."""

from functools import partial

import torch
from interpreter import Launch, by_kernel
from rows import Rows
from torch import Tensor

NO_REQUEST = -1
BLOCK = 1024
LARGE_BLOCK = 8192


def num_blocks(rows: Rows, block: int) -> int:
    return -(-rows.vocab_size // block)


def gumbel_sample(
    rows: Rows, drafting: bool = False, divide: bool = False, cache: str = "", fp64: bool = False
) -> Launch:
    """`cache`: "column" stores all rows' logits in one column of their requests, "columns" each row's in its own."""
    logits, idx = rows.logits(), rows.idx.clone()
    if rows.num_rows > 2:
        idx[1] = NO_REQUEST
    if cache == "column":
        idx[rows.local > 0] = NO_REQUEST
    shape = (rows.num_rows, num_blocks(rows, BLOCK))
    tokens = torch.empty(shape, dtype=torch.int64)
    maxima = torch.empty(shape, dtype=torch.float64 if fp64 else torch.float32)
    kept = torch.zeros(rows.max_reqs, 4, rows.vocab_size + 9, dtype=logits.dtype) if cache else None
    column = rows.local.long() if cache == "columns" else torch.tensor(2) if cache else None
    source = rows.logits() if cache else None
    seeds = rows.ints(rows.max_reqs, low=-(2**62), high=2**62, dtype=torch.int64)
    pos = rows.ints(rows.num_rows, high=2**20, dtype=torch.int64)
    temperatures = rows.floats(rows.max_reqs, choices=(0.0, 0.7, 1.0, 1.5))
    strides = (kept.stride(0), kept.stride(1)) if kept is not None else (0, 0)
    args = (tokens, tokens.stride(0), maxima, maxima.stride(0), kept, *strides, column, source,
            source.stride(0) if source is not None else 0, logits, logits.stride(0), idx, seeds, pos, temperatures,
            rows.vocab_size)  # fmt: skip
    constexprs = {"BLOCK_SIZE": BLOCK, "IS_DRAFTING": drafting, "APPLY_TEMPERATURE": divide, "USE_FP64": fp64,
                  "PER_TOKEN_COL": cache == "columns"}  # fmt: skip

    def sampled() -> list[Tensor]:
        return [tokens.gather(1, maxima.argmax(1, keepdim=True)), *([] if kept is None else [kept])]

    tokens.zero_(), maxima.zero_()
    return Launch(shape, args, constexprs, sampled)


def temperature(rows: Rows) -> Launch:
    logits, temperatures = rows.processed_logits(), rows.floats(rows.max_reqs, choices=(0.0, 0.7, 1.0, 1.5))
    temperatures[rows.slots[-1]] = 0.7
    args = (logits, logits.stride(0), rows.idx, temperatures, rows.vocab_size)
    return Launch((rows.num_rows, num_blocks(rows, LARGE_BLOCK)), args, {"BLOCK_SIZE": LARGE_BLOCK})


def topk_log_softmax(rows: Rows, k: int) -> Launch:
    logits, tokens = rows.logits(), rows.tokens(rows.num_rows, k + 2, dtype=torch.int64)[:, :k]
    output = torch.zeros(rows.num_rows, k)
    args = (output, logits, logits.stride(0), tokens, tokens.stride(0), k, rows.vocab_size)
    constexprs = {"BLOCK_SIZE": BLOCK, "TOPK_BLOCK_SIZE": 1 << (k - 1).bit_length()}
    return Launch((rows.num_rows,), args, constexprs, lambda: [output])


def ranks(rows: Rows) -> Launch:
    """Only tokens with a finite logit: for others the kernel counts its last block's padding too."""
    logits, tokens = rows.comparable_logits(), rows.tokens(rows.num_rows, dtype=torch.int64)
    logits[torch.arange(rows.num_rows), tokens] = 1.5
    output = torch.zeros(rows.num_rows, dtype=torch.int64)
    args = (output, logits, logits.stride(0), tokens, rows.vocab_size)
    return Launch((rows.num_rows,), args, {"BLOCK_SIZE": LARGE_BLOCK})


def fill_logprob_token_ids(rows: Rows, num_top: int) -> Launch:
    most, R = 7, rows.num_rows
    tokens, mask = torch.zeros(R, 1 + most, dtype=torch.int64), torch.zeros(R, 1 + most, dtype=torch.bool)
    top, own = rows.tokens(R, max(num_top, 1)), rows.tokens(rows.max_reqs, 128)
    num_own = rows.ints(rows.max_reqs, high=most + 1) * rows.ints(rows.max_reqs, high=2)
    args = (tokens, tokens.stride(0), mask, mask.stride(0), rows.tokens(R, dtype=torch.int64), top, top.stride(0),
            rows.idx, num_own, own, own.stride(0))  # fmt: skip
    return Launch((R,), args, {"NUM_TOPK": num_top, "PADDED_COLS": 8})


def prompt_logprobs_token_ids(rows: Rows) -> Launch:
    lengths = rows.ints(rows.num_reqs, low=1, high=1300)
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    texts, computed = rows.tokens(rows.max_reqs, 1400), rows.ints(rows.max_reqs, high=50)
    output = torch.zeros(int(starts[-1]), dtype=torch.int64)
    args = (output, starts, rows.slots, computed, texts, texts.stride(0))
    return Launch((rows.num_reqs,), args, {"BLOCK_SIZE": BLOCK})


def penalties(rows: Rows) -> Launch:
    logits, R = rows.processed_logits(), rows.max_reqs
    repetition = rows.floats(R, choices=(1.0, 1.3, 0.8))
    frequency, presence = rows.floats(R, choices=(0.0, 0.3)), rows.floats(R, choices=(0.0, -0.4))
    repetition[rows.slots[-1]] = 1.3
    words = num_blocks(rows, 32)
    in_prompt = rows.ints(R, words, low=-(2**31), high=2**31)
    counts = rows.ints(R, rows.vocab_size, high=4) * rows.ints(R, rows.vocab_size, high=2)
    args = (logits, logits.stride(0), rows.idx, rows.tokens(rows.num_rows), rows.local, repetition, frequency, presence,
            in_prompt, in_prompt.stride(0), counts, counts.stride(0), rows.vocab_size)  # fmt: skip
    return Launch((rows.num_rows, num_blocks(rows, LARGE_BLOCK)), args, {"BLOCK_SIZE": LARGE_BLOCK})


def bincount(rows: Rows) -> Launch:
    length, R = 2500, rows.max_reqs
    prompt, output = rows.ints(R, low=1, high=1300), rows.ints(R, high=1200)
    texts, idx = rows.tokens(R, length), rows.slots.long()
    mask = torch.zeros(R, num_blocks(rows, 32), dtype=torch.int32)
    counts = torch.zeros(R, rows.vocab_size, dtype=torch.int32)
    args = (idx, texts, texts.stride(0), prompt, prompt + output, mask, mask.stride(0), counts, counts.stride(0))
    return Launch((rows.num_reqs, -(-length // BLOCK)), args, {"BLOCK_SIZE": BLOCK})


def min_p(rows: Rows) -> Launch:
    logits, ratios = rows.processed_logits(), rows.floats(rows.max_reqs, choices=(0.0, 0.02, 0.3))
    ratios[rows.slots[-1]] = 0.02
    args = (logits, logits.stride(0), rows.idx, ratios, rows.vocab_size)
    return Launch((rows.num_rows,), args, {"BLOCK_SIZE": BLOCK})


def bad_words(rows: Rows) -> Launch:
    """Words of one to three tokens. Texts and drafts use three distinct tokens, so that many words match."""
    logits, R, num_words, few = rows.processed_logits(), rows.max_reqs, 6, 3
    words = rows.ints(R, 20, high=few)
    offsets = torch.cat([torch.zeros(R, 1), rows.ints(R, num_words, low=1, high=4).cumsum(1)], 1).int()
    nums = rows.ints(R, low=1, high=num_words + 1)
    prompt, output, texts = rows.ints(R, high=5), rows.ints(R, high=5), rows.ints(R, 12, high=few)
    args = (logits, logits.stride(0), rows.idx, words, words.stride(0), offsets, offsets.stride(0), nums, texts,
            texts.stride(0), prompt, prompt + output, rows.ints(rows.num_rows, high=few), rows.local)  # fmt: skip
    return Launch((rows.num_rows, num_words), args)


def bias(rows: Rows, may_restore: bool = False) -> Launch:
    """With `may_restore`, some rows allow only stop tokens."""
    logits, R, most = rows.processed_logits(), rows.max_reqs, 8
    logits[:, -1] = 1.0
    num_allowed = rows.ints(R, low=1, high=most) * rows.ints(R, high=2)
    num_biases, num_stops = rows.ints(R, high=most), rows.ints(R, high=most)
    allowed, biased, stops = (rows.distinct_tokens(R, most) for _ in range(3))
    if may_restore:
        stops, num_stops, num_allowed = allowed.clone(), num_allowed, (num_allowed - 1).clamp(min=0)
    amounts, pos = rows.floats(R, most), rows.ints(rows.num_rows, high=20, dtype=torch.int64)
    least, restores = rows.ints(R, high=40), rows.ints(R, high=2)
    num_biases[rows.slots[-1]] = 3
    args = (logits, logits.stride(0), rows.vocab_size, rows.idx, num_allowed, allowed, allowed.stride(0), num_biases,
            biased, biased.stride(0), amounts, amounts.stride(0), pos, least, num_stops, restores, stops,
            stops.stride(0))  # fmt: skip
    constexprs = {"BLOCK_SIZE": most, "LOGITS_BLOCK_SIZE": LARGE_BLOCK, "CHECK_ALL_MASKED_ROWS": may_restore}
    return Launch((rows.num_rows,), args, constexprs)


def apply_grammar_bitmask(rows: Rows) -> Launch:
    """The last request has a grammar, and masks for one more position than it has rows."""
    logits = rows.logits()
    places, positions = rows.num_reqs - 1, rows.size.num_drafts + 2
    indices = places * positions + torch.arange(positions).int()
    masks = rows.ints(positions, num_blocks(rows, 32), low=-(2**31), high=2**31)
    args = (logits, logits.stride(0), indices, rows.cu_num_logits, masks, masks.stride(0), rows.vocab_size)
    constexprs = {"MASK_STRIDE": positions, "BLOCK_SIZE": LARGE_BLOCK}
    return Launch((positions, num_blocks(rows, LARGE_BLOCK)), args, constexprs)


def num_nans(rows: Rows) -> Launch:
    logits = rows.logits()
    logits[torch.from_numpy(rows.rng.random(logits.shape) < 0.01)] = torch.nan
    output = torch.full((rows.num_rows,), -1, dtype=torch.int32)
    args = (logits, logits.stride(0), output, rows.vocab_size)
    return Launch((rows.num_rows,), args, {"BLOCK_SIZE": LARGE_BLOCK})


MAKERS = by_kernel(
    gumbel_sample, partial(gumbel_sample, divide=True),
    partial(gumbel_sample, drafting=True, divide=True, cache="column"),
    partial(gumbel_sample, drafting=True, cache="columns"), partial(gumbel_sample, divide=True, fp64=True),
    temperature, partial(topk_log_softmax, k=1), partial(topk_log_softmax, k=21), ranks,
    partial(fill_logprob_token_ids, num_top=0), partial(fill_logprob_token_ids, num_top=5), prompt_logprobs_token_ids,
    penalties, bincount, min_p, bad_words, bias, partial(bias, may_restore=True), apply_grammar_bitmask, num_nans,
)  # fmt: skip
