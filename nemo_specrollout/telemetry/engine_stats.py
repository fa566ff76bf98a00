# SPDX-License-Identifier: Apache-2.0
"""Counters and state of an engine, as its vLLM worker reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.telemetry.sample_stats import SampleStats
from nemo_specrollout.telemetry.step_trace import StepRows


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since its start, and its latest steps. Counts by drafter are [D, K] for K draft positions."""

    num_steps: int
    trace: StepRows
    """The steps that were asked for."""
    drafters: list[str] = field(default_factory=list)
    """Types of the drafters; empty without drafters."""
    proposed: list[list[int]] = field(default_factory=list)
    """Draft tokens that were verified."""
    accepted: list[list[int]] = field(default_factory=list)
    """Draft tokens that were accepted."""
    plain_step_s: list[float] | None = None
    """Seconds of a step without drafts, by number of requests; None while unknown."""
    draft_overhead_s: float | None = None
    """Seconds that a step with drafts takes beyond a plain step of as many rows; None while unknown."""
    draft_discount_s: float | None = None
    """Seconds of that overhead that each draft row saves; None while unknown."""
    head_is_dormant: bool | None = None
    """Whether new requests get no drafts of the drafter with weights; None without one."""
    policy_version: int | None = None
    """Weight updates of the engine; None without a drafter with weights."""
    head_version: int | None = None
    """Version of the policy that the head was trained for; None without a drafter with weights."""
    capture_s: float = 0.0
    """Seconds of engine time that the capture of features has taken."""
    drafter_stats: dict[str, Any] | None = None
    """`DrafterStats` as a dict; None without remote drafters."""

    @property
    def num_proposed(self) -> int:
        """Draft tokens that were verified, of all drafters and positions."""
        return sum(map(sum, self.proposed))

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted, of all drafters and positions."""
        return sum(map(sum, self.accepted))


@dataclass(frozen=True)
class StepEnd:
    """Reply of an engine at the end of a training step."""

    alarms: list[dict[str, Any]]
    """Alarms of the head's canary since the last step."""
    sample_stats: list[tuple[int, SampleStats]]
    """Seed and statistics of each sample."""
    policy_version: int
    head_version: int | None
    """None without a drafter with weights."""
    head_is_dormant: bool | None
    """None without a drafter with weights."""

    @classmethod
    def from_wire(cls, reply: Mapping[str, Any]) -> "StepEnd":
        """Builds the record from the vLLM worker's reply."""
        samples = [(seed, SampleStats.from_wire(stats)) for seed, stats in reply["sample_stats"]]
        return cls(**{**reply, "sample_stats": samples})
