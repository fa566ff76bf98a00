# SPDX-License-Identifier: Apache-2.0
"""http_cases.py plain|drafted|strict BASE.yaml: NeMo-RL's asynchronous worker with ours, asked by the real `openai` client.

Prints a JSON object: for each case the texts, token ids and log-probs of the answers, or the error.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["NEMO_SPECROLLOUT_V2_ON_CPU"] = "1"

import openai
from engine_cases import generation_config  # also prepares this process
from nemo_rl.models.generation.vllm import vllm_worker_async

from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.nemo_rl.engine_actors import AsyncEngineActor

BLOCKS = {
    "plain": {"enabled": True, "drafters": []},
    "drafted": {"enabled": True, "budget": {"policy": "fixed", "k": 8}},
    "strict": {"enabled": True, "http_seeds": "required"},
}
WORDS = "1 2 3 1 2 3 1 2 3"


def config_of(base: Path, which: str) -> dict[str, Any]:
    config = generation_config(base, BLOCKS[which])
    config["vllm_cfg"] |= {"async_engine": True, "expose_http_server": True}
    return config


async def answer(client: Any, model: str, content: str, *, header: int | None = None, **options: Any) -> Any:
    """One request's choices, in their order; a stream's parts put together."""
    extra = {} if header is None else {"X-Specrollout-Seed": str(header)}
    messages = [{"role": "user", "content": content}]
    options = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 24, "logprobs": True, "top_logprobs": 1, **options}
    try:
        made = await client.chat.completions.create(model=model, messages=messages, extra_headers=extra, **options)
        return await _streamed(made) if options.get("stream") else [_choice(choice) for choice in made.choices]
    except openai.APIStatusError as error:
        return f"{error.status_code}: {error.message}"


def _choice(choice: Any) -> dict[str, Any]:
    return {
        "tokens": [t.token for t in choice.logprobs.content],
        "logprobs": [t.logprob for t in choice.logprobs.content],
    }


async def _streamed(stream: Any) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    async for part in stream:
        for choice in part.choices:
            made = choices.setdefault(choice.index, {"tokens": [], "logprobs": []})
            for token in choice.logprobs.content if choice.logprobs else ():
                made["tokens"].append(token.token)
                made["logprobs"].append(token.logprob)
    return [choices[index] for index in sorted(choices)]


async def ask_all(worker: Any) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=worker.base_url, api_key="none", max_retries=0, timeout=120)
    model = (worker.cfg["model_name"],)

    async def ask(content: str = WORDS, **options: Any) -> Any:
        return await answer(client, *model, content, **options)

    found: dict[str, Any] = {}
    found["unseeded"] = [await ask(), await ask()]
    found["seeded"] = [await ask(seed=7), await ask(seed=7), await ask(seed=8)]
    found["header"] = [await ask(header=7), await ask(header=8)]
    found["bad_header"] = await ask(header=-1)
    found["streamed"] = await ask(seed=7, stream=True)
    found["samples"] = await ask(seed=7, n=4)
    found["samples_streamed"] = await ask(seed=7, n=4, stream=True)
    found["filtered"] = await ask(seed=7, extra_body={"min_p": 0.01}, logit_bias={"9": -3})
    found["greedy_like"] = await ask(seed=7, presence_penalty=0.5)
    agents = [ask(f"{WORDS} {agent} " * 3, seed=agent) for agent in range(12)]
    found["concurrent"] = await asyncio.gather(*agents)
    found["one_by_one"] = [await ask(f"{WORDS} {agent} " * 3, seed=agent) for agent in reversed(range(12))][::-1]
    totals = await worker.specrollout_call(WorkerCalls.specrollout_totals.__name__, [])
    found["totals"] = {
        "derived": totals["num_derived_seeds"],
        "proposed": sum(map(sum, dict(totals["proposed"]).values())),
    }
    return found


async def main(which: str, base: Path) -> None:
    assert AsyncEngineActor.__mro__.index(vllm_worker_async.VllmAsyncGenerationWorkerImpl)
    worker = AsyncEngineActor(config_of(base, which), bundle_indices=[0], seed=0)
    await worker.post_init_async()
    print("ANSWERS " + json.dumps(await ask_all(worker)))
    sys.stdout.flush()
    worker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
