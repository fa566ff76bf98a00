# SPDX-License-Identifier: Apache-2.0
"""Counterfactual: the estimated duration of a rollout without speculation, from the step-time table."""

import heapq
from collections.abc import Sequence

import numpy as np


def plain_batch_sizes(lengths: Sequence[int], max_num_seqs: int) -> np.ndarray:
    """Returns the number of requests in each decode step, int64, if responses of these lengths get one token a step.

    Prefill produces a request's first token, so that token costs no decode step. At most `max_num_seqs` requests run at a
    time, in the given order. The next request starts when one ends.
    """
    running: list[int] = []
    spans = []
    for length in lengths:
        start = heapq.heappop(running) if len(running) == max_num_seqs else 0
        spans.append((start, start + length - 1))
        heapq.heappush(running, spans[-1][1])
    changes = np.zeros(max(end for _, end in spans) + 1, np.int64)
    for start, end in spans:
        changes[start] += 1
        changes[end] -= 1
    return np.cumsum(changes)[:-1]


def plain_estimate_s(lengths: Sequence[int], max_num_seqs: int, plain_step_s: Sequence[float], other_s: float) -> float:
    """Returns the estimated seconds of a plain rollout with these response lengths.

    `plain_step_s[b]` is the table's time of a decode step of b requests. `other_s` is the time that the measured rollout
    spent outside decode steps (prefill, start), which speculation does not change.
    """
    batches = plain_batch_sizes(lengths, max_num_seqs)
    return other_s + float(np.asarray(plain_step_s)[batches].sum())
