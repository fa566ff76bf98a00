# SPDX-License-Identifier: Apache-2.0
"""The interface of families of vLLM's V2 model runners.

A family is a range of vLLM versions whose model runners are entered at the same places. What is the same for all families is
in the vLLM worker. When no supported version has a family any more, remove its file and its line in `installed.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.step.row_sampling import RowSampler

Settle = Callable[[str | None], None]
"""Callback that receives the reason why the host must choose the drafts of each step, or None if the device does."""


class RunnerFamily(ABC):
    """What the vLLM worker does differently for each family of V2 model runners. Keeps no state of an engine."""

    row_sampler: type[RowSampler] = RowSampler
    """Class that samples, accepts and grades the rows of a step."""

    @abstractmethod
    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has all names that we override or set for exactness.

        Without the check, vLLM would silently ignore an override whose name it no longer has.
        """

    def sampler(self, native: Any) -> Any:
        """Returns our row sampler, or vLLM's own sampler if an option needs other kernels."""
        return self.row_sampler(native) if self.row_sampler.fits(native) else native

    def is_in_force(self, sampler: Any) -> bool:
        """Returns whether a runner's sampler is our row sampler, or one that our row sampler cannot replace."""
        return not self.row_sampler.fits(sampler)

    @abstractmethod
    def verifier(self, runner: Any) -> Any:
        """Returns a rejection sampler that accepts a draft if and only if the target samples it."""

    @abstractmethod
    def verifies(self, verifier: Any) -> bool:
        """Returns whether a runner's rejection sampler is one that `verifier` returns."""

    @abstractmethod
    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns the object that asks a speculator for drafts of a depth. Called before vLLM captures CUDA graphs."""

    @abstractmethod
    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Installs our budget of drafts in a runner before its KV cache is made.

        `settle` is called when it is known who chooses the drafts. A `reason` for the host may be known before.
        """

    @abstractmethod
    def chooses_on_device(self, runner: Any) -> bool:
        """Returns whether the device chooses the drafts of a runner's steps, within our budget."""

    def warm_up(self, runner: Any) -> None:
        """Launches the row sampler's kernels, so that none of them is compiled during a rollout."""
        if isinstance(runner.sampler, RowSampler):
            runner.sampler.warm_up(runner)
