# SPDX-License-Identifier: Apache-2.0
"""Moves and races at random, where a scenario asks for it: tiny rollouts end before a policy finds any that pays."""

import os
from types import ModuleType
from typing import Any

import numpy as np

WILD = "NEMO_RL_CPU_WILD_TAIL"


class WildPolicy:
    """In the place of `FastestOfN`."""

    def __init__(self, *_: Any) -> None:
        self._rng = np.random.default_rng(0)

    def decide(self, seen: Any) -> Any:
        from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision

        workers, starts, stops = np.flatnonzero(seen.capacity_E > 0).tolist(), [], []
        for request in range(len(seen.remaining_R)):
            runs = seen.engine_A[seen.request_A == request].tolist()
            others = [w for w in workers if w not in runs]
            if others and (not runs or self._rng.random() < 0.3):
                starts.append((request, int(self._rng.choice(others))))
                if runs and self._rng.random() < 0.5:
                    stops.append((request, runs[0]))
            elif len(runs) > 1 and self._rng.random() < 0.1:
                stops.append((request, runs[0]))
        return TailDecision(tuple(starts), tuple(stops))


def go_wild(tail_exchange: ModuleType) -> None:
    """With turns so short that there are many."""
    if os.environ.get(WILD):
        from nemo_specrollout.stragglers import coordinator

        tail_exchange.FastestOfN = WildPolicy  # type: ignore[attr-defined]
        coordinator.SHORTEST_TURN_S = 0.02
