# SPDX-License-Identifier: Apache-2.0
"""The draft board, which keeps the proposals of all drafters, learns how good they were, and chooses what is verified next.

*The model* is the drafter that has weights in this engine, if there is one. *The reference drafter* is the model, or a remote
drafter, whose weights are in another process. A draft token is *judged* when it is known what the policy samples at its
position. It is a *hit* if the policy samples the same token.

Shapes: S request slots, B entries of the batch (at most S), D drafters, K draft positions, T engine steps that are kept. The
histogram `spread_FQ` has F = K + 2 rows and Q = NUM_BINS + 1 columns. There are E kinds of evidence, which are NUM_LEVELS
levels for each of NUM_RELATIONS relations to the reference drafter. Without a reference drafter, E is NUM_LEVELS.
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
"""Alignment in bytes of each table within the memory of `SharedTables`. It is torch's alignment of a tensor on a GPU."""
KEPT_WEIGHT = 64.0
"""Largest weight of the evidence of an earlier start, in draft tokens. It is small, so that new evidence soon outweighs the
old evidence, and the board notices if the policy has changed."""


class Tables(NamedTuple):
    """Tensors of a draft board, on the engine's device. The suffix of a field's name is its shape.

    `empty_tables` allocates them and sets their types. A proposal is *open* until all of its tokens turned out right or one of
    them turned out wrong.
    """

    tokens_DBK: torch.Tensor
    """Draft tokens that each drafter proposes in the present engine step. The drafters write this tensor, and also the next
    two, `levels_DBK` and `found_DB`."""
    levels_DBK: torch.Tensor
    """Evidence level of each draft token in `tokens_DBK`."""
    found_DB: torch.Tensor
    """How many draft tokens each drafter proposes for each entry of the batch in the present engine step, or
    `NOT_FOLLOWED`."""
    tokens_SDK: torch.Tensor
    """Draft tokens of the open proposal of each drafter for the request in each slot."""
    evidence_SDK: torch.Tensor
    """Kind of evidence of each draft token in `tokens_SDK`, which is NUM_LEVELS * relation + level."""
    length_SD: torch.Tensor
    """Number of draft tokens in each proposal of `tokens_SDK`. It is 0 if a drafter has no open proposal for the request."""
    base_SD: torch.Tensor
    """Number of tokens that the request's text had when the proposal in `tokens_SDK` was made."""
    checked_SD: torch.Tensor
    """How many draft tokens of the proposal in `tokens_SDK` the request's text has confirmed so far."""
    chosen_S: torch.Tensor
    """Index of the drafter whose draft tokens were submitted for each request. Submitted tokens may be verified in the next
    engine step."""
    submitted_S: torch.Tensor
    """How many draft tokens were submitted for each request, so that the next engine step may verify them."""
    limit_S: torch.Tensor
    """Length of each request's text, in tokens, from which on the request gets no more drafts."""
    is_early_S: torch.Tensor
    """Whether each request belongs to a coming training step. The counts in `verified_DK2` leave out such requests."""
    drafts_BK: torch.Tensor
    """Draft tokens that were submitted for each entry of the batch, followed by zeros."""
    rates_SK: torch.Tensor
    """Estimated acceptance rate of each submitted draft token, followed by zeros.

    The first rate of a request is multiplied by the mean price of a row, divided by the price of a row of this request.
    Without this factor, the product of the rates up to a token is the token's survival. With it, the products of requests can
    be compared even if their rows differ in price. The best drafts of a batch are those with the largest products. If the
    length of a context costs nothing, the factor is 1."""
    spread_FQ: torch.Tensor
    """Histogram of the survival of all requests' draft tokens in the latest choice, int32. The host decides from it how many
    drafts are verified and how deep the model drafts.

    The columns 0 to NUM_BINS - 1 are bins of survival between 0 and 1. The last column counts requests. The last row counts
    the draft tokens that were submitted. Each row f from 0 to K counts the tokens that would have been submitted if the model
    had drafted f tokens for each request. `Spread` in `speculation/spread.py` gives these parts names.

    Row 0 is known for every request, because the text drafters propose anyway. If the model has drafted d > 0 tokens for a
    request, the rows 1 to d are known for it as well. The rows d + 1 to 2 * d + 1 are foreseen. This means that each token
    which the model did not draft is assumed to have the acceptance rate of its last draft token. These rows count the tokens,
    but their last column leaves out the request. So the host can tell what is known from what is only foreseen."""
    alone_token_S: torch.Tensor
    """For a request with drafts of the model, the first token of the best proposal of the other drafters. It is -1 if the
    model has no drafts for the request, or if the other drafters propose nothing."""
    alone_rate_S: torch.Tensor
    """Estimated acceptance rate of the token in `alone_token_S`."""
    evidence_DE2: torch.Tensor
    """Number of right draft tokens (hits) and number of judged draft tokens, for each drafter and kind of evidence. Older
    tokens count less."""
    factor_SD2: torch.Tensor
    """How many recent draft tokens of each request were right (hits), and how many were predicted to be right from their
    evidence. The first divided by the second is the request's factor. It tells how much better than usual a drafter is for
    this request."""
    factor_weight_D2: torch.Tensor
    """Sums for a weighted linear regression that tells how well the factors of requests (`factor_SD2`) predict hits, which are
    right draft tokens. Its x is a factor minus 1. Its y is the number of hits divided by the number of predicted hits, minus
    1. The weight w is the number of predicted hits. The columns are the sums of w * x * y and of w * x * x."""
    calibration_D2: torch.Tensor
    """How many of each drafter's verified draft tokens were accepted, and how many were predicted to be accepted. Fewer are
    accepted than predicted. The board chooses the proposal that looks best, and this is often one whose rates were estimated
    too high (winner's curse)."""
    alone_2: torch.Tensor
    """How many of the tokens in `alone_token_S` were right, and how many were predicted to be right."""
    verified_DK2: torch.Tensor
    """Number of verified and number of accepted draft tokens, by drafter and draft position. Requests of coming training steps
    are left out."""
    request_S2: torch.Tensor
    """Number of verified and number of accepted draft tokens of each request."""
    steps_TD2: torch.Tensor
    """Number of verified and number of accepted draft tokens of each drafter, in each of the last T engine steps."""


