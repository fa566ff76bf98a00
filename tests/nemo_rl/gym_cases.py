# SPDX-License-Identifier: Apache-2.0
"""gym_cases.py GYM.yaml: NeMo-Gym itself, with an asynchronous engine of ours behind its model server, and no trainer.

Rolls rows out before and after the texts of their first turns were made early, as `run_ahead` makes them. Prints a JSON object
with the tokens of both, the prompts that were known early, and how many texts the requests have brought along.
"""

import asyncio
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["NEMO_SPECROLLOUT_V2_ON_CPU"] = "1"

import ray
from engine_cases import generation_config  # also prepares this process
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor

from nemo_specrollout.config.load import load_config
from nemo_specrollout.nemo_rl.early_rows import early_gym_rows
from nemo_specrollout.nemo_rl.engine_actors import AsyncEngineActor
from nemo_specrollout.nemo_rl.gym_prompts import GymPrompts, with_new_gym
from nemo_specrollout.nemo_rl.row_seeds import gym_row_with_seed
from nemo_specrollout.nemo_rl.run_facts import RunFacts

BLOCK = {"enabled": True, "drafters": [], "run_ahead": {}}
SEEDS = [[11, 12], [21, 22]]
"""Seeds of the samples of each row."""


class Engines:
    """The only engine, which is no Ray actor here, as `GymPrompts` asks it."""

    num_engines = 1

    def __init__(self, worker: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop

    def start(self, engine: int, method: Any, **named: Any) -> Any:
        call = getattr(self._worker, method.__name__)(**named)
        return ray.put(asyncio.run_coroutine_threadsafe(call, self._loop).result())


async def rolled_out(gym: Any, rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Any]:
    """Returns the token ids of each message of each sample, the prompt first, as NeMo-RL gets them from NeMo-Gym."""
    samples = []
    for row, seeds in zip(rows, SEEDS, strict=True):
        for seed in seeds:
            params = row["responses_create_params"]
            sampling = {name: config[name] for name in ("temperature", "top_p")}
            params = {**params, **sampling, "max_output_tokens": config["max_new_tokens"]}
            prepared = {**copy.deepcopy(row), "responses_create_params": params, "_rowidx": len(samples)}
            samples.append(gym_row_with_seed(prepared, seed))
    found: dict[int, Any] = {}
    async for reference in gym.run_rollouts.options(num_returns="streaming").remote(samples, "timing"):
        index, result, _ = await reference
        found[index] = [list(map(int, message["token_ids"])) for message in result["message_log"]]
    return [found[i] for i in range(len(samples))]


async def main(base: Path) -> None:
    tree = load_config(base, [])
    config = generation_config(base, BLOCK)
    config["vllm_cfg"] |= {"async_engine": True, "expose_http_server": True}
    worker = AsyncEngineActor(config, bundle_indices=[0], seed=0)
    await worker.post_init_async()
    ray.init("local", num_cpus=4, include_dashboard=False)
    tokenizer = get_tokenizer(tree["policy"]["tokenizer"])
    gym = await asyncio.to_thread(
        with_new_gym,
        spinup_nemo_gym_actor,
        env_configs=tree["env"],
        base_urls=[worker.base_url],
        model_name=config["model_name"],
        tokenizer=tokenizer,
        enable_router_replay=False,
        routed_experts_dtype="int16",
        use_fastokens=False,
    )
    lines = Path(os.environ["TINY"], "gym.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: len(SEEDS)]]
    prompts = GymPrompts(Engines(worker, asyncio.get_running_loop()))  # type: ignore[arg-type]
    known = await asyncio.to_thread(prompts.prompts, rows)
    found: dict[str, Any] = {"prompts": known, "alarms": prompts.take_alarms()}
    found["plain"] = await rolled_out(gym, rows, config)
    early = early_gym_rows(rows, known, SEEDS, RunFacts.of(config).seed, [])
    await worker.specrollout_plan_ahead(early, 0.1, 1.0)
    while await worker.specrollout_run_ahead(1.0, 0):
        pass
    worker.specrollout_texts_ahead((await worker.specrollout_end_ahead(keeps_cache=False)).texts)
    worker.specrollout_take_kept()
    found["ahead"] = await rolled_out(gym, rows, config)
    kept = worker.specrollout_take_kept()
    found["kept"] = {"brought": kept.num_brought, "texts": kept.num_texts, "right": kept.num_right}
    print("FOUND " + json.dumps(found))
    sys.stdout.flush()
    ray.get(gym.shutdown.remote())
    await worker.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
