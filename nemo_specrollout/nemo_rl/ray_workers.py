# SPDX-License-Identifier: Apache-2.0
"""The Ray actors around an engine: NeMo-RL's own, whose engine has our worker and whose requests have seeds."""

from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrollout.nemo_rl.engine_arguments import engine_arguments
from nemo_specrollout.nemo_rl.generation import SEEDS_KEY
from nemo_specrollout.nemo_rl.request_seeds import RequestSeeds

# The seeds of the rows that a generate call is about, in their order.
_row_seeds: ContextVar[Sequence[int] | None] = ContextVar("specrollout_row_seeds", default=None)


def _seeds_of(data: BatchedDataDict[Any]) -> list[int] | None:
    seeds = data.get(SEEDS_KEY)
    return None if seeds is None else seeds.tolist()


def _engine_totals(replies: list[dict[str, Any] | None], request_seeds: RequestSeeds) -> dict[str, Any]:
    """The reply of the rank whose drafts count."""
    (totals,) = [reply for reply in replies if reply is not None]
    return {**totals, "num_made_up_seeds": request_seeds.num_made_up}


def _reply(replies: list[Any]) -> Any:
    """The same of any method; all other ranks say None."""
    return next((reply for reply in replies if reply is not None), None)


class SpecrolloutVllmWorkerImpl(VllmGenerationWorkerImpl):
    """The synchronous engine."""

    _tail: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(engine_arguments(llm_kwargs, self.cfg))
        self._request_seeds = RequestSeeds()
        generate = self.llm.generate

        def generate_with_seeds(prompts: Sequence[Any], sampling_params: Any = None, **kwargs: Any) -> Any:
            seeds = _row_seeds.get()
            params = self._request_seeds.of_batch(sampling_params, len(prompts), seeds)
            if self._tail is None or seeds is None:
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
        token = _row_seeds.set(_seeds_of(data))
        try:
            return super().generate(data, greedy)
        finally:
            _row_seeds.reset(token)

    def specrollout_totals(self) -> dict[str, Any]:
        """`EngineTotals` of the engine, as a dict."""
        return _engine_totals(self.llm.collective_rpc("specrollout_totals"), self._request_seeds)

    def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """What `method` of our vLLM worker returns; plain values, both ways."""
        return _reply(self.llm.collective_rpc(method, args=tuple(arguments)))


class SpecrolloutVllmAsyncWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """The asynchronous engine."""

    _tail: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(engine_arguments(llm_kwargs, self.cfg))
        self._request_seeds = RequestSeeds()
        generate = self.llm.generate

        def generate_with_seeds(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            seeds = _row_seeds.get()
            params = self._request_seeds.of_one(sampling_params, seeds)
            if self._tail is None or seeds is None or args or set(kwargs) != {"request_id"}:
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
        _row_seeds.set(_seeds_of(data))
        async for result in super().generate_async(data, greedy):
            yield result

    async def specrollout_totals(self) -> dict[str, Any]:
        """`EngineTotals` of the engine, as a dict."""
        return _engine_totals(await self.llm.collective_rpc("specrollout_totals"), self._request_seeds)

    async def specrollout_call(self, method: str, arguments: list[Any]) -> Any:
        """What `method` of our vLLM worker returns; plain values, both ways."""
        return _reply(await self.llm.collective_rpc(method, args=tuple(arguments)))


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecrolloutVllmWorker(SpecrolloutVllmWorkerImpl):
    """The actor of the synchronous engine."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SpecrolloutVllmAsyncWorker(SpecrolloutVllmAsyncWorkerImpl):
    """The actor of the asynchronous engine."""
