# SPDX-License-Identifier: Apache-2.0
"""Additions to the output of an engine's step: drafting pauses, and a call when its tokens reach the host.

The vLLM worker decides on a pause, because it measures. It marks each step's output, and the scheduler reads the mark. A step
of a pause is exactly a step of an engine without speculation. vLLM finds the scheduler by its argument `scheduler_cls`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

_PAUSED = "specrollout_paused"
"""Attribute of a step's output that says whether drafting is paused."""


def mark_paused(output: Any) -> None:
    """Tells the scheduler, in a step's output, to schedule no drafts for the next steps."""
    setattr(getattr(output, "model_runner_output", output), _PAUSED, True)


class WatchedOutput(AsyncModelRunnerOutput):
    """A step's output that passes its tokens on as soon as they are on the host, in the thread that waits for them."""

    def __init__(self, output: Any, tell: Callable[[Sequence[Sequence[int]]], None]) -> None:
        """Watches vLLM's asynchronous `output` of a step. `tell` gets the tokens of each request."""
        self._output = output
        self._tell = tell

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the step's output, and tells the tokens."""
        output: ModelRunnerOutput = self._output.get_output()
        self._tell(output.sampled_token_ids)
        return output

    def get_kv_connector_output(self) -> Any:
        """Returns what a KV connector did in the step. vLLM asks for it from 0.33 on, if `get_output` fails."""
        return self._output.get_kv_connector_output()


class _PausingMixin:
    """Schedules no drafts if the output that arrived last has the mark."""

    _is_paused = False

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # vLLM reserves room in the next step for as many drafts as this output names.
        if self._is_paused:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Reads the mark, then does vLLM's work."""
        self._is_paused = getattr(model_runner_output, _PAUSED, False)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def build_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Builds the scheduler that an engine's configuration asks for; `options` go to vLLM's scheduler.

    An asynchronous scheduler schedules a step while the previous one runs. Then a pause begins and ends one step later.
    """
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("PausingScheduler", (_PausingMixin, base), {})(vllm_config=vllm_config, **options)
