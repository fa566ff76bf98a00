# SPDX-License-Identifier: Apache-2.0
"""The family of vLLM's model runners since 0.32, where the device chooses which drafts an engine step verifies."""

from typing import Any

from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.runners.family import RunnerFamily, Settle
from nemo_specrollout.generation.runners.graphed_depth import GraphedDepth
from nemo_specrollout.generation.step.verification import EqualityVerifier
from nemo_specrollout.generation.step.verification_budget import VerificationBudget, install_budget


class Since032(RunnerFamily):
    """Extends vLLM's sampler, its rejection sampler, and its adaptive verification."""

    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has the methods and attributes that this package's classes override or read."""
        compat.require(
            rejection_sampler.RejectionSampler, ["_verify", "_get_logprobs_tensors"], "the rejection sampler"
        )
        compat.require(Sampler, ["add_request", "apply_sampling_params", "get_logprobs_dims"], "the sampler")
        compat.require(SamplingStates, ["add_request", "max_num_logprobs"], "the sampling state")

    def verifier(self, runner: Any) -> EqualityVerifier:
        """Returns this package's extension of vLLM's rejection sampler."""
        return EqualityVerifier(runner.sampler, runner.speculative_config, runner.device)

    def verifies(self, verifier: Any) -> bool:
        """Returns whether the runner's rejection sampler `verifier` is an `EqualityVerifier`."""
        return isinstance(verifier, EqualityVerifier)

    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns an object that passes the number of drafts (the depth) to vLLM's `propose`.

        If one CUDA graph of vLLM holds all positions of the speculator, the object captures additional graphs for smaller
        depths.
        """
        is_looping = hasattr(speculator, "_generate_fused_drafts")
        return GraphedDepth(speculator) if is_looping else DraftDepth(speculator)

    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Lets the device choose which drafts are verified, unless vLLM objects.

        Whether vLLM objects may be known only when the KV cache is made.
        """
        install_budget(runner, router, settle, reason)

    def chooses_on_device(self, runner: Any) -> bool:
        """Returns whether the runner's adaptive verification is this package's `VerificationBudget`."""
        return isinstance(runner.adaptive_verification, VerificationBudget)

    def warm_up(self, runner: Any) -> None:
        """Launches the kernels of the row sampler, and compiles the function by which the device chooses drafts."""
        super().warm_up(runner)
        if self.chooses_on_device(runner):
            runner.adaptive_verification.warm_up()
