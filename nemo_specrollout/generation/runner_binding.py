# SPDX-License-Identifier: Apache-2.0
"""Patch points of vLLM's V2 model runner: seeds for new requests, and a listener that follows requests and steps.

Replaces three methods of one runner object: `add_requests`, `finish_requests`, `sample_tokens`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_specrollout.generation.requests import RequestIdentity, resolve_identity


@dataclass(frozen=True)
class NewRequest:
    """A request that has just taken a slot of the runner."""

    slot: int
    identity: RequestIdentity
    prompt_length: int
    """Tokens of the prompt."""
    token_ids: Sequence[int]
    """Known text: the prompt, and what a preempted request had sampled before."""
    limit: int
    """Most tokens that the text may have."""
    stop_token_ids: frozenset[int] = frozenset()
    sampling_params: Any = None
    """vLLM's sampling parameters."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the known text."""
        return len(self.token_ids)


class RunnerListener(Protocol):
    """Is told about the requests and steps of a model runner."""

    def requests_opened(self, requests: list[NewRequest]) -> None:
        """Requests have taken their slots."""

    def requests_closed(self, slots: list[int]) -> None:
        """Requests are about to leave their slots: finished, aborted or preempted."""

    def step_begins(self, batch: Any) -> None:
        """The logits of a step are computed, and its tokens will now be sampled."""

    def step_ended(self, batch: Any, output: Any) -> Any:
        """The host has finished a step, including the drafts for the next one. Returns the step's output."""


def bind(runner: Any, listener: RunnerListener, engine_seed: int) -> None:
    """Connects the listener to the runner, and gives each request the seed of its identity from now on."""
    add_requests, finish_requests, sample_tokens = runner.add_requests, runner.finish_requests, runner.sample_tokens
    slot_of = runner.req_states.req_id_to_index

    def add_with_seeds(scheduler_output: Any) -> None:
        new_requests = scheduler_output.scheduled_new_reqs
        identities = [_set_seed(new, engine_seed) for new in new_requests]
        add_requests(scheduler_output)
        if new_requests:
            listener.requests_opened(
                [
                    _new_request(new, identity, slot_of[new.req_id], runner.max_model_len)
                    for new, identity in zip(new_requests, identities, strict=True)
                ]
            )

    def finish_and_tell(scheduler_output: Any) -> None:
        leaving = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        slots = [slot_of[name] for name in sorted(leaving) if name in slot_of]
        if slots:
            listener.requests_closed(slots)
        finish_requests(scheduler_output)

    def sample_and_tell(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        if state is None:
            return sample_tokens(grammar_output)
        listener.step_begins(state.input_batch)
        output = sample_tokens(grammar_output)
        return listener.step_ended(state.input_batch, output)

    runner.add_requests, runner.finish_requests, runner.sample_tokens = add_with_seeds, finish_and_tell, sample_and_tell


def _set_seed(new: Any, engine_seed: int) -> RequestIdentity:
    """Puts the seed of a new request's identity into a copy of its sampling parameters. Returns the identity."""
    identity = resolve_identity(new.req_id, new.sampling_params, new.prompt_token_ids, engine_seed)
    new.sampling_params = copy.copy(new.sampling_params)
    new.sampling_params.seed = identity.seed
    return identity


def _new_request(new: Any, identity: RequestIdentity, slot: int, max_model_len: int) -> NewRequest:
    params, prompt_length = new.sampling_params, len(new.prompt_token_ids)
    limit = min(max_model_len, prompt_length + params.max_tokens)
    eos = set() if params.ignore_eos or params.eos_token_id is None else {params.eos_token_id}
    stop_token_ids = frozenset(params.stop_token_ids or ()) | eos
    return NewRequest(slot, identity, prompt_length, new.prefill_token_ids, limit, stop_token_ids, params)
