# SPDX-License-Identifier: Apache-2.0
"""How deep vLLM's speculator drafts in a step. Families of vLLM's model runners differ in it.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DraftDepth:
    """Asks a speculator for drafts of any depth up to K. This one is told the depth of each step, as it is since vLLM 0.32."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._propose = speculator.propose

    @property
    def least(self) -> int:
        """The fewest tokens of a request that are drafted if any are."""
        return 1

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts, int64 [B, K], and how many of each request are new: `wanted`, or more where these are not dearer.

        `inputs` and `options` are the arguments of vLLM's `propose`. If none are wanted, the speculator only reads.
        """
        return self._propose(*inputs, **{**options, "num_speculative_tokens": wanted}), wanted
