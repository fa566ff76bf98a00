# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM's speculator for drafts of a given depth, which works differently in each family of vLLM's model runners.

The depth is the number of draft tokens that the speculator proposes for each request in an engine step.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DraftDepth:
    """Asks a speculator for drafts of any depth up to K. This class serves vLLM 0.32 and later, which takes a depth."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._propose = speculator.propose

    @property
    def least(self) -> int:
        """The smallest depth above zero that can be drafted."""
        return 1

    def propose(self, inputs: Sequence[Any], options: Mapping[str, Any], wanted: int) -> tuple[torch.Tensor, int]:
        """Returns drafts, int64 [B, K], and the depth, which is how many drafts of each request are new.

        The depth is `wanted`, or more where more drafts cost nothing extra. If `wanted` is 0, the speculator only reads the
        step's tokens. `inputs` and `options` are the positional and the keyword arguments of vLLM's `propose`.
        """
        return self._propose(*inputs, **{**options, "num_speculative_tokens": wanted}), wanted
