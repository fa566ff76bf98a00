# SPDX-License-Identifier: Apache-2.0
"""Bad requests of an asynchronous engine, whose core runs in a process of its own, and those that HTTP clients can send it.

As a program, this module starts the engine and prints what came of the requests as JSON.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conftest import ROOT, STEP_ADDER
from engines import KV_CACHE_BYTES
from test_bad_requests import BAD, BLOCK, PROMPT, sampling
from test_equality import requests

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest, rollout_extra_args

pytestmark = pytest.mark.integration


def test_an_asynchronous_engine_refuses_bad_requests_and_finishes_the_others(
    start_engine: Callable[..., RolloutEngine],
) -> None:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    expected = [r.token_ids for r in plain.generate(requests(4, 2))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "VLLM_LOGGING_LEVEL": "ERROR"}
    made = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=500
    )
    assert made.returncode == 0, made.stderr[-4000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["good"] == expected
    for name, (_, words) in BAD.items():
        kind, text = found["bad"][name]
        assert kind in ("VLLMValidationError", "ValueError") and words in text, (name, kind, text)
    for name, (status, text) in found["http"].items():
        assert status == (200 if name.startswith("good") else 400), (name, status, text)
    assert found["http"]["good"][1]
    assert found["http"]["good"][1] == found["http"]["good again"][1] == found["http"]["good, with a key of others"][1]


HTTP: dict[str, dict[str, Any]] = {
    "good": {"seed": 3},
    "no seed": {},
    "seed -1": {"seed": -1},
    "a text for an identity": {"seed": 3, "vllm_xargs": {"specrollout": "seed=1"}},
    "a list for an identity": {"seed": 3, "vllm_xargs": {"specrollout": ["seed", 1]}},
    "a number for an identity": {"seed": 3, "vllm_xargs": {"specrollout": 0}},
    "a mapping, which vLLM's protocol does not have": {"seed": 3, "vllm_xargs": {"specrollout": {"seed": 1}}},
    "a key beside the identity": {"seed": 3, "vllm_xargs": {"specrollout_speculate": 0}},
    "good, with a key of others": {"seed": 3, "vllm_xargs": {"theirs": 1}},
    "good again": {"seed": 3},
}
"""Bodies of requests for completions."""


async def _ask_as_the_server(engine: Any, name: str, more: Mapping[str, Any]) -> tuple[int, Any]:
    """Returns the status of the answer to a body, and its tokens or the error.

    The body becomes sampling parameters by vLLM's own protocol. The server itself needs packages that are not installed here.
    It answers with status 400 to what the protocol does not take, and to vLLM's errors of clients.
    """
    from pydantic import ValidationError
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMClientError

    body = {"model": "policy", "prompt": PROMPT["prompt_token_ids"], "max_tokens": 4, "temperature": 1.0, **more}
    try:
        params = CompletionRequest.model_validate(body).to_sampling_params(4, {})
        outputs = [output async for output in engine.generate(PROMPT, params, f"http {name}")]
    except (ValidationError, VLLMClientError) as error:
        return 400, str(error)
    return 200, [token for output in outputs for token in output.outputs[0].token_ids]


async def _ask_asynchronous_engine() -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from nemo_specrollout.generation.engine import compat
    from nemo_specrollout.generation.engine.arguments import with_specrollout

    arguments = {
        "model": str(STEP_ADDER), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 64, "seed": 7,
        "kv_cache_memory_bytes": KV_CACHE_BYTES, "disable_log_stats": True, "enforce_eager": True,
    }  # fmt: skip
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**with_specrollout(arguments, BLOCK, compat.device_type(), compat.vllm_abilities(arguments)))
    )

    async def ask(name: str, prompt: Any, params: Any) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, params, name)]
        return list(outputs[-1].outputs[0].token_ids)

    async def refusal(name: str, given: Mapping[str, Any]) -> tuple[str, str]:
        try:
            await ask(name, PROMPT, sampling(SamplingParams, given))
        except Exception as error:
            return type(error).__name__, str(error)
        return "none", ""

    good = [
        ask(f"good {i}", {"prompt_token_ids": list(r.prompt_token_ids)}, _as_the_engine_of_tests(r))
        for i, r in enumerate(requests(4, 2))
    ]
    bad = [refusal(f"bad {name}", given) for name, (given, _) in BAD.items()]
    texts, refusals = await asyncio.gather(asyncio.gather(*good), asyncio.gather(*bad))
    http = {name: await _ask_as_the_server(engine, name, more) for name, more in HTTP.items()}
    found = {"good": texts, "bad": dict(zip(BAD, refusals, strict=True)), "http": http}
    engine.shutdown()
    return found


def _as_the_engine_of_tests(request: RolloutRequest) -> Any:
    """Returns sampling parameters like those of `RolloutEngine`, of vLLM's own class."""
    from vllm import SamplingParams

    return sampling(SamplingParams, {"max_tokens": 64, "extra_args": rollout_extra_args(request)})


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(_ask_asynchronous_engine())))
