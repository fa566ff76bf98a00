# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker: drafter-invariant sampling, drafting and telemetry on vLLM's V2 model runner.

Everything is installed on the worker's own runner object: seeds, verification by equality, drafts with the target's noise, and
drafting around vLLM's speculator. Other engines of the process stay vLLM's own.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from vllm.v1.worker.gpu_worker import Worker

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import as_key
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.feature_capture import FeatureCapture
from nemo_specrollout.generation.head_loading import load_published_head, policy_teachers, reload_native_heads
from nemo_specrollout.generation.head_watch import HeadWatch
from nemo_specrollout.generation.host_budget import HostBudget
from nemo_specrollout.generation.older_runners import allow_text_drafters, fix_bad_words
from nemo_specrollout.generation.pausing_scheduler import mark_paused
from nemo_specrollout.generation.ranks import is_output_rank, may_draft
from nemo_specrollout.generation.remote_drafts import WatchedOutput
from nemo_specrollout.generation.runner_binding import NewRequest, bind
from nemo_specrollout.generation.shared_modules import own_lm_head
from nemo_specrollout.generation.step_accounts import StepAccounts
from nemo_specrollout.generation.verification import EqualityVerifier
from nemo_specrollout.scheduling.speculation.budget import build_budget
from nemo_specrollout.telemetry.engine_stats import EngineStats
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog
from nemo_specrollout.training.features.features import SequenceFeatures


