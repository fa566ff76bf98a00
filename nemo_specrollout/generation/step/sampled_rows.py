# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of sampling a step's rows, which `row_sampling.py` and its kernels share.

Shapes: R rows of logits, V vocabulary, S request slots, B requests, K draft positions.
"""

from typing import NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors


class Logits(NamedTuple):
    """Logits of rows, in float32 or bfloat16. If `divides`, each row must be divided by its temperature when it is read."""

    values_RV: torch.Tensor
    divides: bool


class RowKeys(NamedTuple):
    """Keys of each row's noise: its request's slot (negative: none), temperature and seed, and its position."""

    slots_R: torch.Tensor
    temperature_S: torch.Tensor
    seeds_S: torch.Tensor
    positions_R: torch.Tensor


class Drafts(NamedTuple):
    """The drafts of a step, in the form that `accept_by_equality` takes."""

    inputs_R: torch.Tensor
    starts_B1: torch.Tensor
    num_positions: int


class Drawn(NamedTuple):
    """The sampled tokens of all rows, int64, with log-probs of one column; and the results of `accept_by_equality`."""

    tokens_R: torch.Tensor
    logprobs: LogprobsTensors | None
    emitted_BK: torch.Tensor | None
    counts_B: torch.Tensor | None
