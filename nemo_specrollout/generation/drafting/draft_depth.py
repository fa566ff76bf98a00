# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM's speculator for drafts of a given depth, which works differently in each family of vLLM's model runners.

The depth is the number of draft tokens that the speculator proposes for each request in an engine step.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DraftDepth:
    """Asks vLLM's speculator for a given number of draft tokens for each request, from 0 to K. The number is the depth.

    This class is for vLLM 0.32 and later, where the speculator's `propose` takes a depth.
    """

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._propose = speculator.propose

    @property
    def least(self) -> int:
        """The smallest number of draft tokens above zero that the speculator can propose for each request."""
        return 1

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns draft tokens, int64 [B, K], and their depth, which is how many of the K tokens of each request are new.

        The depth is `wanted`, or more if more drafts cost nothing extra. If `wanted` is 0, the speculator only reads the
        tokens of the engine step. `inputs` and `options` are the positional and the keyword arguments of vLLM's `propose`.
        """
        return self._propose(*inputs, **{**options, "num_speculative_tokens": wanted}), wanted
