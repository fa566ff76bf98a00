# SPDX-License-Identifier: Apache-2.0
"""The draft board, which stores the proposals of all drafters, learns from their outcomes, and chooses what is verified next.

Shapes: S request slots, B rows of the batch (room for S), D drafters, K draft positions, T traced steps. The spread has
F = K + 2 rows and Q = NUM_BINS + 1 columns. There are E kinds of evidence, which are NUM_LEVELS levels for each of the
NUM_RELATIONS relations to the reference drafter. Without a reference drafter, E is NUM_LEVELS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from nemo_specrollout.drafters.base import (
    NO_PRICE,
    NUM_BINS,
    NUM_LEVELS,
    NUM_RELATIONS,
    PRIOR_STRENGTH,
    TRACED_STEPS,
    Proposals,
    RowPrice,
    Texts,
)
from nemo_specrollout.drafters.device_index import Lookup
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

ALIGNMENT = 256
"""Alignment in bytes of a table within the shared memory, as torch aligns a tensor on a GPU."""
KEPT_WEIGHT = 64.0
"""Most draft tokens for which the evidence of an earlier start counts. It is small, so that new evidence soon outweighs it and
the board notices a policy that has changed."""


class Tables(NamedTuple):
    """Tensors of a draft board, on the engine's device. The suffix of a field's name is its shape.

    `empty_tables` allocates them and sets their types. A proposal is *open* until it is known for each of its tokens whether
    the policy samples it.
    """

    tokens_DBK: torch.Tensor
    """Tokens that each drafter proposes for each row in this step. The drafters write this tensor and the next two."""
    levels_DBK: torch.Tensor
    """Evidence level of each of those tokens."""
    found_DB: torch.Tensor
    """How many tokens each drafter proposes for each row, or `NOT_FOLLOWED`."""
    tokens_SDK: torch.Tensor
    """Tokens of the open proposals."""
    evidence_SDK: torch.Tensor
    """Kind of evidence of each token: NUM_LEVELS * relation + level."""
    length_SD: torch.Tensor
    """Number of tokens of each open proposal, 0 if none is open."""
    base_SD: torch.Tensor
    """Length of the text that each open proposal continues."""
    checked_SD: torch.Tensor
    """Number of tokens of each open proposal that the text has confirmed."""
    chosen_S: torch.Tensor
    """Drafter whose tokens were submitted, which means that the next step may verify them."""
    submitted_S: torch.Tensor
    """Number of submitted tokens."""
    limit_S: torch.Tensor
    """Length of the text in tokens up to which each request gets drafts."""
    is_early_S: torch.Tensor
    """Whether each request belongs to a coming step, in which case `verified_DK2` does not count it."""
    drafts_BK: torch.Tensor
    """Submitted tokens of each row, followed by zeros."""
    rates_SK: torch.Tensor
    """Rate of each of a request's submitted tokens, followed by zeros. The first one is multiplied by the mean price of a row
    divided by the price of a row of this request. So the product of the rates up to a token is its survival at equal price,
    and the best drafts of a batch are those with the largest products. Where contexts cost nothing the factor is 1."""
    spread_FQ: torch.Tensor
    """Histogram of the survival of the latest choice's draft tokens, over all requests, int32.

    The columns 0 to NUM_BINS - 1 are bins of survival between 0 and 1, and the last column counts requests. The last row
    counts the tokens that were submitted. Each row f up to K counts the tokens that would have been submitted if the model
    had drafted f tokens, so that the host can choose how deep the model drafts next. `Spread` in `speculation/spread.py`
    gives these parts names.

    Row 0 is known for every request, because the text drafters propose anyway. If the model drafted d > 0 tokens for a
    request, the rows 1 to d are known for it too. The rows d + 1 to 2 * d + 1 are foreseen: their further tokens are assumed
    to have the rate of the model's last one. They count such tokens as well, but their last column leaves the request out,
    so that the host can tell what was foreseen from what is known."""
    alone_token_S: torch.Tensor
    """First token of the best proposal without the model, while the model has drafts, or -1 if there is none."""
    alone_rate_S: torch.Tensor
    """Acceptance rate of that token."""
    evidence_DE2: torch.Tensor
    """Hits and trials of each kind of evidence."""
    factor_SD2: torch.Tensor
    """Hits, and hits that the evidence predicted, of each request's recent draft tokens."""
    factor_weight_D2: torch.Tensor
    """A regression of hits on factors, which tells how far factors can be trusted. Both are measured as differences from their
    expectations. The columns are the sum of their products and the sum of the squared factors."""
    calibration_D2: torch.Tensor
    """Hits and predicted hits of each drafter's verified tokens. Fewer hits come than were predicted, because choosing the
    best-looking of several proposals favours those that were rated too high (winner's curse)."""
    alone_2: torch.Tensor
    """Hits and predicted hits of `alone_token_S`."""
    verified_DK2: torch.Tensor
    """Verified and accepted draft tokens by drafter and position, over all requests except early ones."""
    request_S2: torch.Tensor
    """Verified and accepted draft tokens of each request."""
    steps_TD2: torch.Tensor
    """Verified and accepted draft tokens of each of the last T steps."""


