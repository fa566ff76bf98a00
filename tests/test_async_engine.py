# SPDX-License-Identifier: Apache-2.0
"""vLLM's `AsyncLLM`, whose engine is a process of its own, while its weights change amid requests that share a prefix."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file, save_file
from test_racing import noisy
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.arguments import QUIET_START, with_specrollout
from nemo_specrollout.generation.engine.fresh_prefixes import CacheSalt, FreshPrefixes, NewKv
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK_SIZE = 32
SHARED = [11 + i % 9 for i in range(3 * BLOCK_SIZE)]
ARGUMENTS = {
    **QUIET_START,
    "model": str(STEP_ADDER),
    "max_model_len": 512,
    "max_num_seqs": 2,
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 1 << 26,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "dtype": "float32",
}
RELOAD = "reload_weights"
Generate = Callable[..., AsyncIterator[Any]]


@dataclass
class Engine:
    """An `AsyncLLM` for two requests at a time. Keeps the number of tokens that each request has by now."""

    llm: AsyncLLM
    new: Path
    made: dict[str, int] = field(default_factory=dict)

    async def ask(
        self, generate: Generate, tokens: list[int], num_tokens: int, name: str
    ) -> tuple[list[int], list[float]]:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False,
            extra_args={EXTRA_ARGS_KEY: {"seed": 1}},
        )  # fmt: skip
        async for output in generate({"prompt_token_ids": tokens}, params, name):
            self.made[name] = len(output.outputs[0].token_ids)
        (sample,) = output.outputs
        entries = zip(sample.logprobs, sample.token_ids, strict=True)
        return list(sample.token_ids), [entry[token].logprob for entry, token in entries]

    async def until(self, name: str, num_tokens: int) -> None:
        while self.made.get(name, 0) < num_tokens:
            await asyncio.sleep(0.002)

    async def load(self, folder: Path) -> None:
        await self.llm.collective_rpc(RELOAD, kwargs={"weights_path": str(folder)})


def with_engine(folder: Path, work: Callable[[Engine], Any]) -> None:
    new = folder / "new"
    shutil.copytree(STEP_ADDER, new)
    save_file(noisy(load_file(STEP_ADDER / "model.safetensors"), 5), new / "model.safetensors", {"format": "pt"})
    block = SpecrolloutConfig()
    arguments = with_specrollout(ARGUMENTS, block, compat.device_type(), compat.vllm_abilities(ARGUMENTS))

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            await work(Engine(llm, new))
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_weights_that_change_amid_requests(tmp_path: Path) -> None:
    """One engine for all, because its process takes long to start.

    vLLM alone lets a request read a prefix of older weights, which is why the rest is needed. A request that waits in vLLM
    when new weights come is wholly the new policy's. A running request has only KV of the new weights from the first step
    with them, which a new request shows whose prompt is the text so far.
    """

    async def work(engine: Engine) -> None:
        llm = engine.llm
        prefixes = FreshPrefixes(llm, llm.generate, CacheSalt())

        running = asyncio.create_task(engine.ask(llm.generate, [*SHARED, 12], 300, "native running"))
        await engine.until("native running", 3)
        await engine.load(engine.new)
        assert not await llm.reset_prefix_cache()
        stale = await engine.ask(llm.generate, [*SHARED, 14], 10, "native")
        await running
        right = await engine.ask(prefixes.generate, [*SHARED, 14], 10, "fresh")
        assert stale[1] != pytest.approx(right[1], abs=1e-2)

        await engine.load(STEP_ADDER)
        await prefixes.change_begins()
        prefixes.change_ends()
        names = ["one", "two"]
        both = [asyncio.create_task(engine.ask(prefixes.generate, [*SHARED, 12], 300, name)) for name in names]
        await engine.until("one", 3)
        await engine.until("two", 3)
        waiting = asyncio.create_task(engine.ask(prefixes.generate, [*SHARED, 14], 10, "waiting"))
        await asyncio.sleep(0.1)
        assert "waiting" not in engine.made
        await prefixes.change_begins()
        await engine.load(engine.new)
        prefixes.change_ends()
        await asyncio.gather(*both)
        found = await waiting
        assert found[0] == right[0] and found[1] == pytest.approx(right[1], abs=1e-4)

        await engine.load(STEP_ADDER)
        new_kv = NewKv(llm, [RELOAD])
        running = asyncio.create_task(engine.ask(prefixes.generate, [*SHARED, 12], 200, "running"))
        await engine.until("running", 20)
        new_kv.change_begins()
        await prefixes.change_begins()
        await engine.load(engine.new)
        await new_kv.change_ends()
        prefixes.change_ends()
        num_old = engine.made["running"]
        tokens, logprobs = await running
        again = await engine.ask(prefixes.generate, [*SHARED, 12, *tokens[:num_old]], 200 - num_old, "again")
        assert again[0] == tokens[num_old:]
        assert again[1] == pytest.approx(logprobs[num_old:], abs=1e-4)

    with_engine(tmp_path, work)
