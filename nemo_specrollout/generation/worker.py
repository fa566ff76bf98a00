# SPDX-License-Identifier: Apache-2.0
"""Our vLLM workers, named by `worker_cls`: vLLM's own, with the sampling step of their model runner replaced."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from nemo_specrollout.config.addresses import as_key
from nemo_specrollout.config.block import MODEL_DRAFTERS
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.generation import compat
from nemo_specrollout.generation.feature_capture import FeatureCapture
from nemo_specrollout.generation.head_loading import load_head, own_lm_head
from nemo_specrollout.generation.head_watch import HeadWatch
from nemo_specrollout.generation.router import Router
from nemo_specrollout.generation.sampler import CoupledSampler, StepListener
from nemo_specrollout.generation.totals import EngineAccount
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.sampling.noise import gumbel_noise, row_keys
from nemo_specrollout.sampling.sampler import sample_tokens
from nemo_specrollout.training.feature_store import FeatureSource, FeatureStore
from nemo_specrollout.training.features import SequenceFeatures

# Features on their way to a head's training: room on the device, the most of the engine's time, room on the host.
CAPTURE_BYTES, CAPTURE_TIME_SHARE, OUTBOX_BYTES = 64 << 20, 0.02, 512 << 20


class SpecrolloutWorkerMixin:
    """Binds sampler and router to the model runner, and proves it before the engine may serve.

    States: created, device ready (sampler bound), model loaded (router bound, both verified).
    """

    model_runner: Any
    vllm_config: Any
    sampler_cls: Any = CoupledSampler
    specrollout_sampler: CoupledSampler
    specrollout_router: Router | None = None
    specrollout_trace: StepTrace
    specrollout_account: EngineAccount
    specrollout_num_weight_updates = 0
    specrollout_policy_version = 0
    specrollout_store: FeatureStore | None = None
    specrollout_head: HeadWatch | None = None

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner
        compat.verify_model_runner(runner)
        compat.enable_all_logits_processors(runner)
        self.specrollout_router = self._router_of(runner)
        self.specrollout_trace = self.specrollout_router.trace if self.specrollout_router else StepTrace([])
        on_step: StepListener = self.specrollout_trace.begin_step if self.specrollout_router else self._whole_step
        self.specrollout_sampler = self.sampler_cls(runner, self.vllm_config.model_config.seed, on_step)
        runner._sample = self.specrollout_sampler.sample
        if self.specrollout_router is not None:
            self.specrollout_router.bind(runner, self.specrollout_sampler)
            self.specrollout_router.is_passive = not compat.is_output_rank()
            compat.skip_empty_draft_metadata(runner)
        self.specrollout_account = EngineAccount(self.specrollout_trace)
        self._watch_head()

    def _watch_head(self) -> None:
        """Sets up what only a drafter with weights needs: its canary, and the capture of features for its training."""
        router = self.specrollout_router
        if router is None or router.model is None:
            return
        refresh = router.config.draft_refresh
        head = Path(router.config.head or "")
        folder = head if head.is_dir() and router.config.head else None  # a hub's name has no files to look at
        max_age = None if refresh is None else refresh.max_age_alarm
        self.specrollout_head = HeadWatch(self.model_runner, router, folder, max_age)
        if refresh is not None and compat.is_output_rank():
            model, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
            row_bytes = 4 * model.get_hidden_size() * model.dtype.itemsize
            capacity = max(scheduler.max_num_batched_tokens, CAPTURE_BYTES // row_bytes)
            router.capture = FeatureCapture(
                scheduler.max_num_seqs, capacity, refresh.rollout_capture_share, CAPTURE_TIME_SHARE, OUTBOX_BYTES
            )

    @property
    def _capture(self) -> FeatureCapture | None:
        return None if self.specrollout_router is None else self.specrollout_router.capture

    def _router_of(self, runner: Any) -> Router | None:
        """The router that vLLM built as its proposer, or one of ours around vLLM's own drafter with weights."""
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, Router):
            return drafter
        named = {d["type"] for d in self._drafters_wanted()}
        return Router(self.vllm_config) if drafter is not None and named & set(MODEL_DRAFTERS) else None

    def _drafters_wanted(self) -> list[dict[str, Any]]:
        return list((self.vllm_config.additional_config or {}).get("specrollout", {}).get("drafters") or [])

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; what came before a batch without a request of the last step is no part of this one."""
        if not compat.continues_requests(scheduler_output):
            self.specrollout_trace.begin_afresh()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _whole_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        self.specrollout_trace.begin_step(num_requests, num_rows, num_scheduled)
        self.specrollout_trace.end_step()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.specrollout_router is not None and self.specrollout_router.config.head is not None:
            own_lm_head(self.model_runner.model, self.model_runner.drafter.model)
        if self.specrollout_router is not None and self.specrollout_router.model is not None:
            compat.draft_in_few_sizes(self.model_runner)
        self._verify_in_force()

    def _verify_in_force(self) -> None:
        """Raises RuntimeError if this engine would sample or draft in another way than ours."""
        runner = self.model_runner
        if getattr(runner._sample, "__self__", None) is not self.specrollout_sampler:
            raise RuntimeError("specrollout's sampler is not in force: something replaced the model runner's _sample")
        if self._drafters_wanted() and compat.may_draft() and not self._router_is_asked():
            raise RuntimeError(
                "specrollout's router is not in force: speculative_config must be what "
                "nemo_specrollout.generation.arguments.with_specrollout makes of the block"
            )
        _verify_kernel(runner.device)

    def _router_is_asked(self) -> bool:
        runner, router = self.model_runner, self.specrollout_router
        hook = getattr(runner.propose_draft_token_ids, "__self__", None)
        return router is not None and (runner.drafter is router or hook is router)

    def take_draft_token_ids(self) -> Any:
        """vLLM's hook; says nothing, instead of a list of nothings, when no request has drafts."""
        if self.specrollout_router is not None and not self.specrollout_router.take_has_drafts():
            return None
        return super().take_draft_token_ids()  # type: ignore[misc]

    def specrollout_report(self, first_step: int = 0) -> dict[str, Any]:
        """Steps from `first_step` on, and raw acceptance counts since the start: plain lists, for any transport."""
        report: dict[str, Any] = {
            "num_steps": self.specrollout_trace.num_steps,
            "trace": self.specrollout_trace.since(first_step),
        }
        router = self.specrollout_router
        if router is not None:
            costs = router.table.costs()
            report["drafters"] = router.names
            report["proposed"] = router.proposed_DK.tolist()
            report["accepted"] = router.accepted_DK.tolist()
            report["plain_step_s"] = None if costs is None else costs.plain_s.tolist()
            report["draft_overhead_s"] = None if costs is None else costs.overhead_s
            report["draft_discount_s"] = None if costs is None else costs.discount_s
            if router.remote is not None:
                report["draft_supply"] = asdict(router.remote.supply())
            if router.model is not None:
                report["head_is_dormant"] = router.model_is_dormant
                report["policy_version"] = router.stamps.policy_version
                report["head_version"] = router.stamps.head_version
                report["capture_s"] = 0.0 if router.capture is None else router.capture.seconds
        return report

    def specrollout_totals(self) -> dict[str, Any] | None:
        """`EngineTotals` as a dict; None on a rank whose drafts nobody asks for."""
        if not compat.is_output_rank():
            return None
        known: dict[str, Any] = {"num_weight_updates": self.specrollout_num_weight_updates}
        router, costs = self.specrollout_router, None
        if router is not None:
            costs = router.table.costs()
            known |= {"proposed": _by_name(router.names, router.proposed_DK)}
            known |= {"accepted": _by_name(router.names, router.accepted_DK)}
        return self.specrollout_account.read(None if costs is None else costs.plain_s, **known).wire()

    def specrollout_draft_supply(self) -> dict[str, Any] | None:
        """`DraftSupply` as a dict; None without drafters on other workers, and on a rank whose drafts nobody asks for."""
        remote = None if self.specrollout_router is None else self.specrollout_router.remote
        return None if remote is None or not compat.is_output_rank() else asdict(remote.supply())

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Where the drafters on other workers listen from now on ("": nowhere), and the secret that they know."""
        if self.specrollout_router is not None and self.specrollout_router.remote is not None:
            self.specrollout_router.remote.listen_to(addresses, as_key(secret))

    def specrollout_weights_updated(self, seconds: float) -> None:
        """The engine has new weights; taking them kept it from steps for so long."""
        self.specrollout_num_weight_updates += 1
        self.specrollout_trace.stood_still(seconds)
        self.specrollout_policy_is(self.specrollout_policy_version + 1)
        if self.specrollout_head is not None:
            self.specrollout_head.began("refit")

    def specrollout_policy_is(self, version: int) -> None:
        """The engine's weights are those of the policy of `version`; each update of them counts one more."""
        self.specrollout_policy_version = version
        if self.specrollout_router is not None and self.specrollout_router.stamps.policy_version != version:
            self.specrollout_router.policy_updated(version)
        if (capture := self._capture) is not None and capture.version != version:
            capture.weights_updated(version)

    def specrollout_take_features(self) -> list[SequenceFeatures]:
        """What was captured for the training of a head since last asked."""
        return [] if self._capture is None else self._capture.take()

    def specrollout_capture_seconds(self) -> float:
        """What capturing has taken of the engine's time, all together."""
        return 0.0 if self._capture is None else self._capture.seconds

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Puts what was captured into the feature store at `place` (folder, max_bytes, held_out_share, source), of which this
        engine is the one writer. What went wrong, or None: want of disk space must not stop an engine."""
        if self._capture is None:
            return None
        try:
            if self.specrollout_store is None:
                source = {**place["source"], "layer_ids": tuple(place["source"]["layer_ids"])}
                self.specrollout_store = FeatureStore(
                    Path(place["folder"]), place["max_bytes"], FeatureSource(**source), place["held_out_share"]
                )
                self.specrollout_store.forget_after(self.specrollout_policy_version)
            self.specrollout_store.keep(self._capture.take())
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
        """What a step leaves besides its tokens: alarms, the stamps of the requests of `seeds` by seed, or of all that ended,
        the versions of policy and head (None: no head drafts), whether the head lies dormant. None on a rank whose drafts
        nobody asks for."""
        if not compat.is_output_rank():
            return None
        router = self.specrollout_router
        found: list[Any] = []
        if router is not None:
            found = (
                router.stamps.take_ended()
                if seeds is None
                else list(zip(seeds, router.stamps.take(seeds), strict=True))
            )
        return {
            "alarms": self.specrollout_take_alarms(),
            "stamps": [[seed, stamp.wire()] for seed, stamp in found if stamp is not None],
            "policy_version": self.specrollout_policy_version,
            "head_version": None if router is None or self.specrollout_head is None else router.stamps.head_version,
            "head_is_dormant": None if router is None else router.model_is_dormant,
        }

    def specrollout_take_stamps(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """`Stamp` of each request that ended, by its seed, as a dict; None of one that a router never saw."""
        if self.specrollout_router is None:
            return [None] * len(seeds)
        return [None if s is None else s.wire() for s in self.specrollout_router.stamps.take(seeds)]

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """What the canary raised since last asked."""
        return [] if self.specrollout_head is None else self.specrollout_head.take_alarms()

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; the engine has slept: its weights may have been dropped and loaded again."""
        super().wake_up(*args, **kwargs)  # type: ignore[misc]
        if self.specrollout_head is not None:
            self.specrollout_head.began("wake")

    def specrollout_stood_still(self, seconds: float) -> None:
        """The engine was not asked for steps for so long."""
        self.specrollout_trace.stood_still(seconds)

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """The head in `folder`, made for the policy of `head_version` (None: the engine's own), drafts from now on. On
        held-out texts it made `expected_length` tokens a step, drafting `num_positions`.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        router, head = self.specrollout_router, self.specrollout_head
        if router is None or head is None:
            raise ValueError("this engine was started without a head: name a drafter of type eagle3")
        load_head(self.model_runner, Path(folder))
        router.drafter_replaced()
        version = router.stamps.policy_version if head_version is None else head_version
        head.published(Path(folder), version, expected_length, num_positions)

    def specrollout_reload(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights by Hugging Face names; the caller clears the prefix cache."""
        started = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(tensors))
        has_new_heads = compat.reload_native_heads(self.model_runner, dict(tensors))
        self.specrollout_weights_updated(time.perf_counter() - started)
        if has_new_heads and self.specrollout_router is not None:
            self.specrollout_router.stamps.head_version = self.specrollout_router.stamps.policy_version


def _by_name(names: list[str], counts_DK: np.ndarray) -> list[tuple[str, list[int]]]:
    return list(zip(names, counts_DK.tolist(), strict=True))


def _verify_kernel(device: torch.device) -> None:
    """Raises RuntimeError if the device's sampling kernel disagrees with the definition of the noise in any bit.

    The logits are the negated noise, so that every score is exactly 0 and the first id wins; one wrong bit moves it.
    """
    seeds = torch.arange(1, 9, dtype=torch.int64, device=device) << 40
    positions = seeds >> 38
    logits = -gumbel_noise(row_keys(seeds, positions), 4099)
    greedy = torch.zeros(8, dtype=torch.bool, device=device)
    if sample_tokens(logits, seeds, positions, greedy).any():
        raise RuntimeError(f"the sampling kernel for {device} disagrees with its definition; please report this")


class SpecrolloutCPUWorker(SpecrolloutWorkerMixin, CPUWorker):
    """vLLM's CPU worker under drafter-invariant sampling."""


class SpecrolloutGPUWorker(SpecrolloutWorkerMixin, Worker):
    """vLLM's GPU worker (V1 model runner) under drafter-invariant sampling."""
