# SPDX-License-Identifier: Apache-2.0
"""The family of vLLM's model runners before 0.32, where the host chooses which drafts an engine step verifies.

These are the runners of vLLM 0.25.1 to 0.31, among them the versions that NeMo-RL pins. Text drafters also need changes in
processes that have no runner (`engine/text_method.py`).
"""

import inspect
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample import bad_words
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation.drafting.draft_depth import DraftDepth
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.runners.family import RunnerFamily, Settle
from nemo_specrollout.generation.runners.older_depth import older_depth
from nemo_specrollout.generation.runners.older_recurrent import read_reached_states
from nemo_specrollout.generation.runners.older_rows import OlderRowSampler
from nemo_specrollout.generation.step.equality_rule import sample_and_compare, verify_asked


class Before032(RunnerFamily):
    """Extends vLLM's sampler and rejection sampler, and corrects faults that these versions of vLLM have with drafts."""

    row_sampler = OlderRowSampler

    def verify_names(self) -> None:
        """Raises RuntimeError unless vLLM has its acceptance rule in the place where `SwappingVerifier` replaces it."""
        compat.require(rejection_sampler, ["rejection_sample"], rejection_sampler.__name__)

    def verifier(self, runner: Any) -> Any:
        """Returns this package's extension of vLLM's rejection sampler.

        It also corrects two faults of vLLM, in the checks for bad words and in recurrent layers.
        """
        _fix_bad_words(runner.sampler)
        read_reached_states(runner)
        return _verifier_class()(runner.sampler, runner.speculative_config, runner.device)

    def verifies(self, verifier: Any) -> bool:
        """Returns whether the runner's rejection sampler is this package's, as the method `verifier` returns it."""
        return isinstance(verifier, _verifier_class())

    def draft_depth(self, speculator: Any) -> DraftDepth:
        """Returns an object that makes a speculator draft a given number of tokens. vLLM's own `propose` takes no number."""
        return older_depth(speculator)

    def install_budget(self, runner: Any, router: DraftRouter, settle: Settle, reason: str | None) -> None:
        """Lets the host choose the drafts that are verified, by calling `settle` with `reason`.

        `reason` says why the host must choose them. With these versions of vLLM it is never None.
        """
        settle(reason)

    def chooses_on_device(self, runner: Any) -> bool:
        """Returns False, because these runners need to know on the host how many rows an engine step has."""
        return False


def _verifier_class() -> type[Any]:
    """Returns this package's class of rejection sampler for the installed vLLM.

    It is `EqualityVerifier` from vLLM 0.28 on, whose rejection sampler has a method for the acceptance rule that can be
    overridden. For older versions it is `SwappingVerifier`.
    """
    if not hasattr(rejection_sampler.RejectionSampler, "_verify"):
        return SwappingVerifier
    from nemo_specrollout.generation.step.verification import EqualityVerifier

    return EqualityVerifier


class SwappingVerifier(rejection_sampler.RejectionSampler):
    """A rejection sampler that accepts a draft if and only if the policy samples the same token, for vLLM before 0.28.

    These versions have no method for the acceptance rule. So during each call, vLLM's function for the rule is replaced. With
    an `OlderRowSampler`, the same kernels sample the rows, accept drafts and compute log-probs. Otherwise vLLM computes the
    log-probs.
    """

    _has_verified = False
    _slots_B: np.ndarray
    """Request slots of the engine step whose drafts are being verified."""

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verifies the drafts of a batch by this package's acceptance rule. Other engines of the process keep vLLM's rule.

        All engines of a process must verify in the same thread.
        """
        sampler = self.sampler
        if isinstance(sampler, OlderRowSampler):
            dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np, include_token_ids=False)
            if dims in (None, (0, 0)):
                return sampler.verify(logits, input_batch, self.num_speculative_steps, dims is not None)
            self._slots_B = input_batch.idx_mapping_np
        vllm_rule = rejection_sampler.rejection_sample
        rejection_sampler.rejection_sample = self._compare
        try:
            output = super().__call__(logits, input_batch, *args, **kwargs)
        finally:
            rejection_sampler.rejection_sample = vllm_rule
        verify_asked(self._has_verified)
        return output

    def _compare(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._has_verified = True
        if isinstance(self.sampler, OlderRowSampler):
            given = inspect.signature(sample_and_compare).bind(*args, **kwargs).arguments
            rows = (given["expanded_idx_mapping"], self._slots_B, given["pos"])
            self.sampler.keep_ties(given["target_logits"], *rows)
        return sample_and_compare(*args, **kwargs)


def _fix_bad_words(sampler: Any) -> None:
    """Makes vLLM's check for bad words look at the draft that comes right before a row.

    In vLLM 0.25, the check looks at the token before that draft instead. Raises RuntimeError if this vLLM implements bad words
    in another place.
    """
    if "spec_offset + 1" in inspect.getsource(bad_words):
        return
    compat.require(sampler, ["bad_words_state"], "the sampler")
    state = sampler.bad_words_state
    compat.require(state, ["apply_bad_words"], "the state of bad words")
    apply = state.apply_bad_words

    def apply_to_next(logits: Any, rows: Any, slots_np: Any, input_ids: torch.Tensor, local_pos: Any) -> None:
        apply(logits, rows, slots_np, input_ids.roll(-1), local_pos)

    state.apply_bad_words = apply_to_next
