# SPDX-License-Identifier: Apache-2.0
"""The Ray actors around an engine: NeMo-RL's own, whose engine has our worker and whose requests have seeds."""

import os
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrollout.nemo_rl.engine_arguments import engine_arguments, engine_number
from nemo_specrollout.nemo_rl.generation import ROOTS_KEY, SEEDS_KEY
from nemo_specrollout.nemo_rl.request_seeds import RequestSeeds, RowArgs
from nemo_specrollout.nemo_rl.run_facts import RUN_SEED
from nemo_specrollout.nemo_rl.seed_header import SeedHeader

# Of the rows that a generate call is about, in their order.
_rows: ContextVar[RowArgs | None] = ContextVar("specrollout_rows", default=None)


def _rows_of(data: BatchedDataDict[Any]) -> RowArgs | None:
    seeds, roots = data.get(SEEDS_KEY), data.get(ROOTS_KEY)
    return None if seeds is None or roots is None else RowArgs(seeds.tolist(), roots.tolist())


def _engine_totals(replies: list[dict[str, Any] | None], request_seeds: RequestSeeds) -> dict[str, Any]:
    """The reply of the rank whose drafts count."""
    (totals,) = [reply for reply in replies if reply is not None]
    return {**totals, "num_derived_seeds": request_seeds.num_derived}


def _request_seeds(generation_config: Any) -> RequestSeeds:
    """Returns the seeds of the engine that this actor leads."""
    vllm_cfg, required = generation_config["vllm_cfg"], generation_config["specrollout"]["http_seeds"] == "required"
    run_seed = int(os.environ.get(RUN_SEED, "0"))
    return RequestSeeds(run_seed, engine_number(vllm_cfg), required=required)


def _reply(replies: list[Any]) -> Any:
    """The same of any method; all other ranks say None."""
    return next((reply for reply in replies if reply is not None), None)


class _SeededEngine:
    """The handling of seeds in both kinds of engines."""

    _request_seeds: RequestSeeds

    def _listen(self, method: str, arguments: Sequence[Any]) -> None:
        """Passes on the policy version, on which seeds that follow from a prompt depend."""
        if method == "specrollout_policy_is":
            self._request_seeds.begin_version(int(arguments[0]))


class SpecrolloutVllmWorkerImpl(_SeededEngine, VllmGenerationWorkerImpl):
    """The synchronous engine."""

    _tail: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(engine_arguments(llm_kwargs, self.cfg))
        self._request_seeds = _request_seeds(self.cfg)
        generate = self.llm.generate

        def generate_with_seeds(prompts: Sequence[Any], sampling_params: Any = None, **kwargs: Any) -> Any:
            rows = _rows.get()
            if rows is None:
                return generate(prompts, self._request_seeds.of_requests(sampling_params, prompts), **kwargs)
            params = self._request_seeds.of_rows(sampling_params, rows)
            if self._tail is None:
                return generate(prompts, params, **kwargs)
            return self._tail.generate(prompts, params, lambda: generate(prompts, params, **kwargs))

        self.llm.generate = generate_with_seeds

    def specrollout_meet(self, actor: Any, engine: int) -> None:
        """From now on engine number `engine`, this one, shares its requests with the others."""
        from nemo_specrollout.nemo_rl.tail_shard import ShardTail

        self._tail = ShardTail(self.llm, actor, engine)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """NeMo-RL's."""
        if self._tail is not None and not len(data["input_ids"]):
            self._tail.help()
        token = _rows.set(_rows_of(data))
        try:
            return super().generate(data, greedy)
        finally:
            _rows.reset(token)

    def specrollout_totals(self) -> dict[str, Any]:
        """`EngineTotals` of the engine, as a dict."""
        return _engine_totals(self.llm.collective_rpc("specrollout_totals"), self._request_seeds)

    def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """What `method` of our vLLM worker returns; plain values, both ways."""
        self._listen(method, arguments)
        return _reply(self.llm.collective_rpc(method, args=tuple(arguments)))


class SpecrolloutVllmAsyncWorkerImpl(_SeededEngine, VllmAsyncGenerationWorkerImpl):
    """The asynchronous engine."""

    _tail: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(engine_arguments(llm_kwargs, self.cfg))
        self._request_seeds = _request_seeds(self.cfg)
        generate = self.llm.generate

        def generate_with_seeds(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            rows = _rows.get()
            if rows is None:
                (params,) = self._request_seeds.of_requests(sampling_params, [prompt])
            else:
                (params,) = self._request_seeds.of_rows(sampling_params, rows)
            if self._tail is None or rows is None or args or set(kwargs) != {"request_id"}:
                return generate(prompt, params, *args, **kwargs)
            return self._tail.generate(prompt, params, kwargs["request_id"], lambda: generate(prompt, params, **kwargs))

        self.llm.generate = generate_with_seeds
        self._generate = generate

    async def specrollout_meet(self, actor: Any, engine: int) -> None:
        """From now on engine number `engine`, this one, shares its requests with the others."""
        from nemo_specrollout.nemo_rl.tail_stream import stream_tail

        self._tail = await stream_tail(self.llm, self._generate, actor, engine)

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """NeMo-RL's. Ray runs each call in a context of its own, which the tasks that it starts inherit."""
        _rows.set(_rows_of(data))
        async for result in super().generate_async(data, greedy):
            yield result

    def _setup_vllm_openai_api_server(self, app: Any) -> Any:
        """NeMo-RL's server, whose clients may send seeds in a header."""
        app.add_middleware(SeedHeader)
        return super()._setup_vllm_openai_api_server(app)

    async def specrollout_totals(self) -> dict[str, Any]:
        """`EngineTotals` of the engine, as a dict."""
        return _engine_totals(await self.llm.collective_rpc("specrollout_totals"), self._request_seeds)

    async def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """What `method` of our vLLM worker returns; plain values, both ways."""
        self._listen(method, arguments)
        return _reply(await self.llm.collective_rpc(method, args=tuple(arguments)))


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecrolloutVllmWorker(SpecrolloutVllmWorkerImpl):
    """The actor of the synchronous engine."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SpecrolloutVllmAsyncWorker(SpecrolloutVllmAsyncWorkerImpl):
    """The actor of the asynchronous engine."""
