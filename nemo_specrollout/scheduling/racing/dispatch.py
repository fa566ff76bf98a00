# SPDX-License-Identifier: Apache-2.0
"""Which worker a request starts on. The order is free: a request's tokens follow from its seed, not from where it runs.

Shapes: R requests, W workers.
"""

import heapq
from collections.abc import Sequence

import numpy as np


def in_shards(num_requests: int, num_workers: int) -> np.ndarray:
    """As NeMo-RL deals a batch out: contiguous parts of the same number of requests; worker of each, int64 [R]."""
    return np.arange(num_requests) * num_workers // max(num_requests, 1)


def longest_first(groups_R: Sequence[int], expected_R: np.ndarray, loads_W: np.ndarray) -> np.ndarray:
    """The worker of each request, int64 [R]: the longest first, onto the worker with the fewest expected tokens so far.

    `loads_W` are the expected tokens that workers have already; not finite where one takes no requests.

    Siblings stay together where there are at least two prompts for each worker: drafters learn from siblings, and the engine
    shares their prompt's KV cache. Source: LPT scheduling, Graham 1969, within 4/3 of the shortest makespan.
    """
    names = np.unique(np.asarray(groups_R), return_inverse=True)[1]
    least = [(load, w) for w, load in enumerate(loads_W.tolist()) if np.isfinite(load)]
    num_groups = int(names.max(initial=-1)) + 1
    units_R = names if num_groups >= 2 * len(least) else np.arange(len(expected_R))
    loads = np.bincount(units_R, weights=expected_R)
    worker_of_unit = np.zeros(len(loads), np.int64)
    heapq.heapify(least)
    for unit in np.argsort(-loads, kind="stable").tolist():
        load, worker = heapq.heappop(least)
        worker_of_unit[unit] = worker
        heapq.heappush(least, (load + loads[unit], worker))
    return worker_of_unit[units_R]
