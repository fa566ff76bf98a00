# SPDX-License-Identifier: Apache-2.0
"""Use of the GPUs over time, from what the workers did. Shapes: T moments, N spans."""

import numpy as np

from nemo_specrollout.simulation.event_loop import RolloutResult


def running_share(result: RolloutResult, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Moments, seconds, and the share of the workers that are at work around each; float64 [T]."""
    edges = np.linspace(0.0, result.seconds, num_points + 1)
    begins_N = np.array([span.begin_s for span in result.spans])
    ends_N = np.array([span.end_s for span in result.spans])
    busy_s = np.diff(_seconds_since(begins_N, edges) - _seconds_since(ends_N, edges))
    return (edges[1:] + edges[:-1]) / 2, busy_s / np.diff(edges) / result.num_workers


def _seconds_since(starts_N: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """At each edge the seconds since every start before it, summed."""
    sorted_N = np.sort(starts_N)
    sums = np.concatenate([[0.0], np.cumsum(sorted_N)])
    num_before = np.searchsorted(sorted_N, edges, "right")
    return edges * num_before - sums[num_before]
