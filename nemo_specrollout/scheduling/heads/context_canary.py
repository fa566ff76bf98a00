# SPDX-License-Identifier: Apache-2.0
"""Canary by context length: drafts that fail only in long contexts reveal a wrong RoPE or a head with a shorter context.

Shapes: B requests, C classes of context length, shortest first; K draft positions.
"""

import numpy as np

from nemo_specrollout.scheduling.heads.canary import STALE_SHARE, Alarm, Canary, HeadHealth, alarm_of

NUM_CLASSES = 3
RECENT_DRAFTED = 500.0
"""Draft tokens after which a class's recent counts decay to 1/e."""
ENOUGH_RECENT = 48.0
"""Recent draft tokens before a class is judged."""
FALLEN_SHARE = 2 / 3
"""Share of the shortest class's relative acceptance at which a longer class has failed."""


def context_edges(longest: int, head_context: int | None) -> np.ndarray:
    """Returns the context lengths where the second and third class begin, int64 [C - 1]."""
    return np.array([longest // 8, longest // 2] if head_context is None else [head_context // 2, head_context])


def count_by_context(
    contexts_B: np.ndarray, drafted_B: np.ndarray, accepted_B: np.ndarray, edges: np.ndarray, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a step's verified and accepted draft tokens by class of context length and position: two counts [C, K]."""
    first_B = np.searchsorted(edges, contexts_B, side="right") * (num_positions + 1)
    shape = len(edges) + 1, num_positions + 1

    def reach(counts_B: np.ndarray) -> np.ndarray:
        ending_here = np.bincount(first_B + counts_B, minlength=shape[0] * shape[1]).reshape(shape)
        return ending_here[:, :0:-1].cumsum(axis=1)[:, ::-1]

    return reach(drafted_B), reach(accepted_B)


class ContextCanary:
    """Watches one draft model by context length, with one `Canary` for each class.

    It raises an alarm, once after each publish or wake, if a class collapses while the shortest class is as before. An
    unseen class is expected to behave like the shortest one, because a head may never have worked there. Steps may be left
    out. Example: after `canary.begin("publish")`, call `alarm = canary.observe(*count_by_context(...))` in some steps.
    """

    def __init__(self) -> None:
        self._canaries = [Canary() for _ in range(NUM_CLASSES)]
        self._recent_C3 = np.zeros((NUM_CLASSES, 3))
        """Recent tokens drafted, accepted, and expected to be accepted, by class."""
        self._event, self._has_told = "running", False

    def begin(self, event: str, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Notes an event; see `Canary.begin`."""
        for canary in self._canaries:
            canary.begin(event, expected_length, num_positions)
        self._recent_C3[:] = 0.0
        self._event = event
        self._has_told = self._has_told and event == "refit"

    @property
    def fails_in_long_contexts(self) -> bool:
        """Whether recent acceptance has fallen in a class of longer contexts, but not in the shortest class."""
        drafted_C, accepted_C, expected_C = self._recent_C3.T
        seen = np.flatnonzero(drafted_C >= ENOUGH_RECENT)
        if len(seen) < 2:
            return False
        short, *longer = accepted_C[seen] / expected_C[seen]
        return bool(short >= STALE_SHARE and min(longer) <= FALLEN_SHARE * short)

    def observe(self, drafted_CK: np.ndarray, accepted_CK: np.ndarray, num_steps: int = 1) -> Alarm | None:
        """Adds the verified and accepted draft tokens of `num_steps` engine steps. Returns an alarm or None.

        Both counts are [C, K] and non-increasing along K.
        """
        alarm = None
        for c in np.flatnonzero(drafted_CK[:, 0]):
            canary, drafted_K, accepted_K = self._canaries[c], drafted_CK[c], accepted_CK[c]
            if not canary.knows and self._canaries[0].knows:
                canary.begin_like(self._canaries[0], len(drafted_K))
            if canary.knows:
                self._recent_C3[c] *= np.exp(-drafted_K.sum() / RECENT_DRAFTED)
                self._recent_C3[c] += drafted_K.sum(), accepted_K.sum(), canary.expected(drafted_K)
            found = canary.observe(drafted_K, accepted_K, num_steps=num_steps)
            alarm = found if c > 0 and found is not None else alarm
        if alarm is None or self._has_told or not self.fails_in_long_contexts:
            return None
        self._has_told = True
        return alarm_of(
            self._event, alarm.seen, alarm.expected, alarm.num_drafted, HeadHealth(fails_in_long_contexts=True)
        )
