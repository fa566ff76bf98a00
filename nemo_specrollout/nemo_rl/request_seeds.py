# SPDX-License-Identifier: Apache-2.0
"""Puts seeds into the sampling parameters of an engine's requests.

Rows of NeMo-RL's rollouts and validation bring a seed each. Clients of the HTTP server may send a seed: in the OpenAI field
`seed` or in a header. The seed of any other request is derived from its prompt.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.generation.requests import EXTRA_ARGS_KEY
from nemo_specrollout.generation.vllm_requests import REFUSAL, RolloutSamplingParams
from nemo_specrollout.nemo_rl.row_seeds import DERIVED, GIVEN, Conversations
from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

HEADER = b"x-specrollout-seed"
"""HTTP header in which a client sends a seed if it cannot send one in the body."""
_LARGEST_SEED = 2**63 - 1
_SEED_BITS = 62
"""Bits of a seed with several samples: vLLM adds the number of the sample, and the sum must stay below 2^63."""
_Message = MutableMapping[str, Any]

header_seed: ContextVar[int | None] = ContextVar("specrollout_header_seed", default=None)
"""Seed from the header of this task's HTTP request."""


@dataclass(frozen=True)
class RowArgs:
    """Arguments that NeMo-RL's rows bring beside their tokens, in the order of the rows."""

    seeds: Sequence[int]
    """Seed of each row."""

    roots: Sequence[int]
    """Length of the first prompt of each row's conversation, in tokens."""


class RequestSeeds:
    """Gives every request of an engine a seed. Owns the number of unseeded requests for each prompt under one policy."""

    def __init__(self, run_seed: int = 0, engine: int = 0, *, required: bool = False) -> None:
        """`engine` distinguishes equal requests that reach different engines. `required` refuses requests without a seed."""
        self.num_derived = 0
        self._run_seed, self._engine, self._required = run_seed, engine, required
        self._conversations = Conversations()
        self._seen: Counter[int] = Counter()
        self._version = 0
        self._lock = Lock()

    def begin_version(self, policy_version: int) -> None:
        """Resets the counts of prompts: the engine has the weights of `policy_version`."""
        with self._lock:
            self._version = policy_version
            self._seen.clear()

    def of_rows(self, params: Any, rows: RowArgs) -> list[Any]:
        """Returns sampling parameters for each row. `params` is one object for all rows, or a sequence with one for each."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(rows.seeds)
        return [_with_row(p, *row) for p, row in zip(each, zip(rows.seeds, rows.roots, strict=True), strict=True)]

    def of_requests(self, params: Any, prompts: Sequence[Any]) -> list[Any]:
        """Returns sampling parameters for each of vLLM's `prompts` that do not come from rows. `params` as in `of_rows`.

        Raises vLLM's error for a bad request if seeds are required and a request has none.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        return [self._of_request(p, tokens_of(prompt)) for p, prompt in zip(each, prompts, strict=True)]

    def _of_request(self, params: Any, tokens: Sequence[int]) -> Any:
        if EXTRA_ARGS_KEY in (params.extra_args or {}):
            return RolloutSamplingParams.of(params)
        content, given = content_hash(tokens), header_seed.get() if params.seed is None else params.seed
        run = combine(self._run_seed, GIVEN)
        seed = self._derived(content) if given is None else request_seed(run, content, 0, given)
        (root,) = self._conversations.root_lengths([tokens])
        return _with_row(params, seed, root)

    def _derived(self, content: int) -> int:
        if self._required:
            raise REFUSAL(
                f"{BLOCK_PATH}.http_seeds: required, and this request has none; send `seed` in its body or the header "
                "X-Specrollout-Seed"
            )
        with self._lock:
            occurrence = self._seen[content]
            self._seen[content] += 1
            self.num_derived += 1
        run = combine(self._run_seed, DERIVED, self._engine)
        return request_seed(run, content, occurrence, self._version)


def tokens_of(prompt: Any) -> Sequence[int]:
    """Returns the token ids of one of vLLM's prompts, or the bytes of its text."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if isinstance(prompt, dict):
        return list(prompt["prompt_token_ids"]) if "prompt_token_ids" in prompt else tokens_of(prompt.get("prompt", ""))
    return list(prompt)


def _with_row(params: Any, seed: int, root_length: int) -> Any:
    """Returns a copy of `params` that carries `seed` and the length of the group's common prompt.

    The samples of one request (`n` above 1) must differ. vLLM copies `extra_args` unchanged to all of them, but changes
    `SamplingParams.seed` for each.
    """
    seeded = RolloutSamplingParams.of(params)
    identity: dict[str, int] = {"prompt_length": root_length}
    if params.n > 1:
        seeded.seed = seed & (2**_SEED_BITS - 1)
        identity["engine_seed"] = 0  # each engine has another seed of its own
    else:
        identity["seed"] = seed
    seeded.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: identity}
    return seeded


class SeedHeader:
    """ASGI middleware of the engines' HTTP server: sets `header_seed` while a request is served."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: Any, send: Any) -> None:
        """Serves one request. Refuses with status 400 a header that is not a whole number from 0 to 2^63 - 1."""
        text = dict(scope.get("headers") or ()).get(HEADER) if scope["type"] == "http" else None
        if text is None:
            await self._app(scope, receive, send)
        elif not text.isdigit() or int(text) > _LARGEST_SEED:
            await _refuse(send, text)
        else:
            token = header_seed.set(int(text))
            try:
                await self._app(scope, receive, send)
            finally:
                header_seed.reset(token)


async def _refuse(send: Callable[[_Message], Awaitable[None]], text: bytes) -> None:
    sentence = f"X-Specrollout-Seed: {text.decode('latin-1')!r} is no whole number from 0 to 2^63 - 1"
    body = {"error": {"message": sentence, "type": "invalid_request_error", "code": 400}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
