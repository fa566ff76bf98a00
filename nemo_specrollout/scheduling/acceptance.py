# SPDX-License-Identifier: Apache-2.0
"""How likely is a draft to be accepted: per request, drafter and position, learned whether or not it was submitted.

Every proposal is later compared with what the policy sampled. That costs no verification, so an estimate stays fresh
while speculation is off, and there is nothing to explore.

Shapes: B requests of the batch, K draft positions, D drafters, L longest sequence; lanes name requests for their life.
"""

import numpy as np
from numba import njit

LEVEL_DECAY = 0.998
REQUEST_DECAY = 0.94
PRIOR_STRENGTH = 4.0
PRIOR_RATE = 0.6
MAX_RATE = 0.99


class AcceptanceEstimator:
    """Estimates P(draft token j is right | those before it are), as level rate x request factor.

    The level rate is the decayed share of hits among all tokens of that drafter and evidence level. The request factor,
    by position, is decayed hits over what the level rates had promised: above one where a request is easier than most.
    A proposal stays pending until it is refuted or used up; a submitted one replaces it. `level_priors` are the rates
    believed of each drafter's evidence levels before anything was seen, float64 [D, levels].
    """

    def __init__(self, num_lanes: int, max_tokens: int, level_priors: np.ndarray) -> None:
        num_drafters = len(level_priors)
        lanes_by_drafter = (num_lanes, num_drafters)
        self.pending_tokens = np.zeros((*lanes_by_drafter, max_tokens), np.int32)
        self.pending_levels = np.zeros((*lanes_by_drafter, max_tokens), np.int8)
        self.pending_length = np.zeros(lanes_by_drafter, np.int64)
        self.pending_base = np.zeros(lanes_by_drafter, np.int64)
        self.pending_checked = np.zeros(lanes_by_drafter, np.int64)
        self.hits = np.zeros((*lanes_by_drafter, max_tokens))
        self.promised = np.zeros((*lanes_by_drafter, max_tokens))
        self._level_priors = level_priors
        self.level_hits = level_priors * PRIOR_STRENGTH
        self.level_trials = np.full(level_priors.shape, PRIOR_STRENGTH)
        self.position_hits = np.full((num_drafters, max_tokens), PRIOR_RATE * PRIOR_STRENGTH)
        self.position_trials = np.full((num_drafters, max_tokens), PRIOR_STRENGTH)

    @property
    def level_rates(self) -> np.ndarray:
        """The share of each evidence level's tokens that come true, float64 [D, levels]."""
        return self.level_hits / self.level_trials

    def forget_drafter(self, drafter: int) -> None:
        """The drafter is another one from now on: what was learned of it is forgotten."""
        self.level_hits[drafter] = self._level_priors[drafter] * PRIOR_STRENGTH
        self.level_trials[drafter] = PRIOR_STRENGTH
        self.position_hits[drafter] = PRIOR_RATE * PRIOR_STRENGTH
        self.position_trials[drafter] = PRIOR_STRENGTH
        for array in (self.hits, self.promised, self.pending_length):
            array[:, drafter] = 0

    def reset(self, lane: int) -> None:
        """A new request takes `lane`."""
        self.pending_length[lane] = 0
        self.hits[lane] = 0.0
        self.promised[lane] = 0.0

    def score(self, lanes_B: np.ndarray, token_ids_BL: np.ndarray, lengths_B: np.ndarray) -> None:
        """Compares all pending proposals with the requests' texts, and learns from each token that can be judged."""
        _score(
            lanes_B, token_ids_BL, lengths_B, self.pending_tokens, self.pending_levels, self.pending_length,
            self.pending_base, self.pending_checked, self.hits, self.promised, self.level_hits, self.level_trials,
            self.position_hits, self.position_trials,
        )  # fmt: skip

    def forecast(self, lanes_B: np.ndarray, drafter: int) -> np.ndarray:
        """Survival, float64 [B, K], that drafts of `drafter` would have, as long as nothing is known of their evidence:
        by the drafter's rate at each position and the request's factor."""
        rates_BK = (
            self.position_hits[drafter]
            / self.position_trials[drafter]
            * ((self.hits[lanes_B, drafter] + PRIOR_STRENGTH) / (self.promised[lanes_B, drafter] + PRIOR_STRENGTH))
        )
        return np.minimum(rates_BK, MAX_RATE).cumprod(axis=1)

    def choose(
        self, lanes_B: np.ndarray, levels_DBK: np.ndarray, found_DB: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each request's drafter with the most expected accepted tokens, int64 [B], and its survival, float64 [B, K].

        Survival at j is P(the first j + 1 draft tokens are all accepted); it is 0 beyond a proposal's length.
        """
        num_requests, num_positions = levels_DBK.shape[1:]
        chosen_B = np.zeros(num_requests, np.int64)
        survival_BK = np.zeros((num_requests, num_positions))
        _choose(
            self.level_hits,
            self.level_trials,
            lanes_B,
            found_DB,
            levels_DBK,
            self.hits,
            self.promised,
            chosen_B,
            survival_BK,
        )
        return chosen_B, survival_BK

    def remember(
        self,
        lanes_B: np.ndarray,
        lengths_B: np.ndarray,
        proposals: tuple[np.ndarray, np.ndarray, np.ndarray],
        chosen_B: np.ndarray,
        counts_B: np.ndarray,
    ) -> None:
        """Makes proposals pending: tokens [D, B, K], levels [D, B, K], lengths [D, B] of which `counts_B` of the drafter
        `chosen_B` are submitted. What is pending stays, unless it is overtaken by what is submitted."""
        _remember(
            lanes_B, lengths_B, *proposals, chosen_B, counts_B, self.pending_tokens, self.pending_levels,
            self.pending_length, self.pending_base, self.pending_checked,
        )  # fmt: skip


def count_outcomes(
    drafters_B: np.ndarray,
    submitted_B: np.ndarray,
    verified_B: np.ndarray,
    emitted_B: np.ndarray,
    proposed_DK: np.ndarray,
    accepted_DK: np.ndarray,
) -> np.ndarray:
    """Adds a step's verified drafts, and those accepted, to the counts by drafter and position.

    Of `submitted_B` drafts the engine may have verified fewer. A request whose drafts were checked emitted `emitted_B`
    tokens, the last of which was not a draft. Returns the step's totals, drafted and accepted, int64 [D, 2].
    """
    totals_D2 = np.zeros((len(proposed_DK), 2), np.int64)
    _count_outcomes(drafters_B, submitted_B, verified_B, emitted_B, proposed_DK, accepted_DK, totals_D2)
    return totals_D2


@njit("void(int64[:], int64[:], int64[:], int64[:], int64[:,:], int64[:,:], int64[:,:])", cache=True)
def _count_outcomes(drafters_B, submitted_B, verified_B, emitted_B, proposed_DK, accepted_DK, totals_D2):  # type: ignore[no-untyped-def]
    for b in range(len(drafters_B)):
        d = drafters_B[b]
        for k in range(min(submitted_B[b], verified_B[b])):
            is_accepted = k < emitted_B[b] - 1
            proposed_DK[d, k] += 1
            accepted_DK[d, k] += is_accepted
            totals_D2[d, 0] += 1
            totals_D2[d, 1] += is_accepted


@njit(
    "void(int64[:], int32[:,:], int64[:], int32[:,:,:], int8[:,:,:], int64[:,:], int64[:,:], int64[:,:],"
    " float64[:,:,:], float64[:,:,:], float64[:,:], float64[:,:], float64[:,:], float64[:,:])",
    cache=True,
)
def _score(  # type: ignore[no-untyped-def]
    lanes_B, token_ids_BL, lengths_B, tokens, levels, length, base, checked, hits, promised, level_hits, level_trials,
    position_hits, position_trials,
):  # fmt: skip
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        for d in range(tokens.shape[1]):
            while length[lane, d] > 0:
                j = checked[lane, d]
                i = base[lane, d] + j
                if i >= lengths_B[b]:
                    break
                level = levels[lane, d, j]
                hit = token_ids_BL[b, i] == tokens[lane, d, j]
                rate = level_hits[d, level] / level_trials[d, level]
                hits[lane, d, j] = hits[lane, d, j] * REQUEST_DECAY + hit
                promised[lane, d, j] = promised[lane, d, j] * REQUEST_DECAY + rate
                level_hits[d, level] = level_hits[d, level] * LEVEL_DECAY + hit
                level_trials[d, level] = level_trials[d, level] * LEVEL_DECAY + 1.0
                position_hits[d, j] = position_hits[d, j] * LEVEL_DECAY + hit
                position_trials[d, j] = position_trials[d, j] * LEVEL_DECAY + 1.0
                checked[lane, d] = j + 1
                if not hit or j + 1 == length[lane, d]:
                    length[lane, d] = 0


@njit(
    "void(int64[:], int64[:], int32[:,:,:], int8[:,:,:], int64[:,:], int64[:], int64[:],"
    " int32[:,:,:], int8[:,:,:], int64[:,:], int64[:,:], int64[:,:])",
    cache=True,
)
def _remember(  # type: ignore[no-untyped-def]
    lanes_B, lengths_B, tokens_DBK, levels_DBK, found_DB, chosen_B, counts_B, tokens, levels, length, base, checked
):
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        for d in range(len(found_DB)):
            submitted = chosen_B[b] == d and counts_B[b] > 0
            if length[lane, d] > 0 and not submitted:
                continue
            length[lane, d] = found_DB[d, b]
            base[lane, d] = lengths_B[b]
            checked[lane, d] = 0
            for k in range(found_DB[d, b]):
                tokens[lane, d, k] = tokens_DBK[d, b, k]
                levels[lane, d, k] = levels_DBK[d, b, k]


@njit(
    "void(float64[:,:], float64[:,:], int64[:], int64[:,:], int8[:,:,:], float64[:,:,:], float64[:,:,:],"
    " int64[:], float64[:,:])",
    cache=True,
)
def _choose(level_hits, level_trials, lanes_B, found_DB, levels_DBK, hits, promised, chosen_B, survival_BK):  # type: ignore[no-untyped-def]
    survival_K = np.zeros(survival_BK.shape[1])
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        most = 0.0
        for d in range(len(found_DB)):
            alive = 1.0
            expected = 0.0
            for k in range(found_DB[d, b]):
                level = levels_DBK[d, b, k]
                factor = (hits[lane, d, k] + PRIOR_STRENGTH) / (promised[lane, d, k] + PRIOR_STRENGTH)
                alive *= min(MAX_RATE, level_hits[d, level] / level_trials[d, level] * factor)
                survival_K[k] = alive
                expected += alive
            if expected > most:
                most = expected
                chosen_B[b] = d
                survival_BK[b, :] = 0.0
                survival_BK[b, : found_DB[d, b]] = survival_K[: found_DB[d, b]]
