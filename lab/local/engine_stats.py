# SPDX-License-Identifier: Apache-2.0
"""Reads the counters, the latest engine steps and the captured features of an engine inside its vLLM worker."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_specrollout.telemetry.engine_stats import StepRows

if TYPE_CHECKING:
    from nemo_specrollout.heads.features.features import SequenceFeatures


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since its start, and some of its latest engine steps.

    Counts by drafter are lists [D][K], for D drafters and K draft positions.
    """

    num_steps: int
    trace: StepRows
    """The engine steps that were asked for."""
    drafters: list[str] = field(default_factory=list)
    """Types of the drafters."""
    proposed: list[list[int]] = field(default_factory=list)
    """Counts of verified draft tokens, [D][K]."""
    accepted: list[list[int]] = field(default_factory=list)
    """Counts of accepted draft tokens, [D][K]."""
    plain_step_s: list[float] | None = None
    """Seconds of an engine step without drafts, indexed by the number of requests, or None while they are unknown."""
    head_is_dormant: bool | None = None
    """Whether the drafter with weights is dormant, so that new requests get no drafts from it, or None without such a
    drafter."""
    capture_s: float = 0.0
    """Seconds of engine time that the capture of features has taken."""
    drafter_stats: dict[str, Any] | None = None
    """`DrafterStats` as a dict, or None without remote drafters."""

    @property
    def num_proposed(self) -> int:
        """Number of verified draft tokens of all drafters and positions."""
        return sum(map(sum, self.proposed))

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens of all drafters and positions."""
        return sum(map(sum, self.accepted))


# Functions that an engine runs in its worker.


def stats_of(worker: Any, first_step: int) -> EngineStats:
    """Returns the engine's counters, and its engine steps from `first_step` on."""
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
    """Returns the engine's counters without any engine steps."""
    return stats_of(worker, worker.specrollout_accounts.trace.num_steps)


def stand_still(worker: Any, seconds: float) -> None:
    """Excludes `seconds` from the time of the next engine step. In these seconds the engine has waited for its caller."""
    worker.specrollout_accounts.trace.stood_still(seconds)


def take_features(worker: Any) -> "list[SequenceFeatures]":
    """Returns the features that were captured since the last call."""
    router = worker.specrollout_router
    return [] if router is None or router.capture is None else router.capture.take()
