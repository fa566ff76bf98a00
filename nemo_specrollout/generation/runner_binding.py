# SPDX-License-Identifier: Apache-2.0
"""Where we meet vLLM's V2 model runner: seeds for new requests, records of those that leave, a clock around each step.

Stands in for three methods of one runner object: `add_requests`, `finish_requests`, `sample_tokens`.
"""

import copy
from typing import Any, Protocol

from nemo_specrollout.generation.identity import RequestIdentity, resolve_identity
from nemo_specrollout.generation.speculator import NewRequest


class StepListener(Protocol):
    """What wants to know of an engine's steps."""

    def requests_opened(self, requests: list[NewRequest]) -> None:
        """Requests have taken their slots."""

    def requests_closed(self, slots: list[int]) -> None:
        """Requests are about to leave their slots: done, or put aside."""

    def step_begins(self, batch: Any) -> None:
        """A step's logits are computed; its tokens will be sampled now."""

    def step_ended(self, batch: Any, output: Any) -> Any:
        """A step is over, its drafts for the next included, as far as the host is concerned. Returns its output."""


def bind(runner: Any, listener: StepListener, engine_seed: int) -> None:
    """Puts the listener beside the runner's own methods, and gives each request the seed that follows from its identity."""
    add_requests, finish_requests, sample_tokens = runner.add_requests, runner.finish_requests, runner.sample_tokens
    slot_of = runner.req_states.req_id_to_index

    def add_with_seeds(scheduler_output: Any) -> None:
        new_requests = scheduler_output.scheduled_new_reqs
        identities = [_identify(new, engine_seed) for new in new_requests]
        add_requests(scheduler_output)
        if new_requests:
            listener.requests_opened(
                [_opened(new, i, slot_of[new.req_id], runner) for new, i in zip(new_requests, identities, strict=True)]
            )

    def finish_and_tell(scheduler_output: Any) -> None:
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        slots = [slot_of[name] for name in sorted(gone) if name in slot_of]
        if slots:
            listener.requests_closed(slots)
        finish_requests(scheduler_output)

    def sample_between(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        if state is None:
            return sample_tokens(grammar_output)
        listener.step_begins(state.input_batch)
        output = sample_tokens(grammar_output)
        return listener.step_ended(state.input_batch, output)

    runner.add_requests, runner.finish_requests, runner.sample_tokens = add_with_seeds, finish_and_tell, sample_between


def _identify(new: Any, engine_seed: int) -> RequestIdentity:
    """The identity of a new request, whose sampling parameters get its seed."""
    identity = resolve_identity(new.req_id, new.sampling_params, new.prompt_token_ids, engine_seed)
    new.sampling_params = copy.copy(new.sampling_params)
    new.sampling_params.seed = identity.seed
    return identity


def _opened(new: Any, identity: RequestIdentity, slot: int, runner: Any) -> NewRequest:
    length = len(new.prompt_token_ids)
    limit = min(runner.max_model_len, length + new.sampling_params.max_tokens)
    params = new.sampling_params
    eos = set() if params.ignore_eos or params.eos_token_id is None else {params.eos_token_id}
    stop_token_ids = frozenset(params.stop_token_ids or ()) | eos
    return NewRequest(slot, identity, length, new.prefill_token_ids, limit, stop_token_ids, params)
