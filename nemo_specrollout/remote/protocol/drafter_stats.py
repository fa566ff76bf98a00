# SPDX-License-Identifier: Apache-2.0
"""Statistics of remote drafters, which show whether drafts arrive in time and how many of them are useful."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

GOOD_OCCUPANCY = 0.8
"""Drafters count as fast enough if drafts arrive in time for at least this share of request steps. A request step is one
request in one engine step."""
LARGE_WASTE = 0.5
"""Share of useless draft tokens above which the acceptance rate counts as the bottleneck."""


@dataclass(frozen=True)
class DrafterStats:
    """Counts about an engine's remote drafters since the engine's start, and the current state of the drafters."""

    num_request_steps: int = 0
    """Number of request steps, which is the number of requests summed over the engine steps that could use drafts."""
    num_supplied: int = 0
    """Number of request steps for which at least one draft token had arrived."""
    num_at_hand: int = 0
    """Number of draft tokens that had arrived for a request step, summed over all request steps. Draft tokens beyond the
    maximum that an engine step may verify for a request are not counted."""
    num_kept: int = 0
    """Number of draft tokens that arrived in time and continued the right text."""
    num_wrong: int = 0
    """Number of kept draft tokens that were dropped later, because the verifier sampled another token at their position or
    before."""
    num_late: int = 0
    """Number of draft tokens that arrived too late, when the verifier had already sampled the token at their position."""
    num_stale: int = 0
    """Number of draft tokens that continued another text than the request's."""
    host_s: float = 0.0
    """Time that the verifier's host spent on the protocol, in seconds."""
    num_drafters: int = 0
    num_ready: int = 0
    """Number of drafters that answer."""
    num_failures: int = 0
    """Number of times that a drafter was dropped because it failed."""
    num_refused: int = 0
    """Number of requests for which a drafter refused to draft."""
    draft_token_s: float = 0.0
    """Seconds that the slowest drafter takes to draft one token for each of its requests."""
    problem: str = ""
    """Why a drafter is not ready, or empty if all are. If several are not ready, the reason is that of the first one."""
    last_problem: str = ""
    """Why a drafter failed last, even if it answers again. If several have failed, this is about the first of them in the list
    of drafters. If none has failed, it is the reason why a drafter last refused a request, or empty."""

    def since(self, before: "DrafterStats") -> "DrafterStats":
        """Returns these stats, but with the counts since `before`. `before` are earlier stats of the same engine."""
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in _COUNTS})

    @classmethod
    def together(cls, parts: Sequence["DrafterStats"]) -> "DrafterStats":
        """Returns the stats of several engines that share their drafters.

        The counts are added. For each state, such as the number of ready drafters, the result has the worst value.
        """
        sums = {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
        worst = {name: choose(getattr(part, name) for part in parts) for name, choose in _WORST.items()}
        words: dict[str, Any] = {
            name: next(filter(None, (getattr(part, name) for part in parts)), "") for name in _WORDS
        }
        return cls(**sums, **worst, **words)

    def figures(self) -> dict[str, Any]:
        """Returns ratios and counts by their names in docs/reference/metrics.md. A ratio is None if its divisor is 0."""
        steps = self.num_request_steps
        useless = self.num_wrong + self.num_late + self.num_stale
        drafted = self.num_kept + self.num_late + self.num_stale
        occupancy = self.num_supplied / steps if steps else None
        run_ahead = self.num_at_hand / steps if steps else None
        waste = min(1.0, useless / drafted) if drafted else None  # a token may have arrived before counting began
        if self.num_ready == 0:
            bottleneck = "no drafter answers"
        elif occupancy is None:
            bottleneck = "nothing was asked for"
        elif occupancy >= GOOD_OCCUPANCY:
            bottleneck = "the verifier"
        else:
            bottleneck = "acceptance" if (waste or 0.0) > LARGE_WASTE else "the drafters"
        ratios = {"occupancy": occupancy, "run_ahead": run_ahead, "waste": waste, "bottleneck": bottleneck}
        return {**ratios, **asdict(self)}


_WORST: Mapping[str, Any] = {"num_drafters": max, "num_ready": min, "draft_token_s": max}
_WORDS = ("problem", "last_problem")
_COUNTS = [field.name for field in fields(DrafterStats) if field.name not in (*_WORST, *_WORDS)]


def in_words(figures: Mapping[str, Any]) -> str:
    """Returns a line of text for the user that describes `figures`, which are the result of `DrafterStats.figures`."""
    if not figures["num_ready"]:
        return f"none of {figures['num_drafters']} drafters answers: {figures['problem'] or 'not yet'}"
    known = {name: figures[name] or 0.0 for name in ("occupancy", "run_ahead", "waste")}
    trouble = f"{figures['num_failures']} failures and {figures['num_refused']} requests refused"
    has_trouble = figures["num_failures"] or figures["num_refused"]
    told = f"; {trouble}, the latest: {figures['last_problem']}" if has_trouble else ""
    return (
        f"{figures['num_ready']} of {figures['num_drafters']} drafters; drafts in time for {known['occupancy']:.0%} of "
        f"request steps, {known['run_ahead']:.1f} tokens each; {known['waste']:.0%} of all drafts wasted; a draft token takes "
        f"{1e3 * figures['draft_token_s']:.1f} ms; bottleneck: {figures['bottleneck']}{told}"
    )
