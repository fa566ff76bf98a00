# SPDX-License-Identifier: Apache-2.0
"""The worker of a drafter's engine: ours, and it lets mirrors be corrected, and grades the evidence of what it samples."""

from typing import Any

from nemo_specrollout.decoupled.mirrors import Burst
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.mirror_sampler import MirrorSampler
from nemo_specrollout.generation.worker import SpecrolloutCPUWorker, SpecrolloutGPUWorker


class MirrorWorkerMixin:
    """What `MirrorScheduler` has to tell its workers, and they it."""

    model_runner: Any
    sampler_cls: Any = MirrorSampler
    specrollout_sampler: Any

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; mirrors get their corrected texts first."""
        for req_id, (num_outputs, tokens) in scheduler_output.specrollout_corrections.items():
            compat.replace_output(self.model_runner, req_id, num_outputs, tokens)
        may_burst = compat.DecodePasses.is_possible(self.model_runner)
        self.specrollout_sampler.burst = scheduler_output.specrollout_burst if may_burst else Burst()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; with the evidence level of each token."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if output is not None:
            output.specrollout_levels = self.specrollout_sampler.levels_BN
        return output


class MirrorCPUWorker(MirrorWorkerMixin, SpecrolloutCPUWorker):
    """On a CPU."""


class MirrorGPUWorker(MirrorWorkerMixin, SpecrolloutGPUWorker):
    """On a GPU, V1 model runner."""
