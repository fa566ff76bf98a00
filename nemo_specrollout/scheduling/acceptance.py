# SPDX-License-Identifier: Apache-2.0
"""How likely is a draft to be accepted: per request, drafter and position, learned whether or not it was submitted.

Every proposal is later compared with what the policy sampled. That costs no verification, so an estimate stays fresh
while speculation is off, and there is nothing to explore.

Shapes: B requests of the batch, K draft positions, D drafters, L longest sequence; lanes name requests for their life.
"""

import numpy as np
from numba import njit

NUM_LEVELS = 16
LEVEL_DECAY = 0.998
REQUEST_DECAY = 0.94
PRIOR_STRENGTH = 4.0
# What a drafter's evidence level promises before anything was seen: four classes of its candidate's share.
PRIOR_RATE = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), NUM_LEVELS // 4)


class AcceptanceEstimator:
    """Estimates P(draft token j is right | those before it are), as level rate x request factor.

    The level rate is the decayed share of hits among all tokens of that drafter and evidence level. The request factor,
    by position, is decayed hits over what the level rates had promised: above one where a request is easier than most.
    A proposal stays pending until it is refuted or used up; a submitted one replaces it.
    """

    def __init__(self, num_lanes: int, num_drafters: int, max_tokens: int) -> None:
        lanes_by_drafter = (num_lanes, num_drafters)
        self.pending_tokens = np.zeros((*lanes_by_drafter, max_tokens), np.int32)
        self.pending_levels = np.zeros((*lanes_by_drafter, max_tokens), np.int8)
        self.pending_length = np.zeros(lanes_by_drafter, np.int64)
        self.pending_base = np.zeros(lanes_by_drafter, np.int64)
        self.pending_checked = np.zeros(lanes_by_drafter, np.int64)
        self.hits = np.zeros((*lanes_by_drafter, max_tokens))
        self.promised = np.zeros((*lanes_by_drafter, max_tokens))
        self.level_hits = np.tile(PRIOR_RATE * PRIOR_STRENGTH, (num_drafters, 1))
        self.level_trials = np.full((num_drafters, NUM_LEVELS), PRIOR_STRENGTH)

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
        )  # fmt: skip

    def remember(
        self,
        drafter: int,
        lanes_B: np.ndarray,
        lengths_B: np.ndarray,
        proposal: tuple[np.ndarray, np.ndarray, np.ndarray],
        submitted_B: np.ndarray,
    ) -> None:
        """Makes a proposal (tokens, lengths, levels) pending where it is submitted or nothing else is pending."""
        _remember(
            drafter, lanes_B, lengths_B, *proposal, submitted_B, self.pending_tokens, self.pending_levels,
            self.pending_length, self.pending_base, self.pending_checked,
        )  # fmt: skip

    def survival(self, drafter: int, lanes_B: np.ndarray, lengths_B: np.ndarray, levels_BK: np.ndarray) -> np.ndarray:
        """P(the first j + 1 draft tokens are all accepted), float64 [B, K]; 0 beyond a proposal's length."""
        rates = self.level_hits[drafter] / self.level_trials[drafter]
        survival_BK = np.zeros(levels_BK.shape)
        _survival(rates, lanes_B, lengths_B, levels_BK, self.hits[:, drafter], self.promised[:, drafter], survival_BK)
        return survival_BK


@njit(cache=True)
def _score(
    lanes_B, token_ids_BL, lengths_B, tokens, levels, length, base, checked, hits, promised, level_hits, level_trials
):  # type: ignore[no-untyped-def]
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
                checked[lane, d] = j + 1
                if not hit or j + 1 == length[lane, d]:
                    length[lane, d] = 0


@njit(cache=True)
def _remember(
    drafter, lanes_B, lengths_B, tokens_BK, found_B, levels_BK, submitted_B, tokens, levels, length, base, checked
):  # type: ignore[no-untyped-def]
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        if length[lane, drafter] == 0 or submitted_B[b]:
            length[lane, drafter] = found_B[b]
            base[lane, drafter] = lengths_B[b]
            checked[lane, drafter] = 0
            for k in range(found_B[b]):
                tokens[lane, drafter, k] = tokens_BK[b, k]
                levels[lane, drafter, k] = levels_BK[b, k]


@njit(cache=True)
def _survival(rates, lanes_B, lengths_B, levels_BK, hits, promised, survival_BK):  # type: ignore[no-untyped-def]
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        alive = 1.0
        for k in range(lengths_B[b]):
            factor = (hits[lane, k] + PRIOR_STRENGTH) / (promised[lane, k] + PRIOR_STRENGTH)
            alive *= min(0.99, rates[levels_BK[b, k]] * factor)
            survival_BK[b, k] = alive
