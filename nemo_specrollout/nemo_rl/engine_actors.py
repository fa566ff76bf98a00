# SPDX-License-Identifier: Apache-2.0
"""Engine actors, which are NeMo-RL's Ray actors around an engine, extended by our vLLM workers and a seed for each request.

NeMo-RL calls these actors workers too (`VllmGenerationWorker`). In this package a worker is always a vLLM worker, which is
vLLM's process for a GPU. An engine actor calls the workers of its engine through `collective_rpc`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrollout.generation.engine.fresh_prefixes import CacheSalt, FreshPrefixes, NewKv, salt_synchronous
from nemo_specrollout.generation.engine.recorded_requests import RequestRecorder
from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls, WorkerCalls
from nemo_specrollout.generation.engine.vllm_requests import reason_to_stay
from nemo_specrollout.installed.versions import vllm_version
from nemo_specrollout.nemo_rl.engine_inputs import (
    RequestSeeds,
    SeedHeader,
    chat_prompts,
    engine_arguments,
    engine_number,
)
from nemo_specrollout.nemo_rl.moved_modules import lend_old_names
from nemo_specrollout.nemo_rl.ray_calls import ask_exchange, ask_exchange_async
from nemo_specrollout.nemo_rl.row_seeds import DRAFTS_KEY, RECORD_KEY, ROOTS_KEY, SEEDS_KEY, Row
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade, early_params
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.one_policy import OnePolicyStream, branch_request
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.run_ahead.rolling_stream import RollingStream
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.stream_engine import StreamEngine, StreamShard
from nemo_specrollout.stragglers.turn_shard import TurnShard

LAST_WEIGHT_CALLS = (
    "update_weights_via_ipc_zmq",
    "update_weights_from_collective",
    "update_weights_from_checkpoint_engine",
    "nccl_reshard_refit",
    "finish_sparse_delta_refit",
)
"""Methods of NeMo-RL's worker extension that deliver the last tensors of a weight update."""

_NOTHING = EarlyMade({}, EarlyFigures())

_rows: ContextVar[list[Row] | None] = ContextVar("specrollout_rows", default=None)
"""Rows (samples) of the `generate` call that runs in this context."""


def _rows_of(data: BatchedDataDict[Any]) -> list[Row] | None:
    """Returns the rows (samples) of `data`, or None if `data` does not come from `SpecrolloutGeneration`."""
    columns = [data.get(key) for key in (SEEDS_KEY, ROOTS_KEY, DRAFTS_KEY, RECORD_KEY)]
    if any(column is None for column in columns):
        return None
    return [Row(*facts) for facts in zip(*(column.tolist() for column in columns), strict=True)]


