# SPDX-License-Identifier: Apache-2.0
"""Extends vLLM's scheduler by drafting pauses and by a limit on the number of drafts in an engine step.

The vLLM worker decides on a pause, because it measures whether drafts pay. While the pause lasts, the worker marks the output
of each engine step, and the scheduler reads the mark. An engine step in a pause is exactly like one of an engine without
drafts. The setting `scheduler_cls` tells vLLM to use this scheduler.

This module also has a wrapper of a step's output, which passes the sampled tokens to remote drafters.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nemo_specrollout.generation.engine.arguments import DRAFT_ROWS

_PAUSED = "specrollout_paused"
"""Attribute of an engine step's output that is true during a drafting pause."""


def mark_paused(output: Any) -> None:
    """Marks the output of an engine step, so that the scheduler schedules no drafts for the steps that follow."""
    setattr(getattr(output, "model_runner_output", output), _PAUSED, True)


class WatchedOutput(AsyncModelRunnerOutput):
    """Output of an engine step that passes its tokens to a callback as soon as they are on the host.

    The callback is called in the thread that waits for the output.
    """

    def __init__(self, output: Any, tell: Callable[[Sequence[Sequence[int]]], None]) -> None:
        """Wraps vLLM's asynchronous `output` of an engine step. `tell` is the callback. It gets each request's new tokens."""
        self._output = output
        self._tell = tell

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the output of the engine step, passes its tokens to the callback, and returns the output."""
        output: ModelRunnerOutput = self._output.get_output()
        self._tell(output.sampled_token_ids)
        return output

    def get_kv_connector_output(self) -> Any:
        """Returns what a KV connector did in the engine step. vLLM 0.33 and later ask for it if `get_output` fails."""
        return self._output.get_kv_connector_output()


class _PausingMixin:
    """Extends vLLM's scheduler. It schedules no drafts during a pause, and limits the number of drafts in an engine step.

    A pause lasts while the outputs of engine steps are marked (`mark_paused`). The limit is divided equally among requests.
    """

    _is_paused = False
    vllm_config: Any
    num_spec_tokens: int
    """Largest number of drafts that each request may have in an engine step."""

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Schedules an engine step as vLLM does, but with at most an equal share of the step's draft rows for each request."""
        most_drafts = self.num_spec_tokens
        self.num_spec_tokens = self._drafts_of_each(most_drafts)
        try:
            return super().schedule(*args, **options)  # type: ignore[misc]
        finally:
            self.num_spec_tokens = most_drafts

    def _drafts_of_each(self, most_drafts: int) -> int:
        """Returns how many drafts each request may have in the next engine step, at most `most_drafts`.

        The number assumes that all waiting requests for which there is a slot start in that step.
        """
        scheduler: Any = self
        most_rows = self.vllm_config.additional_config.get(DRAFT_ROWS)
        num_requests = min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_num_running_reqs)
        if most_rows is None or num_requests == 0:
            return most_drafts
        return min(most_drafts, int(most_rows) // num_requests)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Takes over the new drafts as vLLM does, but only as many of each request as the next engine step has room for.

        vLLM calls this only for a scheduler that waits for the end of each engine step. Older versions of vLLM pass all drafts
        that a request may have, even if there is no room for them.
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
        """Reads from an engine step's output whether drafting is paused, and then lets vLLM update the requests."""
        self._is_paused = getattr(model_runner_output, _PAUSED, False)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def build_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """Returns the scheduler for an engine with this vLLM config. `options` are passed to vLLM's scheduler.

    An asynchronous scheduler schedules an engine step while the step before still runs. So it hears of a drafting pause one
    step later, and the pause begins and ends one step later.
    """
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("PausingScheduler", (_PausingMixin, base), {})(vllm_config=vllm_config, **options)
