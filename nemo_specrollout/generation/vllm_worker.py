# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker. It extends vLLM's V2 model runner by drafting, telemetry, and sampling that drafts cannot change.

Most changes are made to the worker's model runner. It seeds each request, accepts a draft only if the policy samples the same
token, and gets its drafts from the draft router instead of vLLM's speculator. Three changes affect the whole process:

- Top-p gives the same result for a row in batches of all sizes (`compat.make_top_p_independent_of_batch`).
- Before vLLM 0.32, drafters without weights are allowed (`text_method.allow_text_drafters`).
- Before vLLM 0.28, vLLM's acceptance rule is replaced while a batch is verified (`before_0_32.SwappingVerifier`).

Code that differs between families of vLLM's model runners is in `generation/runners`.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from vllm.distributed.parallel_state import get_pp_group

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import as_key
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.arguments import HOST_CHOOSES
from nemo_specrollout.generation.engine.identity import identity_of_unchecked, resolve_identity
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.engine.text_method import allow_text_drafters
from nemo_specrollout.generation.engine.transfers import is_output_rank
from nemo_specrollout.generation.kept import Kept
from nemo_specrollout.generation.runners.installed import RUNNERS
from nemo_specrollout.generation.step.host_budget import HostBudget
from nemo_specrollout.generation.step.near_ties import NearTies
from nemo_specrollout.generation.step.row_sampling import RowSampler
from nemo_specrollout.generation.step.step_accounts import StepAccounts
from nemo_specrollout.generation.warm_start import Learning
from nemo_specrollout.heads.serving.feature_capture import FeatureCapture
from nemo_specrollout.heads.serving.head_loading import accept_published_heads, own_lm_head, policy_teachers
from nemo_specrollout.heads.serving.head_monitor import HeadMonitor
from nemo_specrollout.remote.verifier.draft_stream import RemoteDrafter
from nemo_specrollout.sampling.platforms import native_worker
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog, StepEnd

logger = logging.getLogger(__name__)
_NativeWorker: Any = native_worker(compat.device_type())