class _SeededEngine(EngineActorCalls):
    """Base of both kinds of engine actors. Owns the seeds of the requests and the cache salt of their prompts."""

    cfg: Any
    llm: Any
    _vllm_config: Any
    _racing: Any = None
    """The engine's part in the exchange of requests, or None before the engine has joined the exchange."""
    _most_branches: int = 0
    """Largest number of branches of a text that is made ahead."""
    _made_awake: EarlyMade | None = None
    """What the engine had made for coming steps when it was put to sleep. It is kept until the driver asks for it."""
    _recorder: RequestRecorder | None = None
    """Records requests for an audit, or None if the run records none."""

    def _create_engine(self, llm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        block = block_of(self.cfg)
        facts = RunFacts.of(self.cfg)
        engine = engine_number(self.cfg["vllm_cfg"])
        arguments = engine_arguments(llm_kwargs, self.cfg, block)
        result = super()._create_engine(arguments, *args, **kwargs)  # type: ignore[misc]
        if block.runs_ahead and block.run_ahead is not None:
            self._most_branches = block.run_ahead.branches
        required = block.http_seeds == "required"
        self._request_seeds = RequestSeeds(facts.seed, engine, required=required)
        self._salt = CacheSalt()
        if facts.rows:
            version = vllm_version()
            self._recorder = RequestRecorder(Path(facts.rows), engine, self._vllm_config, str(version))
        self.llm.generate = self._generate_with_seeds  # type: ignore[attr-defined]
        return result

    def _early_request(self, start: EarlyStart) -> tuple[Any, Any]:
        """Returns vLLM's prompt and sampling parameters for a request of a coming step.

        The parameters are None if nothing is left to decode.
        """
        prompt = start.row.prompt
        limit = max(1, min(int(self.cfg["max_new_tokens"]), int(self.cfg["vllm_cfg"]["max_model_len"]) - len(prompt)))
        build: Any = self._build_sampling_params  # type: ignore[attr-defined]
        params = build(greedy=False, stop_strings=None, max_new_tokens=limit)
        row: Any = start.row.row
        (params,) = self._request_seeds.of_rows([params], [row])
        return {"prompt_token_ids": [*prompt, *start.prefix]}, early_params(params, start)

    def specrollout_texts_ahead(self, texts: dict[int, TextAhead]) -> None:
        """Receives the texts that engines have made ahead for the step that begins now, by the seeds of their requests."""
        self._request_seeds.texts.replace(texts)

    def specrollout_take_kept(self) -> KeptCounts:
        """Returns how much of the texts made ahead agreed with the responses, counted since the last call."""
        return self._request_seeds.texts.take_kept()

    def _rows_ended(self, rows: Sequence[Row] | None, data: BatchedDataDict[Any], result: BatchedDataDict[Any]) -> None:
        """Records rows (samples) for an audit, and counts how much of the texts made ahead for them agrees with them."""
        if not rows:
            return
        starts = data["input_lengths"].tolist()
        ends = result["unpadded_sequence_lengths"].tolist()
        texts = result["output_ids"].numpy()
        logprobs = result["logprobs"].numpy()
        for row, text, of_text, start, end in zip(rows, texts, logprobs, starts, ends, strict=True):
            self._request_seeds.texts.compare(row.seed, text[start:end])
            if self._recorder is not None and row.is_recorded:
                self._recorder.ended(row.seed, text[:start].copy(), text[start:end].copy(), of_text[start:end].copy())

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's own `generate`, which `_generate_with_seeds` hides."""
        return type(self.llm).generate(self.llm, *args, **kwargs)

    def _reply(self, method: str, arguments: Sequence[Any], replies: Sequence[Any]) -> Any:
        """Does this actor's own part of a call of the vLLM workers, and returns the only reply that is not None.

        It notes each policy version, because derived seeds depend on it. It adds the number of derived seeds to the totals. At
        the end of a step it writes the recorded rows.
        """
        if method == WorkerCalls.specrollout_policy_is.__name__:
            self._request_seeds.begin_version(int(arguments[0]))
        reply: Any = next((reply for reply in replies if reply is not None), None)
        if method == WorkerCalls.specrollout_end_step.__name__ and self._recorder is not None:
            self._recorder.rows.flush()
            if problem := self._recorder.rows.take_problem():
                reply["alarms"].append({"sentence": problem})
        if method == WorkerCalls.specrollout_totals.__name__:
            return {**reply, "num_derived_seeds": self._request_seeds.num_derived}
        return reply


class EngineActor(_SeededEngine, VllmGenerationWorkerImpl):
    """Engine actor around a synchronous engine."""

    _num_generated = 0
    """Number of calls of `generate` that have ended."""
    _rolling: RollingEngine | None = None
    """Decodes requests of coming steps, or None before any were planned."""

    def _create_engine(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._create_engine(*args, **kwargs)
        salt_synchronous(self.llm.llm_engine, self._salt)
        return result

    def specrollout_weights_change_begins(self) -> None:
        """Notes that a weight update begins. A synchronous engine has no running requests then."""

    def specrollout_weights_change_ends(self) -> None:
        """Notes that the weight update has ended. Later requests reuse no prefix that was cached before it."""
        self._salt.renew()

    def _generate_with_seeds(self, prompts: Sequence[Any], sampling_params: Any = None, **kwargs: Any) -> Any:
        rows = _rows.get()
        if rows is None:
            return self._generate(prompts, self._request_seeds.of_requests(sampling_params, prompts), **kwargs)
        params = self._request_seeds.of_rows(sampling_params, rows)
        if self._recorder is not None:
            self._recorder.begun(prompts, params)
        order = self._request_seeds.texts.longest_first([row.seed for row in rows])
        outputs = self._in_order([prompts[i] for i in order], [params[i] for i in order], **kwargs)
        return [output for _, output in sorted(zip(order, outputs, strict=True), key=itemgetter(0))]

    def _in_order(self, prompts: Sequence[Any], params: Sequence[Any], **kwargs: Any) -> Sequence[Any]:
        """Returns vLLM's outputs of requests, which start in the given order as slots become free."""
        if self._racing is None:
            native: Sequence[Any] = self._generate(prompts, params, **kwargs)
            return native
        outputs: Sequence[Any] = self._racing.generate(
            prompts, params, lambda: self._generate(prompts, params, **kwargs), **kwargs
        )
        return outputs

    def generate(self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any) -> Any:
        """Generates as NeMo-RL does. An engine without requests of its own helps the other engines."""
        if self._racing is not None and not len(data["input_ids"]):
            self._racing.generate([], [], list)
        rows = _rows_of(data)
        token = _rows.set(rows)
        try:
            result = super().generate(data, *args, **kwargs)
            self._rows_ended(rows, data, result)
            if self._recorder is not None:
                self._recorder.rows.flush()
            return result
        finally:
            _rows.reset(token)
            self._num_generated += 1

    def shutdown(self) -> bool:
        """Ends the engine after all recorded rows are on disk."""
        if self._recorder is not None:
            self._recorder.rows.settle()
        is_down: bool = super().shutdown()
        return is_down

    @property
    def _vllm_config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    def specrollout_join_exchange(self, actor: Any, engine: int) -> None:
        """Joins the exchange of requests as engine number `engine`."""
        idle = self._roll() if block_of(self.cfg).runs_ahead else None
        self._racing = TurnShard(self.llm, engine, partial(ask_exchange, actor, engine), idle)

    def specrollout_plan_ahead(self, rows: list[EarlyRow], scale: float, kept: float) -> None:
        """Receives requests of coming steps, which the engine decodes in free slots (`EngineActorCalls`)."""
        self._roll().plan(rows, scale, kept)

    def _roll(self) -> RollingEngine:
        """Returns the object that decodes requests of coming steps in this engine. It is idle until some are planned."""
        self._rolling = self._rolling or RollingEngine(self.llm, self._early_request, self._most_branches)
        return self._rolling

    def specrollout_run_ahead(self, seconds: float, after: int) -> bool | None:
        """Decodes requests of coming steps for about `seconds`, while the engine has nothing else to do.

        Returns whether there are more of them to decode. Returns None and decodes nothing if fewer than `after` calls of
        `generate` have ended.
        """
        if self._num_generated < after:
            return None
        return self._rolling is not None and self._rolling.slice(seconds)

    def specrollout_end_ahead(self, *, keeps_cache: bool) -> EarlyMade:
        """Removes all requests of coming steps and returns their texts. Drops cached prefixes unless `keeps_cache` is true."""
        made = self._made_awake
        self._made_awake = None
        if made is not None:
            return made
        return _NOTHING if self._rolling is None else self._rolling.end(keeps_cache=keeps_cache)

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the engine to sleep. Removes requests of coming steps first, because sleep drops their KV, whoever calls it."""
        if self._rolling is not None and self._rolling.has_plan:
            self._made_awake = self._rolling.end(keeps_cache=False)
        return super().sleep(*args, **kwargs)

    def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """Calls a method of this package's vLLM workers by its name."""
        return self._reply(method, arguments, self.llm.collective_rpc(method, args=tuple(arguments)))


class AsyncEngineActor(_SeededEngine, VllmAsyncGenerationWorkerImpl):
    """Engine actor around an asynchronous engine."""

    _prefixes: FreshPrefixes
    """Decodes every request that `_one_policy` does not decode."""
    _one_policy: OnePolicyStream | None = None
    """Decodes requests that start over when the weights change, or None if no requests do."""
    _new_kv: NewKv | None = None
    """Recomputes the KV of running requests with new weights, or None if old KV is kept."""
    _rolling: RollingStream | None = None
    """Decodes requests of coming steps, or None before any were planned."""

    def _create_engine(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._create_engine(*args, **kwargs)
        native = super()._generate
        self._prefixes = FreshPrefixes(self.llm, native, self._salt)
        facts = RunFacts.of(self.cfg)
        begins_again = facts.in_flight and block_of(self.cfg).runs_ahead
        if begins_again and self._most_branches:
            self._rolling = RollingStream(self.llm, self._prefixes.generate, branch_request, self._most_branches)
        if begins_again:
            self._one_policy = OnePolicyStream(self._generate_as_row, self._rolling)
        if facts.recomputes_kv and not begins_again:
            self._new_kv = NewKv(self.llm, LAST_WEIGHT_CALLS)
        return result

    def _generate(self, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls vLLM's own method for a request, which then reuses no prefix that older weights have cached."""
        outputs = self._prefixes.generate(prompt, params, *args, **kwargs)
        return outputs if self._rolling is None else self._rolling.own(outputs, params)

    def _generate_as_row(self, prompt: Any, params: Any, request_id: str) -> Any:
        """Calls vLLM's own method for a request that may start over when the weights change (`OnePolicyStream`)."""
        outputs = super()._generate(self._salt.of(prompt), params, request_id=request_id)
        return outputs if self._rolling is None else self._rolling.own(outputs, params)

    def _generate_with_seeds(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _rows.get()
        if rows is None:
            (params,) = self._request_seeds.of_requests(sampling_params, [prompt])
            outputs = self._request_seeds.texts.followed(self._generate(prompt, params, *args, **kwargs), params)
            return outputs if self._recorder is None else self._recorder.followed(outputs, prompt, params)
        (params,) = self._request_seeds.of_rows(sampling_params, rows)
        if self._recorder is not None:
            self._recorder.begun([prompt], [params])
        # A request with further arguments than its id cannot be started over.
        if args or set(kwargs) != {"request_id"}:
            return self._generate(prompt, params, *args, **kwargs)
        if self._one_policy is not None:
            return self._one_policy.generate(prompt, params, **kwargs)
        if self._racing is None:
            return self._generate(prompt, params, **kwargs)
        return self._racing.generate(prompt, params, native=lambda: self._generate(prompt, params, **kwargs), **kwargs)

    async def generate_async(
        self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """Generates as NeMo-RL does. Ray runs each call in a context of its own, which the call's tasks inherit."""
        rows = _rows_of(data)
        _rows.set(rows)
        async for result in super().generate_async(data, *args, **kwargs):
            self._rows_ended(rows, data, result[1])
            yield result

    def specrollout_take_kept(self) -> KeptCounts:
        """Returns how much of the texts of older weights agreed with the responses, counted since the last call."""
        kept = super().specrollout_take_kept()
        return kept if self._one_policy is None else kept.plus(self._one_policy.take_kept())

    async def shutdown(self) -> bool:
        """Ends the engine after all recorded rows are on disk."""
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.rows.settle)
        is_down: bool = await super().shutdown()
        return is_down

    @property
    def _vllm_config(self) -> Any:
        return self.llm.vllm_config

    def _setup_vllm_openai_api_server(self, app: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets up NeMo-RL's HTTP server. It then works with newer vLLMs too, and clients may send a seed in a header."""
        lend_old_names()
        app.add_middleware(SeedHeader)
        return super()._setup_vllm_openai_api_server(app, *args, **kwargs)

    async def specrollout_chat_prompts(self, requests: list[dict[str, Any]]) -> list[list[int] | None]:
        """Returns the token ids of each chat request's prompt, or None for a request that the HTTP server refuses."""
        return await chat_prompts(str(self.base_url), requests)

    async def reset_prefix_cache_async(self) -> bool:
        """Replaces NeMo-RL's method, which asks vLLM to drop cached prefixes. vLLM refuses this while requests run.

        After this call, requests no longer find the prefixes that were cached before, even if other requests are still
        running.
        """
        self._salt.renew()
        return True

    async def specrollout_weights_change_begins(self) -> None:
        """Notes that a weight update begins. No request starts until it has ended."""
        if self._new_kv is not None:
            self._new_kv.change_begins()
        if self._one_policy is not None:
            await self._one_policy.change_begins()
        await self._prefixes.change_begins()

    async def specrollout_weights_change_ends(self) -> None:
        """Notes that the weight update has ended, and starts the requests that have waited for it."""
        try:
            if self._new_kv is not None:
                await self._new_kv.change_ends()
        finally:
            self._prefixes.change_ends()
            if self._one_policy is not None:
                self._one_policy.change_ends()

    async def specrollout_join_exchange(self, actor: Any, engine: int) -> None:
        """Joins the exchange of requests as engine number `engine`. `actor` is the handle of the exchange's actor."""
        stream = StreamEngine(self._generate, int(self.llm.vllm_config.scheduler_config.max_num_seqs))
        stays = reason_to_stay(self.llm.vllm_config)
        ask = partial(ask_exchange_async, actor, engine)
        self._racing = StreamShard(engine, stream, ask, stays, self._early_worth)
        await self._racing.begin()

    def _early_worth(self) -> EarlyWorth:
        return EarlyWorth() if self._rolling is None else self._rolling.worth()

    async def specrollout_leave_exchange(self) -> None:
        """Leaves the exchange for good. The engine decodes its own requests alone, from their beginning."""
        await self._racing.leave("it ended no turn before new weights came")

    async def specrollout_plan_ahead(self, rows: list[EarlyRow], scale: float, kept: float) -> None:
        """Receives requests of coming steps, which the engine starts to decode in free slots (`EngineActorCalls`).

        If requests start over when the weights change, none are planned, and branches of the running requests use the slots.
        """
        if self._one_policy is not None:
            self._one_policy.expect(scale)
            return
        if self._rolling is None:
            self._rolling = RollingStream(self.llm, self._prefixes.generate, self._early_request, self._most_branches)
        await self._rolling.plan(rows, scale, kept)

    async def specrollout_run_ahead(self, seconds: float, after: int) -> bool:
        """Waits for about `seconds`. Returns whether any requests of coming steps are left to decode."""
        return self._rolling is not None and await self._rolling.wait(seconds)

    async def specrollout_end_ahead(self, *, keeps_cache: bool) -> EarlyMade:
        """Removes all requests of coming steps and returns their texts. Drops cached prefixes unless `keeps_cache` is true.

        If requests start over when the weights change, there are no requests of coming steps. Then nothing is removed or
        dropped, and branches of running requests go on until the weights change.
        """
        if self._one_policy is not None:
            return EarlyMade({}, self._one_policy.take_figures())
        made = self._made_awake
        self._made_awake = None
        if made is not None:
            return made
        return _NOTHING if self._rolling is None else await self._rolling.end(keeps_cache=keeps_cache)

    async def sleep_async(self, *args: Any, **kwargs: Any) -> Any:
        """Puts the engine to sleep. Removes requests of coming steps first, because sleep drops their KV, whoever calls it."""
        if self._rolling is not None and self._rolling.has_plan:
            self._made_awake = await self._rolling.end(keeps_cache=False)
        return await super().sleep_async(*args, **kwargs)

    async def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """Calls a method of this package's vLLM workers by its name."""
        return self._reply(method, arguments, await self.llm.collective_rpc(method, args=tuple(arguments)))


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecrolloutEngineActor(EngineActor):
    """Ray's class for the engine actors of synchronous engines."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SpecrolloutAsyncEngineActor(AsyncEngineActor):
    """Ray's class for the engine actors of asynchronous engines."""
