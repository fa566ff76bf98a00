# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of `row_sampling.py`, which sample rows in two passes over their logits.

The first pass finds the best token of each block of a row. The second pass finds the row's best token, computes its log-prob
and rank, and accepts drafts. In both passes each program has only a part of a row, so that even few rows use the whole device.
In the second pass, each program writes its partial sums to a place of its own. The last program of a row to finish adds them
in a fixed order. So the results have the same bits in every run. The last program of a request to finish accepts the request's
drafts.

Scores equal those of vLLM's `gumbel_sample` bit for bit (see `draft_sampling_triton.py`). No constant depends on the number of
rows, because Triton would then compile the kernels again while the engine runs.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions. N blocks of a row in the first pass, P
parts of a row in the second.
"""

import torch
import triton
import triton.language as tl
from vllm.v1.outputs import LogprobsTensors

from nemo_specrollout.generation.drafting.draft_sampling_triton import add_noise, load_divided
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn, Logits, RowKeys, TieTables
from nemo_specrollout.sampling.equality_triton import accept_request
from nemo_specrollout.sampling.triton_common import is_last

BLOCK = 1024
PART = 4096
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _temperature_of(row, slots_ptr, temperature_ptr):  # type: ignore[no-untyped-def]
    """Returns the request slot and the temperature of a row. In a row without a request, the temperature is 0."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    return slot, tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)


