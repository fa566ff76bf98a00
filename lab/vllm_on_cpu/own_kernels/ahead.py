# SPDX-License-Identifier: Apache-2.0
"""The kernel of the drafter `ahead` on a CPU. `drafters/ahead.py` says what it computes.

In all functions, `t` are the drafter's tables. Shapes: as in `drafters/ahead.py`.
"""

from numba import njit

from lab.vllm_on_cpu.own_kernels.tensors import on_tensors
from nemo_specrollout.drafters.ahead import ENOUGH, FARTHEST, WINDOW
from nemo_specrollout.drafters.base import NUM_LEVELS


@njit(cache=True, nogil=True)
def _read(t, slot, path, place):  # type: ignore[no-untyped-def]
    """Returns the token that a path has at index `place` of the request's text, or -1 if the path has none there."""
    is_known = t.begin_SP[slot, path] <= place < t.end_SP[slot, path]
    return t.tokens_SPL[slot, path, place] if is_known else -1


@njit(cache=True, nogil=True)
def _run(t, slot, path, shift, text_L):  # type: ignore[no-untyped-def]
    """Compares the text with a path, from the text's last token backwards. Returns how many tokens match before the first
    mismatch, but at most `WINDOW`.

    The text's token at index i is compared with the path's token at index i + `shift`.
    """
    length = len(text_L)
    for w in range(min(WINDOW, length)):
        if _read(t, slot, path, length - 1 - w + shift) != text_L[length - 1 - w]:
            return w
    return min(WINDOW, length)


@njit(cache=True, nogil=True)
def _agreeing(t, slot, path, shift, text_L):  # type: ignore[no-untyped-def]
    """Returns how many of the text's last `WINDOW` tokens match the path.

    The text's token at index i is compared with the path's token at index i + `shift`. Mismatches do not end the count.
    """
    length = len(text_L)
    total = 0
    for place in range(max(0, length - WINDOW), length):
        total += _read(t, slot, path, place + shift) == text_L[place]
    return total


@on_tensors
@njit(cache=True, nogil=True)
def propose(t, texts, out):  # type: ignore[no-untyped-def]
    most = out.tokens_BK.shape[1]
    for b in range(len(texts.slots_B)):
        slot = texts.slots_B[b]
        out.found_B[b] = 0
        if slot < 0 or t.num_paths_S[slot] == 0:
            continue
        text_L = texts.token_ids_SL[slot, : texts.total_len_S[slot]]
        path = t.path_S[slot]
        run = _run(t, slot, path, t.shift_SP[slot, path], text_L)
        for p in range(t.num_paths_S[slot]):
            there = _run(t, slot, p, t.shift_SP[slot, p], text_L)
            if there > run:
                path, run = p, there
        t.path_S[slot] = path
        shift = t.shift_SP[slot, path]
        best_score, best, best_run = -FARTHEST - 1, 0, 0
        for offset in range(-FARTHEST, FARTHEST + 1):
            there = _run(t, slot, path, shift + offset, text_L)
            score = there * (FARTHEST + 1) - abs(offset)
            if score > best_score:
                best_score, best, best_run = score, offset, there
        if best_run - 2 * run >= ENOUGH:
            shift += best
        t.shift_SP[slot, path] = shift
        level = min(max(_agreeing(t, slot, path, shift, text_L) - 1, 0), NUM_LEVELS - 1)
        first = len(text_L) + shift
        out.found_B[b] = min(max(t.end_SP[slot, path] - first, 0), most)
        for k in range(most):
            out.tokens_BK[b, k] = _read(t, slot, path, first + k)
            out.levels_BK[b, k] = level
