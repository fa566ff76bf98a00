# SPDX-License-Identifier: Apache-2.0
"""What the same tokens would have cost without speculation, by the step-time table."""

import heapq
from collections.abc import Sequence

import numpy as np


def plain_batch_sizes(lengths: Sequence[int], max_num_seqs: int) -> np.ndarray:
    """Requests in each decode step, int64, if responses of these lengths were decoded one token a step.

    A request's first token comes from its prefill and costs no decode step. At most `max_num_seqs` run at a time, in
    order; the next starts when one ends.
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
    """Seconds that a plain rollout of these response lengths would take.

    `plain_step_s[b]` is the table's time of a decode step of b requests; `other_s` is what the measured rollout spent
    outside decode steps (prefill, start), which speculation does not change.
    """
    batches = plain_batch_sizes(lengths, max_num_seqs)
    return other_s + float(np.asarray(plain_step_s)[batches].sum())
