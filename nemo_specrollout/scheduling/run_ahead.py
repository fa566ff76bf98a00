# SPDX-License-Identifier: Apache-2.0
"""How far drafters elsewhere may run ahead of each request: as far as there is a chance that the drafts will stand.

A drafter's step is for all its requests together: what one drafts in vain makes it slower for the others.
Shapes: B requests, K draft positions.
"""

import numpy as np

LEAST_SURVIVAL = 0.02
"""A draft token that is less likely to be reached is not worth a drafter's while, even where it has nothing else to do."""
PERIOD_STEPS = 8
"""Rates change slowly: so often they are looked at."""


def windows(forecast_BK: np.ndarray, most: int) -> np.ndarray:
    """Draft tokens that each request's drafter may be ahead of it, uint8 [B], 1 to `most`.

    `forecast_BK`: survival of its drafts, of which the mean rate of a token follows. Source: the per-request windows of
    SpecActor's Algorithm 2 (arXiv 2511.16193); here nobody waits for a window to be full.
    """
    rate_B = np.clip(forecast_BK[:, -1], 1e-9, 1 - 1e-9) ** (1 / forecast_BK.shape[1])
    return np.clip(np.ceil(np.log(LEAST_SURVIVAL) / np.log(rate_B)), 1, most).astype(np.uint8)
