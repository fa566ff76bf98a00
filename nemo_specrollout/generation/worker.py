# SPDX-License-Identifier: Apache-2.0
"""Our vLLM workers, named by `worker_cls`: vLLM's own, with the sampling step of their model runner replaced."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.router import Router
from nemo_specrollout.generation.sampler import CoupledSampler, StepListener
from nemo_specrollout.generation.totals import EngineAccount
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.sampling.noise import gumbel_noise, row_keys
from nemo_specrollout.sampling.sampler import sample_tokens


class SpecrolloutWorkerMixin:
    """Binds sampler and router to the model runner, and proves it before the engine may serve.

    States: created, device ready (sampler bound), model loaded (router bound, both verified).
    """

    model_runner: Any
    vllm_config: Any
    specrollout_sampler: CoupledSampler
    specrollout_router: Router | None = None
    specrollout_trace: StepTrace
    specrollout_account: EngineAccount
    specrollout_num_weight_updates = 0

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner
        compat.verify_model_runner(runner)
        compat.enable_all_logits_processors(runner)
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, Router):
            self.specrollout_router, self.specrollout_trace = drafter, drafter.trace
        else:
            self.specrollout_trace = StepTrace([])
        on_step: StepListener = self.specrollout_trace.begin_step if self.specrollout_router else self._whole_step
        self.specrollout_sampler = CoupledSampler(runner, self.vllm_config.model_config.seed, on_step)
        runner._sample = self.specrollout_sampler.sample
        if self.specrollout_router is not None:
            self.specrollout_router.bind(runner, self.specrollout_sampler)
            self.specrollout_router.is_passive = not compat.is_output_rank()
            compat.skip_empty_draft_metadata(runner)
        self.specrollout_account = EngineAccount(self.specrollout_trace)

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
        self._verify_in_force()

    def _verify_in_force(self) -> None:
        """Raises RuntimeError if this engine would sample or draft in another way than ours."""
        runner = self.model_runner
        if getattr(runner._sample, "__self__", None) is not self.specrollout_sampler:
            raise RuntimeError("specrollout's sampler is not in force: something replaced the model runner's _sample")
        wanted = (self.vllm_config.additional_config or {}).get("specrollout", {}).get("drafters")
        if wanted and compat.may_draft() and not isinstance(getattr(runner, "drafter", None), Router):
            raise RuntimeError(
                "specrollout's router is not in force: speculative_config must be "
                '{"method": "custom_class", "model": "nemo_specrollout.generation.router.Router", ...}'
            )
        _verify_kernel(runner.device)

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

    def specrollout_weights_updated(self, seconds: float) -> None:
        """The engine has new weights; taking them kept it from steps for so long."""
        self.specrollout_num_weight_updates += 1
        self.specrollout_trace.stood_still(seconds)

    def specrollout_stood_still(self, seconds: float) -> None:
        """The engine was not asked for steps for so long."""
        self.specrollout_trace.stood_still(seconds)

    def specrollout_reload(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replaces the model's weights by Hugging Face names; the caller clears the prefix cache."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors))


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
