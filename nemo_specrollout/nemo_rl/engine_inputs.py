# SPDX-License-Identifier: Apache-2.0
"""Inputs of an engine under NeMo-RL, which are vLLM's arguments with the block put into effect, and the seeds of requests."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from starlette.responses import JSONResponse

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.ahead_branches import pack
from nemo_specrollout.generation.engine.arguments import with_specrollout
from nemo_specrollout.generation.engine.identity import check_seed
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY
from nemo_specrollout.generation.engine.text_method import allow_text_drafters
from nemo_specrollout.generation.engine.vllm_requests import REFUSAL, RolloutSamplingParams, refused_as_by_vllm
from nemo_specrollout.nemo_rl.row_seeds import DRAFTS_KEY, Conversations, Row, RowSeeds, SeedKind, given_seed
from nemo_specrollout.run_ahead.texts import TextAhead, TextsAhead

_WORKERS = {
    "VllmInternalWorkerExtension": "nemo_specrollout.nemo_rl.vllm_workers.NemoRlWorker",
    "VllmInternalWorkerExtensionWithCheckpointEngine": "nemo_specrollout.nemo_rl.vllm_workers.NemoRlCheckpointEngineWorker",
}
MTP_FROM_FOLDER = "specrollout_mtp_from_folder"
"""Key of vLLM's `additional_config`. Its value is true if the trainer does not train the policy's MTP layers. Then no refit
brings them, and they are loaded from the policy's folder."""
HEADER = b"x-specrollout-seed"
"""HTTP header in which a client sends a seed if it cannot send one in the body."""
_RENDERED_AT_ONCE = 16
"""Number of prompts of coming steps that the HTTP server renders at a time. It is small so that requests of the current step
do not wait long behind them."""
_MOST_DIGITS = len(str(2**63))
"""Largest number of digits of a seed. Without a limit, Python raises an error for a number of several thousand digits."""

header_seed: ContextVar[int | None] = ContextVar("specrollout_header_seed", default=None)
"""Seed from the header of the HTTP request that the current asyncio task serves."""


def engine_arguments(
    llm_kwargs: Mapping[str, Any], generation_config: Mapping[str, Any], block: SpecrolloutConfig
) -> dict[str, Any]:
    """Returns the arguments for vLLM: those of NeMo-RL, with this package's vLLM worker, the drafters and the block.

    Raises ConfigError if this vLLM cannot run the block.
    """
    compat.check_version()
    compat.check_features(block)
    allow_text_drafters()
    if len(block.drafters_of_engines) > 1:
        block = block.of_engine(engine_number(generation_config["vllm_cfg"]))
    abilities = compat.vllm_abilities(llm_kwargs, bool(generation_config["vllm_cfg"].get("async_engine")))
    arguments = with_specrollout(llm_kwargs, block, compat.device_type(), abilities)
    if block.model_drafter is not None and arguments.get("load_format") == "dummy":
        # The drafter's weights are loaded from its folder, as NeMo-RL does for its own drafter if it does not train it.
        arguments["load_format"] = "auto"
    if block.model_drafter is not None and block.model_drafter.type == "mtp":
        arguments["additional_config"][MTP_FROM_FOLDER] = not generation_config.get("_mtp_weights_from_refit")
    arguments["worker_cls"] = _WORKERS[llm_kwargs["worker_extension_cls"].rpartition(".")[2]]
    return arguments


