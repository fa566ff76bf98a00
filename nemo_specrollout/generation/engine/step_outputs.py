# SPDX-License-Identifier: Apache-2.0
"""Extends vLLM's scheduler by drafting pauses and by a limit on the draft rows of an engine step.

The vLLM worker decides on a pause, because it has the measurements. While the pause lasts, it marks the output of each engine
step, and the scheduler reads the mark. A step in a pause is exactly like a step of an engine without speculation. vLLM finds
the scheduler by its argument `scheduler_cls`. This module also has the output that reports its tokens to remote drafters.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nemo_specrollout.generation.engine.arguments import DRAFT_ROWS

_PAUSED = "specrollout_paused"
"""Attribute of an engine step's output that is true if drafting is paused."""


def mark_paused(output: Any) -> None:
    """Marks an engine step's output, so that the scheduler schedules no drafts for the next steps."""
    setattr(getattr(output, "model_runner_output", output), _PAUSED, True)


class WatchedOutput(AsyncModelRunnerOutput):
    """An engine step's output that reports its tokens as soon as they are on the host, in the thread that waits for them."""

    def __init__(self, output: Any, tell: Callable[[Sequence[Sequence[int]]], None]) -> None:
        """Wraps vLLM's asynchronous `output` of an engine step. `tell` receives the list of each request's tokens."""
        self._output = output
        self._tell = tell

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the step's output, and reports its tokens."""
        output: ModelRunnerOutput = self._output.get_output()
        self._tell(output.sampled_token_ids)
        return output

    def get_kv_connector_output(self) -> Any:
        """Returns what a KV connector did in the step. vLLM asks for it from 0.33 on, if `get_output` fails."""
        return self._output.get_kv_connector_output()


class _PausingMixin:
    """Schedules no drafts if the latest output has the mark, and lets requests share the draft rows of an engine step."""

    _is_paused = False
    vllm_config: Any
    num_spec_tokens: int
    """Most drafts of each request in an engine step."""

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Schedules as vLLM does, with as many drafts per request as fit if all requests share the draft rows of the step."""
        most_drafts = self.num_spec_tokens
        self.num_spec_tokens = self._drafts_of_each(most_drafts)
        try:
            return super().schedule(*args, **options)  # type: ignore[misc]
        finally:
            self.num_spec_tokens = most_drafts

    def _drafts_of_each(self, most_drafts: int) -> int:
        """Returns how many drafts each request may have in the next step, if all requests that can start now have started."""
        scheduler: Any = self
        most_rows = self.vllm_config.additional_config.get(DRAFT_ROWS)
        num_requests = min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_num_running_reqs)
        if most_rows is None or num_requests == 0:
            return most_drafts
        return min(most_drafts, int(most_rows) // num_requests)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Takes a step's drafts as vLLM does, but no more of each request than the next step has room for.

        vLLM calls this only for a scheduler that waits for the end of each step. Older versions always pass all drafts that a
        request may have.
        """
        most = self._drafts_of_each(self.num_spec_tokens)
        draft_token_ids.draft_token_ids = [tokens[:most] for tokens in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # vLLM reserves room in the next step for as many drafts as this output names.
        if self._is_paused:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Reads the mark of a step's output, and then lets vLLM update the requests."""
        self._is_paused = getattr(model_runner_output, _PAUSED, False)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def build_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Builds the scheduler that an engine's configuration asks for. `options` are passed to vLLM's scheduler.

    An asynchronous scheduler schedules a step while the previous one runs, so pauses begin and end one step later there.
    """
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("PausingScheduler", (_PausingMixin, base), {})(vllm_config=vllm_config, **options)
