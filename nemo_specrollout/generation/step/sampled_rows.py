# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of sampling a step's rows, which `row_sampling.py` and its kernels share.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors


class Logits(NamedTuple):
    """Logits of a step's rows."""

    values_RV: torch.Tensor
    """Values in float32 or bfloat16."""
    divides: bool
    """Whether each row must be divided by its temperature when it is read."""


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
    """The drafts of a step, in the form that `accept_by_equality` takes, which explains the fields."""

    inputs_R: torch.Tensor
    starts_B1: torch.Tensor
    num_positions: int


class TieTables(NamedTuple):
    """Near-ties of requests whose texts are made ahead, by request slot and token position (S, L)."""

    gap_SL: torch.Tensor
    """Difference of the best and the second-best score where the token at this position was sampled, float32."""
    runner_up_SL: torch.Tensor
    """Token with the second-best score, int32."""
    wanted_S: torch.Tensor
    """Whether the request in each slot asks for near-ties, bool."""


class Drawn(NamedTuple):
    """The results of sampling a step's rows."""

    tokens_R: torch.Tensor
    """The token that was sampled in each row, int64."""
    logprobs: LogprobsTensors | None
    """Log-prob and rank of those tokens in a single column, or None if they were not requested."""
    emitted_BK: torch.Tensor | None
    """First result of `accept_by_equality`, or None in a step without drafts."""
    counts_B: torch.Tensor | None
    """Second result of `accept_by_equality`, or None in a step without drafts."""
