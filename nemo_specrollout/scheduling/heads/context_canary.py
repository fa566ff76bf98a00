# SPDX-License-Identifier: Apache-2.0
"""Do drafts fail in long contexts only? So it looks when a RoPE is wrong, or a context longer than a head was made for.

Shapes: B requests, C classes of context length, shortest first; K draft positions.
"""

import numpy as np

from nemo_specrollout.scheduling.heads.canary import STALE_SHARE, Alarm, Canary, HeadHealth, alarm_of

NUM_CLASSES = 3
# Decayed draft tokens by which a class is judged to be as before, or not; fewer than the second say nothing.
RECENT_DRAFTED, ENOUGH_RECENT = 500.0, 48.0
FALLEN_SHARE = 2 / 3


def context_edges(longest: int, head_context: int | None) -> np.ndarray:
    """Lengths at which the second and the third class begin, of contexts up to `longest` tokens, int64 [C - 1]."""
    return np.array([longest // 8, longest // 2] if head_context is None else [head_context // 2, head_context])


def count_by_context(
    contexts_B: np.ndarray, drafted_B: np.ndarray, accepted_B: np.ndarray, edges: np.ndarray, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """A step's draft tokens, verified and accepted, by length of context and position: counts [C, K]."""
    first_B = np.searchsorted(edges, contexts_B, side="right") * (num_positions + 1)
    shape = len(edges) + 1, num_positions + 1

    def reach(counts_B: np.ndarray) -> np.ndarray:
        ending_here = np.bincount(first_B + counts_B, minlength=shape[0] * shape[1]).reshape(shape)
        return ending_here[:, :0:-1].cumsum(axis=1)[:, ::-1]

    return reach(drafted_B), reach(accepted_B)


class ContextCanary:
    """Watches one model drafter by length of context; raises an alarm, once after each publish or wake, when drafts in a
    class fare as if at most a third as many were accepted while those in the shortest class are as before.

    Each class has a `Canary` of its own. Of a class that was never seen, what the shortest does is expected: a head may
    never have worked there. Steps may be left out. Example: after `canary.begin("publish")`, for some engine steps
    `alarm = canary.observe(*count_by_context(...))`.
    """

    def __init__(self) -> None:
        self._canaries = [Canary() for _ in range(NUM_CLASSES)]
        self._recent_C3 = np.zeros((NUM_CLASSES, 3))  # drafted, accepted, expected
        self._event, self._has_told = "running", False

    def begin(self, event: str, expected_length: float | None = None, num_positions: int = 3) -> None:
        """What follows comes after `event`; see `Canary.begin`."""
        for canary in self._canaries:
            canary.begin(event, expected_length, num_positions)
        self._recent_C3[:] = 0.0
        self._event = event
        self._has_told = self._has_told and event == "refit"

    @property
    def fails_in_long_contexts(self) -> bool:
        """Whether, of late, some class of longer contexts has fallen much below what it was, and the shortest has not."""
        drafted_C, accepted_C, expected_C = self._recent_C3.T
        seen = np.flatnonzero(drafted_C >= ENOUGH_RECENT)
        if len(seen) < 2:
            return False
        short, *longer = accepted_C[seen] / expected_C[seen]
        return bool(short >= STALE_SHARE and min(longer) <= FALLEN_SHARE * short)

    def observe(self, drafted_CK: np.ndarray, accepted_CK: np.ndarray, num_steps: int = 1) -> Alarm | None:
        """Learns of the draft tokens of `num_steps` engine steps, verified and accepted: counts [C, K], non-increasing along
        K."""
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