@dataclass(frozen=True)
class BoardShape:
    """Sizes of a draft board."""

    num_slots: int
    """Number of request slots of the engine (S)."""
    num_positions: int
    """Number of positions of a draft (K)."""


class SharedTables(NamedTuple):
    """The three tables that must be equal on all tensor-parallel ranks of an engine.

    They are views of the tensor `memory`, so that a single broadcast of it makes them equal.
    """

    memory: torch.Tensor
    """The bytes of the three tables, uint8."""
    drafts_BK: torch.Tensor
    rates_SK: torch.Tensor
    spread_FQ: torch.Tensor

    @classmethod
    def empty(cls, shape: BoardShape, device: torch.device) -> "SharedTables":
        """Allocates the tables for a board of this `shape`, filled with zeros."""
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
    """Allocates the tables of a board for `num_drafters` drafters and `num_kinds` kinds of evidence, filled with zeros.

    `shared` are the three tables that all tensor-parallel ranks share.
    """
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
    """Returns a float32 copy of pairs of sums, in which the second sum of each pair is at most `KEPT_WEIGHT`.

    If the second sum is larger, both sums of the pair are scaled down alike. So what an earlier start has learned counts
    little.
    """
    scaled_X2: np.ndarray = learned_X2 * (KEPT_WEIGHT / np.maximum(learned_X2[..., 1:], KEPT_WEIGHT))
    return scaled_X2.astype(np.float32)


