# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler in a drafter's engine, named by `scheduler_cls`: shadows run ahead, sleep, and are corrected in place.

A corrected shadow keeps its KV up to the token that was wrong: nothing of its text is computed again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from nemo_specrollout.remote.protocol.shadow_sequences import Correction, Drafted


@dataclass(frozen=True)
class TextChange:
    """A worker's text of a request is another from index `start` on, where it ends with `tokens`; of that text
    `num_computed` tokens are in the KV cache."""

    start: int
    tokens: list[int]
    num_computed: int


class ShadowScheduler(Scheduler):
    """Runs only the shadows that are `awake`, in that order, beside texts that are yet to be read.

    Invariant: of a shadow's text, exactly its first `num_computed_tokens` are in its KV. Only `take_drafted` learns of
    what was sampled. `_changed` says from where on a worker's text may differ from the request's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.awake: list[int] = []
        self._shadows: dict[int, Any] = {}
        self._changed: dict[str, int] = {}
        self._drafted: list[tuple[int, int, int, int]] = []

    def add_request(self, request: Any) -> None:
        """vLLM's; the request's id is its shadow's number, to which vLLM may have added something."""
        self._shadows[_shadow_of(request.request_id)] = request
        self._changed.pop(request.request_id, None)
        super().add_request(request)

    def correct(self, correction: Correction) -> None:
        """A shadow keeps its first tokens, and goes on with others."""
        request = self._shadows[correction.shadow]
        del request._output_token_ids[correction.num_kept - request.num_prompt_tokens :]
        del request._all_token_ids[correction.num_kept :]
        request.append_output_token_ids(list(correction.tokens))
        self._changes(request, correction.num_kept, correction.num_kept)

    def read_again(self) -> None:
        """The weights are others: the KV of all texts is computed again, in place, when a shadow is awake."""
        for request in self.requests.values():
            self._changes(request, request.num_tokens, 0)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with a word to the workers about changed texts."""
        running, awake = self.running, [self._shadows[m] for m in self.awake]
        is_awake = {r.request_id for r in awake}
        may_run = {r.request_id for r in running}
        self.running = [r for r in awake if r.request_id in may_run]
        asleep = [r for r in running if r.request_id not in is_awake]
        output: Any = super().schedule(*args, **kwargs)
        self.running = self.running + asleep
        for new in output.scheduled_new_reqs:  # workers are given all of their texts
            self._changed.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        output.specrollout_changes = {
            req_id: TextChange(start, self.requests[req_id]._all_token_ids[start:], num_computed)
            for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if (start := self._changed.pop(req_id, None)) is not None
        }
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; what was sampled goes nowhere else."""
        super().update_from_output(scheduler_output, model_runner_output)
        for row, req_id in enumerate(model_runner_output.req_ids):
            tokens = model_runner_output.sampled_token_ids[row]
            if tokens and req_id in self.requests:
                position, level = self.requests[req_id].num_tokens - 1, model_runner_output.specrollout_levels[row]
                self._drafted.append((_shadow_of(req_id), position, tokens[0], level))
        return {}

    def take_drafted(self) -> Drafted:
        """What was drafted since last asked."""
        rows_M4 = np.array(self._drafted, np.int64).reshape(-1, 4)
        self._drafted = []
        return Drafted(rows_M4[:, 0], rows_M4[:, 1], rows_M4[:, 2].astype(np.int32), rows_M4[:, 3].astype(np.int8))

    def _changes(self, request: Any, start: int, most_computed: int) -> None:
        request.num_computed_tokens = min(request.num_computed_tokens, most_computed)
        self._changed[request.request_id] = min(start, self._changed.get(request.request_id, start))


def _shadow_of(request_id: str) -> int:
    return int(request_id.partition("-")[0])
