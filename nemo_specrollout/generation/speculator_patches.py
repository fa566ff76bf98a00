# SPDX-License-Identifier: Apache-2.0
"""Patch points of vLLM's speculators: their drafts get the target's noise, and they draft only on demand.

EAGLE-3, draft models and MTP draft one position after another. DFlash and DSpark draft a block of positions in one pass:
DFlash samples all of them at once, DSpark one after another, because each depends on the token before.

Shapes: B requests of the batch, K draft positions, R rows of logits, V vocabulary of the drafter.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.draft_sampling import sample_with_score_gap

_POSITION_OFFSET = 0 if compat.takes(DraftModelSpeculator.sample_draft, "sample_src_positions") else 1
"""Distance from the position that vLLM passes to `sample_draft` to the position that keys the target's noise."""


def share_noise(
    speculator: Any, levels_RK: torch.Tensor, only_reads: Callable[[], bool], column: torch.Tensor | None = None
) -> None:
    """Makes a speculator sample drafts with the noise that the target will draw at each position.

    Writes the evidence levels of the drafts to `levels_RK` if this vLLM's noise allows score gaps. They go to `column`, or to
    the column of the draft step. Nothing is sampled while `only_reads()` is true.
    """

    def sample_draft(
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        if only_reads():
            return torch.zeros(len(hidden_states), dtype=torch.int64, device=hidden_states.device)
        logits, token_ids = _draft_logits(speculator, hidden_states, spec_step_idx)
        noise_positions = positions + _POSITION_OFFSET if _POSITION_OFFSET else positions
        rows = (logits, idx_mapping, temperature, seeds, noise_positions)
        if compat.HAS_SCORE_GAPS:
            return sample_with_score_gap(*rows, levels_RK, draft_step if column is None else column, token_ids)
        return compat.draw(*rows, apply_temperature=True)

    speculator.sample_draft = sample_draft


def share_noise_of_block(speculator: Any, levels_BK: torch.Tensor) -> None:
    """Makes a DFlash or DSpark sample with the target's noise, and write the evidence levels of its drafts to `levels_BK`."""
    if hasattr(speculator, "_sample_logits"):
        _share_noise_of_dspark(speculator, levels_BK)
        return
    # Row b * K + k of what DFlash samples is draft k of request b.
    first_column = torch.zeros((), dtype=torch.int32, device=levels_BK.device)
    share_noise(speculator, levels_BK.view(-1, 1), lambda: False, first_column)


def draft_only_on_demand(dflash: Any, only_reads: Callable[[], bool]) -> None:
    """Leaves out a DFlash's or DSpark's pass over the block while `only_reads()` is true.

    The context's keys and values are stored before that pass. A pass that is replayed as a CUDA graph is not left out.
    """
    generate = dflash._generate_draft

    def generate_on_demand(*args: Any, **kwargs: Any) -> None:
        if not only_reads():
            generate(*args, **kwargs)

    dflash._generate_draft = generate_on_demand


def verify_block_speculator(speculator: Any) -> None:
    """Raises ValueError unless the speculator is a plain DFlash or DSpark. Variants of DFlash sample in their own kernels."""
    generates = type(speculator)._generate_draft
    if generates not in (DFlashSpeculator._generate_draft, DSparkSpeculator._generate_draft):
        raise ValueError(
            f"specrollout.drafters: vLLM {compat.VLLM_VERSION} drafts with {type(speculator).__name__} for this checkpoint, "
            "which samples in kernels of its own; name the checkpoint of a plain DFlash or DSpark"
        )


def norm_context_by_layer(speculator: Any) -> None:
    """Makes a DFlash or DSpark on a CPU norm the context's keys of each layer by that layer's weights.

    vLLM's kernel for CPUs uses the first layer's weights for all layers (0.32).
    """
    model = speculator.model.model
    if compat.device_type() != "cpu" or not hasattr(model, "_normalize_context_k"):
        return

    def normalize(keys_L: torch.Tensor) -> torch.Tensor:
        norms = [layer.self_attn.k_norm for layer in model.layers]
        return torch.stack([norm(keys.contiguous()) for norm, keys in zip(norms, keys_L, strict=True)])

    model._normalize_context_k = normalize


def _share_noise_of_dspark(dspark: Any, levels_BK: torch.Tensor) -> None:
    # DSpark passes the position of the token to be drafted; the noise is keyed by the position before it.
    def sample_logits(logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int) -> torch.Tensor:
        return sample_with_score_gap(
            logits, idx_map, dspark.temperature, dspark.seeds, sample_pos - 1, levels_BK, dspark._step_cols[step],
            _reduced_vocabulary(dspark.model),
        )  # fmt: skip

    dspark._sample_logits = sample_logits
    dspark.model.sample_sequential = None  # vLLM 0.33 lets a model sample in kernels of its own, with other noise


def _draft_logits(speculator: Any, hidden_states: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the logits of drafts, and the target's token of each column; None if the columns are the whole vocabulary.

    They always are where vLLM's own kernel samples.
    """
    model: Any = getattr(speculator, "model", None)
    token_ids = _reduced_vocabulary(model) if compat.HAS_SCORE_GAPS else None
    if token_ids is not None:
        return model.logits_processor(model.lm_head, hidden_states), token_ids
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden_states, step), None
    return speculator.model.compute_logits(hidden_states), None


def _reduced_vocabulary(model: Any) -> torch.Tensor | None:
    """Returns the target's token of each token of the drafter, int64 [V], ascending; None if the vocabularies are equal."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets
