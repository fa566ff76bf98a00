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
    """Request slot of each row, int32 or int64, without duplicates, and -1 in a row without a request."""
    total_len_S: "torch.Tensor"
    """Number of tokens of each slot's text, int32."""
    token_ids_SL: "torch.Tensor"
    """Tokens of each slot's text, int32. Rows may be strided, or may be in host memory that the device reads."""


class RowPrice(NamedTuple):
    """The cost of one more row in an engine step, in tokens that the engine would generate in the same time.

    For a CUDA graph, the fields are tensors of one float32, which each replay reads again.
    """

    row: "float | torch.Tensor" = 0.0
    """Part of the price that every row has, whatever its context."""
    context: "float | torch.Tensor" = 0.0
    """Additional price for each token of the request's text, to which the row attends."""
    mean: "float | torch.Tensor" = 0.0
    """Whole price of a row if the request's text has the mean length of the batch."""


NO_PRICE = RowPrice()


class Proposals(NamedTuple):
    """Buffers to which a drafter writes its draft tokens."""

    tokens_BK: "torch.Tensor"
    """Draft tokens, int32."""
    levels_BK: "torch.Tensor"
    """Evidence level of each draft token, int8."""
    found_B: "torch.Tensor"
    """Number of draft tokens of each row, int32. Tokens and levels beyond this number are undefined. It is `NOT_FOLLOWED` in a
    row whose request a drafter with weights does not follow."""


NOT_FOLLOWED = -1
"""Value in place of the number of draft tokens for a request that a drafter with weights does not follow."""
LEVEL_PRIORS = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), 4)
"""Assumed acceptance rate of each evidence level before anything is observed.

A level grades the evidence for a draft token. With a context index it is 4 * (grade of the context's length) + (grade of the
token's share among the tokens that followed the context)."""
NUM_LEVELS = len(LEVEL_PRIORS)
"""Number of evidence levels."""
SCORE_GAP_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.75, 3.5, 4.5, 5.5, 7.0, 8.5, 10.0, 12.0, 15.0)
"""Score gaps in nats at which the next evidence level begins. They reach far, because most drafts of a good head are nearly
sure."""
NUM_RELATIONS = 4
"""Number of relations between a draft token and the proposal of the other side.

One side is the drafter with weights, and the other side is all text drafters together. The board learns an acceptance rate for
each of these relations:

- 0, if the other side proposes nothing
- 1, if it proposes the same token
- 2, if it proposes another token after the same draft tokens
- 3, if its proposal has ended, or has differed at an earlier token"""
EVIDENCE_WINDOW = 512.0
"""Approximate number of recent draft tokens from which the acceptance rate of an evidence level is estimated."""
REQUEST_DECAY = 0.94
"""Factor by which each new draft token of a request reduces the weight of that request's earlier draft tokens."""
FACTOR_WEIGHT_DECAY = 0.998
"""Factor by which each step reduces the weight of what earlier steps showed about how far request factors can be trusted."""
PRIOR_STRENGTH = 4.0
"""Number of draft tokens that a prior counts for."""
MAX_RATE = 0.99
"""Upper bound of the estimated acceptance rate of a draft token."""
MIN_WORTH_SHARE = 1e-3
"""Worth of a draft token that costs more than it gains, as a share of its survival. It puts such tokens in an order."""
LEAST_PRICE = 1e-9
"""Price of a row in tokens below which it counts as free."""
CALIBRATION_DECAY = 0.98
"""Factor by which each step reduces the weight of earlier steps in the calibration of a drafter (`Tables.calibration_D2`)."""
NUM_BINS = 128
"""Number of bins of survival between 0 and 1, all of the same width."""
SMALLEST_SHARE = 0.02
"""Survival below which a draft token is not looked up."""
TRACED_STEPS = 1 << 16
"""Number of latest steps whose counts are kept."""
MOST_LOOKED_UP = 64
"""Most positions of a draft that are looked up in indexes, one after another."""
FEW_LOOKED_UP = 32
"""Number of positions that are looked up if drafts may have more than `MOST_LOOKED_UP` positions, as with texts made ahead. It
is small because the kernel needs registers for each position of a draft."""


def num_looked_up(num_positions: int) -> int:
    """Returns how many positions of a draft are looked up in indexes, for drafts of up to `num_positions`."""
    return num_positions if num_positions <= MOST_LOOKED_UP else FEW_LOOKED_UP
