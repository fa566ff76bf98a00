# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler in a drafter's engine, named by `scheduler_cls`: mirrors run ahead, sleep, and are corrected in place.

A corrected mirror keeps its KV up to the token that was wrong: nothing of its text is computed again.
"""

from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from nemo_specrollout.decoupled.mirrors import MOST_IN_BURST, Burst, Correction, Drafted


class MirrorScheduler(Scheduler):
    """Runs only the mirrors that are `awake`, in that order, beside texts that are yet to be read.

    Invariant: of a mirror's text, exactly its first `num_computed_tokens` are in its KV. Nobody but `take_drafted` learns of
    what was sampled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.awake: list[int] = []
        self.burst = Burst()
        self.num_lookahead_tokens = MOST_IN_BURST - 1
        self._mirrors: dict[int, Any] = {}
        self._corrections: dict[str, tuple[int, list[int]]] = {}
        self._drafted: list[tuple[int, int, int, int]] = []

    def add_request(self, request: Any) -> None:
        """vLLM's; the request's id is its mirror's number, to which vLLM may have added something."""
        self._mirrors[_mirror_of(request.request_id)] = request
        super().add_request(request)

    def correct(self, correction: Correction) -> None:
        """A mirror keeps its first tokens, and goes on with others."""
        request, tokens = self._mirrors[correction.mirror], list(correction.tokens)
        if request.status == RequestStatus.WAITING:  # nothing was drafted yet, and no worker knows of it
            request.prompt_token_ids.extend(tokens)
            request._all_token_ids.extend(tokens)
            request.num_prompt_tokens += len(tokens)
            return
        num_outputs = correction.num_kept - request.num_prompt_tokens
        del request._output_token_ids[num_outputs:]
        del request._all_token_ids[correction.num_kept :]
        request.append_output_token_ids(tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, correction.num_kept)
        first, corrected = self._corrections.get(request.request_id, (num_outputs, []))
        first, corrected = min(first, num_outputs), corrected[: max(num_outputs - first, 0)] + tokens
        self._corrections[request.request_id] = first, corrected

    def read_anew(self) -> None:
        """The weights are others: the KV of all texts is computed again, in place, when a mirror is awake."""
        for request in self.requests.values():
            request.num_computed_tokens = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with a word to the workers about corrected texts."""
        running, awake = self.running, [self._mirrors[m] for m in self.awake]
        is_awake = {r.request_id for r in awake}
        may_run = {r.request_id for r in running}
        self.running = [r for r in awake if r.request_id in may_run]
        asleep = [r for r in running if r.request_id not in is_awake]
        output: Any = super().schedule(*args, **kwargs)
        self.running = self.running + asleep
        output.specrollout_corrections, self._corrections = self._corrections, {}
        is_decode = output.total_num_scheduled_tokens == len(output.scheduled_cached_reqs.req_ids)
        is_decode &= self.parallel_config.world_size == 1  # what goes on is asked in this process
        output.specrollout_burst = self.burst if is_decode else Burst()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; what was sampled goes nowhere else."""
        super().update_from_output(scheduler_output, model_runner_output)
        sampled, levels = model_runner_output.sampled_token_ids, model_runner_output.specrollout_levels
        for req_id, row in model_runner_output.req_id_to_index.items():
            if sampled and sampled[row] and req_id in self.requests:
                request, tokens = self.requests[req_id], sampled[row]
                request.num_computed_tokens += len(tokens) - 1
                first = request.num_tokens - len(tokens)
                for i, token in enumerate(tokens):
                    self._drafted.append((_mirror_of(req_id), first + i, token, int(levels[row, i])))
        return {}

    def take_drafted(self) -> Drafted:
        """What was drafted since last asked."""
        rows_M4 = np.array(self._drafted, np.int64).reshape(-1, 4)
        self._drafted = []
        return Drafted(rows_M4[:, 0], rows_M4[:, 1], rows_M4[:, 2].astype(np.int32), rows_M4[:, 3].astype(np.int8))


def _mirror_of(request_id: str) -> int:
    return int(request_id.partition("-")[0])
