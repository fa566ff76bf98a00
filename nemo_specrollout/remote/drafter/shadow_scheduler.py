# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a drafter's engine, which lets shadow sequences draft or sleep, and corrects their texts in place.

A corrected shadow sequence keeps its KV cache up to the wrong token, so that none of its text is computed twice.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from nemo_specrollout.remote.protocol.messages import DRAFT_ROW


@dataclass(frozen=True)
class TextChange:
    """Change of a request's text, which the scheduler sends to the vLLM workers."""

    start: int
    """Index of the first token that may differ. `tokens` is the text from there on."""
    tokens: list[int]
    num_computed: int
    """Number of tokens of the new text that are in the KV cache."""


class ShadowScheduler(Scheduler):
    """vLLM's scheduler with one restriction. Of the running requests, only those in `awake` get an engine step, in this order.

    At any time, exactly the first `num_computed_tokens` tokens of a shadow sequence's text are in the KV cache. Only
    `take_drafted` hands out the sampled tokens. The vLLM workers have copies of the texts. For a text whose copy is out of
    date, `_changed` has the first index at which the copy may be wrong, by request id.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.awake: list[int] = []
        self._shadows: dict[int, Any] = {}
        self._changed: dict[str, int] = {}
        self._drafted: list[tuple[int, int, int, int, int]] = []

    def add_request(self, request: Any) -> None:
        """Adds a request. Its id begins with the number of its shadow sequence. vLLM may have appended a suffix."""
        self._shadows[_shadow_of(request.request_id)] = request
        self._changed.pop(request.request_id, None)
        super().add_request(request)

    def correct(self, shadow: int, num_kept: int, tokens: list[int]) -> None:
        """Keeps the first `num_kept` tokens of a shadow sequence's text, and continues it with `tokens`."""
        request = self._shadows[shadow]
        del request._output_token_ids[num_kept - request.num_prompt_tokens :]
        del request._all_token_ids[num_kept:]
        request.append_output_token_ids(tokens)
        self._note_change(request, num_kept, num_kept)

    def read_again(self) -> None:
        """Drops the KV cache of all texts, because the weights have changed.

        A text is read again when its shadow sequence is next in `awake`.
        """
        for request in self.requests.values():
            self._note_change(request, request.num_tokens, 0)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules an engine step of the shadow sequences in `awake`, and adds the changes of texts to vLLM's output."""
        running = self.running
        awake = [self._shadows[m] for m in self.awake]
        is_awake = {r.request_id for r in awake}
        may_run = {r.request_id for r in running}
        self.running = [r for r in awake if r.request_id in may_run]
        asleep = [r for r in running if r.request_id not in is_awake]
        output: Any = super().schedule(*args, **kwargs)
        self.running = self.running + asleep
        for new in output.scheduled_new_reqs:  # vLLM sends their whole texts
            self._changed.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        output.specrollout_changes = {
            req_id: TextChange(start, self.requests[req_id]._all_token_ids[start:], num_computed)
            for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if (start := self._changed.pop(req_id, None)) is not None
        }
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Appends the sampled tokens to their requests. Returns no outputs, because `take_drafted` reports the tokens."""
        super().update_from_output(scheduler_output, model_runner_output)
        for row, req_id in enumerate(model_runner_output.req_ids):
            tokens = model_runner_output.sampled_token_ids[row]
            if tokens and req_id in self.requests:
                position = self.requests[req_id].num_tokens - 1
                level = model_runner_output.specrollout_levels[row]
                self._drafted.append((_shadow_of(req_id), position, 0, tokens[0], level))
        return {}

    def take_drafted(self) -> np.ndarray:
        """Returns the tokens drafted since the last call, as `DRAFT_ROW`."""
        rows = np.array(self._drafted, DRAFT_ROW)
        self._drafted = []
        return rows

    def _note_change(self, request: Any, start: int, most_computed: int) -> None:
        """Notes that a text has changed from index `start` on. Its KV cache is kept for `most_computed` tokens at most."""
        request.num_computed_tokens = min(request.num_computed_tokens, most_computed)
        self._changed[request.request_id] = min(start, self._changed.get(request.request_id, start))


def _shadow_of(request_id: str) -> int:
    return int(request_id.partition("-")[0])
