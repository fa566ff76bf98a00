# SPDX-License-Identifier: Apache-2.0
"""A synchronous engine that decodes early requests, those of coming steps, in slots that its own requests leave free.

The code that drives the engine sees only the engine's own requests. vLLM's `LLM.generate`, `HostedEngine` and `TurnShard` all
step vLLM's object `llm.llm_engine`. While there is a plan, three methods of `llm.llm_engine` are wrapped.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from nemo_specrollout.generation.engine.vllm_requests import REFUSALS
from nemo_specrollout.run_ahead.early_requests import LOOK_STEPS, EarlyMade, EarlyRequests, engine_id, is_early
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.rolling import MAX_TRIES, RETRY_S, Question, RequestOf, Rolling, StaleCache


class RollingEngine(Rolling):
    """Decodes early requests, which are those of coming steps, beside the own requests of a `vllm.LLM`.

    A plan says which early requests the engine may decode. It lasts from `plan` until `end`, and this object is idle
    otherwise. It owns the early requests of the plan. After a plan the engine is as before, except that the numbers of early
    requests continue in the next plan.

    Invariant: the wrapped methods return outputs and counts of the engine's own requests only. Early requests never make the
    caller step the engine more often than its own requests need.
    """

    def __init__(self, llm: Any, request_of: RequestOf, most_branches: int) -> None:
        """`most_branches` is the largest number of branches of a request, or 0 for none."""
        super().__init__(request_of, most_branches)
        self._llm = llm
        self._engine = llm.llm_engine
        self._native: dict[str, Any] = {}
        """The engine's own methods while they are wrapped, by name."""
        self._seen_own = 0
        """Number of the engine's own requests at the latest check."""
        self._steps_left = 0
        """Number of engine steps until it is checked again which early requests to start or stop."""

    def plan(self, rows: Sequence[EarlyRow], scale: float, kept: float) -> None:
        """Starts a plan with requests of coming steps (`rows`), the most urgent ones first. An earlier plan must have ended.

        `scale` is how far the next weight update is expected to move the difference between the scores of two tokens, in nats
        (`FlipModel`). `kept` is the share of the tokens made ahead that earlier updates have left unchanged.
        """
        self._open(self._engine, rows, scale, kept)
        self._steps_left = 0
        self._wrap("step", self._step)
        self._wrap("has_unfinished_requests", self._has_unfinished_requests)
        self._wrap("get_num_unfinished_requests", self._get_num_unfinished_requests)

    def slice(self, seconds: float) -> bool:
        """Decodes early requests for about `seconds`, during which nothing else may use the engine.

        Returns whether there is more to decode.
        """
        early = self._early
        if early is None:
            return False
        started = time.perf_counter()
        now = started
        self._steps_left = 0
        while now < started + seconds or now == started:
            self._look_if_due(early)
            if not early.num_running:
                break
            self._advance(early)
            early.figures.num_steps_alone += 1
            now = time.perf_counter()
        early.figures.alone_s += now - started
        return not early.is_empty

    def end(self, *, keeps_cache: bool) -> EarlyMade:
        """Ends the plan, removes all early requests from the engine, and returns what was made.

        Also makes the engine drop its cached prefixes, unless `keeps_cache` is true. Raises StaleCache if that fails.
        """
        early = self._early
        self._early = None
        for name in list(self._native):
            self._unwrap(name)
        if early is not None:
            early.read_all()
            self._stop(early, early.running)
            for question in self._last_questions(early):
                self._ask(question)
        if not keeps_cache:
            self._drop_cache()
        return self._made(early)

    # Replacements of the engine's methods

    def _step(self) -> list[Any]:
        early = self._early
        if early is None:  # the plan has ended since the caller looked this method up
            return list(self._engine.step())
        self._look_if_due(early)
        early.note_step(self._seen_own)
        return self._advance(early)

    def _has_unfinished_requests(self) -> bool:
        return self._get_num_unfinished_requests() > 0

    def _get_num_unfinished_requests(self) -> int:
        num_early = 0 if self._early is None else self._early.num_running
        return int(self._engine.output_processor.get_num_unfinished_requests()) - num_early

    def _wrap(self, name: str, method: Callable[..., Any]) -> None:
        self._native[name] = getattr(self._engine, name)
        setattr(self._engine, name, method)

    def _unwrap(self, name: str) -> None:
        native = self._native.pop(name)
        if getattr(native, "__func__", None) is getattr(type(self._engine), name, None):
            delattr(self._engine, name)  # removes the wrapper, so that the class's method is found again
        else:
            setattr(self._engine, name, native)

    # Early requests

    def _look_if_due(self, early: EarlyRequests) -> None:
        """Starts and stops early requests if other requests have come or gone, or after `LOOK_STEPS` engine steps."""
        num_own = self._get_num_unfinished_requests()
        if num_own == self._seen_own and self._steps_left > 0:
            self._steps_left -= 1
            return
        self._seen_own = num_own
        if not early.num_running and num_own >= early.size.slots:
            return
        load = early.own_load()
        names = early.give_way(load)
        self._stop(early, names)
        early.figures.num_stopped += len(names)
        for question in self._questions(early, load):
            self._ask(question)
        starts = early.begin(load)
        for start in starts:
            self._begin(early, start)
        self._steps_left = 0 if starts or (load.is_waiting and early.num_running) else LOOK_STEPS

    def _begin(self, early: EarlyRequests, start: EarlyStart) -> None:
        prompt, params = self._request_of(start)
        if params is None:
            self._leave(early, start.name)
            return
        try:
            self._engine.add_request(engine_id(start.name), prompt, params)
        except REFUSALS as error:
            self._refused(early, start.name, error)

    def _stop(self, early: EarlyRequests, names: Sequence[int]) -> None:
        if names:
            early.read(names)
            self._engine.abort_request([engine_id(name) for name in names])
            early.stopped(names)

    def _advance(self, early: EarlyRequests) -> list[Any]:
        """Makes an engine step. Returns the outputs of the engine's own requests."""
        try:
            outputs = self._native["step"]()
        except BaseException:
            early.settle()
            raise
        return self._sift(early, outputs)

    def _sift(self, early: EarlyRequests, outputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the engine's own requests, and notes which early requests have ended."""
        own = []
        for output in outputs:
            if is_early(output.request_id):
                completion = output.outputs[0]
                if output.finished:
                    early.finished(output.request_id, completion.token_ids, completion.finish_reason)
                    self._steps_left = 0
                continue
            own.append(output)
            if output.finished:
                self._lengths.extend(len(sample.token_ids) for sample in output.outputs)
        return own

    def _ask(self, question: Question) -> None:
        with question.pace:
            question.answered(self._llm.collective_rpc(question.method.__name__, args=question.arguments))

    def _drop_cache(self) -> None:
        for _ in range(MAX_TRIES):
            if self._llm.reset_prefix_cache() is not False:
                return
            if hasattr(self._engine.engine_core, "engine_core"):
                self._engine.step()  # so that a step that was running ends
            else:
                time.sleep(RETRY_S)  # an engine core in a separate process ends its step by itself
        raise StaleCache
