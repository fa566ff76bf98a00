# SPDX-License-Identifier: Apache-2.0
"""The draft board: stores the proposals of all drafters, learns from their outcomes, and chooses what is verified next.

Shapes: S request slots, B rows of the batch (room for S), D drafters, K draft positions, T traced steps. The spread has
F = K + 2 rows and Q = NUM_BINS + 1 columns. E kinds of evidence: NUM_LEVELS levels for each of the NUM_RELATIONS relations to
the reference drafter; without one, E is NUM_LEVELS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import (
    NUM_BINS,
    NUM_LEVELS,
    NUM_RELATIONS,
    PRIOR_STRENGTH,
    TRACED_STEPS,
    Proposals,
    Texts,
)
from nemo_specrollout.drafters.device_index import Lookup
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

Int8 = Annotated[torch.Tensor, torch.int8]
Int32 = Annotated[torch.Tensor, torch.int32]
Int64 = Annotated[torch.Tensor, torch.int64]
Float = Annotated[torch.Tensor, torch.float32]


class Tables(NamedTuple):
    """Tensors of a draft board, on the engine's device. The end of a field's name is its shape."""

    tokens_DBK: Int32
    """Tokens that the drafters proposed in this step. The drafters write the first three tensors."""
    levels_DBK: Int8
    """Evidence levels of those tokens."""
    found_DB: Int32
    """Numbers of those tokens."""
    tokens_SDK: Int32
    """Tokens of the open proposals: those whose outcome is not known."""
    evidence_SDK: Int8
    """Kind of evidence of each token: NUM_LEVELS * relation + level."""
    length_SD: Int32
    """Number of tokens of each open proposal, 0 if none is open."""
    base_SD: Int32
    """Length of the text that each open proposal continues."""
    checked_SD: Int32
    """Number of tokens of each open proposal that the text has confirmed."""
    chosen_S: Int32
    """Drafter whose tokens were submitted."""
    submitted_S: Int32
    """Number of submitted tokens."""
    limit_S: Int32
    """Length up to which each request is drafted, tokens."""
    drafts_BK: Int64
    """Submitted tokens, which the next step verifies. 0 beyond them."""
    rates_SK: Float
    """Rate of each request's submitted tokens. 0 beyond them."""
    spread_FQ: Int32
    """Draft tokens of the latest choice, by bin of survival; the last column counts requests. Row f below K + 1: those that
    would be submitted if the model drafted f tokens, which is known for requests for which it did. If it drafted d > 0,
    depths of up to 2 * d + 1 are foreseen, and not counted in the last column. The last row: all that were submitted."""
    alone_token_S: Int32
    """First token of the best proposal without the model, while the model has drafts; -1 if there is none."""
    alone_rate_S: Float
    """Rate of that token."""
    evidence_DE2: Float
    """Hits and trials of each kind of evidence."""
    factor_SD2: Float
    """Hits, and hits that the evidence predicted, of each request's recent draft tokens."""
    factor_weight_D2: Float
    """Regression of hits on factors, both less their expectation: sum of products, and sum of squared factors."""
    calibration_D2: Float
    """Hits, and predicted hits, of each drafter's tokens that were verified. A proposal that looks best promises too much."""
    alone_2: Float
    """Hits, and predicted hits, of `alone_token_S`."""
    verified_DK2: Int64
    """Verified and accepted draft tokens by drafter and position."""
    request_S2: Int32
    """Verified and accepted draft tokens of each request."""
    steps_TD2: Int32
    """Verified and accepted draft tokens of each of the last T steps."""


@dataclass(frozen=True)
class BoardShape:
    """Sizes of a draft board."""

    num_slots: int
    """Request slots of the engine (S)."""
    num_positions: int
    """Positions of a draft (K)."""


