# SPDX-License-Identifier: Apache-2.0
"""http_cases.py plain|drafted|strict|ahead BASE.yaml: NeMo-RL's asynchronous worker with ours, asked by the `openai` client.

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
from nemo_specrollout.nemo_rl.row_seeds import Row, given_seed
from nemo_specrollout.nemo_rl.run_facts import RunFacts
from nemo_specrollout.run_ahead.early_texts import EarlyRow

BLOCKS = {
    "plain": {"enabled": True, "drafters": []},
    "drafted": {"enabled": True, "budget": {"policy": "fixed", "k": 8}},
    "strict": {"enabled": True, "http_seeds": "required"},
    "ahead": {"enabled": True, "drafters": [], "run_ahead": {}},
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


async def ask_with_texts_ahead(worker: Any, temperature: float) -> dict[str, Any]:
    """Answers to the first requests of coming rows, before and after their texts were made early as `run_ahead` makes them."""
    worker.cfg["temperature"] = temperature  # which the server asks of every request
    client = openai.AsyncOpenAI(base_url=worker.base_url, api_key="none", max_retries=0, timeout=120)
    contents = [f"{WORDS} {agent} " * 3 for agent in range(4)]

    async def ask(content: str, seed: int) -> Any:
        return await answer(client, worker.cfg["model_name"], content, seed=seed, temperature=temperature)

    async def ask_rows() -> list[Any]:
        return list(await asyncio.gather(*(ask(content, seed) for seed, content in enumerate(contents))))

    requests = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    too_long = {"messages": [{"role": "user", "content": WORDS * 4000}]}
    prompts = await worker.specrollout_chat_prompts([*requests, too_long, {"messages": "none"}])
    run_seed = RunFacts.of(worker.cfg).seed
    rows = [
        EarlyRow(prompt, Row(given_seed(run_seed, seed, prompt), len(prompt)))
        for seed, prompt in enumerate(prompts[:4])
    ]
    found: dict[str, Any] = {"plain": await ask_rows(), "unknown": prompts[4:]}
    await worker.specrollout_plan_ahead(rows, 0.1, 1.0)
    while await worker.specrollout_run_ahead(1.0, 0):
        pass
    made = await worker.specrollout_end_ahead(keeps_cache=False)
    worker.specrollout_texts_ahead(made.texts)
    worker.specrollout_take_kept()
    found["made"] = [made.texts[row.row.seed].num_tokens for row in rows]
    found["ahead"] = await ask_rows()
    kept = worker.specrollout_take_kept()
    found["kept"] = {"brought": kept.num_brought, "texts": kept.num_texts, "right": kept.num_right}
    found["other_prompt"] = await ask(contents[0] + "more", 0)
    worker.specrollout_texts_ahead({})
    found["other_prompt_plain"] = await ask(contents[0] + "more", 0)
    found["brought_by_other_prompt"] = worker.specrollout_take_kept().num_brought
    return found


async def main(which: str, base: Path) -> None:
    assert AsyncEngineActor.__mro__.index(vllm_worker_async.VllmAsyncGenerationWorkerImpl)
    worker = AsyncEngineActor(config_of(base, which), bundle_indices=[0], seed=0)
    await worker.post_init_async()
    if which == "ahead":
        found = {str(temperature): await ask_with_texts_ahead(worker, temperature) for temperature in (1.0, 0.0)}
    else:
        found = await ask_all(worker)
    print("ANSWERS " + json.dumps(found))
    sys.stdout.flush()
    worker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
