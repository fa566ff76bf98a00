# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels of vLLM's rejection sampler and acceptance estimator.

Shapes: R rows of logits, V vocabulary, K drafts of a request, B blocks of a row, S slots of the runner's state.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from interpreter import Launch, by_kernel
from torch import Tensor
from triton import language as tl
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
from world import PAD, World

LONG = torch.int64
NEVER = -torch.inf

# A function of CUDA's device library, which the interpreter does not have.
rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(x + 1.0))


class Ratio:
    """Logits of the target and the drafter, greedy and sampled requests, and drafts: likely ones, others, placeholders."""

    def __init__(self, w: World, has_draft_logits: bool = True, is_blockwise: bool = False) -> None:
        self.w, self.has_draft_logits, self.is_blockwise = w, has_draft_logits, is_blockwise
        self.vocab, self.block = (2500, 1024) if w.size.longest > 1024 else (150, 64)
        self.num_blocks = -(-self.vocab // self.block)
        self.slots_R, self.local_R = w.rows()
        self.temp_S = torch.ones(w.max_reqs)
        drafting = w.slots[np.argsort(-w.num_drafts)]
        self.temp_S[drafting] = torch.tensor([0.7, 0.0, 1.0])[torch.arange(w.num_reqs) % 3]
        R, V = w.num_rows, self.vocab
        self.target_RV = w.floats(R, V + 3)[:, :V]
        self.target_RV[:, 5:9] = NEVER
        dtype = torch.float32 if is_blockwise else w.size.dtype  # spares numba some types
        self.draft_SKV = w.floats(w.max_reqs, w.num_steps, V, dtype=dtype)
        self.draft_SKV[:, :, 7:11] = NEVER
        self.steps_R = self.local_R.long().clamp(max=w.num_steps - 1)
        of_rows = (self.slots_R, self.steps_R)
        self.draft_SKV[of_rows] = (0.1 * self.draft_SKV[of_rows].float() + self.target_RV).to(dtype)
        chance_R = torch.from_numpy(w.rng.random(R))
        likely_R = torch.cat([torch.zeros(1).long(), self.target_RV.argmax(-1)[:-1]]).int()
        self.drafted_R = torch.where(chance_R < 0.7, likely_R, w.ints(R, high=V))
        self.drafted_R[chance_R > 0.9] = PAD
        self.seeds_S = w.ints(w.max_reqs, high=2**62, dtype=LONG) - 2**61
        self.pos_R = w.ints(R, high=2**40, dtype=LONG)
        self.log_p_R = -0.2 * w.floats(R).abs()

    def target(self) -> tuple[Tensor, int]:
        return self.target_RV, self.target_RV.stride(0)

    def draft(self) -> tuple[Any, int, int]:
        if not self.has_draft_logits:
            return None, 0, 0
        return self.draft_SKV, self.draft_SKV.stride(0), self.draft_SKV.stride(1)

    def log_p(self) -> Tensor | None:
        return self.log_p_R if self.is_blockwise else None

    def blocks(self, logits_RV: Tensor) -> tuple[Tensor, int, Tensor, int, Tensor, int]:
        """Returns arg-max, maximum and sum of exponentials of each row's blocks, each with its stride."""
        parts = logits_RV.split(self.block, -1)
        tokens = [part.argmax(-1) + i * self.block for i, part in enumerate(parts)]
        maxima = torch.stack([part.amax(-1) for part in parts], -1)
        sums = [(part - maxima[:, i : i + 1]).exp().sum(-1) for i, part in enumerate(parts)]
        n = self.num_blocks
        return torch.stack(tokens, -1), n, maxima, n, torch.stack(sums, -1), n

    def target_blocks(self) -> tuple[Any, ...]:
        return self.blocks(self.target_RV)

    def draft_blocks(self) -> tuple[Any, ...]:
        temp_R = torch.where(self.temp_S > 0, self.temp_S, 1.0)[self.slots_R]
        return self.blocks(self.draft_SKV[self.slots_R, self.steps_R].float() / temp_R[:, None])[2:]


def flatten_sampled(w: World) -> Launch:
    sampled = w.ints(w.num_reqs, w.num_steps + 1, dtype=LONG)
    args = (w.ints(w.num_rows, dtype=LONG), sampled, sampled.stride(0), w.num_sampled, w.cu_num_logits)
    return Launch((w.num_reqs,), args, {"num_warps": 1})


def gather_draft_sampled(w: World) -> Launch:
    slots, local = w.rows()
    ends = w.query_start_loc[1:].repeat_interleave(torch.from_numpy(w.num_drafts + 1))
    counts = torch.from_numpy(w.num_drafts + 1).repeat_interleave(torch.from_numpy(w.num_drafts + 1))
    w.prefill_len[w.slots[0]] += 12
    args = (w.ints(w.num_rows), w.ints(w.num_rows, dtype=LONG), w.ints(w.num_tokens), w.positions,
            (ends - counts + local).long(), slots, local, w.prefill_len, w.num_rows)  # fmt: skip
    return Launch((-(-w.num_rows // 4),), args, {"BLOCK_SIZE": 4})


def compute_local_logits_stats(w: World, has_draft_logits: bool = True) -> Launch:
    r = Ratio(w, has_draft_logits)
    n, R = r.num_blocks, w.num_rows
    blocks = (w.ints(R, n, dtype=LONG), n, *(x for _ in range(4) for x in (w.floats(R, n), n)))
    args = (*blocks, *r.target(), *r.draft(), r.slots_R, r.local_R, r.temp_S, r.vocab, w.num_steps)
    return Launch((R, n), args, {"BLOCK_SIZE": r.block, "HAS_DRAFT_LOGITS": has_draft_logits})


def compute_cumulative_log_p(w: World, has_draft_logits: bool = True) -> Launch:
    r = Ratio(w, has_draft_logits)
    args = (w.floats(w.num_rows), *r.target(), *r.target_blocks()[2:], r.drafted_R, *r.draft(), *r.draft_blocks(),
            w.cu_num_logits, w.idx(), r.temp_S, r.num_blocks)  # fmt: skip
    return Launch((w.num_reqs,), args, {"PADDED_VOCAB_NUM_BLOCKS": 4, "HAS_DRAFT_LOGITS": has_draft_logits})


def compute_local_residual_mass(w: World) -> Launch:
    r = Ratio(w)
    args = (w.floats(w.num_rows, r.num_blocks), r.num_blocks, r.log_p_R, *r.target(), *r.target_blocks()[2:],
            *r.draft(), *r.draft_blocks(), r.drafted_R, r.slots_R, r.local_R, r.temp_S, r.vocab, w.num_steps,
            r.num_blocks)  # fmt: skip
    return Launch((w.num_rows, r.num_blocks), args, {"BLOCK_SIZE": r.block, "PADDED_VOCAB_NUM_BLOCKS": 4})


def reject(w: World, *, synthetic: bool = False, **how: bool) -> Launch:
    r = Ratio(w, **how)
    sampled = w.ints(w.num_reqs, w.num_steps + 1, dtype=LONG)
    has_mass = r.is_blockwise and r.has_draft_logits
    masses = w.floats(w.num_rows, r.num_blocks).abs() * 0.1
    args = (sampled, sampled.stride(0), w.ints(w.num_reqs), w.floats(w.num_reqs), w.floats(w.num_reqs), *r.target(),
            *r.target_blocks(), r.drafted_R, *r.draft(), *r.draft_blocks(), w.cu_num_logits, w.idx(), r.temp_S,
            r.seeds_S, r.pos_R, torch.tensor([0.9, 0.5, 0.7, 0.2]) if synthetic else None, r.log_p(),
            masses if has_mass else None, r.num_blocks, r.num_blocks)  # fmt: skip
    constexprs = {"PADDED_VOCAB_NUM_BLOCKS": 4, "HAS_DRAFT_LOGITS": r.has_draft_logits, "SYNTHETIC_MODE": synthetic}
    return Launch((w.num_reqs,), args, {**constexprs, "USE_BLOCK_VERIFICATION": r.is_blockwise, "num_warps": 1})


def resample(w: World, *, use_fp64: bool = False, **how: bool) -> Launch:
    r = Ratio(w, **how)
    n, accepted = r.num_blocks, torch.from_numpy(w.accepted).int()
    rows = w.cu_num_logits[:-1] + accepted
    target_sums, steps = r.target_RV.logsumexp(-1)[rows], torch.from_numpy(w.accepted).clamp(max=w.num_steps - 1)
    temp = torch.where(r.temp_S > 0, r.temp_S, 1.0)[w.idx()]
    draft_sums = (r.draft_SKV[w.idx(), steps].float() / temp[:, None]).logsumexp(-1)
    tokens, maxima = w.ints(w.num_reqs, n, dtype=LONG), w.floats(w.num_reqs, n)
    maxima = maxima.double() if use_fp64 else maxima
    args = (tokens, n, maxima, n, *r.target(), target_sums, *r.draft(), draft_sums, accepted, w.cu_num_logits, r.slots_R,
            r.drafted_R, r.temp_S, r.seeds_S, r.pos_R, r.log_p(), None, 0, None, None, 0, 0, r.vocab)  # fmt: skip
    constexprs = {"BLOCK_SIZE": r.block, "HAS_DRAFT_LOGITS": r.has_draft_logits, "USE_FP64": use_fp64,
                  "USE_BLOCK_VERIFICATION": r.is_blockwise, "CONTEXT_WIDTH": 1, "WATERMARK": False,
                  "DEDUPLICATE_CONTEXTS": False}  # fmt: skip
    return Launch((w.num_reqs, n), args, constexprs)


def insert_resampled(w: World) -> Launch:
    r = Ratio(w)
    sampled, n = w.ints(w.num_reqs, w.num_steps + 1, dtype=LONG), r.num_blocks
    maxima = w.floats(w.num_reqs, n)
    maxima[0] = torch.tensor([torch.nan, 1.0, 1.0])
    args = (sampled, sampled.stride(0), torch.from_numpy(w.accepted).int(), w.ints(w.num_reqs, n, dtype=LONG), n,
            maxima, n, n, w.cu_num_logits, r.slots_R, r.temp_S)  # fmt: skip
    return Launch((w.num_reqs,), args, {"PADDED_RESAMPLE_NUM_BLOCKS": 4})


def accumulate(w: World) -> Launch:
    K = w.num_steps
    features, predicted = w.floats(w.max_reqs, K), w.floats(w.max_reqs, K).sigmoid()
    args = (w.floats(K, 3), w.floats(K, 2), w.idx(), w.num_sampled, w.num_rejected, features, K, predicted, K,
            w.floats(K), w.num_reqs)  # fmt: skip
    return Launch((K,), args, {"BLOCK_R": 256, "num_warps": 1})


def refit(w: World, has_counts: bool = True) -> Launch:
    K = w.num_steps
    info = w.floats(K, 3).abs() * torch.tensor([90.0, 1.0, 3.0])
    grad, counts = w.floats(K, 2), w.ints(K, high=40).float()
    if not has_counts:
        for sums in (info, grad, counts):
            sums.zero_()
    args = (torch.tensor([0.5]), w.floats(K), info, 3, grad, 2, counts)
    return Launch((1,), args, {"NUM_SPECULATIVE_STEPS": K, "L2": 1e-3, "DAMPING": 50.0, "BLOCK": 4})


def every_second(values: Tensor) -> Tensor:
    """Returns the same values with a stride of two."""
    return values[:, None].expand(-1, 2).contiguous()[:, 0]


def local_max_sumexp(w: World) -> Launch:
    r, B = Ratio(w), w.num_reqs
    idx, logits = every_second(w.idx(may_be_gone=True)), w.floats(B, r.vocab + 2, dtype=w.size.dtype)
    args = (w.floats(B, r.num_blocks), r.num_blocks, w.floats(B, r.num_blocks), r.num_blocks, logits, logits.stride(0),
            idx, 2, r.temp_S, B, r.vocab)  # fmt: skip
    return Launch((B, r.num_blocks), args, {"BLOCK_SIZE": r.block})


def predict(w: World, per_token: bool = False) -> Launch:
    K, n = w.num_steps, 3
    num_tokens = w.num_reqs * (K if per_token else 1)
    idx = every_second(w.idx(may_be_gone=True).repeat_interleave(K if per_token else 1))
    maxima, sums = w.floats(num_tokens, n), w.floats(num_tokens, n).abs() + 1
    maxima[0], sums[0] = torch.tensor([3.0, NEVER, NEVER]), torch.tensor([1.0, 0.0, 0.0])
    steps = torch.arange(K).repeat(w.num_reqs) if per_token else torch.tensor(K - 1)
    tables = [x for _ in range(3) for x in (w.floats(w.max_reqs, K), K)]
    args = (*tables, torch.tensor([0.5]), w.floats(K), maxima, n, sums, n, idx, 2, steps, num_tokens, n)
    constexprs = {"per_token_step": per_token, "NUM_SPECULATIVE_STEPS": K, "MAX_LOG_ODDS": 40.0}
    return Launch((num_tokens,), args, {**constexprs, "PADDED_VOCAB_NUM_BLOCKS": 4})


MAKERS = by_kernel(
    flatten_sampled, gather_draft_sampled,
    compute_local_logits_stats, partial(compute_local_logits_stats, has_draft_logits=False),
    compute_cumulative_log_p, partial(compute_cumulative_log_p, has_draft_logits=False), compute_local_residual_mass,
    reject, partial(reject, has_draft_logits=False), partial(reject, is_blockwise=True),
    partial(reject, is_blockwise=True, has_draft_logits=False), partial(reject, synthetic=True, has_draft_logits=False),
    resample, partial(resample, has_draft_logits=False), partial(resample, is_blockwise=True),
    partial(resample, use_fp64=True, has_draft_logits=False), insert_resampled,
    accumulate, refit, partial(refit, has_counts=False), local_max_sumexp, predict, partial(predict, per_token=True),
)  # fmt: skip