@dataclass(frozen=True)
class BoardShape:
    """Sizes of a draft board."""

    num_slots: int
    """Number of request slots of the engine (S)."""
    num_positions: int
    """Number of positions of a draft (K)."""


class SharedTables(NamedTuple):
    """The tables that all ranks of an engine must share, as parts of one tensor, because one message is cheaper than three."""

    memory: torch.Tensor
    """All bytes of the three tables, uint8."""
    drafts_BK: torch.Tensor
    rates_SK: torch.Tensor
    spread_FQ: torch.Tensor

    @classmethod
    def empty(cls, shape: BoardShape, device: torch.device) -> "SharedTables":
        """Returns tables of zeros."""
        of_request = (shape.num_slots, shape.num_positions)
        of_depth = (shape.num_positions + 2, NUM_BINS + 1)
        parts = ((of_request, torch.int64), (of_request, torch.float32), (of_depth, torch.int32))
        sizes = [rows * columns * dtype.itemsize for (rows, columns), dtype in parts]
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        placed = zip(parts, starts, sizes, strict=False)
        views = [memory[start : start + size].view(dtype).view(sides) for (sides, dtype), start, size in placed]
        return cls(memory, *views)


def empty_tables(
    shape: BoardShape, num_drafters: int, num_kinds: int, shared: SharedTables, device: torch.device
) -> Tables:
    """Returns tables of zeros for a board of `num_drafters` drafters and `num_kinds` kinds of evidence."""
    zeros = partial(_zeros, device=device)
    num_slots = shape.num_slots
    num_positions = shape.num_positions
    return Tables(
        tokens_DBK=zeros(num_drafters, num_slots, num_positions, dtype=torch.int32),
        levels_DBK=zeros(num_drafters, num_slots, num_positions, dtype=torch.int8),
        found_DB=zeros(num_drafters, num_slots, dtype=torch.int32),
        tokens_SDK=zeros(num_slots, num_drafters, num_positions, dtype=torch.int32),
        evidence_SDK=zeros(num_slots, num_drafters, num_positions, dtype=torch.int8),
        length_SD=zeros(num_slots, num_drafters, dtype=torch.int32),
        base_SD=zeros(num_slots, num_drafters, dtype=torch.int32),
        checked_SD=zeros(num_slots, num_drafters, dtype=torch.int32),
        chosen_S=zeros(num_slots, dtype=torch.int32),
        submitted_S=zeros(num_slots, dtype=torch.int32),
        limit_S=zeros(num_slots, dtype=torch.int32),
        is_early_S=zeros(num_slots, dtype=torch.bool),
        drafts_BK=shared.drafts_BK,
        rates_SK=shared.rates_SK,
        spread_FQ=shared.spread_FQ,
        alone_token_S=zeros(num_slots, dtype=torch.int32),
        alone_rate_S=zeros(num_slots, dtype=torch.float32),
        evidence_DE2=zeros(num_drafters, num_kinds, 2, dtype=torch.float32),
        factor_SD2=zeros(num_slots, num_drafters, 2, dtype=torch.float32),
        factor_weight_D2=zeros(num_drafters, 2, dtype=torch.float32),
        calibration_D2=zeros(num_drafters, 2, dtype=torch.float32),
        alone_2=zeros(2, dtype=torch.float32),
        verified_DK2=zeros(num_drafters, num_positions, 2, dtype=torch.int64),
        request_S2=zeros(num_slots, 2, dtype=torch.int32),
        steps_TD2=zeros(TRACED_STEPS, num_drafters, 2, dtype=torch.int32),
    )


