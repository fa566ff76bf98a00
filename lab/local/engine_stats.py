# SPDX-License-Identifier: Apache-2.0
"""Counters and latest steps of an engine, and what else the lab does in the engine's vLLM worker."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.telemetry.engine_stats import StepRows

if TYPE_CHECKING:
    from nemo_specrollout.heads.features.features import SequenceFeatures


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since its start, and its latest steps. Counts by drafter are [D, K]."""

    num_steps: int
    trace: StepRows
    """The steps that were asked for."""
    drafters: list[str] = field(default_factory=list)
    """Types of the drafters."""
    proposed: list[list[int]] = field(default_factory=list)
    """Draft tokens that were verified."""
    accepted: list[list[int]] = field(default_factory=list)
    """Draft tokens that were accepted."""
    plain_step_s: list[float] | None = None
    """Seconds of a step without drafts, by number of requests; None while unknown."""
    head_is_dormant: bool | None = None
    """True if new requests get no drafts of the drafter with weights; None without one."""
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


# Functions that an engine runs in its worker.


def stats_of(worker: Any, first_step: int) -> EngineStats:
    """Returns the engine's counters, and its steps from `first_step` on."""
    accounts, router = worker.specrollout_accounts, worker.specrollout_router
    num_steps, trace = accounts.trace.num_steps, accounts.trace.since(first_step)
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
    """Leaves `seconds`, in which the engine waited for its caller, out of the next step's time."""
    worker.specrollout_accounts.trace.stood_still(seconds)


def reload(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Replaces the model's weights by Hugging Face names. The caller clears the prefix cache."""
    started = time.perf_counter()
    worker.model_runner.reload_weights(weights_iterator=iter(tensors))
    has_new_heads = _reload_native_heads(worker.model_runner, dict(tensors))
    worker.specrollout_weights_updated(time.perf_counter() - started)
    if has_new_heads and worker.specrollout_router is not None:
        worker.specrollout_router.samples.head_version = worker.specrollout_policy_version


def _reload_native_heads(runner: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Loads the policy's own (MTP) heads from a checkpoint's tensors. Returns whether it did.

    vLLM's reloading of a policy leaves these heads out. Nothing is loaded if the engine does not draft with them or the
    checkpoint lacks them.
    """
    if getattr(runner.speculative_config, "method", None) != "mtp":
        return False
    num_layers = runner.model_config.hf_text_config.num_hidden_layers
    layers = [int(number) for name in tensors for number in re.findall(r"layers\.(\d+)\.", name)[:1]]
    if max(layers, default=0) < num_layers and not any("mtp" in name for name in tensors):
        return False
    from nemo_specrollout.heads.serving.head_loading import reload_draft_weights

    reload_draft_weights(runner, tensors)
    return True


def take_features(worker: Any) -> "list[SequenceFeatures]":
    """Returns the features that were captured since the last call."""
    router = worker.specrollout_router
    return [] if router is None or router.capture is None else router.capture.take()
