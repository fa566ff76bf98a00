# SPDX-License-Identifier: Apache-2.0
"""The draft board: stores the proposals of all drafters, learns from their outcomes, and chooses what is verified next.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence. E kinds of evidence
(relation and level), C classes of context length, T traced steps. A last dimension of 2 holds (hits, trials).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS, NUM_RELATIONS, PRIOR_STRENGTH, TRACED_STEPS, Proposals


@dataclass(frozen=True)
class BoardShape:
    """Sizes of a draft board."""

    num_slots: int
    """Request slots of the engine (S)."""
    num_positions: int
    """Positions of a draft (K)."""
    context_edges: Sequence[int] = ()
    """Context lengths, in tokens, at which a new class of counts begins."""


class DraftBoard:
    """Decides for each request which drafter's tokens the next step verifies.

    Owns: the proposals whose outcome is open, what was learned from past proposals, and counts of verified and accepted
    drafts. All of it stays on the engine's device. One kernel runs before the drafters propose (`observe`), one after
    (`choose`), and the host reads nothing during a step.

    Invariant: the first `checked_SD` tokens of an open proposal equal the request's text from `base_SD` on. A proposal
    closes (`length_SD` becomes 0) when a token differs from the text, or when its last token is confirmed.

    Model. The rate of a draft token is the probability that it is accepted if the tokens before it are. The rate is the
    rate of the token's evidence times the request's factor:

    - Evidence is the drafter's level plus NUM_LEVELS times the token's relation to the witness (`NUM_RELATIONS`). The
      witness is the drafter with weights. Its rate is a decayed share of hits.
    - The factor is the request's hits divided by the hits that its evidence predicted. It counts only as far as factors
      have predicted hits so far (`factor_weight_D2`).

    Survival of a token is the product of the rates up to it. A proposal is worth the sum of its survivals, less the price
    of a row for each token. Every proposal is judged by what the policy samples later, submitted or not, so the board needs
    no exploration.

    Example: drafters 0 "suffix" and 1 "eagle3" (the witness); request slot 5, in row b, has 10 tokens of text.

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
        witness: int | None = None,
    ) -> None:
        """Creates an empty board.

        Args:
            names: of the drafters.
            priors_DE: assumed acceptance rates of each drafter's levels, [D, NUM_LEVELS].
            shape: sizes of the board.
            device: of the engine.
            model: index of the drafter that has weights in this engine, if there is one.
            witness: index of the drafter that has weights, here or in another process; by default `model`.
        """
        self.names, self.num_positions = list(names), shape.num_positions
        num_drafters = len(self.names)
        self.model = -1 if model is None else model
        self.witness = -1 if num_drafters == 1 else self.model if witness is None else witness
        self._num_relations = 1 if self.witness < 0 else NUM_RELATIONS
        self._priors_DE = torch.from_numpy(np.tile(priors_DE, self._num_relations).astype(np.float32)).to(device)
        self._edges_C = torch.tensor(shape.context_edges, dtype=torch.int32, device=device)
        self._allocate_proposals(shape.num_slots, shape.num_positions)
        self._allocate_records(shape)
        for drafter in range(num_drafters):
            self.forget_drafter(drafter)
        self._kernels = _kernels(device)
        self._tables = (
            self.tokens_SDK, self.evidence_SDK, self.length_SD, self.base_SD, self.checked_SD, self.factor_SD2,
            self.factor_weight_D2, self.calibration_2, self.evidence_DE2, self.position_DK2, self.chosen_S, self.submitted_S,
        )  # fmt: skip

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._priors_DE.device)

    def _allocate_proposals(self, num_slots: int, num_positions: int) -> None:
        zeros, num_drafters = self._zeros, len(self.names)
        # The drafters of this step write these.
        self.tokens_DBK = zeros(num_drafters, num_slots, num_positions)
        self.levels_DBK = zeros(num_drafters, num_slots, num_positions, dtype=torch.int8)
        self.found_DB = zeros(num_drafters, num_slots)
        # Open proposals.
        self.tokens_SDK = zeros(num_slots, num_drafters, num_positions)
        self.evidence_SDK = zeros(num_slots, num_drafters, num_positions, dtype=torch.int8)
        self.length_SD, self.base_SD, self.checked_SD = (zeros(num_slots, num_drafters) for _ in range(3))
        self.chosen_S, self.submitted_S, self.limit_S = (zeros(num_slots) for _ in range(3))
        # The drafts that the next step verifies, and their rates.
        self.drafts_BK = zeros(num_slots, num_positions, dtype=torch.int64)
        self.rates_BK = zeros(num_slots, num_positions, dtype=torch.float32)
        # Survival of drafts, written only if there is a model. Rows 0 and 1: means over the last steps, of the best text
        # proposal and of the model's drafts. Rows 2 and 3: the latest of both, 0 where nothing was drafted.
        self.outlook_S4K = zeros(num_slots, 4, num_positions, dtype=torch.float32)

    def _allocate_records(self, shape: BoardShape) -> None:
        zeros, num_drafters = self._zeros, len(self.names)
        num_slots, num_positions = shape.num_slots, shape.num_positions
        # Hits and trials of each kind of evidence and of each position; hits and predicted hits of each request.
        self.evidence_DE2 = zeros(*self._priors_DE.shape, 2, dtype=torch.float32)
        self.position_DK2 = zeros(num_drafters, num_positions, 2, dtype=torch.float32)
        self.factor_SD2 = zeros(num_slots, num_drafters, 2, dtype=torch.float32)
        # Regression of hits on factors, both less their expectation: the sum of products, and the sum of squared factors.
        self.factor_weight_D2 = zeros(num_drafters, 2, dtype=torch.float32)
        # Hits and predicted hits of the text drafts that were verified while the witness proposed nothing.
        self.calibration_2 = zeros(2, dtype=torch.float32)
        # Verified and accepted draft tokens: by drafter, class of context length and position; by request; by step.
        self.verified_DCK2 = zeros(num_drafters, len(shape.context_edges) + 1, num_positions, 2, dtype=torch.int64)
        self.request_S2 = zeros(num_slots, 2)
        self.steps_TD2 = zeros(TRACED_STEPS, num_drafters, 2)

    def proposals_of(self, drafter: int) -> Proposals:
        """Returns the buffers that a drafter writes its proposals of this step to."""
        return Proposals(self.tokens_DBK[drafter], self.levels_DBK[drafter], self.found_DB[drafter])

    def open(self, slots: torch.Tensor, limits: torch.Tensor) -> None:
        """Gives `slots` (int64) to new requests. `limits` (int32) are the lengths, in tokens, up to which each is drafted."""
        for tensor in (self.length_SD, self.submitted_S, self.factor_SD2, self.request_S2, self.outlook_S4K):
            tensor.index_fill_(0, slots, 0)  # tensor[slots] = 0 would wait for a GPU
        self.limit_S[slots] = limits

    def forget_drafter(self, drafter: int) -> None:
        """Forgets what was learned of a drafter, because its weights were replaced."""
        self.evidence_DE2[drafter, :, 0] = self._priors_DE[drafter] * PRIOR_STRENGTH
        self.evidence_DE2[drafter, :, 1] = PRIOR_STRENGTH
        self.position_DK2[drafter] = 0.0
        self.factor_weight_D2[drafter] = 0.0
        self.factor_SD2[:, drafter] = 0.0
        self.length_SD[:, drafter] = 0

    def observe(
        self,
        slots_B: torch.Tensor,
        num_sampled_B: torch.Tensor,
        num_rejected_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        step: int,
    ) -> None:
        """Learns from the tokens that step number `step` sampled, and counts which submitted drafts were accepted.

        Each request emitted `num_sampled_B` tokens. All but the last of them were drafts. `num_rejected_B` drafts were
        rejected.
        """
        self._kernels.observe(
            slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL, *self._tables, self._edges_C,
            self.verified_DCK2, self.request_S2, self.steps_TD2[step % TRACED_STEPS], self.witness,
        )  # fmt: skip

    def choose(self, slots_B: torch.Tensor, total_len_S: torch.Tensor, row_price: float = 0.0) -> None:
        """Submits the proposal of the highest worth for each request, and writes `drafts_BK` and `rates_BK`.

        `row_price` is the number of tokens that the engine makes in the time of one more row. Tokens that do not win their
        price hardly count, so a long proposal is worth only what would be verified of it.
        """
        num_requests = len(slots_B)
        self._kernels.choose(
            slots_B, total_len_S, self.limit_S,
            self.tokens_DBK[:, :num_requests], self.levels_DBK[:, :num_requests], self.found_DB[:, :num_requests],
            *self._tables, self.drafts_BK[:num_requests], self.rates_BK[:num_requests], self.outlook_S4K,
            self.model, self.witness, row_price,
        )  # fmt: skip

    @property
    def level_rates_DE(self) -> torch.Tensor:
        """Share of hits of each level, over all relations: float32 [D, NUM_LEVELS], on the device."""
        tried_DL2 = self.evidence_DE2
        if self._num_relations > 1:
            tried_DL2 = tried_DL2.unflatten(1, (self._num_relations, NUM_LEVELS)).sum(dim=1)
        return tried_DL2[..., 0] / tried_DL2[..., 1]


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        from nemo_specrollout.drafters import board_triton

        return board_triton
    from nemo_specrollout.drafters import board_numba

    return board_numba
