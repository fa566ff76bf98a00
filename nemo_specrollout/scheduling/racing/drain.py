# SPDX-License-Identifier: Apache-2.0
"""Drain of an engine: the fewer requests it still has, the faster it decodes each of them.

Shapes: B requests of one engine, R requests under way, M draft methods, E engines.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.scheduling.racing.draft_ladder import SpeedModel


def drain(alone_s_B: np.ndarray, slowdowns_B: np.ndarray) -> np.ndarray:
    """Returns when each of an engine's requests ends, seconds from now, float64 [B].

    `alone_s_B` is the time that each request would take alone. `slowdowns_B` is the factor by which a request is slower in
    batches of 1, 2, ... B. Example: in an engine with a factor of 1.5 for two, requests of 1 s and 3 s end after 1.5 s and
    3.5 s.
    """
    order_B = np.argsort(alone_s_B, kind="stable")
    gaps_B = np.diff(alone_s_B[order_B], prepend=0.0)
    ends_B = np.empty(len(alone_s_B))
    ends_B[order_B] = np.cumsum(gaps_B * slowdowns_B[::-1])
    return ends_B


def slowdowns_of(speeds: SpeedModel, method: int, first: int, last: int) -> list[float]:
    """Returns by which factor a request is slower than alone, in batches of `first` to `last`."""
    alone = speeds.tokens_per_s(method, 1)
    return [alone / speeds.tokens_per_s(method, b) for b in range(first, last + 1)]


@dataclass(frozen=True)
class Assignment:
    """Distribution of requests over engines just before the first move or race of a rollout."""

    engine_R: np.ndarray
    """Engine of each request under way, int64."""

    num_tokens_R: np.ndarray
    """Response tokens that the engine had reported, int64."""

    reported_s_E: np.ndarray
    """Time of each engine's latest report, seconds by any clock, float64."""


def undisturbed_end_s(
    before: Assignment, lengths_R: np.ndarray, speed_RM: np.ndarray, method_E: np.ndarray, speeds: SpeedModel
) -> float:
    """Returns the estimated end of a rollout, by the same clock, if every engine had kept its requests.

    `lengths_R` is the final number of response tokens. `speed_RM` is the decode speed relative to a typical request.
    """
    method_R = method_E[before.engine_R]
    typical_M = np.array([speeds.tokens_per_s(m, 1) for m in range(speed_RM.shape[1])])
    speed_R = speed_RM[np.arange(len(method_R)), method_R]
    alone_s_R = (lengths_R - before.num_tokens_R) / (typical_M[method_R] * speed_R)
    ends_E = [
        reported_s + drain(part, np.array(slowdowns_of(speeds, int(method_E[e]), 1, len(part)))).max(initial=0.0)
        for e, reported_s in enumerate(before.reported_s_E.tolist())
        if len(part := alone_s_R[before.engine_R == e])
    ]
    return float(max(ends_E))
