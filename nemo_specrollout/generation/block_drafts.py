# SPDX-License-Identifier: Apache-2.0
"""DFlash and DSpark, vLLM's speculators that draft a block of tokens in one pass, under the noise of the target.

DFlash samples all positions at once. DSpark samples them one after another, for each hangs on the token before.

Shapes: B requests of the batch, K draft positions, R = B x K rows, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.draft_sampling import sample_with_margin, share_noise


def share_noise_of_block(speculator: Any, levels_BK: torch.Tensor) -> None:
    """Makes a DFlash or DSpark speculator sample with the noise that the target will draw at each position.

    `levels_BK` gets the evidence levels of its draft tokens.
    """
    if hasattr(speculator, "_sample_logits"):
        _share_noise_of_dspark(speculator, levels_BK)
        return
    # Row b * K + k of what DFlash samples is draft k of request b.
    first_column = torch.zeros((), dtype=torch.int32, device=levels_BK.device)
    share_noise(speculator, levels_BK.view(-1, 1), lambda: False, first_column)


def _share_noise_of_dspark(dspark: Any, levels_BK: torch.Tensor) -> None:
    """DSpark names the position of the token to be drafted; the noise is keyed by the one before."""

    def sample_logits(logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int) -> torch.Tensor:
        return sample_with_margin(
            logits, idx_map, dspark.temperature, dspark.seeds, sample_pos - 1, levels_BK, dspark._step_cols[step],
            compat.reduced_vocabulary(dspark.model),
        )  # fmt: skip

    dspark._sample_logits = sample_logits
    dspark.model.sample_sequential = None  # vLLM 0.33: kernels of a model's own, with noise of their own


def draft_only_on_demand(dflash: Any, only_reads: Callable[[], bool]) -> None:
    """Leaves out the pass over the block where a DFlash or DSpark speculator `only_reads`.

    The context's keys and values are stored before. A pass that is replayed as a CUDA graph is not left out.
    """
    generate = dflash._generate_draft

    def generate_on_demand(*args: Any, **kwargs: Any) -> None:
        if not only_reads():
            generate(*args, **kwargs)

    dflash._generate_draft = generate_on_demand
