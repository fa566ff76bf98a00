# SPDX-License-Identifier: Apache-2.0
"""Verification in vLLM's V2 model runner: which drafts a step verifies, and which of them are accepted.

vLLM's V2 runner samples by Gumbel-max with noise that is a function of (seed, position, token). So a draft is right if and
only if it is the token that the runner would have sampled without it. Source: Daliri, Musco, Suresh, arXiv 2408.07978.

Shapes: B requests of the batch, K draft positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.fx.experimental import _config
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.transfers import to_device
from nemo_specrollout.generation.step.row_sampling import RowSampler
from nemo_specrollout.generation.step.sampled_rows import Drafts, Drawn
from nemo_specrollout.sampling.equality import accept_by_equality

if compat.CHOOSES_ON_DEVICE:
    from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
else:  # `HostBudget` takes the place of this module's budget
    AdaptiveVerificationManager = object  # type: ignore[assignment, misc]

_compiler: Any = _config
_runner_module: Any = model_runner


class EqualityVerifier(rejection_sampler.RejectionSampler):
    """vLLM's rejection sampler with another rule: a draft is accepted if and only if the target samples it.

    With a `RowSampler`, rows are sampled, accepted and graded together. Else log-probs are vLLM's. A token's log-prob comes
    from the row that sampled it. Chunks of rows and counts of rejected drafts are vLLM's.
    """

    _drawn: Drawn | None = None
    """Results for the rows between vLLM's calls of `_verify` and `_get_logprobs_tensors`; None without `RowSampler`."""
    _num_logprobs = NO_LOGPROBS
    """Largest number of log-probs that a request of the step wants, as vLLM counts them."""
    _num_token_ids = 0
    """Largest number of `logprob_token_ids` of a request of the step."""
    _has_verified = False
    """True if vLLM has asked for our rule. A step of drafts must."""

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **options: Any) -> Any:
        """Verifies a step with drafts. Each chunk of its rows gets as many log-probs as any request wants."""
        self._num_logprobs = self.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        if self._num_logprobs > 0:
            self._num_token_ids = self.sampler.logprob_token_ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        output = super().__call__(logits, input_batch, *args, **options)
        _verify_asked(self._has_verified or not len(logits))
        return output

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[Any, Any, Any]:
        self._has_verified = True
        self._slots_R = expanded_idx_mapping
        sampler = self.sampler
        sampling = self.sampler.sampling_states
        num_positions = self.num_speculative_steps
        rows = (logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos)
        others = (expanded_local_pos, seq_lens_upper_bound_np)
        if isinstance(sampler, RowSampler) and self._num_logprobs <= 0:
            drafts = Drafts(verify_draft_sampled, cu_num_logits, num_positions)
            has_logprobs = self._num_logprobs != NO_LOGPROBS
            drawn = sampler.draw(*rows, lambda: draft_sampled, *others, has_logprobs=has_logprobs, drafts=drafts)
            self._drawn = drawn
            return logits, drawn.emitted_BK, drawn.counts_B
        self._drawn = None
        processed = sampler.apply_sampling_params(*rows, draft_sampled, *others)
        emitted_BK, counts_B = sample_and_compare(
            processed,
            draft_logits,
            verify_draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            sampling.temperature.gpu,
            sampling.seeds.gpu,
            num_positions,
            use_fp64=sampler.use_fp64_gumbel,
        )
        return processed, emitted_BK, counts_B

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if self._drawn is None:
            found = super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
            return found if found is None or not self._num_token_ids else self._of_asked_ids(logits, found)
        logprobs = self._drawn.logprobs
        self._drawn = None
        if logprobs is None or len(logits) == len(sampled):
            return logprobs
        if self.enable_adaptive_verification:  # then only the device knows where each request's rows begin
            return logprobs._replace(cu_num_generated_tokens_tensor=cu_num_logits)
        return logprobs._replace(cu_num_generated_tokens=cu_num_logits_np.tolist())

    def _of_asked_ids(self, logits: torch.Tensor, best: LogprobsTensors) -> LogprobsTensors:
        """Returns the log-probs of the ids that requests ask for, where vLLM's method takes the best ids."""
        starts = best.cu_num_generated_tokens_tensor
        return compute_topk_scores(
            logits,
            best.logprob_token_ids.shape[1] - 1,
            best.logprob_token_ids[:, 0],
            best.cu_num_generated_tokens if starts is None else starts,
            self.sampler.logprob_token_ids_state,
            self._slots_R,
            self._num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class SwappingVerifier(rejection_sampler.RejectionSampler):
    """Verification by equality before vLLM 0.32, which has no method for the rule of acceptance. Log-probs are vLLM's."""

    _has_verified = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Verifies a batch with vLLM's code and our rule. Other engines of this process keep vLLM's rule.

        Engines of one process must verify in the same thread.
        """
        vllm_rule = rejection_sampler.rejection_sample
        rejection_sampler.rejection_sample = self._compare
        try:
            output = super().__call__(*args, **kwargs)
        finally:
            rejection_sampler.rejection_sample = vllm_rule
        _verify_asked(self._has_verified)
        return output

    def _compare(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._has_verified = True
        return sample_and_compare(*args, **kwargs)


def _verify_asked(was_asked: bool) -> None:
    """Raises RuntimeError if vLLM has verified drafts without asking for our rule."""
    if not was_asked:
        raise RuntimeError(
            f"specrollout's verification is not in force: the rejection sampler of vLLM {compat.VLLM_VERSION} accepts "
            "drafts by a rule of its own"
        )


def sample_and_compare(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    use_fp64: bool = False,
    **_others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens emitted [B, K + 1] and their number [B]. Takes the arguments of vLLM's `rejection_sample`.

    Args:
        target_logits: Logits of all rows, after sampling parameters including temperature.
        draft_sampled: The token that each row's forward pass read; -1 for a draft that must not be accepted.
    """
    sampled = compat.draw(
        target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False, use_fp64=use_fp64
    )
    return accept_by_equality(sampled, draft_sampled, cu_num_logits, num_speculative_steps)


class VerificationBudget(AdaptiveVerificationManager):
    """vLLM's adaptive verification with our budget policy, and with step costs that are measured while the engine runs.

    vLLM schedules all draft rows of each request, then keeps the best drafts of the batch. The host chooses how many, from
    counts that are a step old. The device chooses which ones, from the latest rates. So nothing waits for the device.
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
        """Compiles vLLM's choice of the best drafts, which a step with a budget smaller than its drafts calls.

        torch.compile makes a variant for one request and for several, and for a budget of one draft and of several. It must
        not take sizes that happen to be equal for one size. So these calls serve all steps.
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
        """Yields nothing: costs are measured while the engine runs."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Ignores vLLM's cost curves, which our policy does not read."""

    def add_request(self, req_idx: int) -> None:
        """Sets the rates of a new request to zero, until drafts are proposed for it."""
        self._confidence_probs[req_idx].fill_(0.0)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Does nothing: the draft board has written the rates, and counted them for the host."""

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Returns the tokens of the step's forward pass, including drafts within the budget. Sets the step's budget."""
        num_drafts = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
        num_others = {name: num_tokens_per_req[name] - count for name, count in num_drafts.items()}
        # A chunk of logits may have fewer rows than there are requests. Then it has no room for any draft.
        room = max(0, self._max_total_logits - len(num_drafts) * self.num_bonus_tokens)
        most = min(sum(num_drafts.values()), room)
        budget = self._router.num_drafts(len(num_drafts), most)
        self._batch_budget = (num_drafts, num_others, budget)
        return sum(num_others.values()) + budget


def install_budget(runner: Any, router: DraftRouter, settle: Callable[[str | None], None], reason: str | None) -> None:
    """Makes `runner.initialize_kv_cache` put our budget in the place of vLLM's adaptive verification, if vLLM allows that.

    `settle` is called with None, or with the reason why the host must choose the drafts; a `reason` may be known before.
    vLLM makes a manager with each KV cache: one while it measures the memory of CUDA graphs, then the engine's.
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
    """Yields a list that receives what vLLM says against a choice on the device while it initializes a KV cache.

    vLLM would end the engine. Where its adaptive verification is off, because there are no CUDA graphs, vLLM does not ask its
    attention backends, so they are asked here.
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
        except ValueError as error:  # graphs that cannot replay steps of any number of drafts
            refusals.append(str(error))
            return None

    _runner_module.maybe_create_adaptive_verification_manager = ask
    try:
        yield refusals
    finally:
        _runner_module.maybe_create_adaptive_verification_manager = create


def _options_with_sharding(sharder: Any) -> dict[str, bool]:
    """Returns further arguments of vLLM's manager for a runner whose ranks share the sampling out; `sharder` may be None.

    Tells the sharder that the device decides the numbers of drafts. The manager then copies them to the host, for its plan.

    Raises RuntimeError for a vLLM that plans with other numbers (before 0.33).
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
