# SPDX-License-Identifier: Apache-2.0
"""Use of the GPUs over time, from what the workers did. Shapes: T moments."""

import numpy as np

from nemo_specrollout.simulation.rollout import RolloutResult


def running_share(result: RolloutResult, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Moments, seconds, and the share of the workers that are at work around each; float64 [T]."""
    return _mean_between(result, num_points, by_requests=False)


def requests_under_way(result: RolloutResult, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Moments, seconds, and the requests that are being decoded around each; float64 [T]."""
    at_s, mean = _mean_between(result, num_points, by_requests=True)
    return at_s, mean * result.num_workers


def _mean_between(result: RolloutResult, num_points: int, by_requests: bool) -> tuple[np.ndarray, np.ndarray]:
    """Means over intervals of equal length, of workers at work or of their requests, by worker."""
    edges = np.linspace(0.0, result.seconds, num_points + 1)
    begins, ends = (np.array([getattr(s, name) for s in result.spans]) for name in ("begin_s", "end_s"))
    weights = np.array([s.num_requests if by_requests else 1 for s in result.spans], float)
    area = _area_before(edges, ends, begins, weights)
    middles = (edges[1:] + edges[:-1]) / 2
    return middles, np.diff(area) / np.diff(edges) / result.num_workers


def _area_before(edges: np.ndarray, ends: np.ndarray, begins: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of all spans together, seconds times weight before each moment: a sum of ramps that begin and that end."""
    return _ramps(edges, begins, weights) - _ramps(edges, ends, weights)


def _ramps(edges: np.ndarray, starts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    order = np.argsort(starts)
    starts, weights = starts[order], weights[order]
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    moments = np.concatenate([[0.0], np.cumsum(weights * starts)])
    num = np.searchsorted(starts, edges, "right")
    return edges * sums[num] - moments[num]
