# SPDX-License-Identifier: Apache-2.0
"""Puts seeds into sampling parameters, where the engine's worker looks for them.

NeMo-RL's rollouts and validation bring a seed for each row. Clients of the HTTP server may bring one: the OpenAI field
`seed`, or a header. The seed of any other request follows from what it asks for.
"""

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.generation.compat import REFUSAL, RolloutSamplingParams
from nemo_specrollout.generation.identity import EXTRA_ARGS_KEY
from nemo_specrollout.nemo_rl.conversations import Conversations
from nemo_specrollout.nemo_rl.identities import DERIVED, GIVEN
from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

# vLLM adds a child's number to the seed of a request that asks for several samples; the sum must stay below 2^63.
_SEED_BITS = 62

header_seed: ContextVar[int | None] = ContextVar("specrollout_header_seed", default=None)
"""The seed that the HTTP request of this task brought in its header."""


@dataclass(frozen=True)
class RowArgs:
    """What NeMo-RL's rows bring beside their tokens: of each row its seed, and the number of its tokens with which the
    conversation began."""

    seeds: Sequence[int]
    roots: Sequence[int]


class RequestSeeds:
    """Gives every request of an engine a seed. Owns how often each prompt was asked for without one, under one policy.

    `engine` is the number of the engine, which tells apart equal requests that reach different engines. With `required`
    a request without a seed is refused.
    """

    def __init__(self, run_seed: int = 0, engine: int = 0, *, required: bool = False) -> None:
        self.num_derived = 0
        self._run_seed, self._engine, self._required = run_seed, engine, required
        self._conversations = Conversations()
        self._seen: Counter[int] = Counter()
        self._version = 0
        self._lock = Lock()

    def begin_version(self, policy_version: int) -> None:
        """The engine has the weights of `policy_version`; prompts are counted afresh."""
        with self._lock:
            self._version = policy_version
            self._seen.clear()

    def of_rows(self, params: Any, rows: RowArgs) -> list[Any]:
        """Returns one object for each row, from one for all or one for each."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(rows.seeds)
        return [_with_row(p, *row) for p, row in zip(each, zip(rows.seeds, rows.roots, strict=True), strict=True)]

    def of_requests(self, params: Any, prompts: Sequence[Any]) -> list[Any]:
        """Returns one object for each of `prompts`, vLLM's own, that come another way than as rows.

        Raises vLLM's error of a bad request for one without a seed where seeds are required.
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
    """Returns the token ids of a prompt of vLLM's, or the bytes of its text."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if isinstance(prompt, dict):
        return list(prompt["prompt_token_ids"]) if "prompt_token_ids" in prompt else tokens_of(prompt.get("prompt", ""))
    return list(prompt)


def _with_row(params: Any, seed: int, root_length: int) -> Any:
    """Returns a copy of `params` that carries `seed` and the length of the prompt that its group shares.

    The samples of one request (`n` above 1) differ: vLLM copies `extra_args` to all of them unchanged, and changes
    `SamplingParams.seed` for each.
    """
    seeded = RolloutSamplingParams.of(params)
    identity: dict[str, int] = {"prompt_length": root_length}
    if params.n > 1:
        seeded.seed = seed & (2**_SEED_BITS - 1)
        identity["engine_seed"] = 0  # the engine's own seed differs from engine to engine
    else:
        identity["seed"] = seed
    seeded.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: identity}
    return seeded
