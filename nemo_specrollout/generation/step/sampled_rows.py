# SPDX-License-Identifier: Apache-2.0
"""Records of the inputs and results of sampling an engine step's rows, which `row_sampling.py` and its kernels share.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors


class Logits(NamedTuple):
    """The logits of an engine step's rows."""

    values_RV: torch.Tensor
    """The logits, in float32 or bfloat16."""
    divides: bool
    """Whether the logits must still be divided by the temperature of each row's request when they are read."""


class RowKeys(NamedTuple):
    """The values that determine the noise of each row."""

    slots_R: torch.Tensor
    """Request slot of each row, negative in a row without a request."""
    temperature_S: torch.Tensor
    """Temperature of the request in each slot, float32. 0 means greedy sampling without noise."""
    seeds_S: torch.Tensor
    """Seed of the noise of the request in each slot, int64."""
    positions_R: torch.Tensor
    """Position of the last token that each row has read, int64."""


class Drafts(NamedTuple):
    """The drafts of an engine step. The fields are arguments of `sampling.equality.accept_by_equality` and explained there."""

    inputs_R: torch.Tensor
    starts_B1: torch.Tensor
    num_positions: int


class TieTables(NamedTuple):
    """Score gaps and second-best tokens of early requests, by request slot (S) and token position (L)."""

    gap_SL: torch.Tensor
    """Score gap of the token at each position, float32. It is the best score minus the second-best score when the token was
    sampled."""
    runner_up_SL: torch.Tensor
    """Token that had the second-best score at each position, int32."""
    wanted_S: torch.Tensor
    """Whether the request in each slot asks for near-ties, bool."""


class Drawn(NamedTuple):
    """The results of sampling an engine step's rows."""

    tokens_R: torch.Tensor
    """The token that was sampled in each row, int64."""
    logprobs: LogprobsTensors | None
    """Log-prob and rank of the token in `tokens_R` for each row, in a single column. None if no log-probs were requested."""
    emitted_BK: torch.Tensor | None
    """Tokens that each request emits, which is the first result of `accept_by_equality`. None in an engine step without
    drafts."""
    counts_B: torch.Tensor | None
    """Number of tokens that each request emits, which is the second result of `accept_by_equality`. None in an engine step
    without drafts."""
