# SPDX-License-Identifier: Apache-2.0
"""Assigns requests to engines at the start of a rollout.

Shapes: R requests, E engines.
"""

import heapq
from collections.abc import Sequence

import numpy as np


def in_shards(num_requests: int, num_engines: int) -> np.ndarray:
    """Returns the engine of each request, int64 [R]. Each engine gets a contiguous shard of equal size, as in NeMo-RL."""
    return np.arange(num_requests) * num_engines // max(num_requests, 1)


def longest_first(groups_R: Sequence[int], expected_R: np.ndarray, loads_E: np.ndarray) -> np.ndarray:
    """Returns the engine of each request, int64 [R]. The longest requests are placed first, each in the least loaded engine.

    `groups_R` has the number of each request's prompt, and `expected_R` its expected length in tokens. `loads_E` are the
    tokens that each engine is already expected to decode. An engine whose load is not finite gets no request.

    Samples of a prompt go to the same engine if there are at least two prompts for each engine, because drafters learn from
    them and they share the KV cache of the prompt. Source: LPT scheduling, Graham 1969, within 4/3 of the shortest makespan.
    """
    names = np.unique(np.asarray(groups_R), return_inverse=True)[1]
    least = [(load, e) for e, load in enumerate(loads_E.tolist()) if np.isfinite(load)]
    num_groups = int(names.max(initial=-1)) + 1
    units_R = names if num_groups >= 2 * len(least) else np.arange(len(expected_R))
    loads = np.bincount(units_R, weights=expected_R)
    engine_of_unit = np.zeros(len(loads), np.int64)
    heapq.heapify(least)
    for unit in np.argsort(-loads, kind="stable").tolist():
        load, engine = heapq.heappop(least)
        engine_of_unit[unit] = engine
        heapq.heappush(least, (load + loads[unit], engine))
    return engine_of_unit[units_R]
