# SPDX-License-Identifier: Apache-2.0
"""Makes a speculator of vLLM before 0.32 draft a given number of tokens, although its `propose` takes no such number.

That number is called the depth. A speculator that drafts one position after another reads the number of positions from an
attribute. This module sets that attribute in each engine step.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.runners.graphed_depth import GraphedDepth


class BlockDepth(DraftDepth):
    """Makes a DFlash or DSpark speculator before 0.32 draft all positions, and uses only the wanted number of them.

    Such a speculator drafts all positions in one pass, so drafting fewer would save nothing.
    """

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens of all positions, int64 [B, K], and `wanted`. The first `wanted` of each request are used."""
        return self._propose(*inputs, **options), wanted


class FullDepth(DraftDepth):
    """Makes a speculator before 0.32 that fits neither `BlockDepth` nor `LoopDepth` draft all positions or none.

    An example is a speculator with several MTP modules.
    """

    @property
    def least(self) -> int:
        """The smallest number of drafts above zero that the speculator can make for each request, which is all positions."""
        return int(self._speculator.num_speculative_steps)

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens of all positions, int64 [B, K], and how many of each request's tokens are used.

        All of them are used, or none if `wanted` is 0.
        """
        return self._propose(*inputs, **options), self.least if wanted else 0


class LoopDepth(GraphedDepth):
    """Limits a speculator before 0.32, which drafts one position after another, to a given number of positions.

    Sets the speculator's number of positions before a pass, and sets it back to the largest afterwards. vLLM needs the largest
    number when it profiles the speculator and captures its CUDA graphs.
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
    """Returns the object that makes this speculator of vLLM before 0.32 draft a given number of tokens."""
    if isinstance(speculator, DFlashSpeculator):
        return BlockDepth(speculator)
    return LoopDepth(speculator) if hasattr(speculator, "_multi_step_decode") else FullDepth(speculator)
