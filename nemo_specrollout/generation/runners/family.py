# SPDX-License-Identifier: Apache-2.0
"""The interface behind which families of vLLM's V2 model runners differ.

A family is a range of vLLM versions whose model runners are entered at the same places. What is the same everywhere stands
in the vLLM worker. A family that no supported version has any more goes with its file and its line in `installed.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.step.row_sampling import RowSampler

Settle = Callable[[str | None], None]
"""Is called with the reason why the host must choose the drafts of each step; None if the device does."""


class RunnerFamily(ABC):
    """What the vLLM worker does in its own way for a family of V2 model runners. Keeps no state of an engine."""

    row_sampler: type[RowSampler] = RowSampler
    """Class that samples, accepts and grades the rows of a step."""

    @abstractmethod
    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has all that exactness overrides or sets. vLLM would go on without a lost name."""

    def sampler(self, native: Any) -> Any:
        """Returns our row sampler, or vLLM's own sampler with an option that needs other kernels."""
        return self.row_sampler(native) if self.row_sampler.fits(native) else native

    def is_in_force(self, sampler: Any) -> bool:
        """Returns whether no sampler of vLLM's stands where our row sampler could."""
        return not self.row_sampler.fits(sampler)

    @abstractmethod
    def verifier(self, runner: Any) -> Any:
        """Returns a rejection sampler that accepts a draft if and only if the target samples it."""

    @abstractmethod
    def verifies(self, verifier: Any) -> bool:
        """Returns whether a runner's rejection sampler is one of `verifier`."""

    @abstractmethod
    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns how a runner's speculator is asked for drafts of a depth. Called before vLLM makes its CUDA graphs."""

    @abstractmethod
    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Puts our budget of drafts into a runner before its KV cache is made. A `reason` may be known before."""

    @abstractmethod
    def chooses_on_device(self, runner: Any) -> bool:
        """Returns whether the device chooses with our budget which drafts a runner's step verifies."""

    def warm_up(self, runner: Any) -> None:
        """Launches the row sampler's kernels, so that none of them is compiled in a rollout."""
        if isinstance(runner.sampler, RowSampler):
            runner.sampler.warm_up(runner)
