# SPDX-License-Identifier: Apache-2.0
"""What our vLLM workers have in common, on every device: drafter-invariant sampling on vLLM's V2 model runner.

Installed on the worker's own runner object: seeds, verification by equality, drafts with the target's noise, and our drafting
around vLLM's speculator. Nothing of vLLM is changed beyond that object.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from nemo_specrollout.config.addresses import as_key
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.feature_capture import FeatureCapture
from nemo_specrollout.generation.head_loading import load_head, own_lm_head
from nemo_specrollout.generation.head_watch import HeadWatch
from nemo_specrollout.generation.host_budget import HostBudget
from nemo_specrollout.generation.older_runners import allow_text_drafters, mend_bad_words
from nemo_specrollout.generation.remote_drafts import ToldOutput
from nemo_specrollout.generation.resting_scheduler import say_that_drafting_rests
from nemo_specrollout.generation.runner_binding import bind
from nemo_specrollout.generation.sample_stats import SampleStatsLog
from nemo_specrollout.generation.speculator import Drafting, NewRequest
from nemo_specrollout.generation.step_accounts import StepAccounts
from nemo_specrollout.generation.verification import EqualityVerifier
from nemo_specrollout.scheduling.speculation.budget import build_budget
from nemo_specrollout.training.features.feature_index import FeatureSource
from nemo_specrollout.training.features.feature_store import FeatureStore
from nemo_specrollout.training.features.features import SequenceFeatures

# Features on their way to a head's training: room on the device, the most of the engine's time, room on the host.
CAPTURE_BYTES, CAPTURE_TIME_SHARE, OUTBOX_BYTES = 64 << 20, 0.02, 512 << 20


class EngineWorkerMixin:
    """Binds the package to vLLM's V2 model runner, and proves it before the engine may serve.

    States: created; model loaded: all of ours is there, so that vLLM's memory profile sees it; KV cache ready; warm: bound to
    the runner's requests and steps.
    """

    model_runner: Any
    vllm_config: Any
    specrollout_drafting: Drafting | None = None
    specrollout_host_budget: HostBudget | None = None
    specrollout_sample_stats: SampleStatsLog | None = None
    specrollout_head: HeadWatch | None = None
    specrollout_capture: FeatureCapture | None = None
    specrollout_store: FeatureStore | None = None
    specrollout_policy_version = 0

    def init_device(self) -> None:
        """vLLM's; then a look at what it has built."""
        allow_text_drafters()
        super().init_device()  # type: ignore[misc]
        compat.verify_model_runner(self.model_runner)
        compat.mask_alike_whatever_the_rows()
        self.specrollout_config = build(
            SpecrolloutConfig, self.vllm_config.additional_config["specrollout"], BLOCK_PATH
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then ours beside it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner, config = self.model_runner, self.specrollout_config
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = EqualityVerifier(runner.sampler, runner.speculative_config, runner.device)
            mend_bad_words(runner.sampler)
        if runner.speculator is not None and config.drafters:
            if config.head is not None:
                own_lm_head(runner.model, runner.speculator.model)
            self.specrollout_drafting = Drafting(config, runner)
            self.specrollout_sample_stats = SampleStatsLog(self.specrollout_drafting.board.request_S2)
            self._watch_head()
        self.specrollout_accounts = StepAccounts(runner, self.specrollout_drafting)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, which allocates the KV cache; then how many drafts a step verifies is ours to say."""
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
        """vLLM's, whose requests for warming up have no identities; from then on each request must have one."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.specrollout_host_budget is not None:
            self.specrollout_host_budget.bind(self.model_runner)
        bind(self.model_runner, self, self.vllm_config.model_config.seed)
        return times

    def _watch_head(self) -> None:
        """Sets up what only a drafter with weights needs: its canary, and the capture of features for its training."""
        drafting, sample_stats, config = (
            self.specrollout_drafting,
            self.specrollout_sample_stats,
            self.specrollout_config,
        )
        if drafting is None or sample_stats is None or drafting.model is None:
            return
        refresh = config.draft_refresh
        max_age = None if refresh is None else refresh.max_age_alarm
        self.specrollout_head = HeadWatch(self.model_runner, drafting, sample_stats, config.head_folder, max_age)
        if refresh is not None and compat.is_output_rank():
            model, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
            num_features = (len(compat.aux_layer_ids(self.model_runner) or ()) + 1) * model.get_hidden_size()
            capacity = max(scheduler.max_num_batched_tokens, CAPTURE_BYTES // (num_features * model.dtype.itemsize))
            self.specrollout_capture = FeatureCapture(
                self.model_runner, capacity, num_features, refresh.rollout_capture_share, CAPTURE_TIME_SHARE,
                OUTBOX_BYTES,
            )  # fmt: skip
            drafting.on_step.append(self.specrollout_capture.observe)

    def _verify_in_force(self) -> None:
        """Raises RuntimeError if this engine would sample or draft in another way than ours."""
        runner, drafting = self.model_runner, self.specrollout_drafting
        if runner.rejection_sampler is not None and not isinstance(runner.rejection_sampler, EqualityVerifier):
            raise RuntimeError("specrollout's verification is not in force: something replaced the rejection sampler")
        should_draft = self.specrollout_config.most_drafts and self.specrollout_config.drafters and compat.may_draft()
        proposer = getattr(getattr(runner.speculator, "propose", None), "__self__", None)
        if should_draft and (drafting is None or proposer is not drafting):
            raise RuntimeError(
                "specrollout's drafting is not in force: speculative_config must be what "
                "nemo_specrollout.generation.arguments.with_specrollout makes of the block"
            )

    # What the runner tells (`runner_binding.StepListener`).

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
            self.specrollout_head.stepped()
        drafting = self.specrollout_drafting
        if drafting is not None and drafting.rests:
            say_that_drafting_rests(output)
        remote = None if drafting is None else drafting.remote
        return output if remote is None else ToldOutput(output, remote.awaits(batch.idx_mapping_np))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; what came before a batch without a request of the last step is no part of this one."""
        if not compat.continues_requests(scheduler_output):
            self.specrollout_accounts.trace.begin_afresh()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    # What the engine's owner asks.

    def specrollout_engine_facts(self) -> dict[str, str | bool]:
        """What is in force: vLLM's version, model runner, scheduling and CUDA graph mode."""
        return compat.engine_facts(self.vllm_config)

    def specrollout_report(self, first_step: int = 0) -> dict[str, Any]:
        """Steps from `first_step` on, and raw acceptance counts since the start: plain lists, for any transport."""
        report = self.specrollout_accounts.report(first_step)
        if self.specrollout_head is not None and self.specrollout_sample_stats is not None:
            assert self.specrollout_drafting is not None and self.specrollout_drafting.model is not None
            report["head_is_dormant"] = self.specrollout_drafting.model.is_dormant
            report["policy_version"] = self.specrollout_sample_stats.policy_version
            report["head_version"] = self.specrollout_sample_stats.head_version
            report["capture_s"] = self.specrollout_capture_seconds()
        if (supply := self.specrollout_drafter_stats()) is not None:
            report["draft_supply"] = supply
        return report

    def specrollout_totals(self) -> dict[str, Any] | None:
        """`EngineTotals` as a dict; None on a rank whose drafts are not used."""
        return self.specrollout_accounts.totals().wire() if compat.is_output_rank() else None

    def specrollout_weights_updated(self, seconds: float) -> None:
        """The engine has new weights; taking them kept it from steps for so long."""
        self.specrollout_accounts.num_weight_updates += 1
        self.specrollout_accounts.trace.stood_still(seconds)
        self.specrollout_policy_is(self.specrollout_policy_version + 1)
        if self.specrollout_head is not None:
            self.specrollout_head.began("refit")

    def specrollout_policy_is(self, version: int) -> None:
        """The engine's weights are those of the policy of `version`; each update of them counts one more."""
        self.specrollout_policy_version = version
        sample_stats, capture = self.specrollout_sample_stats, self.specrollout_capture
        if sample_stats is not None and sample_stats.policy_version != version:
            sample_stats.policy_updated(version, self.model_runner.req_states.total_len.gpu)
        if capture is not None and capture.version != version:
            capture.weights_updated(version)

    def specrollout_take_features(self) -> list[SequenceFeatures]:
        """What was captured for the training of a head since last asked."""
        return [] if self.specrollout_capture is None else self.specrollout_capture.take()

    def specrollout_capture_seconds(self) -> float:
        """What capturing has taken of the engine's time, all together."""
        return 0.0 if self.specrollout_capture is None else self.specrollout_capture.seconds

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Puts what was captured into the feature store at `place` (folder, max_bytes, held_out_share, source), of which this
        engine is the one writer. What went wrong, or None: want of disk space must not stop an engine."""
        if self.specrollout_capture is None:
            return None
        try:
            if self.specrollout_store is None:
                source = {**place["source"], "layer_ids": tuple(place["source"]["layer_ids"])}
                self.specrollout_store = FeatureStore(
                    Path(place["folder"]), place["max_bytes"], FeatureSource(**source), place["held_out_share"]
                )
                self.specrollout_store.forget_after(self.specrollout_policy_version)
            self.specrollout_store.keep(self.specrollout_capture.take())
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`; all tensor-parallel ranks must be asked. What went wrong."""
        try:
            tensors = compat.policy_teachers(self.model_runner)
            if compat.is_output_rank():
                write_atomically(Path(file), safetensors_bytes(tensors))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """What a step leaves besides its tokens: alarms, the sample stats of the requests of `seeds` by seed, or of all that
        ended,        the versions of policy and head (None: no head drafts), whether the head lies dormant. None on a rank whose drafts
        are not used."""
        if not compat.is_output_rank():
            return None
        sample_stats, drafting = self.specrollout_sample_stats, self.specrollout_drafting
        found: list[Any] = []
        if sample_stats is not None:
            found = (
                sample_stats.take_ended() if seeds is None else list(zip(seeds, sample_stats.take(seeds), strict=True))
            )
        model = None if drafting is None else drafting.model
        return {
            "alarms": self.specrollout_take_alarms(),
            "sample_stats": [[seed, sample.wire()] for seed, sample in found if sample is not None],
            "policy_version": self.specrollout_policy_version,
            "head_version": None
            if sample_stats is None or self.specrollout_head is None
            else sample_stats.head_version,
            "head_is_dormant": None if model is None else model.is_dormant,
        }

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """`SampleStats` of each request that ended, by its seed, as a dict; None of one that no drafter ever saw."""
        if self.specrollout_sample_stats is None:
            return [None] * len(seeds)
        return [None if s is None else s.wire() for s in self.specrollout_sample_stats.take(seeds)]

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """What the canary raised since last asked."""
        return [] if self.specrollout_head is None else self.specrollout_head.take_alarms()

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; gives room back that only drafting needs."""
        if self.specrollout_capture is not None:
            self.specrollout_capture.release()
        super().sleep(*args, **kwargs)  # type: ignore[misc]

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; the engine has slept: its weights may have been dropped and loaded again."""
        super().wake_up(*args, **kwargs)  # type: ignore[misc]
        if self.specrollout_capture is not None:
            self.specrollout_capture.resume()
        if self.specrollout_head is not None:
            self.specrollout_head.began("wake")

    def specrollout_stood_still(self, seconds: float) -> None:
        """The engine was not asked for steps for so long."""
        self.specrollout_accounts.trace.stood_still(seconds)

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """The head in `folder`, made for the policy of `head_version` (None: the engine's own), drafts from now on. On
        held-out texts it made `expected_length` tokens a step, drafting `num_positions`.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        drafting, head, sample_stats = self.specrollout_drafting, self.specrollout_head, self.specrollout_sample_stats
        if drafting is None or drafting.model is None or head is None or sample_stats is None:
            raise ValueError("this engine was started without a head: name a drafter of type eagle3")
        load_head(self.model_runner, Path(folder))
        drafting.model.begin_again()
        version = sample_stats.policy_version if head_version is None else head_version
        head.published(Path(folder), version, expected_length, num_positions)

    def specrollout_reload(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights by Hugging Face names; the caller clears the prefix cache."""
        started = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(tensors))
        has_new_heads = compat.reload_native_heads(self.model_runner, dict(tensors))
        self.specrollout_weights_updated(time.perf_counter() - started)
        if has_new_heads and self.specrollout_sample_stats is not None:
            self.specrollout_sample_stats.head_version = self.specrollout_sample_stats.policy_version

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """`DrafterStats` as a dict; None without drafters on other workers, and on a rank whose drafts are not used."""
        remote = None if self.specrollout_drafting is None else self.specrollout_drafting.remote
        return None if remote is None or not compat.is_output_rank() else asdict(remote.stats())

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Where the drafters on other workers listen from now on ("": nowhere), and the secret that they know."""
        if self.specrollout_drafting is not None and self.specrollout_drafting.remote is not None:
            self.specrollout_drafting.remote.listen_to(addresses, as_key(secret))
