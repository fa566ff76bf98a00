# SPDX-License-Identifier: Apache-2.0
"""The draft board: who proposed what for each request, how it came out, and whose drafts are verified next.

All of it lives on the engine's device, in one kernel before the drafters propose (`observe`) and one after (`choose`).
Nothing of it is read on the host in a step.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence, E evidence levels by
relation, C classes of context length.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_RELATIONS, PRIOR_STRENGTH, TRACED_STEPS


class DraftBoard:
    """Owns the proposals that await their outcome, what was learned of each drafter, and the counts.

    The rate of a draft token is the probability that it is accepted if the tokens before it are. It is the rate of the token's
    evidence times the request's factor. Evidence has two parts: the drafter's level, and the token's relation to the witness,
    the drafter with weights (`NUM_RELATIONS`). A text token that contradicts the witness is rarely accepted. The rate of
    evidence is a decayed share of hits. A request's factor is its hits over the hits that its evidence promised. The factor
    is weighted by how well factors have predicted hits so far.

    Each proposal is compared with what the policy samples later, submitted or not, so that nothing need be tried to be known.
    A proposal waits until it is refuted or used up. One that is submitted replaces it.

    Example, in each step: `observe(...)`, each drafter writes to `tokens_DBK[d]`, `levels_DBK[d]` and `found_DB[d]`,
    then `choose(...)`, after which `drafts_BK` and `rates_BK` hold what the next step verifies.
    """

    def __init__(
        self,
        names: Sequence[str],
        priors_DE: np.ndarray,
        num_slots: int,
        num_positions: int,
        context_edges: Sequence[int],
        device: torch.device,
        model: int | None = None,
        witness: int | None = None,
    ) -> None:
        """`priors_DE`: rates believed of each drafter's evidence levels before anything was seen. `context_edges`: lengths of
        context at which another class of counts begins. `model`: which drafter has weights in this engine, if one does.
        `witness`: which one has weights, here or elsewhere; by default `model`."""
        self.names, self.num_positions = list(names), num_positions
        num_drafters = len(self.names)
        self.model = -1 if model is None else model
        self.witness = -1 if num_drafters == 1 else self.model if witness is None else witness

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # What the drafters of this step write.
        self.tokens_DBK = zeros(num_drafters, num_slots, num_positions)
        self.levels_DBK = zeros(num_drafters, num_slots, num_positions, dtype=torch.int8)
        self.found_DB = zeros(num_drafters, num_slots)
        # Proposals that await their outcome.
        self.tokens_SDK = zeros(num_slots, num_drafters, num_positions)
        self.levels_SDK = zeros(num_slots, num_drafters, num_positions, dtype=torch.int8)
        self.length_SD, self.base_SD, self.checked_SD = (zeros(num_slots, num_drafters) for _ in range(3))
        self.chosen_S, self.submitted_S, self.limit_S = (zeros(num_slots) for _ in range(3))
        # What was learned: hits and trials (promised hits, for the factors).
        self._num_relations = 1 if self.witness < 0 else NUM_RELATIONS
        self._priors_DE = torch.from_numpy(np.tile(priors_DE, self._num_relations).astype(np.float32)).to(device)
        self.factor_SD2 = zeros(num_slots, num_drafters, 2, dtype=torch.float32)
        self.level_DE2 = zeros(*self._priors_DE.shape, 2, dtype=torch.float32)
        # The regression of hits on factors, both less what was expected: their products, and the squares of factors.
        self.foretold_D2 = zeros(num_drafters, 2, dtype=torch.float32)
        # Hits of text drafts that were verified while the witness proposed nothing, and the hits that they promised.
        self.kept_2 = zeros(2, dtype=torch.float32)
        self.position_DK2 = zeros(num_drafters, num_positions, 2, dtype=torch.float32)
        for drafter in range(num_drafters):
            self.forget_drafter(drafter)
        # Draft tokens verified and accepted: by drafter, length of context and position, by request, by step.
        self._edges_C = torch.tensor(context_edges, dtype=torch.int32, device=device)
        self.verified_DCK2 = zeros(num_drafters, len(context_edges) + 1, num_positions, 2, dtype=torch.int64)
        self.request_S2 = zeros(num_slots, 2)
        self.steps_TD2 = zeros(TRACED_STEPS, num_drafters, 2)
        # What the next step verifies: draft tokens, and the rate of each given that those before it are accepted.
        self.drafts_BK = zeros(num_slots, num_positions, dtype=torch.int64)
        self.rates_BK = zeros(num_slots, num_positions, dtype=torch.float32)
        # Survival of drafts, written only if there is a model. First the means over the last steps: of the best text proposal,
        # and of the model's drafts. Then the latest of both, 0 where nothing was drafted.
        self.outlook_S4K = zeros(num_slots, 4, num_positions, dtype=torch.float32)
        self._kernels = _kernels(device)

    def open(self, slots: torch.Tensor, limits: torch.Tensor) -> None:
        """Requests take `slots`, int64; each may get as long as `limits`, int32, and still be drafted for."""
        for tensor in (self.length_SD, self.submitted_S, self.factor_SD2, self.request_S2, self.outlook_S4K):
            tensor.index_fill_(0, slots, 0)  # tensor[slots] = 0 would wait for a GPU
        self.limit_S[slots] = limits

    def forget_drafter(self, drafter: int) -> None:
        """The drafter is another one from now on: what was learned of it is forgotten."""
        self.level_DE2[drafter, :, 0] = self._priors_DE[drafter] * PRIOR_STRENGTH
        self.level_DE2[drafter, :, 1] = PRIOR_STRENGTH
        self.position_DK2[drafter] = 0.0
        self.foretold_D2[drafter] = 0.0
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

        A request emitted `num_sampled_B` tokens, of which all but the last were drafts, and refuted `num_rejected_B`.
        """
        self._kernels.observe(
            slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL,
            self.tokens_SDK, self.levels_SDK, self.length_SD, self.base_SD, self.checked_SD,
            self.factor_SD2, self.foretold_D2, self.kept_2, self.level_DE2, self.position_DK2,
            self.chosen_S, self.submitted_S, self._edges_C, self.verified_DCK2, self.request_S2,
            self.steps_TD2[step % TRACED_STEPS], self.witness,
        )  # fmt: skip

    def choose(self, slots_B: torch.Tensor, total_len_S: torch.Tensor, row_price: float = 0.0) -> None:
        """Submits, for each request, the proposal that is worth most: tokens expected to be accepted, less `row_price` for
        each that is verified. So of a long proposal only those tokens count that would be verified."""
        num_requests = len(slots_B)
        self._kernels.choose(
            slots_B, total_len_S, self.limit_S,
            self.tokens_DBK[:, :num_requests], self.levels_DBK[:, :num_requests], self.found_DB[:, :num_requests],
            self.tokens_SDK, self.levels_SDK, self.length_SD, self.base_SD, self.checked_SD,
            self.factor_SD2, self.foretold_D2, self.kept_2, self.level_DE2, self.position_DK2,
            self.chosen_S, self.submitted_S, self.drafts_BK[:num_requests], self.rates_BK[:num_requests],
            self.outlook_S4K, self.model, self.witness, row_price,
        )  # fmt: skip

    @property
    def level_rates_DE(self) -> torch.Tensor:
        """The share of hits of each level, over all relations: float32 [D, NUM_LEVELS], on the device."""
        tried_DL2 = self.level_DE2
        if self._num_relations > 1:
            tried_DL2 = tried_DL2.unflatten(1, (self._num_relations, -1)).sum(dim=1)
        return tried_DL2[..., 0] / tried_DL2[..., 1]


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        from nemo_specrollout.drafters import board_triton

        return board_triton
    from nemo_specrollout.drafters import board_numba

    return board_numba
