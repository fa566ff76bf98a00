# SPDX-License-Identifier: Apache-2.0
"""Reads counters, latest steps and captured features of an engine in its vLLM worker."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_specrollout.telemetry.engine_stats import StepRows

if TYPE_CHECKING:
    from nemo_specrollout.heads.features.features import SequenceFeatures


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since its start, and its latest steps. Counts by drafter are [D, K]."""

    num_steps: int
    trace: StepRows
    """The requested steps."""
    drafters: list[str] = field(default_factory=list)
    """Types of the drafters."""
    proposed: list[list[int]] = field(default_factory=list)
    """Draft tokens that were verified."""
    accepted: list[list[int]] = field(default_factory=list)
    """Draft tokens that were accepted."""
    plain_step_s: list[float] | None = None
    """Seconds of a step without drafts by number of requests, or None while unknown."""
    head_is_dormant: bool | None = None
    """True if new requests get no drafts from the drafter with weights, or None without such a drafter."""
    capture_s: float = 0.0
    """Seconds of engine time that the capture of features has taken."""
    drafter_stats: dict[str, Any] | None = None
    """`DrafterStats` as a dict, or None without remote drafters."""

    @property
    def num_proposed(self) -> int:
        """Draft tokens that were verified, of all drafters and positions."""
        return sum(map(sum, self.proposed))

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted, of all drafters and positions."""
        return sum(map(sum, self.accepted))


# Functions that an engine runs in its worker.


def stats_of(worker: Any, first_step: int) -> EngineStats:
    """Returns the engine's counters, and its steps from `first_step` on."""
    accounts = worker.specrollout_accounts
    router = worker.specrollout_router
    num_steps = accounts.trace.num_steps
    trace = accounts.trace.since(first_step)
    if router is None:
        return EngineStats(num_steps, trace)
    plain_step_s = accounts.plain_step_s()
    return EngineStats(
        num_steps,
        trace,
        router.board.names,
        **accounts.verified(),
        plain_step_s=None if plain_step_s is None else plain_step_s.tolist(),
        head_is_dormant=router.model.is_dormant if router.model is not None else None,
        capture_s=0.0 if router.capture is None else router.capture.seconds,
        drafter_stats=None if router.remote is None else asdict(router.remote.stats()),
    )


def counters_of(worker: Any) -> EngineStats:
    """Returns the engine's counters without its steps."""
    return stats_of(worker, worker.specrollout_accounts.trace.num_steps)


def stand_still(worker: Any, seconds: float) -> None:
    """Excludes `seconds`, in which the engine waited for its caller, from the next step's time."""
    worker.specrollout_accounts.trace.stood_still(seconds)


def take_features(worker: Any) -> "list[SequenceFeatures]":
    """Returns the features that were captured since the last call."""
    router = worker.specrollout_router
    return [] if router is None or router.capture is None else router.capture.take()
