# SPDX-License-Identifier: Apache-2.0
"""Makes the device choose the drafts that an engine step verifies, while the host decides how many they are.

This needs vLLM 0.32 or later.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.fx.experimental import _config
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.transfers import to_device

_compiler: Any = _config
_runner_module: Any = model_runner


class VerificationBudget(AdaptiveVerificationManager):
    """vLLM's adaptive verification, with the number of drafts that this package's `SpeculationPolicy` decides.

    vLLM schedules all draft rows of each request, and then keeps the best drafts of the batch. The host decides how many
    drafts are kept, from counts that are one engine step old. The device decides which drafts these are, from the latest
    acceptance rates. So neither of them waits for the other.
    """

    def __init__(self, runner: Any, router: DraftRouter) -> None:
        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            rejection_sampler.get_max_chunk_logits(runner.vocab_size),
            **_options_with_sharding(getattr(runner, "batch_sharder", None)),
        )
        self._router = router
        self._confidence_probs = router.board.tables.rates_SK

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles vLLM's function that chooses the best drafts, so that it is not compiled in an engine step.

        torch.compile makes separate variants for one and for several requests, and for keeping one draft and several drafts.
        This method calls the function once for each variant. Some sizes happen to be equal in these calls. So torch.compile is
        told not to assume that these sizes are always equal.
        """
        device = self._confidence_probs.device
        width = self.num_speculative_steps
        for num_requests in {1, min(3, self.req_states.max_num_reqs)}:
            names = [str(b) for b in range(num_requests)]
            slots_B = to_device(range(num_requests), np.int64, device)
            for budget in range(1, min(3, num_requests * width)):
                self._batch_budget = (dict.fromkeys(names, width), dict.fromkeys(names, self.num_bonus_tokens), budget)
                with _compiler.patch(use_duck_shape=False):
                    self.reallocate_drafts(names, slots_B)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Yields nothing, because costs are measured while the engine runs."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Ignores the costs that vLLM has measured, because the `SpeculationPolicy` does not use them."""

    def add_request(self, req_idx: int) -> None:
        """Sets the acceptance rates of a new request to zero, until drafts are proposed for it."""
        self._confidence_probs[req_idx].fill_(0.0)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Does nothing, because the draft board has already written the acceptance rates and counted them for the host."""

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Decides how many drafts an engine step verifies. Returns the number of tokens in its forward pass.

        The forward pass reads the verified drafts and all other scheduled tokens.
        """
        num_drafts = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
        num_others = {name: num_tokens_per_req[name] - count for name, count in num_drafts.items()}
        # A chunk of logits may have fewer rows than there are requests. Then there is no room for drafts.
        room = max(0, self._max_total_logits - len(num_drafts) * self.num_bonus_tokens)
        most = min(sum(num_drafts.values()), room)
        budget = self._router.num_drafts(len(num_drafts), most)
        self._batch_budget = (num_drafts, num_others, budget)
        return sum(num_others.values()) + budget


def install_budget(runner: Any, router: DraftRouter, settle: Callable[[str | None], None], reason: str | None) -> None:
    """Makes `runner.initialize_kv_cache` replace vLLM's adaptive verification by a `VerificationBudget`, if vLLM allows that.

    `settle` is then called with None, or with the reason why the host must choose the drafts. `reason` is such a reason if
    one is known already, and None otherwise. All of this happens for each KV cache that vLLM makes. The first KV cache only
    serves to measure the memory of CUDA graphs, and the second one is the engine's.
    """
    initialize_kv_cache = runner.initialize_kv_cache

    def initialize_with_budget(*args: Any, **options: Any) -> None:
        with _questions_to_vllm() as refusals:
            initialize_kv_cache(*args, **options)
        found = reason or next(iter(refusals), None)
        runner.adaptive_verification = None if found else VerificationBudget(runner, router)
        runner.rejection_sampler.enable_adaptive_verification = found is None
        settle(found)

    runner.initialize_kv_cache = initialize_with_budget


@contextmanager
def _questions_to_vllm() -> Iterator[list[str]]:
    """Collects vLLM's reasons against letting the device choose the drafts, while vLLM makes a KV cache in this context.

    Yields the list of reasons, which is filled during the context. Without the context, such a reason would end the engine.
    Without CUDA graphs, vLLM does not ask whether its attention backends allow this. So the context asks them itself.
    """
    create = _runner_module.maybe_create_adaptive_verification_manager
    refusals = list[str]()

    def ask(**options: Any) -> Any:
        unfit = get_query_lens_mismatch_unsupported_backend(options["attn_groups"], options["target_layer_names"])
        if unfit is not None:
            refusals.append(f"the attention backend {unfit} plans a step by numbers of drafts on the host")
            return None
        try:
            return create(**options)
        except ValueError as error:  # the CUDA graphs cannot replay engine steps with any number of drafts
            refusals.append(str(error))
            return None

    _runner_module.maybe_create_adaptive_verification_manager = ask
    try:
        yield refusals
    finally:
        _runner_module.maybe_create_adaptive_verification_manager = create


def _options_with_sharding(sharder: Any) -> dict[str, bool]:
    """Returns further arguments of vLLM's adaptive verification, for ranks that divide the sampling among themselves.

    `sharder` is vLLM's object that divides the sampling. If it is None, the result is empty. Otherwise the argument makes vLLM
    copy the number of each request's drafts, which the device has decided, to the host for the sharder. This function also
    tells the sharder to expect these numbers. Raises RuntimeError for a vLLM before 0.33, whose sharder uses other numbers.
    """
    if sharder is None:
        return {}
    if not compat.takes(AdaptiveVerificationManager.__init__, "copy_admitted_drafts_to_host"):
        raise RuntimeError(
            f"vllm_kwargs.enable_batch_sharded_sampling: true; vLLM {compat.VLLM_VERSION} shards by other numbers of drafts "
            "than a step verifies: remove it, or use vLLM 0.33 or later"
        )
    sharder.adaptive_verification_enabled = True
    return {"copy_admitted_drafts_to_host": True}
