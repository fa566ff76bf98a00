# SPDX-License-Identifier: Apache-2.0
"""Asks a speculator of vLLM before 0.32 for a given number of drafts, although its `propose` takes no such number.

That number is called the depth. A speculator that drafts one position after another loops up to a number in one of its
attributes. This module sets that attribute in each engine step.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.runners.graphed_depth import GraphedDepth


class BlockDepth(DraftDepth):
    """Asks a DFlash or DSpark speculator before 0.32 for all positions, of which only as many count as are wanted.

    Such a speculator drafts all positions in one pass, so fewer would save nothing.
    """

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens of all positions, int64 [B, K], and `wanted`, the number of each request's that count."""
        return self._propose(*inputs, **options), wanted


class FullDepth(DraftDepth):
    """Asks any other speculator before 0.32 for all positions or for none. An example is one with several MTP modules."""

    @property
    def least(self) -> int:
        """The smallest number of drafts above zero that the speculator can make for each request, which is all positions."""
        return int(self._speculator.num_speculative_steps)

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens of all positions, int64 [B, K], and how many of each request's tokens count.

        All of them count, or none if `wanted` is 0.
        """
        return self._propose(*inputs, **options), self.least if wanted else 0


class LoopDepth(GraphedDepth):
    """Asks a speculator before 0.32 that drafts one position after another to stop after a given number of positions.

    Between engine steps the speculator is set to all positions, because vLLM profiles it and captures its CUDA graphs like
    that.
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
    """Returns the object that asks this speculator of vLLM before 0.32 for any number of drafts."""
    if isinstance(speculator, DFlashSpeculator):
        return BlockDepth(speculator)
    return LoopDepth(speculator) if hasattr(speculator, "_multi_step_decode") else FullDepth(speculator)
