# SPDX-License-Identifier: Apache-2.0
"""How an engine drains: the fewer requests it has, the faster each of them goes.

Shapes: B requests of one worker, R requests under way, W workers.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.scheduling.racing.draft_ladder import Paces


def drain(alone_s_B: np.ndarray, slowdowns_B: np.ndarray) -> np.ndarray:
    """When each of an engine's requests ends, seconds from now, float64 [B].

    `alone_s_B`: what each would take alone; `slowdowns_B`: how much slower it is in batches of 1, 2, ... B. Example: two
    requests of 1 s and 3 s in an engine that two slow down by a half end after 1.5 s and 3.5 s.
    """
    order_B = np.argsort(alone_s_B, kind="stable")
    gaps_B = np.diff(alone_s_B[order_B], prepend=0.0)
    ends_B = np.empty(len(alone_s_B))
    ends_B[order_B] = np.cumsum(gaps_B * slowdowns_B[::-1])
    return ends_B


def slowdowns_of(paces: Paces, method: int, first: int, last: int) -> list[float]:
    """How much slower than alone a request is, in batches of `first` to `last`."""
    alone = paces.tokens_per_s(method, 1)
    return [alone / paces.tokens_per_s(method, b) for b in range(first, last + 1)]


@dataclass(frozen=True)
class Held:
    """Who had what just before the first request of a rollout was moved or raced. Every request has one worker."""

    worker_R: np.ndarray
    """The worker of each request under way, int64."""
    num_tokens_R: np.ndarray
    """Tokens of response that the worker had told, int64."""
    told_s_W: np.ndarray
    """When each worker had told last, seconds by any clock, float64."""


def undisturbed_end_s(
    held: Held, lengths_R: np.ndarray, speed_RM: np.ndarray, method_W: np.ndarray, paces: Paces
) -> float:
    """When a rollout would have ended, by the same clock and by estimate, if all workers had kept what they had.

    `lengths_R`: tokens that the responses turned out to have; `speed_RM`: a request's pace under a method over a typical
    request's.
    """
    method_R = method_W[held.worker_R]
    pace_M = np.array([paces.tokens_per_s(m, 1) for m in range(speed_RM.shape[1])])
    speed_R = speed_RM[np.arange(len(method_R)), method_R]
    alone_s_R = (lengths_R - held.num_tokens_R) / (pace_M[method_R] * speed_R)
    ends_W = [
        told_s + drain(part, np.array(slowdowns_of(paces, int(method_W[w]), 1, len(part)))).max(initial=0.0)
        for w, told_s in enumerate(held.told_s_W.tolist())
        if len(part := alone_s_R[held.worker_R == w])
    ]
    return float(max(ends_W))
