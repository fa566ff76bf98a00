# SPDX-License-Identifier: Apache-2.0
"""The interface to families of vLLM's V2 model runners.

A family is a range of vLLM versions whose model runners are extended at the same places. Code that all families share is in
the vLLM worker. When no supported version of vLLM belongs to a family any more, remove the family's file and its line in
`installed.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.step.row_sampling import RowSampler

Settle = Callable[[str | None], None]
"""Callback that gets the reason why the host must choose the drafts that are verified, or None if the device chooses them."""


class RunnerFamily(ABC):
    """The part of the vLLM worker that differs between families of V2 model runners. An object keeps no state of an engine."""

    row_sampler: type[RowSampler] = RowSampler
    """Class that samples the rows of an engine step, accepts drafts and computes log-probs."""

    @abstractmethod
    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has all names that this package must override or set so that drafts change no token.

        If a version of vLLM has renamed a method, this package's override of the old name would silently have no effect.
        """

    def sampler(self, native: Any) -> Any:
        """Returns the row sampler that replaces vLLM's sampler `native`, or `native` if an option needs vLLM's kernels."""
        return self.row_sampler(native) if self.row_sampler.fits(native) else native

    def is_in_force(self, sampler: Any) -> bool:
        """Returns whether a runner's sampler is a row sampler, or one that the row sampler cannot replace."""
        return not self.row_sampler.fits(sampler)

    @abstractmethod
    def verifier(self, runner: Any) -> Any:
        """Returns a rejection sampler that accepts a draft if and only if the policy samples the same token."""

    @abstractmethod
    def verifies(self, verifier: Any) -> bool:
        """Returns whether a runner's rejection sampler is this package's, as the method `verifier` returns it."""

    @abstractmethod
    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns an object that asks a speculator for any number of drafts. Call it before vLLM captures CUDA graphs."""

    @abstractmethod
    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Makes a model runner verify as many drafts as the `SpeculationPolicy` decides. Call it before the KV cache is made.

        Either the host or the device chooses which drafts are verified. `settle` is called as soon as this is known. `reason`
        says why the host must choose them, or is None if no such reason is known yet.
        """

    @abstractmethod
    def chooses_on_device(self, runner: Any) -> bool:
        """Returns whether the device chooses which drafts an engine step verifies. The host still decides their number."""

    def warm_up(self, runner: Any) -> None:
        """Launches the kernels of the row sampler once, so that none of them is compiled during a rollout."""
        if isinstance(runner.sampler, RowSampler):
            runner.sampler.warm_up(runner)