class DraftBoard:
    """Decides for each request which drafter's tokens the next step verifies.

    Owns `tables`: the proposals whose outcome is open, what was learned from past proposals, and counts of verified and
    accepted drafts. `observe` runs before the drafters propose, `choose` after, and the host reads nothing during a step. Both
    take the context indexes of the engine along: on a GPU, one launch then serves the board and all indexes.

    Invariant: the first `checked_SD` tokens of an open proposal equal the request's text from `base_SD` on. A proposal
    closes (`length_SD` becomes 0) when a token differs from the text, or when its last token is confirmed.

    Model. The rate of a draft token is the probability that it is accepted if the tokens before it are. The rate is the
    rate of the token's evidence times the request's factor:

    - Evidence is the drafter's level plus NUM_LEVELS times the token's relation to the reference drafter (`NUM_RELATIONS`),
      which is the drafter with weights. The rate of evidence is a decayed share of hits.
    - The factor is the request's hits divided by the hits that its evidence predicted. It counts only as far as factors
      have predicted hits so far (`factor_weight_D2`).

    Survival of a token is the product of the rates up to it. A proposal is worth the sum of its survivals, less the price
    of a row for each token. Every proposal is judged by what the policy samples later, submitted or not, so the board needs
    no exploration. The host gets a histogram of survival (`spread_FQ`), calibrated by what was accepted.

    Example: drafters 0 "suffix" and 1 "eagle3" (the reference drafter); request slot 5, in row b, has 10 tokens of text.

    1. The drafters write `tokens_DBK[0, b] = [7, 8, 9]` and `tokens_DBK[1, b] = [7, 4]`, with levels and counts.
    2. `choose` relates them: both propose 7 (relation 1), then they differ (2), and 9 comes after the difference (3). With
       rates of 0.9, 0.3, 0.2 the first is worth 0.9 + 0.27 + 0.05 = 1.22 tokens. With 0.9, 0.8 the second is worth 1.62. So
       `drafts_BK[b] = [7, 4, 0]`, `chosen_S[5] = 1`, `submitted_S[5] = 2`. Both proposals stay open, with base 10.
    3. The policy samples 7, 4, 6. `observe` counts two accepted drafts of eagle3 and two hits. For suffix it counts a hit
       (7) and a miss (8); 9 is not judged. Both proposals close.
    """

    def __init__(
        self,
        names: Sequence[str],
        priors_DE: np.ndarray,
        shape: BoardShape,
        device: torch.device,
        model: int | None = None,
        reference: int | None = None,
    ) -> None:
        """Creates an empty board.

        Args:
            names: of the drafters.
            priors_DE: assumed acceptance rates of each drafter's levels, [D, NUM_LEVELS].
            shape: sizes of the board.
            device: of the engine.
            model: index of the drafter that has weights in this engine, if there is one.
            reference: index of the drafter that has weights, here or in another process; by default `model`.
        """
        self.names = list(names)
        self.num_positions = shape.num_positions
        self.model = -1 if model is None else model
        self.reference = -1 if len(names) == 1 else self.model if reference is None else reference
        num_relations = 1 if self.reference < 0 else NUM_RELATIONS
        self._priors_DE = torch.from_numpy(np.tile(priors_DE, num_relations)).float().to(device)
        sizes = {
            "S": shape.num_slots,
            "B": shape.num_slots,
            "D": len(names),
            "K": shape.num_positions,
            "E": num_relations * NUM_LEVELS,
            "T": TRACED_STEPS,
            "F": shape.num_positions + 2,
            "Q": NUM_BINS + 1,
            "2": 2,
        }
        fields = [(name.rsplit("_", 1)[1], kind.__metadata__[0]) for name, kind in Tables.__annotations__.items()]
        self.tables = Tables(*(torch.zeros([sizes[s] for s in dims], dtype=d, device=device) for dims, d in fields))
        for drafter in range(len(names)):
            self.forget_drafter(drafter)
        self.use_kernels(kernels_for(device.type, KernelModule.STEP))

    def use_kernels(self, kernels: ModuleType) -> None:
        """Uses a module of kernels, which takes the tables in a form of its own."""
        self._kernels, self.memory = kernels, kernels.memory_of(self.tables)

    def proposals_of(self, drafter: int) -> Proposals:
        """Returns the buffers that a drafter writes its proposals of this step to."""
        return Proposals(*(table[drafter] for table in self.tables[:3]))

    def open(self, slots: torch.Tensor, limits: torch.Tensor) -> None:
        """Gives `slots` (int64) to new requests. `limits` (int32) are the lengths, in tokens, up to which each is drafted."""
        t = self.tables
        for table in (t.length_SD, t.submitted_S, t.factor_SD2, t.request_S2, t.rates_SK):
            table.index_fill_(0, slots, 0)  # table[slots] = 0 would wait for a GPU
        t.alone_token_S.index_fill_(0, slots, -1)
        t.limit_S[slots] = limits

    def forget_drafter(self, drafter: int) -> None:
        """Forgets what was learned of a drafter, because its weights were replaced."""
        t = self.tables
        t.evidence_DE2[drafter, :, 0] = self._priors_DE[drafter] * PRIOR_STRENGTH
        t.evidence_DE2[drafter, :, 1] = PRIOR_STRENGTH
        for table in (
            t.factor_weight_D2[drafter],
            t.calibration_D2[drafter],
            t.factor_SD2[:, drafter],
            t.length_SD[:, drafter],
        ):
            table.zero_()

    def observe(
        self,
        texts: Texts,
        num_sampled_B: torch.Tensor,
        num_rejected_B: torch.Tensor,
        step: int,
        lookups: Sequence[Lookup] = (),
        max_new: int = 0,
    ) -> None:
        """Learns from the tokens that step number `step` sampled, and counts which submitted drafts were accepted.

        Each request emitted `num_sampled_B` tokens. All but the last of them were drafts. `num_rejected_B` drafts were
        rejected. Indexes learn the new tokens of their texts, at most `max_new` of each.
        """
        outcomes = (num_sampled_B, num_rejected_B)
        self._kernels.observe(self, texts, outcomes, step % TRACED_STEPS, lookups, max_new)

    def choose(
        self, texts: Texts, row_price: float = 0.0, lookups: Sequence[Lookup] = (), most: int | None = None
    ) -> None:
        """Lets indexes propose, then submits each request's proposal of the highest worth: `drafts_BK` and `rates_SK`.

        `row_price` is the number of tokens that the engine makes in the time of one more row. Tokens that do not win their
        price hardly count, so a long proposal is worth only what would be verified of it. At most `most` tokens of a
        request are submitted. A model that does not follow a request has found a negative number.
        """
        self._kernels.choose(self, texts, row_price, lookups, self.num_positions if most is None else most)
