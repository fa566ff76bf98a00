# SPDX-License-Identifier: Apache-2.0
"""Records and constants that the drafters and the draft board share.

Shapes: B requests of the batch, S request slots, L longest sequence, K draft positions.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class Texts(NamedTuple):
    """The texts of a batch, on the engine's device. vLLM keeps every text in its request slot."""

    slots_B: "torch.Tensor"
    """Request slot of each row, int32 or int64, no slot twice; -1 in a row without a request."""
    total_len_S: "torch.Tensor"
    """Number of tokens of each slot's text, int32."""
    token_ids_SL: "torch.Tensor"
    """Tokens of each slot's text, int32. Rows may be strided, or lie in host memory that the device reads."""


class RowPrice(NamedTuple):
    """What one more row costs: the number of tokens that the engine makes in that time.

    A CUDA graph records both as tensors of one float32, which each replay reads anew.
    """

    row: "float | torch.Tensor" = 0.0
    """For every row."""
    context: "float | torch.Tensor" = 0.0
    """For each token of its request's text, to which the row attends."""


NO_PRICE = RowPrice()


class Proposals(NamedTuple):
    """Buffers that a drafter writes its draft tokens to."""

    tokens_BK: "torch.Tensor"
    """Draft tokens, int32."""
    levels_BK: "torch.Tensor"
    """Evidence level of each draft token, int8."""
    found_B: "torch.Tensor"
    """Number of draft tokens of each row, int32. Tokens and levels beyond it are undefined. `NOT_FOLLOWED` in a row whose
    request a drafter with weights does not follow."""


NOT_FOLLOWED = -1
"""Stands for the number of draft tokens of a request that a drafter with weights does not follow, and so never drafts for."""
LEVEL_PRIORS = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), 4)
"""Assumed acceptance rate of each evidence level before anything is observed.

A level grades the evidence for a draft token: level = 4 * (grade of the context's length) + (grade of the token's share)."""
NUM_LEVELS = len(LEVEL_PRIORS)
"""Number of evidence levels."""
SCORE_GAP_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.75, 3.5, 4.5, 5.5, 7.0, 8.5, 10.0, 12.0, 15.0)
"""Score gaps, in nats, at which the next evidence level begins. They are wide: most drafts of a good head are nearly sure."""
NUM_RELATIONS = 4
"""Number of relations between a draft token and the proposal of the other side.

One side is the drafter with weights, the other side is all text drafters. The board learns a rate for each relation.
0: the other side proposes nothing. 1: it proposes the same token. 2: it proposes another token after the same draft tokens.
3: its proposal has ended, or has differed at an earlier token."""
EVIDENCE_WINDOW = 512.0
"""Approximate number of recent draft tokens from which the acceptance rate of an evidence level is estimated."""
REQUEST_DECAY = 0.94
"""Factor by which each new draft token of a request reduces the weight of that request's earlier draft tokens."""
FACTOR_WEIGHT_DECAY = 0.998
"""Factor by which each step reduces the weight of what earlier steps showed about the use of request factors."""
PRIOR_STRENGTH = 4.0
"""Number of draft tokens that a prior counts for."""
MAX_RATE = 0.99
"""Upper bound of the estimated rate of a draft token."""
MIN_WORTH_SHARE = 1e-3
"""Share of its survival that a draft token is worth if its row costs more than it wins. It breaks ties between proposals."""
CALIBRATION_DECAY = 0.98
"""Factor by which each step reduces the weight of earlier steps in the calibration of a drafter."""
NUM_BINS = 128
"""Number of bins of survival between 0 and 1, all of one width."""
SMALLEST_SHARE = 0.02
"""Survival below which a draft token is not looked up."""
TRACED_STEPS = 1 << 16
"""Number of steps whose counts are kept."""
MOST_LOOKED_UP = 64
"""Positions up to which a draft is looked up in indexes, one after another."""
FEW_LOOKED_UP = 32
"""Positions that are looked up where a draft may have more than `MOST_LOOKED_UP`, as texts that were made ahead have. A kernel
that looks up has registers for each of them."""


def num_looked_up(num_positions: int) -> int:
    """Returns how many of the positions of a draft are looked up in indexes."""
    return num_positions if num_positions <= MOST_LOOKED_UP else FEW_LOOKED_UP