@triton.jit
def _begin_counts(row, starts_ptr, num_requests, marks_ptr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sets the counters of row number `row` and of request number `row` to 0, and marks the rows of this request.

    The mark of a row is the number of its request. There are at least as many rows as requests, so the programs of all rows
    reach all requests.
    """
    num_rows = tl.num_programs(0)
    tl.store(marks_ptr + row, 0)
    tl.store(marks_ptr + num_rows + row, 0)
    if starts_ptr is not None:
        k = tl.arange(0, WIDTH)
        is_request = row < num_requests
        start = tl.load(starts_ptr + row, mask=is_request, other=0)
        end = tl.load(starts_ptr + row + 1, mask=is_request, other=0)
        tl.store(marks_ptr + 2 * num_rows + start + k, row.to(tl.int32), mask=k < end - start)


@triton.jit(do_not_specialize=["divides", "num_requests"])
def _score_blocks(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, divides, slots_ptr, temperature_ptr, seeds_ptr, positions_ptr, num_vocab, best_ptr, token_ptr,
    starts_ptr, num_requests, marks_ptr, second_ptr, runner_up_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block == 0:
        _begin_counts(row, starts_ptr, num_requests, marks_ptr, WIDTH)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_vocab
    slot, temperature = _temperature_of(row, slots_ptr, temperature_ptr)
    seed = tl.load(seeds_ptr + slot, mask=slot >= 0, other=0)
    position = tl.load(positions_ptr + row)
    scores = load_divided(logits_ptr + row * logits_stride, token, mask, tl.where(divides != 0, temperature, 1.0))
    scores = add_noise(scores, mask, temperature, seed, position, token)
    best, index = tl.max(scores, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + block
    tl.store(best_ptr + out, best)
    tl.store(token_ptr + out, block * BLOCK + index)
    if second_ptr is not None:
        others = tl.where(tl.arange(0, BLOCK) == index, _NEVER, scores)
        second, second_index = tl.max(others, axis=0, return_indices=True)
        tl.store(second_ptr + out, second)
        tl.store(runner_up_ptr + out, block * BLOCK + second_index)


@triton.jit
def _record_tie(  # type: ignore[no-untyped-def]
    ties,
    longest,
    row,
    slot,
    position,
    best_N,
    index,
    token_ptr,
    second_ptr,
    runner_up_ptr,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """Writes the score gap and the runner-up of a row into the tables of near-ties, if the row's request asks for them.

    The runner-up is the row's second-best token. It may come from the same block of the vocabulary as the best token, or be
    the best token of another block.
    """
    n = tl.arange(0, BLOCKS)
    others_N = tl.where(n == index, _NEVER, best_N)
    other, other_index = tl.max(others_N, axis=0, return_indices=True)
    own = tl.load(second_ptr + row * num_blocks + index)
    runner_up = tl.load(runner_up_ptr + row * num_blocks + index)
    if other > own:
        runner_up = tl.load(token_ptr + row * num_blocks + other_index)
    place = position + 1
    is_asked = tl.load(ties.wanted_S + slot, mask=slot >= 0, other=0) & (place < longest)
    gap = tl.max(best_N, axis=0) - tl.maximum(own, other)
    tl.store(ties.gap_SL + slot * longest + place, gap, mask=is_asked)
    tl.store(ties.runner_up_SL + slot * longest + place, runner_up, mask=is_asked)


@triton.jit
def _grade_part(logits_ptr, num_vocab, divisor, token, parts_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes three values for a part of a row, from which `_grade_row` computes the log-prob and the rank of the token.

    They are the part's largest logit, its sum of exponentials, and how many of its logits are at least as large as the
    token's.
    """
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_vocab
    values = load_divided(logits_ptr, column, mask, divisor)
    largest = tl.max(values, axis=0)
    total = tl.sum(tl.exp(values - tl.where(largest == _NEVER, 0.0, largest)), axis=0)
    num_above = tl.sum(((values >= load_divided(logits_ptr, token, True, divisor)) & mask).to(tl.int32), axis=0)
    tl.store(parts_ptr + part, largest)
    tl.store(parts_ptr + num_parts + part, total)
    tl.store(parts_ptr + 2 * num_parts + part, num_above.to(tl.float32))  # exact below 2^24


@triton.jit
def _grade_row(logits_ptr, divisor, token, parts_ptr, logprob_ptr, rank_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the log-prob and the rank of a row's token, from the values of all parts of the row."""
    p = tl.arange(0, PARTS)
    num_parts = tl.num_programs(1)
    largest_P = tl.load(parts_ptr + p, mask=p < num_parts, other=_NEVER)
    total_P = tl.load(parts_ptr + num_parts + p, mask=p < num_parts, other=0.0)
    num_above_P = tl.load(parts_ptr + 2 * num_parts + p, mask=p < num_parts, other=0.0)
    largest = tl.max(largest_P, axis=0)
    total = tl.sum(total_P * tl.exp(largest_P - largest), axis=0)
    tl.store(logprob_ptr, load_divided(logits_ptr, token, True, divisor) - largest - tl.log(total))
    tl.store(rank_ptr, tl.sum(num_above_P, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["divides", "longest"])
def _finish_rows(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, divides, slots_ptr, temperature_ptr, num_vocab, best_ptr, token_ptr, num_blocks, marks_ptr,
    parts_ptr, tokens_ptr, logprobs_ptr, ranks_ptr, inputs_ptr, starts_ptr, emitted_ptr, counts_ptr, ties, longest,
    positions_ptr, second_ptr, runner_up_ptr,
    K1: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    n = tl.arange(0, BLOCKS)
    best_N = tl.load(best_ptr + row * num_blocks + n, mask=n < num_blocks, other=_NEVER)
    index = tl.max(best_N, axis=0, return_indices=True)[1]
    token = tl.load(token_ptr + row * num_blocks + tl.minimum(index, num_blocks - 1))  # a NaN may cause any index
    token = tl.minimum(token, num_vocab - 1)
    if logprobs_ptr is not None:
        logits_ptr += row * logits_stride
        parts_ptr += row * 3 * tl.num_programs(1)
        temperature = _temperature_of(row, slots_ptr, temperature_ptr)[1]
        divisor = tl.where(divides != 0, temperature, 1.0)
        _grade_part(logits_ptr, num_vocab, divisor, token, parts_ptr, PART)
        if not is_last(marks_ptr + row, tl.num_programs(1)):
            return
        _grade_row(logits_ptr, divisor, token, parts_ptr, logprobs_ptr + row, ranks_ptr + row, PARTS)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    if second_ptr is not None:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        index = tl.minimum(index, num_blocks - 1)
        _record_tie(
            ties, longest, row, slot, tl.load(positions_ptr + row), best_N, index, token_ptr, second_ptr, runner_up_ptr,
            num_blocks, BLOCKS,
        )  # fmt: skip
    if starts_ptr is not None:
        request = tl.load(marks_ptr + 2 * num_rows + row).to(tl.int64)
        num_own = tl.load(starts_ptr + request + 1) - tl.load(starts_ptr + request)
        if is_last(marks_ptr + num_rows + request, num_own):
            accept_request(request, tokens_ptr, inputs_ptr, starts_ptr, emitted_ptr, counts_ptr, K1, WIDTH)


def draw_rows(
    scored: Logits, keys: RowKeys, graded: Logits | None, drafts: Drafts | None, ties: TieTables | None = None
) -> Drawn:
    """Launches the kernels that sample rows and accept drafts, for `row_sampling.draw_rows`."""
    logits_RV = scored.values_RV
    (slots_R, temperature_S, seeds_S, positions_R) = keys
    num_rows, num_vocab = logits_RV.shape
    num_blocks = triton.cdiv(num_vocab, BLOCK)
    num_parts = 1 if graded is None else triton.cdiv(num_vocab, PART)
    slots_R = slots_R.contiguous()
    positions_R = positions_R.contiguous()
    best_RN = logits_RV.new_empty(num_rows, num_blocks, dtype=torch.float32)
    token_RN = best_RN.new_empty(best_RN.shape, dtype=torch.int32)
    marks_3R = slots_R.new_empty(3, num_rows, dtype=torch.int32)
    tokens_R = slots_R.new_empty(num_rows, dtype=torch.int64)
    inputs_R = starts_B1 = emitted_BK = counts_B = None
    num_requests, width = 0, 1
    if drafts is not None:
        inputs_R, starts_B1, num_positions = drafts
        num_requests = len(starts_B1) - 1
        width = num_positions + 1
        emitted_BK = tokens_R.new_empty(num_requests, width)
        counts_B = marks_3R.new_empty(num_requests)
    parts_R3P = logprobs_R = ranks_R = None
    if graded is not None:
        parts_R3P = best_RN.new_empty(num_rows, 3, num_parts)
        logprobs_R = best_RN.new_empty(num_rows)
        ranks_R = tokens_R.new_empty(num_rows)
    second_RN = runner_up_RN = None
    longest = 0
    if ties is not None:
        second_RN = torch.empty_like(best_RN)
        runner_up_RN = torch.empty_like(token_RN)
        longest = ties.gap_SL.shape[1]
    _score_blocks[(num_rows, num_blocks)](
        logits_RV, logits_RV.stride(0), int(scored.divides), slots_R, temperature_S, seeds_S, positions_R, num_vocab,
        best_RN, token_RN, starts_B1, num_requests, marks_3R, second_RN, runner_up_RN,
        WIDTH=triton.next_power_of_2(width), BLOCK=BLOCK,
    )  # fmt: skip
    graded_RV, divides = graded or (None, False)
    stride = 0 if graded_RV is None else graded_RV.stride(0)
    _finish_rows[(num_rows, num_parts)](
        graded_RV, stride, int(divides), slots_R, temperature_S, num_vocab, best_RN, token_RN, num_blocks, marks_3R, parts_R3P,
        tokens_R, logprobs_R, ranks_R, inputs_R, starts_B1, emitted_BK, counts_B, ties, longest,
        positions_R, second_RN, runner_up_RN, K1=width,
        WIDTH=triton.next_power_of_2(width), BLOCKS=triton.next_power_of_2(num_blocks), PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
    )  # fmt: skip
    logprobs = None
    if logprobs_R is not None and ranks_R is not None:
        logprobs = LogprobsTensors(tokens_R[:, None], logprobs_R[:, None], ranks_R)
    return Drawn(tokens_R, logprobs, emitted_BK, counts_B)
