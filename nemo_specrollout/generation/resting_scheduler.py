# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, which schedules no drafts while the engine's drafting rests: such steps are exactly those of an engine
without speculative decoding.

The worker decides, because it measures; each step's output carries its word. Entered by vLLM's `scheduler_cls`.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

_RESTS = "specrollout_rests"


def say_that_drafting_rests(output: Any) -> None:
    """Tells the scheduler, by a step's output, that the steps to come need no drafts."""
    setattr(getattr(output, "model_runner_output", output), _RESTS, True)


class _Resting:
    """What both of vLLM's schedulers get; the last output that came says whether drafting rests."""

    _drafting_rests = False

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """vLLM's, which makes room in the next step for as many drafts as this output names."""
        if self._drafting_rests:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; takes note of the worker's word."""
        self._drafting_rests = getattr(model_runner_output, _RESTS, False)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


class RestingScheduler(_Resting, Scheduler):
    """Of engines whose host waits for each step."""


class RestingAsyncScheduler(_Resting, AsyncScheduler):
    """Of engines that schedule a step while the one before runs; a rest begins and ends a step later there."""


def build_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """What `scheduler_cls` names; `options` are those of vLLM's schedulers."""
    is_asynchronous = vllm_config.scheduler_config.async_scheduling
    return (RestingAsyncScheduler if is_asynchronous else RestingScheduler)(vllm_config=vllm_config, **options)