def faded(learned_X2: np.ndarray) -> np.ndarray:
    """Returns pairs of sums, float32, scaled such that no second sum exceeds `KEPT_WEIGHT` and the ratios stay the same."""
    scaled_X2: np.ndarray = learned_X2 * (KEPT_WEIGHT / np.maximum(learned_X2[..., 1:], KEPT_WEIGHT))
    return scaled_X2.astype(np.float32)


def _zeros(*sizes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


class DraftBoard:
    """Decides for each request which drafter's tokens the next step verifies.

    Owns `tables`, which hold the proposals whose outcome is open, what was learned from past proposals, and counts of verified
    and accepted drafts. `observe` runs before the drafters propose and `choose` after them, and the host reads nothing during
    a step. Both also serve the context indexes of the engine, so that on a GPU one launch is enough for the board and all
    indexes.

    Invariant: the first `checked_SD` tokens of an open proposal equal the request's text from `base_SD` on. A proposal
    closes (`length_SD` becomes 0) when a token differs from the text, or when its last token is confirmed.

    Model. The rate of a draft token is the probability that it is accepted if the tokens before it are. It is the rate of the
    token's evidence times the request's factor:

    - Evidence is the drafter's level plus NUM_LEVELS times the token's relation to the reference drafter (`NUM_RELATIONS`),
      which is the drafter with weights. The rate of a kind of evidence is its decayed share of hits.
    - The factor is the request's hits divided by the hits that its evidence predicted. It counts only as far as factors
      have predicted hits so far (`factor_weight_D2`).

    The survival of a token is the product of the rates up to it. The worth of a proposal is the sum of its survivals minus
    the price of a row for each token, which grows with the length of the request's text. Every proposal is judged by what the
    policy samples later, whether it was submitted or not, so the board needs no exploration. The host gets a histogram of
    survival (`spread_FQ`), which is calibrated by what was accepted.

    Example with drafters 0 "suffix" and 1 "eagle3" (the reference drafter), and 10 tokens of text in request slot 5, row b:

    1. The drafters write `tokens_DBK[0, b] = [7, 8, 9]` and `tokens_DBK[1, b] = [7, 4]`, with levels and counts.
    2. `choose` relates them. Both propose 7 (relation 1), then they differ (2), and 9 comes after the difference (3). With
       rates of 0.9, 0.3, 0.2 the first is worth 0.9 + 0.27 + 0.05 = 1.22 tokens. With 0.9, 0.8 the second is worth 1.62. So
       `drafts_BK[b] = [7, 4, 0]`, `chosen_S[5] = 1`, `submitted_S[5] = 2`. Both proposals stay open, with base 10.
    3. The policy samples 7, 4, 6. `observe` counts two accepted drafts of eagle3 and two hits. For suffix it counts a hit
       (7) and a miss (8), and does not judge 9. Both proposals close.
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
            names: names of the drafters.
            priors_DE: assumed acceptance rates of each drafter's levels, [D, NUM_LEVELS].
            shape: sizes of the board.
            device: device of the engine.
            model: index of the drafter that has weights in this engine, if there is one.
            reference: index of the drafter that has weights in this engine or in another process, by default `model`.
        """
        self.names = list(names)
        self.num_positions = shape.num_positions
        self.model = -1 if model is None else model
        self.reference = -1 if len(names) == 1 else self.model if reference is None else reference
        num_relations = 1 if self.reference < 0 else NUM_RELATIONS
        self._priors_DE = torch.from_numpy(np.tile(priors_DE, num_relations)).float().to(device)
        shared = SharedTables.empty(shape, device)
        self.shared = shared.memory
        """Memory of the submitted drafts, their rates and `spread_FQ`, which all ranks of an engine must share."""
        self.tables = empty_tables(shape, len(names), num_relations * NUM_LEVELS, shared, device)
        self._had_early = False
        """Whether any slot may have an early request. If not, nothing is launched for `is_early_S`."""
        for drafter in range(len(names)):
            self.forget_drafter(drafter)
        self.use_kernels(kernels_for(device.type, KernelModule.STEP))

    def use_kernels(self, kernels: ModuleType) -> None:
        """Switches to a module of kernels, which takes the tables in a form of its own."""
        self._kernels = kernels
        self.memory = kernels.memory_of(self.tables)

    def proposals_of(self, drafter: int) -> Proposals:
        """Returns the buffers to which a drafter writes its proposals of this step."""
        return Proposals(*(table[drafter] for table in self.tables[:3]))

    def open(self, slots: torch.Tensor, limits: torch.Tensor, is_early: torch.Tensor | None = None) -> None:
        """Gives `slots` (int64) to new requests. `limits` (int32) are the text lengths up to which each one gets drafts.

        `is_early` (bool) tells which of them belong to a coming step. None means that none of them does.
        """
        t = self.tables
        self._had_early |= is_early is not None
        if is_early is not None:
            t.is_early_S[slots] = is_early
        elif self._had_early:
            t.is_early_S.index_fill_(0, slots, False)
        for table in (t.length_SD, t.submitted_S, t.factor_SD2, t.request_S2, t.rates_SK):
            table.index_fill_(0, slots, 0)  # table[slots] = 0 would wait for a GPU
        t.alone_token_S.index_fill_(0, slots, -1)
        t.limit_S[slots] = limits

    def forget_drafter(self, drafter: int) -> None:
        """Forgets what was learned about a drafter whose weights were replaced."""
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

    def learned(self, drafter: int) -> dict[str, np.ndarray]:
        """Returns float32 copies of the tables with what was learned about a drafter, by name. Waits for the device.

        The last one has the hits and the predicted hits of proposals without the model.
        """
        return {name: table.cpu().numpy().copy() for name, table in self._learned_tables(drafter).items()}

    def begin_with(self, drafter: int, learned: Mapping[str, np.ndarray]) -> None:
        """Begins with what another board has `learned` about a drafter. Shapes must equal those of this board's tables."""
        tables = self._learned_tables(drafter)
        for name, table in tables.items():
            table.copy_(torch.from_numpy(faded(learned[name])))

    def _learned_tables(self, drafter: int) -> dict[str, torch.Tensor]:
        t = self.tables
        return {
            "evidence_E2": t.evidence_DE2[drafter],
            "factor_weight_2": t.factor_weight_D2[drafter],
            "calibration_2": t.calibration_D2[drafter],
            **({"alone_2": t.alone_2} if drafter == self.model else {}),
        }

    def observe(
        self,
        texts: Texts,
        num_sampled_B: torch.Tensor,
        num_rejected_B: torch.Tensor,
        step: int | torch.Tensor,
        lookups: Sequence[Lookup] = (),
        max_new: int = 0,
    ) -> None:
        """Learns from the tokens that step number `step` sampled, and counts which submitted drafts were accepted.

        Each request emitted `num_sampled_B` tokens, of which all but the last were drafts, and `num_rejected_B` drafts were
        rejected. Indexes learn the new tokens of their texts, at most `max_new` per text.

        A CUDA graph records `step` as a tensor of one int32 below `TRACED_STEPS`, which each replay reads again.
        """
        outcomes = (num_sampled_B, num_rejected_B)
        number = step if isinstance(step, torch.Tensor) else step % TRACED_STEPS
        self._kernels.observe(self, texts, outcomes, number, lookups, max_new)

    def choose(
        self,
        texts: Texts,
        price: RowPrice = NO_PRICE,
        lookups: Sequence[Lookup] = (),
        most: int | torch.Tensor | None = None,
    ) -> None:
        """Lets indexes propose, and then submits each request's best proposal by writing `drafts_BK` and `rates_SK`.

        A row costs `price`, which grows with the length of its request's text. Tokens that do not earn their price hardly
        count, so a long proposal is worth only what would be verified of it. At most `most` tokens of a request are
        submitted. A model that does not follow a request reports a negative number of found tokens.

        A CUDA graph records `most` as a tensor of one int32, which each replay reads again, as it does the price.
        """
        self._kernels.choose(self, texts, price, lookups, self.num_positions if most is None else most)