def engine_number(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns the number of this actor's engine.

    NeMo-RL numbers all GPUs, and the GPUs of an engine have consecutive numbers.
    """
    return int(os.environ.get("RANK", "0")) // (vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"])


class RequestSeeds(RowSeeds):
    """Gives every request of an engine a seed. This follows from the seed that the request brings, or else from its prompt."""

    def __init__(self, run_seed: int = 0, engine: int = 0, *, required: bool = False) -> None:
        """`engine` is the engine's number, by which equal requests of different engines get different seeds.

        With `required`, requests without a seed are refused.
        """
        super().__init__(run_seed)
        self.num_derived = 0
        self.texts = TextsAhead()
        self._engine = engine
        self._required = required
        self._conversations = Conversations()
        self._lock = Lock()

    def of_rows(self, params: Any, rows: Sequence[Row]) -> list[Any]:
        """Returns sampling parameters with a seed for each row (sample).

        `params` is one object for all rows, or a sequence with one object for each row.
        """
        pairs = zip(_each(params, len(rows)), rows, strict=True)
        return [_with_row(p, row, self.texts.bring(row.seed)) for p, row in pairs]

    def of_requests(self, params: Any, prompts: Sequence[Any]) -> list[Any]:
        """Returns sampling parameters with a seed for each of vLLM's `prompts`, which come from HTTP requests.

        `params` is one object for all prompts, or a sequence with one object for each. Raises vLLM's error for a bad request
        if seeds are required and a request has none.
        """
        return [
            self._of_request(p, tokens_of(prompt))
            for p, prompt in zip(_each(params, len(prompts)), prompts, strict=True)
        ]

    def _of_request(self, params: Any, tokens: Sequence[int]) -> Any:
        if EXTRA_ARGS_KEY in (params.extra_args or {}):
            return RolloutSamplingParams.of(params)  # vLLM asks an object of this class whether it is valid
        with refused_as_by_vllm():
            check_seed(params)
        given = header_seed.get() if params.seed is None else params.seed
        seed = self._derived(tokens) if given is None else given_seed(self._run_seed, given, tokens)
        length = self._conversations.root_lengths([tokens])[0]
        row = Row(seed, length, speculate=_may_speculate(params))
        brings_text = row.speculate and params.n == 1 and given is not None
        return _with_row(params, row, self.texts.bring(seed) if brings_text else None)

    def _derived(self, tokens: Sequence[int]) -> int:
        if self._required:
            raise REFUSAL(
                f"{BLOCK_PATH}.http_seeds: required, and this request has none; send `seed` in its body or the header "
                "X-Specrollout-Seed"
            )
        with self._lock:
            self.num_derived += 1
        return self.seeds([tokens], SeedKind.DERIVED, self._engine)[0]


def _each(params: Any, number: int) -> list[Any]:
    return list(params) if isinstance(params, Sequence) else [params] * number


def tokens_of(prompt: Any) -> Sequence[int]:
    """Returns the token ids of one of vLLM's prompts, or the bytes of its text if it has no token ids."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if isinstance(prompt, dict):
        return list(prompt["prompt_token_ids"]) if "prompt_token_ids" in prompt else tokens_of(prompt.get("prompt", ""))
    return list(prompt)


def _may_speculate(params: Any) -> bool:
    """Returns whether an HTTP request may have drafts.

    Raises vLLM's error for a bad request if the request's own field for this (`DRAFTS_KEY`) is neither 0 nor 1.
    """
    given = (params.extra_args or {}).get(DRAFTS_KEY, 1)
    if given not in (0, 1):
        raise REFUSAL(f"vllm_xargs.{DRAFTS_KEY}: {given!r} is neither 0 nor 1; send 0 for a request without drafts")
    return bool(given)


def _with_row(params: Any, row: Row, text: TextAhead | None = None) -> Any:
    """Returns a copy of `params` with the facts of `row`, and with the text and branches that were made ahead for it.

    If a request has `n` above 1, its samples must differ. vLLM gives all of them the same `extra_args`, but each a different
    `SamplingParams.seed`. So in this case the seed is put there.
    """
    seeded = RolloutSamplingParams.of(params)
    identity: dict[str, int | bytes] = {"prompt_length": row.prompt_length}
    if not row.speculate:
        identity["speculate"] = False
    if text is not None and text.tokens:
        identity["ahead"] = text.tokens
        if text.branches:
            identity["branches"] = pack(text.branches)
    if params.n > 1:
        seeded.seed = row.seed % 2**62  # vLLM adds the number of the sample, and the sum must stay below 2^63
        identity["engine_seed"] = 0  # replaces the engine's own seed, which differs between engines
    else:
        identity["seed"] = row.seed
    others = {key: value for key, value in (params.extra_args or {}).items() if key != DRAFTS_KEY}
    seeded.extra_args = {**others, EXTRA_ARGS_KEY: identity}
    return seeded


async def chat_prompts(base_url: str, requests: Sequence[Mapping[str, Any]]) -> list[list[int] | None]:
    """Returns the token ids of each chat request's prompt, as the engine's HTTP server at `base_url` renders it.

    The result has None for a request that the server refuses, and for a prompt that leaves no room for a response. NeMo-RL's
    route `/tokenize` renders prompts in the same way as its chat route, and NeMo-Gym gets its token ids from there. The route
    is called by HTTP, because the renderer must stay in the server's event loop.
    """
    url = base_url.removesuffix("/v1") + "/tokenize"
    limit = asyncio.Semaphore(_RENDERED_AT_ONCE)

    async def prompt_of(request: Mapping[str, Any]) -> list[int] | None:
        async with limit:
            return await asyncio.to_thread(_chat_prompt, url, request)

    return list(await asyncio.gather(*map(prompt_of, requests)))


def _chat_prompt(url: str, request: Mapping[str, Any]) -> list[int] | None:
    """Returns the token ids of a request's prompt, and waits for them.

    No proxy is used, because the server is in this process.
    """
    asked = Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(asked) as answer:
            found = json.load(answer)
    except HTTPError:
        return None
    token_ids: list[int] = found["tokens"]
    return token_ids if len(token_ids) < found["max_model_len"] else None


class SeedHeader:
    """ASGI middleware of the engines' HTTP server, which sets `header_seed` while a request is served."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Serves one request.

        If the header is not a whole number from 0 to 2^63 - 1, the request is refused with status 400.
        """
        text = dict(scope.get("headers") or ()).get(HEADER) if scope["type"] == "http" else None
        if text is None:
            await self._app(scope, receive, send)
        elif not text.isdigit() or len(text) > _MOST_DIGITS or int(text) >= 2**63:
            sentence = f"X-Specrollout-Seed: {text.decode('latin-1')!r} is not a whole number from 0 to 2^63 - 1"
            error = {"message": sentence, "type": "invalid_request_error", "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
        else:
            token = header_seed.set(int(text))
            try:
                await self._app(scope, receive, send)
            finally:
                header_seed.reset(token)