class VllmWorkerMixin(WorkerCalls):
    """Extends a vLLM worker. Before the engine may serve, it checks that nothing has replaced these extensions.

    The worker goes through four states in this order:

    1. It is created.
    2. Its models are loaded. This package allocates all of its memory now, so that vLLM's memory profile includes it.
    3. Its KV cache is ready. From now on this package samples, verifies and drafts.
    4. It is warmed up. From now on each request must have an identity (`RequestIdentity`).
    """

    model_runner: Any
    vllm_config: Any
    specrollout_config: SpecrolloutConfig
    specrollout_accounts: StepAccounts
    specrollout_router: DraftRouter | None = None
    """Runs all drafters of the engine. None if the engine has no drafters."""
    specrollout_samples: SampleStatsLog
    """Log of the policy versions that sampled each request, and of how many of its drafts were accepted."""
    specrollout_host_budget: HostBudget | None = None
    """Chooses on the host which drafts an engine step verifies. None if vLLM chooses them on the device."""
    specrollout_host_chooses: str | None = None
    """Reason why the host chooses the drafts that are verified, or None if the device does."""
    specrollout_ties: NearTies | None = None
    """Near-ties of early requests. None if the block does not run ahead, and on ranks other than the output rank."""
    specrollout_kept = Kept()
    """Writes files for later starts and other engines. It writes none without drafters or before the warm-up is over."""
    specrollout_policy_version = 0

    # Methods of vLLM's worker for its life cycle.

    def init_device(self) -> None:
        """Lets vLLM build its model runner. Raises RuntimeError if it is V1's, or lacks what this package relies on."""
        allow_text_drafters()
        compat.verify_runner_choice(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        compat.verify_model_runner(self.model_runner)
        RUNNERS.verify_names()
        compat.make_top_p_independent_of_batch()
        self.specrollout_config = build(
            SpecrolloutConfig, self.vllm_config.additional_config["specrollout"], BLOCK_PATH
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Lets vLLM load its models, and then adds this package's verification and drafting to the model runner."""
        accept_published_heads()
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner = self.model_runner
        config = self.specrollout_config
        runner.sampler = RUNNERS.sampler(runner.sampler)
        if config.runs_ahead and isinstance(runner.sampler, RowSampler) and is_output_rank():
            self.specrollout_ties = NearTies(runner.max_num_reqs, runner.max_model_len, runner.device)
            runner.sampler.near_ties = self.specrollout_ties
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = RUNNERS.verifier(runner)
        if runner.speculator is not None and config.drafters:
            if config.head is not None:
                own_lm_head(runner.model, runner.speculator.model)
            self.specrollout_router = DraftRouter(config, runner, RUNNERS.draft_depth)
            reason = self.vllm_config.additional_config.get(HOST_CHOOSES)
            RUNNERS.install_budget(runner, self.specrollout_router, self._settle_budget, reason)
        self.specrollout_accounts = StepAccounts(runner, self.specrollout_router)
        self.specrollout_samples = self._sample_stats_log()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Lets vLLM allocate the KV cache. Raises RuntimeError unless this package will sample, verify and draft."""
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        self._verify_in_force()

    def compile_or_warm_up_model(self) -> Any:
        """Warms up this package's kernels and then vLLM's. From then on, the worker follows every request.

        vLLM reports everything that is compiled after its own warm-up, so ours comes first. Ray's executor calls the model
        runner directly, and not through the worker. Therefore methods of the runner are replaced here.
        """
        runner = self.model_runner
        router = self.specrollout_router
        RUNNERS.warm_up(runner)
        if router is not None:
            router.warm_up()
            router.stands_by = True
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if router is not None:
            router.stands_by = False
            budget = self.specrollout_host_budget
            learning = Learning(router, self.specrollout_accounts, None if budget is None else budget.foresight)
            self.specrollout_kept = Kept.begun(self.specrollout_config, runner, learning)
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        runner.execute_model = self._execute_step
        runner.sample_tokens = self._sample_step
        return times

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Releases the memory of the features captured for a draft head, and then lets vLLM put the worker to sleep."""
        if self._capture is not None:
            self._capture.release()
        super().sleep(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Waits until all responses of the history are written, and then lets vLLM end the worker."""
        self.specrollout_kept.close()
        super().shutdown()  # type: ignore[misc]

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Wakes up vLLM's worker and then the drafters. The canary begins anew, because the head's weights may be reloaded."""
        super().wake_up(*args, **kwargs)  # type: ignore[misc]
        if self.specrollout_router is not None:
            self.specrollout_router.woke_up()

    def _settle_budget(self, reason: str | None) -> None:
        """Lets the host choose the drafts that are verified if there is a `reason`. Otherwise the device chooses them."""
        if reason and reason != self.specrollout_host_chooses:
            logger.warning("specrollout: the host chooses the drafts of each step: %s", reason)
        self.specrollout_host_chooses = reason
        self.specrollout_host_budget = HostBudget(self.model_runner, self.specrollout_router) if reason else None

    def _verify_in_force(self) -> None:
        """Raises RuntimeError unless this package will sample, verify and draft in this engine."""
        runner = self.model_runner
        router = self.specrollout_router
        config = self.specrollout_config
        compat.verify_top_p()
        if not RUNNERS.is_in_force(runner.sampler):
            raise RuntimeError("specrollout's sampling is not in force: something replaced the sampler")
        if runner.rejection_sampler is not None and not RUNNERS.verifies(runner.rejection_sampler):
            raise RuntimeError("specrollout's verification is not in force: something replaced the rejection sampler")
        should_draft = config.most_drafts and config.drafters and get_pp_group().is_last_rank
        proposer = getattr(getattr(runner.speculator, "propose", None), "__self__", None)
        if should_draft and (router is None or proposer is not router):
            raise RuntimeError(
                "specrollout's drafting is not in force: speculative_config must be what "
                "nemo_specrollout.generation.engine.arguments.with_specrollout makes of the block"
            )
        if router is not None and RUNNERS.chooses_on_device(runner) == (self.specrollout_host_budget is not None):
            raise RuntimeError("specrollout's budget is not in force: something replaced the adaptive verification")

    def _sample_stats_log(self) -> SampleStatsLog:
        """Returns the draft router's log of samples. Without a draft router it is a new log, whose draft counts stay zero."""
        if self.specrollout_router is not None:
            return self.specrollout_router.samples
        zeros_S2 = torch.zeros(self.model_runner.max_num_reqs, 2, dtype=torch.int32)
        return SampleStatsLog(zeros_S2, begins_again=self.specrollout_config.runs_ahead)

    @property
    def _lengths_S(self) -> torch.Tensor:
        """Number of tokens of the request in each slot, int32, on the device."""
        lengths_S: torch.Tensor = self.model_runner.req_states.total_len.gpu
        return lengths_S

    def _next_positions(self) -> list[int]:
        """Returns the position of the next token to be sampled in each request slot, counted from the start of the prompt.

        If a request is decoding, this position is the length of its text. While its prompt is being read in chunks, the
        position is one more than the number of tokens that have been read.
        """
        states = self.model_runner.req_states
        num_read_S = states.num_computed_prefill_tokens
        is_reading_S = num_read_S < states.prefill_len.np
        next_S: list[int] = np.where(is_reading_S, num_read_S + 1, self._lengths_S.cpu().numpy()).tolist()
        return next_S

    # Methods of vLLM's model runner for engine steps.

    def _execute_step(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        """Wraps the runner's `execute_model`. Seeds new requests, limits drafts, and notes which requests begin and end."""
        if options.get("dummy_run"):
            return self._execute_model(scheduler_output, *args, **options)
        identities = [self._set_seed(new) for new in scheduler_output.scheduled_new_reqs]
        if not scheduler_output.scheduled_cached_reqs.req_ids:  # no request of an earlier step goes on
            self.specrollout_accounts.trace.begin_after_idle()
        self._close_leaving(scheduler_output)
        if self.specrollout_host_budget is not None:
            scheduler_output = self.specrollout_host_budget.trimmed(scheduler_output)
        output = self._execute_model(scheduler_output, *args, **options)
        self._open_new(scheduler_output, identities)
        return output

    def _close_leaving(self, scheduler_output: Any) -> None:
        """Ends the records and the drafting of requests that leave their slots now, before new requests take these slots."""
        leaving = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        if not leaving:
            return
        slot_of = self.model_runner.req_states.req_id_to_index
        slots = [slot_of[name] for name in sorted(leaving) if name in slot_of]
        if not slots:
            return
        if self.specrollout_router is not None:
            finished = scheduler_output.finished_req_ids
            self.specrollout_router.ended([slot_of[name] for name in sorted(finished) if name in slot_of])
        self.specrollout_samples.close(slots)
        if self.specrollout_ties is not None:
            self.specrollout_ties.close(slots, self._lengths_S)
        if self.specrollout_router is not None:
            self.specrollout_router.close(slots)

    def _open_new(self, scheduler_output: Any, identities: Sequence[RequestIdentity]) -> None:
        """Starts the records and the drafting of new requests, which vLLM's `execute_model` has just put into slots."""
        if not identities:
            return
        slot_of = self.model_runner.req_states.req_id_to_index
        longest = self.model_runner.max_model_len
        new_requests = zip(scheduler_output.scheduled_new_reqs, identities, strict=True)
        opened = [NewRequest.from_vllm(new, who, slot_of[new.req_id], longest) for new, who in new_requests]
        if self.specrollout_router is not None:
            self.specrollout_router.open(opened)
        if self.specrollout_host_budget is not None:
            self.specrollout_host_budget.opened(opened)
        if self.specrollout_ties is not None:
            self.specrollout_ties.open(opened)
        for request in opened:
            if not request.identity.is_early:
                self.specrollout_samples.open(
                    request.slot, request.identity.seed, request.prompt_length, request.num_tokens
                )

    def _sample_step(self, grammar_output: Any) -> Any:
        """Wraps the runner's `sample_tokens`, which samples the tokens of an engine step and then drafts for the next one."""
        state = self.model_runner.execute_model_state
        if state is None:
            return self._sample_tokens(grammar_output)
        batch = state.input_batch
        router = self.specrollout_router
        self.specrollout_accounts.begin_step(batch)
        if router is not None and router.can_skip(batch, getattr(state, "num_spec_tokens_to_schedule", None)):
            output = self._sample_without_speculator(grammar_output)
            router.skip(batch)
        else:
            output = self._sample_tokens(grammar_output)
            if self.specrollout_host_budget is not None:
                self.specrollout_host_budget.record()
        self.specrollout_accounts.end_step()
        return output if router is None else router.end_step(batch, output)

    def _sample_without_speculator(self, grammar_output: Any) -> Any:
        """Runs `sample_tokens` as if there were no speculator, for an engine step that has no drafts and makes none.

        With a speculator, vLLM would overwrite the drafts of the whole batch, although no engine step reads them.
        """
        runner = self.model_runner
        speculator = runner.speculator
        runner.speculator = None
        try:
            return self._sample_tokens(grammar_output)
        finally:
            runner.speculator = speculator

    def _set_seed(self, new: Any) -> RequestIdentity:
        """Puts the seed of a new request's identity into a copy of the request's sampling parameters. Returns the identity.

        Bad requests are normally refused before they get here (`admission.py`). If one arrives nevertheless, an error must not
        end the engine, because all of its other requests would be lost. So the request is decoded without drafts, and an error
        is logged.
        """
        try:
            prompt = new.prompt_token_ids or []  # there are none if the prompt consists of embeddings
            identity = resolve_identity(new.sampling_params, prompt, self.vllm_config.model_config.seed)
        except ValueError as error:
            logger.error("specrollout: request %s is decoded without drafts: %s", new.req_id, error)
            identity = identity_of_unchecked(new.req_id)
        new.sampling_params = copy.copy(new.sampling_params)
        new.sampling_params.seed = identity.seed
        return identity

    # Remote calls, whose contracts are in `WorkerCalls`. Replies are plain values.

    def specrollout_totals(self) -> dict[str, Any] | None:
        """Returns `EngineTotals` as a dict, or None on ranks other than the output rank."""
        return asdict(self.specrollout_accounts.totals()) if is_output_rank() else None

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """Ends a training step. Returns `StepEnd` as a dict, or None on ranks other than the output rank.

        `StepEnd` has the statistics of the requests with these `seeds`, or of all requests that have ended if `seeds` is None.
        """
        if not is_output_rank():
            return None
        router = self.specrollout_router
        self.specrollout_keep_learned()
        alarms = self.specrollout_take_alarms()
        found = list(self.specrollout_samples.take(seeds).items())
        kept = self.specrollout_kept
        end = StepEnd(alarms, found, self.specrollout_policy_version, began=kept.take_began(), history=kept.facts())
        if router is not None and router.model is not None:
            dormant = router.model.is_dormant
            end = replace(end, head_version=self.specrollout_samples.head_version, head_is_dormant=dormant)
        return asdict(end)

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """Returns `SampleStats` as a dict for each seed, or None where the engine has none. Forgets what it returns."""
        found = self.specrollout_samples.take(seeds)
        return [asdict(found[seed]) if seed in found else None for seed in seeds]

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms of the draft head's canary, and the problems with kept files, since the last call."""
        return ([] if self._monitor is None else self._monitor.take_alarms()) + self.specrollout_kept.take_alarms()

    def specrollout_keep_learned(self) -> None:
        """Writes what the engine has learned to files, for engines that start later. Call it while no request runs."""
        self.specrollout_kept.keep()

    def specrollout_weights_updated(self, seconds: float) -> None:
        """Counts an update of the engine's weights, which kept the engine from making engine steps for `seconds`."""
        self.specrollout_accounts.num_weight_updates += 1
        self.specrollout_accounts.trace.stood_still(seconds)
        self.specrollout_policy_is(self.specrollout_policy_version + 1)
        if self._monitor is not None:
            self._monitor.began("refit")

    def specrollout_policy_is(self, version: int) -> None:
        """Sets the policy version of the engine's weights. Each update of the weights adds 1 to it."""
        self.specrollout_policy_version = version
        if self.specrollout_samples.policy_version != version:
            self.specrollout_samples.policy_updated(version, self._next_positions())
            if self.specrollout_router is not None:
                self.specrollout_router.policy_updated(version)

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """Loads the draft head in `folder`. Its canary begins with the acceptance length `expected_length`, if it is known."""
        router = self.specrollout_router
        if router is None or router.head is None or router.monitor is None:
            raise ValueError("this engine was started without a head: name a drafter of type eagle3")
        router.head.load(Path(folder), self.specrollout_policy_version if head_version is None else head_version)
        self.specrollout_kept.loaded_head(Path(folder))
        router.monitor.began("publish", expected_length=expected_length, num_positions=num_positions)

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Writes captured features to a feature store. Returns None, or the text of an error.

        The error is not raised, because a full disk must not stop an engine. `place` has the arguments of
        `FeatureCapture.store`. No other engine may write to the same place.
        """
        try:
            if self._capture is not None:
                self._capture.store(**place)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`. Returns None, or the text of an error.

        It must be called on all tensor-parallel ranks.
        """
        try:
            tensors = policy_teachers(self.model_runner)
            if is_output_rank():
                write_atomically(Path(file), safetensors_bytes(tensors))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_take_ties(self, names: list[int]) -> dict[int, tuple[int, bytes, bytes]] | None:
        """Returns `Ties.packed` of each of these early requests, by name, without near-ties that were returned before."""
        if not is_output_rank():
            return None
        ties = self.specrollout_ties
        found = {} if ties is None else ties.take(names, self._lengths_S)
        return {name: one.packed() for name, one in found.items()}

    def specrollout_forget_ties(self) -> None:
        """Forgets all near-ties up to now, both of early requests that have ended and of those that are running."""
        if self.specrollout_ties is not None:
            self.specrollout_ties.forget(self._lengths_S)

    def specrollout_step_seconds(self) -> tuple[list[float], float] | None:
        """Returns the predicted seconds of plain engine steps by number of requests, and the seconds of one more draft row."""
        return self.specrollout_accounts.step_seconds() if is_output_rank() else None

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """Returns `DrafterStats` as a dict. It is None without remote drafters, and on ranks other than the output rank."""
        return None if self._remote is None else asdict(self._remote.stats())

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that all of them share."""
        if self._remote is not None:
            self._remote.set_addresses(addresses, as_key(secret))

    @property
    def _monitor(self) -> HeadMonitor | None:
        return None if self.specrollout_router is None else self.specrollout_router.monitor

    @property
    def _capture(self) -> FeatureCapture | None:
        return None if self.specrollout_router is None else self.specrollout_router.capture

    @property
    def _remote(self) -> RemoteDrafter | None:
        return None if self.specrollout_router is None else self.specrollout_router.remote


class SpecrolloutWorker(VllmWorkerMixin, _NativeWorker):
    """vLLM's worker for the device of this process, with this package's sampling and drafting."""
