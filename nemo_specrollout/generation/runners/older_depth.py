# SPDX-License-Identifier: Apache-2.0
"""Asks a speculator of vLLM before 0.32 for drafts of a depth, although its `propose` takes no depth.

A speculator that drafts one position after another loops up to a number in an attribute of its own. This module sets that
attribute for each engine step.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.runners.graphed_depth import GraphedDepth


class BlockDepth(DraftDepth):
    """Asks a DFlash or DSpark speculator before 0.32 for all positions of its single pass, of which only the first count."""

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts of all positions, int64 [B, K], and the number of those that count, which is `wanted`."""
        return self._propose(*inputs, **options), wanted


class FullDepth(DraftDepth):
    """Asks any other speculator before 0.32, such as one for several MTP modules, for all positions or for none."""

    @property
    def least(self) -> int:
        """The smallest depth above zero, which is the number of all positions."""
        return int(self._speculator.num_speculative_steps)

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts of all positions, int64 [B, K], and the number of those that count, which is 0 if none are wanted."""
        return self._propose(*inputs, **options), self.least if wanted else 0


class LoopDepth(GraphedDepth):
    """Asks a speculator before 0.32 that drafts one position after another to stop at a given depth.

    Between engine steps the speculator is set to all positions, because vLLM profiles and captures graphs with all of them.
    """

    def __init__(self, looping: Any) -> None:
        super().__init__(looping)
        propose = self._propose

        def propose_some(*inputs: Any, num_speculative_tokens: int, **options: Any) -> torch.Tensor:
            # The first pass drafts one position, or only reads. vLLM's result has only the positions of this call, so all
            # positions are taken from the speculator's buffer.
            looping.num_speculative_steps = max(num_speculative_tokens, 1)
            try:
                propose(*inputs, **options)
            finally:
                looping.num_speculative_steps = self._most
            drafts_BK: torch.Tensor = looping.draft_tokens[: inputs[0].num_reqs]
            return drafts_BK

        self._propose = propose_some

    def _forward(self, depth: int) -> Callable[..., None]:
        return self._speculator._generate_fused_drafts

    def _capture_depth(self, depth: int) -> None:
        looping = self._speculator
        looping.num_speculative_steps = depth
        try:
            super()._capture_depth(depth)
        finally:
            looping.num_speculative_steps = self._most


def older_depth(speculator: Any) -> DraftDepth:
    """Returns the object that asks a speculator of vLLM before 0.32 for drafts of a depth."""
    if isinstance(speculator, DFlashSpeculator):
        return BlockDepth(speculator)
    return LoopDepth(speculator) if hasattr(speculator, "_multi_step_decode") else FullDepth(speculator)