class VllmWorkerMixin:
    """Extends a vLLM worker, and proves that the extension is in force before the engine may serve.

    States: created; model loaded, with all of our memory allocated so that vLLM's memory profile includes it; KV cache ready;
    warmed up, from when on each request must have an identity.
    """

    model_runner: Any
    vllm_config: Any
    specrollout_config: SpecrolloutConfig
    specrollout_accounts: StepAccounts
    specrollout_drafting: Drafting | None = None
    """None without drafters."""
    specrollout_sample_stats: SampleStatsLog | None = None
    """None without drafters."""
    specrollout_host_budget: HostBudget | None = None
    """The budget of a vLLM without adaptive verification."""
    specrollout_head: HeadWatch | None = None
    """None without a drafter with weights."""
    specrollout_capture: FeatureCapture | None = None
    """None unless features are captured for a head's training, and on a rank whose outputs vLLM does not use."""
    specrollout_policy_version = 0

    # Life cycle: methods of vLLM's worker.

    def init_device(self) -> None:
        """Lets vLLM build its model runner, and checks it."""
        allow_text_drafters()
        super().init_device()  # type: ignore[misc]
        compat.verify_model_runner(self.model_runner)
        compat.make_top_p_independent_of_batch()
        self.specrollout_config = build(
            SpecrolloutConfig, self.vllm_config.additional_config["specrollout"], BLOCK_PATH
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Lets vLLM load its models, then adds verification and drafting."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner, config = self.model_runner, self.specrollout_config
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = EqualityVerifier(runner.sampler, runner.speculative_config, runner.device)
            fix_bad_words(runner.sampler)
        if runner.speculator is not None and config.drafters:
            if config.head is not None:
                own_lm_head(runner.model, runner.speculator.model)
            self.specrollout_drafting = Drafting(config, runner)
            self.specrollout_sample_stats = SampleStatsLog(self.specrollout_drafting.board.tables.request_S2)
            self._watch_head(self.specrollout_drafting, self.specrollout_sample_stats)
        self.specrollout_accounts = StepAccounts(runner, self.specrollout_drafting)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Lets vLLM allocate the KV cache, then replaces its choice of how many drafts a step verifies."""
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        runner, drafting = self.model_runner, self.specrollout_drafting
        if drafting is not None:
            policy = build_budget(self.specrollout_config.budget)
            budget = (runner, policy, lambda: self.specrollout_accounts.costs, drafting)
            if compat.CHOOSES_ON_DEVICE:
                from nemo_specrollout.generation.verification_budget import VerificationBudget

                runner.adaptive_verification = VerificationBudget(*budget)
                runner.rejection_sampler.enable_adaptive_verification = True
            else:
                self.specrollout_host_budget = HostBudget(*budget)
        self._verify_in_force()

    def compile_or_warm_up_model(self) -> Any:
        """Lets vLLM warm up with requests that have no identity, then binds the runner."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.specrollout_host_budget is not None:
            self.specrollout_host_budget.bind(self.model_runner)
        bind(self.model_runner, self, self.vllm_config.model_config.seed)
        return times

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Tells the step clock if the engine was idle before this step, then does vLLM's work."""
        if not compat.continues_requests(scheduler_output):
            self.specrollout_accounts.trace.begin_after_idle()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Releases memory that only drafting needs, then does vLLM's work."""
        if self.specrollout_capture is not None:
            self.specrollout_capture.release()
        super().sleep(*args, **kwargs)  # type: ignore[misc]

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Lets vLLM wake up. The head's weights may have been dropped and loaded again, so its canary starts over."""
        super().wake_up(*args, **kwargs)  # type: ignore[misc]
        if self.specrollout_capture is not None:
            self.specrollout_capture.resume()
        if self.specrollout_head is not None:
            self.specrollout_head.began("wake")

    def _watch_head(self, drafting: Drafting, sample_stats: SampleStatsLog) -> None:
        """Starts the canary of a drafter with weights, and the capture of features for its training."""
        if drafting.model is None:
            return
        runner, config, refresh = self.model_runner, self.specrollout_config, self.specrollout_config.draft_refresh
        max_age = None if refresh is None else refresh.max_age_alarm
        self.specrollout_head = HeadWatch(runner, drafting, sample_stats, config.head_folder, max_age)
        if refresh is not None and is_output_rank():
            self.specrollout_capture = FeatureCapture.for_runner(runner, refresh.rollout_capture_share)
            drafting.on_step.append(self.specrollout_capture.observe)

    def _verify_in_force(self) -> None:
        """Raises RuntimeError if this engine would verify or draft in another way than ours."""
        runner, drafting = self.model_runner, self.specrollout_drafting
        if runner.rejection_sampler is not None and not isinstance(runner.rejection_sampler, EqualityVerifier):
            raise RuntimeError("specrollout's verification is not in force: something replaced the rejection sampler")
        should_draft = self.specrollout_config.most_drafts and self.specrollout_config.drafters and may_draft()
        proposer = getattr(getattr(runner.speculator, "propose", None), "__self__", None)
        if should_draft and (drafting is None or proposer is not drafting):
            raise RuntimeError(
                "specrollout's drafting is not in force: speculative_config must be what "
                "nemo_specrollout.generation.arguments.with_specrollout makes of the block"
            )

    # Requests and steps: methods of `runner_binding.RunnerListener`.

    def requests_opened(self, requests: list[NewRequest]) -> None:
        if self.specrollout_drafting is None or self.specrollout_sample_stats is None:
            return
        self.specrollout_drafting.open(requests)
        for r in requests:
            self.specrollout_sample_stats.open(r.slot, r.identity.seed, r.prompt_length, r.num_tokens)
        if self.specrollout_capture is not None:
            self.specrollout_capture.open(requests)

    def requests_closed(self, slots: list[int]) -> None:
        if self.specrollout_drafting is None or self.specrollout_sample_stats is None:
            return
        self.specrollout_sample_stats.close(slots)
        self.specrollout_drafting.close(slots)
        if self.specrollout_capture is not None:
            self.specrollout_capture.close(slots)

    def step_begins(self, batch: Any) -> None:
        self.specrollout_accounts.step_begins(batch)

    def step_ended(self, batch: Any, output: Any) -> Any:
        self.specrollout_accounts.step_ended()
        if self.specrollout_head is not None:
            self.specrollout_head.step_ended()
        drafting = self.specrollout_drafting
        if drafting is not None and drafting.is_paused:
            mark_paused(output)
        remote = None if drafting is None else drafting.remote
        return output if remote is None else WatchedOutput(output, remote.token_callback(batch.idx_mapping_np))

    # Remote calls: see `worker_client.WorkerClient`. Replies are plain values, except where only this process asks.

    def specrollout_stats(self, first_step: int) -> EngineStats:
        """Returns the engine's counters, and its steps from `first_step` on."""
        log, drafting = self.specrollout_sample_stats, self.specrollout_drafting
        model = None if drafting is None else drafting.model
        of_head: dict[str, Any] = {}
        if model is not None and log is not None:
            of_head = {
                "head_is_dormant": model.is_dormant,
                "policy_version": log.policy_version,
                "head_version": log.head_version,
                "capture_s": self.specrollout_capture_seconds(),
            }
        return self.specrollout_accounts.stats(first_step, drafter_stats=self.specrollout_drafter_stats(), **of_head)

    def specrollout_totals(self) -> dict[str, Any] | None:
        """Returns `EngineTotals` as a dict; None on a rank whose drafts are not used."""
        return self.specrollout_accounts.totals().wire() if is_output_rank() else None

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """Returns `StepEnd` as a dict; None on a rank whose drafts are not used.

        Sample stats are returned for the requests of `seeds`; with None, for all requests that ended.
        """
        if not is_output_rank():
            return None
        log, drafting = self.specrollout_sample_stats, self.specrollout_drafting
        found: list[Any] = []
        if log is not None:
            found = log.take_ended() if seeds is None else list(zip(seeds, log.take(seeds), strict=True))
        model = None if drafting is None else drafting.model
        return {
            "alarms": self.specrollout_take_alarms(),
            "sample_stats": [[seed, stats.wire()] for seed, stats in found if stats is not None],
            "policy_version": self.specrollout_policy_version,
            "head_version": None if log is None or self.specrollout_head is None else log.head_version,
            "head_is_dormant": None if model is None else model.is_dormant,
        }

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """Returns `SampleStats` as a dict for each seed; None for a request that no drafter saw."""
        log = self.specrollout_sample_stats
        found = [None] * len(seeds) if log is None else log.take(seeds)
        return [None if stats is None else stats.wire() for stats in found]

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms that the head's canary raised since the last call."""
        return [] if self.specrollout_head is None else self.specrollout_head.take_alarms()

    def specrollout_stood_still(self, seconds: float) -> None:
        """Leaves `seconds`, in which the engine waited for its caller, out of the next step's time."""
        self.specrollout_accounts.trace.stood_still(seconds)

    def specrollout_reload(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights by Hugging Face names. The caller clears the prefix cache."""
        started = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(tensors))
        has_new_heads = reload_native_heads(self.model_runner, dict(tensors))
        self.specrollout_weights_updated(time.perf_counter() - started)
        if has_new_heads and self.specrollout_sample_stats is not None:
            self.specrollout_sample_stats.head_version = self.specrollout_sample_stats.policy_version

    def specrollout_weights_updated(self, seconds: float) -> None:
        """Counts a weight update that kept the engine from steps for `seconds`."""
        self.specrollout_accounts.num_weight_updates += 1
        self.specrollout_accounts.trace.stood_still(seconds)
        self.specrollout_policy_is(self.specrollout_policy_version + 1)
        if self.specrollout_head is not None:
            self.specrollout_head.began("refit")

    def specrollout_policy_is(self, version: int) -> None:
        """Sets the version of the engine's weights. Each update of the weights increments it."""
        self.specrollout_policy_version = version
        log, capture = self.specrollout_sample_stats, self.specrollout_capture
        if log is not None and log.policy_version != version:
            log.policy_updated(version, self.model_runner.req_states.total_len.gpu)
        if capture is not None and capture.version != version:
            capture.weights_updated(version)

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """Loads the head in `folder`. It drafts from now on.

        Args:
            folder: A published head.
            head_version: Version of the policy that the head was trained for; None: the engine's own.
            expected_length: Tokens a step that the head made on held-out texts, if known.
            num_positions: Draft positions of that measurement.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        drafting, head, log = self.specrollout_drafting, self.specrollout_head, self.specrollout_sample_stats
        if drafting is None or drafting.model is None or head is None or log is None:
            raise ValueError("this engine was started without a head: name a drafter of type eagle3")
        load_published_head(self.model_runner, Path(folder))
        drafting.model.begin_again()
        version = log.policy_version if head_version is None else head_version
        head.published(Path(folder), version, expected_length, num_positions)

    def specrollout_take_features(self) -> list[SequenceFeatures]:
        """Returns the features that were captured since the last call."""
        return [] if self.specrollout_capture is None else self.specrollout_capture.take()

    def specrollout_capture_seconds(self) -> float:
        """Returns the seconds of engine time that the capture of features has taken in all."""
        return 0.0 if self.specrollout_capture is None else self.specrollout_capture.seconds

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Writes captured features to a store. Returns the error, or None: a full disk must not stop an engine.

        `place` has the arguments of `FeatureCapture.store`. This engine must be the only writer there.
        """
        if self.specrollout_capture is None:
            return None
        try:
            self.specrollout_capture.store(**place)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`. Returns the error, or None.

        All tensor-parallel ranks must be asked.
        """
        try:
            tensors = policy_teachers(self.model_runner)
            if is_output_rank():
                write_atomically(Path(file), safetensors_bytes(tensors))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """Returns `DrafterStats` as a dict; None without remote drafters, and on a rank whose drafts are not used."""
        remote = None if self.specrollout_drafting is None else self.specrollout_drafting.remote
        return None if remote is None else asdict(remote.stats())

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that they share."""
        if self.specrollout_drafting is not None and self.specrollout_drafting.remote is not None:
            self.specrollout_drafting.remote.set_addresses(addresses, as_key(secret))


class SpecrolloutGPUWorker(VllmWorkerMixin, Worker):
    """vLLM's GPU worker with drafter-invariant sampling."""
