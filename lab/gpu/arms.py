# SPDX-License-Identifier: Apache-2.0
"""The arms that `real_8b` compares, which are ways of rolling out, and the verdict on their times. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """A way of rolling out, with a prediction of its time that was written down before any GPU ran it."""

    letter: str
    name: str
    predicted: str

    @property
    def title(self) -> str:
        """Returns the letter and the name."""
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
"""Numbers of drafts besides 3 that are tried to find vLLM's best number, the most promising first."""
DEPTHS = "steps of a request whose first 1, 2, ... drafts were all accepted"


def verdict(seconds: Mapping[str, float]) -> str:
    """Returns a sentence that says whether arm D is faster than arm C, and by how much.

    `seconds` has the seconds that each arm needs for the texts of arm A, by the arm's letter.
    """
    c, d = seconds["C"], seconds["D"]
    if d > c:
        return (
            f"The claim falls: ours (D) needs {d:.2f} s for A's texts, and vLLM's EAGLE-3 with its best number of drafts (C) "
            f"{c:.2f} s."
        )
    return (
        f"The claim stands: ours (D) is {c / d:.2f} times as fast as vLLM's EAGLE-3 with its best number of drafts (C)."
    )
