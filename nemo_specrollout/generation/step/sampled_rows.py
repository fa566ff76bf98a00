# SPDX-License-Identifier: Apache-2.0
"""Records of the inputs and results of sampling an engine step's rows, which `row_sampling.py` and its kernels share.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors


class Logits(NamedTuple):
    """Logits of an engine step's rows."""

    values_RV: torch.Tensor
    """The logits, in float32 or bfloat16."""
    divides: bool
    """Whether each row must be divided by its request's temperature when it is read."""


class RowKeys(NamedTuple):
    """The values that determine the noise of each row."""

    slots_R: torch.Tensor
    """Request slot of each row, negative in a row without a request."""
    temperature_S: torch.Tensor
    """Temperature of each request, float32, where 0 means greedy sampling without noise."""
    seeds_S: torch.Tensor
    """Seed of each request, int64."""
    positions_R: torch.Tensor
    """Position of the last token that each row has read, int64."""


class Drafts(NamedTuple):
    """The drafts of an engine step, as arguments of `sampling.equality.accept_by_equality`, which explains the fields."""

    inputs_R: torch.Tensor
    starts_B1: torch.Tensor
    num_positions: int


class TieTables(NamedTuple):
    """Near-ties of early requests, by request slot (S) and token position (L)."""

    gap_SL: torch.Tensor
    """Difference between the best and the second-best score when the token at this position was sampled, float32."""
    runner_up_SL: torch.Tensor
    """Token with the second-best score, int32."""
    wanted_S: torch.Tensor
    """Whether the request in each slot asks for near-ties, bool."""


class Drawn(NamedTuple):
    """The results of sampling an engine step's rows."""

    tokens_R: torch.Tensor
    """The token that was sampled in each row, int64."""
    logprobs: LogprobsTensors | None
    """Log-prob and rank of those tokens in a single column, or None if they were not requested."""
    emitted_BK: torch.Tensor | None
    """Tokens that each request emits, the first result of `accept_by_equality`. None in a step without drafts."""
    counts_B: torch.Tensor | None
    """Number of these tokens, the second result of `accept_by_equality`. None in a step without drafts."""
