# SPDX-License-Identifier: Apache-2.0
"""Records and constants that the drafters and the draft board share.

Shapes: B entries of the batch, S request slots, L longest text, K draft positions. An entry of the batch is a request, or it
is empty and only pads a CUDA graph.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch


class Texts(NamedTuple):
    """The texts of a batch's requests, on the engine's device. vLLM keeps the text of each request in the request's slot."""

    slots_B: "torch.Tensor"
    """Request slot of each entry of the batch, int32 or int64, without duplicates. It is -1 in an entry without a request."""
    total_len_S: "torch.Tensor"
    """Number of tokens of the text in each slot, int32."""
    token_ids_SL: "torch.Tensor"
    """Token ids of the text in each slot, int32. The tensor may be strided, and it may lie in host memory that the device can
    read."""


class RowPrice(NamedTuple):
    """The price of one more row in an engine step, measured in the tokens that the engine would generate in the same time.

    For a CUDA graph, the fields are tensors of one float32, which the graph reads again in each replay.
    """

    row: "float | torch.Tensor" = 0.0
    """Part of the price that is the same for every row, however long its context is."""
    context: "float | torch.Tensor" = 0.0
    """Additional price for each token of the request's text, because the row attends to all of them."""
    mean: "float | torch.Tensor" = 0.0
    """Price of a row of a request whose text has the batch's mean length, which is `row` plus this length times `context`."""


NO_PRICE = RowPrice()


class Proposals(NamedTuple):
    """Buffers to which a drafter writes its draft tokens for a batch."""

    tokens_BK: "torch.Tensor"
    """Draft tokens, int32."""
    levels_BK: "torch.Tensor"
    """Evidence level of each draft token, int8. The level is the drafter's grade for how probable the token is."""
    found_B: "torch.Tensor"
    """Number of draft tokens for each entry of the batch, int32. Tokens and levels beyond this number are undefined. The
    number is `NOT_FOLLOWED` for a request that a drafter with weights does not follow."""


NOT_FOLLOWED = -1
"""Value that stands for the number of draft tokens of a request that a drafter with weights does not follow."""
LEVEL_PRIORS = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), 4)
"""Acceptance rate that is assumed for each evidence level before any draft token of that level was judged.

An evidence level is a drafter's grade for a draft token. A drafter with a context index computes the level as 4 * g + h from
two other grades. The grade g is for the length of the context, and h is for the token's share among all tokens that followed
the context."""
NUM_LEVELS = len(LEVEL_PRIORS)
"""Number of evidence levels, which are the grades that a drafter can give a draft token."""
SCORE_GAP_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.75, 3.5, 4.5, 5.5, 7.0, 8.5, 10.0, 12.0, 15.0)
"""Score gaps in nats at which the next evidence level begins, if a drafter with weights samples with the request's own noise.
A score gap is the difference between the best two scores. The edges reach far, because most drafts of a good head are nearly
certain."""
NUM_RELATIONS = 4
"""Number of ways in which a draft token can relate to the proposal of the other side.

One side is the drafter with weights, and the other side is all text drafters together. The board learns an acceptance rate for
each of these relations:

- 0, if the other side proposes nothing
- 1, if it proposes the same token
- 2, if it proposes another token after the same draft tokens
- 3, if its proposal has ended before this position, or differed at an earlier one"""
EVIDENCE_WINDOW = 512.0
"""Approximate number of the latest draft tokens of an evidence level from which its acceptance rate is estimated."""
REQUEST_DECAY = 0.94
"""Factor by which each new draft token of a request lowers the weight of the request's earlier draft tokens."""
FACTOR_WEIGHT_DECAY = 0.998
"""Factor by which each engine step lowers the sums in `Tables.factor_weight_D2`. These sums tell how well the factors of
requests have predicted right drafts."""
PRIOR_STRENGTH = 4.0
"""Weight of an assumed acceptance rate, in observed draft tokens."""
MAX_RATE = 0.99
"""Upper bound of the acceptance rate that is estimated for a draft token."""
MIN_WORTH_SHARE = 1e-3
"""Smallest worth of a draft token, as a share of its survival (the probability that it and all tokens before it are accepted).
It applies to tokens that cost more than they win, so that even these tokens can be ranked."""
LEAST_PRICE = 1e-9
"""Price, in tokens, below which a row counts as free."""
CALIBRATION_DECAY = 0.98
"""Factor by which each engine step lowers the sums in `Tables.calibration_D2`. These sums compare how many draft tokens were
accepted with how many were predicted to be accepted."""
NUM_BINS = 128
"""Number of equally wide bins of a histogram of survival. Survival is the probability that a draft token and all draft tokens
before it are accepted."""
SMALLEST_SHARE = 0.02
"""Probability that all tokens of a draft are accepted, below which a context index no longer extends the draft."""
TRACED_STEPS = 1 << 16
"""Number of latest engine steps for which the counts of draft tokens are kept."""
MOST_LOOKED_UP = 64
"""Largest number of tokens of a draft that are looked up in a context index, one lookup for each token. A context index is a
table that maps the last tokens of a text to the tokens that followed them in earlier texts."""
FEW_LOOKED_UP = 32
"""Number of tokens of a draft that are looked up in a context index, if drafts may be longer than `MOST_LOOKED_UP`.

With texts made ahead, drafts may be much longer. This number is small because the kernel needs registers for each possible
position of a draft."""


def num_looked_up(num_positions: int) -> int:
    """Returns how many tokens of a draft are looked up in a context index, if drafts have up to `num_positions` tokens."""
    return num_positions if num_positions <= MOST_LOOKED_UP else FEW_LOOKED_UP
