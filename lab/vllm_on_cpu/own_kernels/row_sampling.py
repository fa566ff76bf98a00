# SPDX-License-Identifier: Apache-2.0
"""The kernel that samples the rows of an engine step, on a CPU and by vLLM's functions (`generation/step/row_sampling.py`)."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample import gumbel, logprob

from lab.vllm_on_cpu.own_kernels.draft_sampling import record_ties
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn, Logits, RowKeys, TieTables
from nemo_specrollout.sampling.equality import accept_by_equality

_logprob: Any = logprob
_log_probs = _logprob.compute_topk_scores if hasattr(logprob, "compute_topk_scores") else _logprob.compute_topk_logprobs


def draw_rows(
    scored: Logits, keys: RowKeys, graded: Logits | None, drafts: Drafts | None, ties: TieTables | None = None
) -> Drawn:
    """Implements `row_sampling.draw_rows` on a CPU."""
    logprobs = emitted_BK = counts_B = None
    tokens_R = compat.draw(scored.values_RV, *keys, apply_temperature=scored.divides)
    if ties is not None:
        record_ties(scored.values_RV, scored.divides, keys, ties)
    if graded is not None:
        values_RV, divides = graded
        if divides:
            values_RV = values_RV.to(torch.float32, copy=True)
            gumbel.apply_temperature(values_RV, keys.slots_R, keys.temperature_S)
        logprobs = _log_probs(values_RV, 0, tokens_R)
    if drafts is not None:
        emitted_BK, counts_B = accept_by_equality(tokens_R, *drafts)
    return Drawn(tokens_R, logprobs, emitted_BK, counts_B)