def _zeros(*sizes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


class DraftBoard:
    """Decides for each request which drafter's tokens the next engine step may verify.

    Owns `tables`. They hold the open proposals, what was learned from past ones, and counts of verified and accepted drafts.
    In each engine step, `observe` runs before the drafters propose, and `choose` after them. During the step the host reads
    nothing from the device. Both methods also serve the context indexes of the engine, so that a GPU needs only a few
    launches.

    Invariant: the first `checked_SD` tokens of an open proposal equal the request's text from `base_SD` on. A proposal is
    closed (`length_SD` becomes 0) when one of its tokens differs from the text, or when its last token is confirmed.

    Estimates: The rate of a draft token is the probability that it is accepted if the tokens before it are. It is estimated as
    the rate of the token's kind of evidence times the request's factor:

    - The kind of evidence combines two grades of the token. One is the level that the drafter gives it. The other is its
      relation to the proposal of the reference drafter, or for a token of this drafter to all other proposals
      (`NUM_RELATIONS`). The rate of a kind is the share of hits among its judged tokens, of which recent ones count more.
    - The factor is the request's hits divided by the hits that were predicted from the evidence of its tokens. It is used only
      as far as factors have predicted hits well so far (`factor_weight_D2`).

    The survival of a token is the product of the rates up to it. The worth of a proposal is the sum of its survivals minus the
    price of a row for each of its tokens. The price grows with the length of the request's text. Every proposal is judged by
    what the policy samples later, even if it was not submitted. So the board need not submit bad proposals to learn about
    them. The host gets a histogram of survival (`spread_FQ`), which is corrected by how many draft tokens were really
    accepted.

    Example with drafters 0 "suffix" and 1 "eagle3" (the reference drafter), for entry b, whose text in slot 5 has 10 tokens:

    1. The drafters write `tokens_DBK[0, b] = [7, 8, 9]` and `tokens_DBK[1, b] = [7, 4]`, with levels and counts.
    2. `choose` relates them. Both propose 7 (relation 1), then they differ (2), and 9 comes after the difference (3). With
       rates of 0.9, 0.3 and 0.2, the first is worth 0.9 + 0.27 + 0.05 = 1.22 tokens. With 0.9 and 0.8, the second is worth
       1.62. So `drafts_BK[b] = [7, 4, 0]`, `chosen_S[5] = 1`, `submitted_S[5] = 2`. Both proposals stay open, with base 10.
    3. The policy samples 7, 4, 6. `observe` counts two accepted drafts and two hits of eagle3. For suffix it counts a hit (7)
       and a miss (8), and does not judge 9. Both proposals are closed.
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
            priors_DE: acceptance rate that is assumed at first for each drafter's evidence levels, [D, NUM_LEVELS].
            shape: sizes of the board.
            device: device of the engine.
            model: index of the drafter that has weights in this engine, or None if there is none.
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
        """Memory of the submitted drafts, their rates and `spread_FQ`, which must be equal on all tensor-parallel ranks of an
        engine."""
        self.tables = empty_tables(shape, len(names), num_relations * NUM_LEVELS, shared, device)
        self._had_early = False
        """True once a request of a coming training step has been opened. Before that, `is_early_S` is false everywhere and
        needs no reset."""
        for drafter in range(len(names)):
            self.forget_drafter(drafter)
        self.use_kernels(kernels_for(device.type, KernelModule.STEP))

    def use_kernels(self, kernels: ModuleType) -> None:
        """Makes the board call the kernels in the Python module `kernels` from now on.

        The module keeps the board's tables in a form of its own, which becomes the attribute `memory`.
        """
        self._kernels = kernels
        self.memory = kernels.memory_of(self.tables)

    def proposals_of(self, drafter: int) -> Proposals:
        """Returns the buffers to which a drafter writes its proposals in each engine step."""
        return Proposals(*(table[drafter] for table in self.tables[:3]))

    def open(self, slots: torch.Tensor, limits: torch.Tensor, is_early: torch.Tensor | None = None) -> None:
        """Prepares `slots` (int64, on the device) for new requests.

        A request gets drafts until its text has as many tokens as `limits` (int32) says. `is_early` (bool) tells which of the
        requests belong to a coming training step. None means that none of them does.
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
        """Forgets what was learned about a drafter, because its weights or the run's tasks may have changed."""
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

        For the drafter with weights there is one more table, `alone_2`. It is about the drafts that the other drafters would
        have submitted without this drafter.
        """
        return {name: table.cpu().numpy().copy() for name, table in self._learned_tables(drafter).items()}

    def begin_with(self, drafter: int, learned: Mapping[str, np.ndarray]) -> None:
        """Takes over what another board has learned about a drafter, with a small weight (`KEPT_WEIGHT`).

        `learned` is what the other board's method `learned` has returned. Its tables must have the shapes of this board's
        tables.
        """
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
        """Learns from the tokens that engine step number `step` sampled, and counts which submitted drafts were accepted.

        Each request has emitted `num_sampled_B` tokens, of which all but the last were drafts. `num_rejected_B` of its drafts
        were rejected. The context indexes in `lookups` learn the new tokens of the texts, at most `max_new` of each text.

        For a CUDA graph, `step` is a tensor of one int32 below `TRACED_STEPS`, which the graph reads again in each replay.
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
        """Lets the context indexes in `lookups` propose, and then submits the best proposal for each request.

        A proposal is submitted by writing it to `drafts_BK` and `rates_SK`. At most `most` tokens of a request are submitted.
        Each row costs `price`, which grows with the length of the request's text. Tokens that win less than this price hardly
        count. So a long proposal is worth only as much as the part of it that would be verified. If the drafter with weights
        does not follow a request, it must have written `NOT_FOLLOWED` to `found_DB` for this request.

        For a CUDA graph, `most` is a tensor of one int32, and `price` has tensors too. The graph reads them again in each
        replay.
        """
        self._kernels.choose(self, texts, price, lookups, self.num_positions if most is None else most)
