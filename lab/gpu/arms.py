# SPDX-License-Identifier: Apache-2.0
"""Ways of rolling out that `real_8b` compares, the prediction for each, and the verdict on their times. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """A way of rolling out. Its prediction was written before any GPU ran it."""

    letter: str
    name: str
    predicted: str

    @property
    def title(self) -> str:
        return f"{self.letter} {self.name}"


ARMS = (
    Arm("A", "vLLM without drafts", "11 to 13 s to the last token"),
    Arm("B", "vLLM's EAGLE-3, 3 drafts", "1.8 to 2.1 times A"),
    Arm("C", "vLLM's EAGLE-3, best number", "2.0 to 2.3 times A"),
    Arm("D", "ours, head and texts", "2.2 to 2.6 times A"),
    Arm("E", "ours, texts made ahead", "3 to 4 times A"),
)
PREDICTIONS = tuple(f"{arm.title}: {arm.predicted}" for arm in ARMS)
BEST_OF = (5, 7, 1)
"""Numbers of drafts, besides 3, among which vLLM's best is chosen. The most promising one comes first."""
DEPTHS = "steps of a request whose first 1, 2, ... drafts were all accepted"


def verdict(seconds: Mapping[str, float]) -> str:
    """Returns the conclusion from the seconds that the arms need for A's texts."""
    c, d = seconds["C"], seconds["D"]
    if d > c:
        return (
            f"The claim falls: ours (D) needs {d:.2f} s for A's texts, and vLLM's EAGLE-3 with its best number of drafts (C) "
            f"{c:.2f} s."
        )
    return (
        f"The claim stands: ours (D) is {c / d:.2f} times as fast as vLLM's EAGLE-3 with its best number of drafts (C)."
    )
