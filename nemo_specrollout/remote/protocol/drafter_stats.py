# SPDX-License-Identifier: Apache-2.0
"""How well drafters on other workers keep up, as sums and as what a user reads. Raw counts travel; ratios come last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

# From this share of request steps with a draft at hand on, drafters keep up; from this share of drafts dropped on, what they
# make is of little use.
GOOD_OCCUPANCY, LARGE_WASTE = 0.8, 0.5


@dataclass(frozen=True)
class DrafterStats:
    """Counts since an engine's start, and how things are now. Counts subtract: `after.since(before)`."""

    num_request_steps: int = 0
    """Requests, summed over the steps in which drafts were wanted."""
    num_supplied: int = 0
    """Those of them that had a draft at hand."""
    num_at_hand: int = 0
    """Draft tokens at hand in them, up to as many as one step may take."""
    num_kept: int = 0
    """Draft tokens that came in time and for the right text."""
    num_wrong: int = 0
    """Those of them that were dropped, because the verifier sampled another token there or before."""
    num_late: int = 0
    """Draft tokens for positions that the verifier had sampled by then."""
    num_stale: int = 0
    """Draft tokens for a text that was not the request's (any more)."""
    host_s: float = 0.0
    """Time that all this took the verifier."""
    num_drafters: int = 0
    num_ready: int = 0
    """Drafters that are named, and that answer."""
    num_failures: int = 0
    """How often one was dropped."""
    draft_token_s: float = 0.0
    """What a token takes the slowest drafter, for each of the requests that it drafts for."""
    answer_s: float = 0.0
    """From telling a drafter what was committed to reading its answer, less what it had it lying; a verifier reads once a
    step."""
    draft_version: int = 0
    """The oldest version of weights that a drafter has."""
    problem: str = ""
    """Why the first drafter that does not answer does not."""

    @property
    def occupancy(self) -> float | None:
        """The share of request steps that had drafts in time."""
        return self.num_supplied / self.num_request_steps if self.num_request_steps else None

    @property
    def run_ahead(self) -> float | None:
        """Draft tokens at hand, per request and step."""
        return self.num_at_hand / self.num_request_steps if self.num_request_steps else None

    @property
    def waste(self) -> float | None:
        """The share of drafted tokens that were of no use. What is dropped may have come before the counts began."""
        total = self.num_kept + self.num_late + self.num_stale
        return min(1.0, (self.num_wrong + self.num_late + self.num_stale) / total) if total else None

    @property
    def bottleneck(self) -> str:
        """What keeps the rollout from being faster, in a word or two."""
        if self.num_ready == 0:
            return "no drafter answers"
        if self.occupancy is None:
            return "nothing was asked for"
        if self.occupancy >= GOOD_OCCUPANCY:
            return "the verifier"
        return "acceptance" if (self.waste or 0.0) > LARGE_WASTE else "the drafters"

    def since(self, before: "DrafterStats") -> "DrafterStats":
        """What came after `before`, and how things are now."""
        return replace(self, **{n: getattr(self, n) - getattr(before, n) for n in _COUNTS})

    @classmethod
    def together(cls, parts: Sequence["DrafterStats"]) -> "DrafterStats":
        """Of engines that have the same drafters: counts are added; of how things are now, the worst that an engine sees."""
        sums = {n: sum(getattr(s, n) for s in parts) for n in _COUNTS}
        return cls(
            **sums,
            num_drafters=max(s.num_drafters for s in parts),
            num_ready=min(s.num_ready for s in parts),
            draft_token_s=max(s.draft_token_s for s in parts),
            answer_s=max(s.answer_s for s in parts),
            draft_version=min(s.draft_version for s in parts),
            problem=next((s.problem for s in parts if s.problem), ""),
        )

    def figures(self) -> dict[str, Any]:
        """By the names of docs/reference/metrics.md."""
        return {
            "occupancy": self.occupancy,
            "run_ahead": self.run_ahead,
            "waste": self.waste,
            "bottleneck": self.bottleneck,
            **{name: getattr(self, name) for name in _FIELDS},
        }


_FIELDS = tuple(f.name for f in fields(DrafterStats))
_COUNTS = (*_FIELDS[: _FIELDS.index("num_drafters")], "num_failures")


def in_words(figures: Mapping[str, Any]) -> str:
    """`DrafterStats.figures` in a line."""
    if not figures["num_ready"]:
        return f"none of {figures['num_drafters']} drafters answers: {figures['problem'] or 'not yet'}"
    known = {n: figures[n] or 0.0 for n in ("occupancy", "run_ahead", "waste")}
    return (
        f"{figures['num_ready']} of {figures['num_drafters']} drafters; drafts in time for {known['occupancy']:.0%} of "
        f"request steps, {known['run_ahead']:.1f} tokens each; {known['waste']:.0%} of all drafts wasted; a draft token takes "
        f"{1e3 * figures['draft_token_s']:.1f} ms; bottleneck: {figures['bottleneck']}"
    )
