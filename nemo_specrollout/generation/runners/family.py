# SPDX-License-Identifier: Apache-2.0
"""The interface to families of vLLM's V2 model runners.

A family is a range of vLLM versions whose model runners are extended at the same places. What is the same for all families is
in the vLLM worker. When no supported version of vLLM belongs to a family any more, remove the family's file and its line in
`installed.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.step.row_sampling import RowSampler

Settle = Callable[[str | None], None]
"""Callback that receives the reason why the host must choose the drafts of each engine step, or None if the device does."""


class RunnerFamily(ABC):
    """The parts of the vLLM worker that differ between families of V2 model runners. An object keeps no state of an engine."""

    row_sampler: type[RowSampler] = RowSampler
    """Class that samples the rows of an engine step, accepts drafts and computes log-probs."""

    @abstractmethod
    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has all names that we override or set for exactness.

        Without the check, vLLM would silently ignore an override whose name it no longer has.
        """

    def sampler(self, native: Any) -> Any:
        """Returns our row sampler in the place of vLLM's sampler `native`, or `native` if an option needs vLLM's kernels."""
        return self.row_sampler(native) if self.row_sampler.fits(native) else native

    def is_in_force(self, sampler: Any) -> bool:
        """Returns whether a runner's sampler is our row sampler, or one that our row sampler cannot replace."""
        return not self.row_sampler.fits(sampler)

    @abstractmethod
    def verifier(self, runner: Any) -> Any:
        """Returns a rejection sampler that accepts a draft if and only if the policy samples the same token."""

    @abstractmethod
    def verifies(self, verifier: Any) -> bool:
        """Returns whether a runner's rejection sampler is one that the method `verifier` returns."""

    @abstractmethod
    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns the object that asks a speculator for drafts of a depth. Call it before vLLM captures CUDA graphs."""

    @abstractmethod
    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Installs our budget of drafts in a runner. Call it before the runner's KV cache is made.

        `settle` is called as soon as it is known whether the host or the device chooses the drafts. `reason` is the reason for
        the host, if one is known already.
        """

    @abstractmethod
    def chooses_on_device(self, runner: Any) -> bool:
        """Returns whether the device chooses the drafts of a runner's engine steps, within our budget."""

    def warm_up(self, runner: Any) -> None:
        """Launches the row sampler's kernels, so that none of them is compiled during a rollout."""
        if isinstance(runner.sampler, RowSampler):
            runner.sampler.warm_up(runner)
