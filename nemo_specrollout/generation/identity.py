# SPDX-License-Identifier: Apache-2.0
"""Who a request is, as carried by `SamplingParams.extra_args["specrollout"]`, and the seed that follows from it."""

from dataclasses import dataclass
from typing import Any

from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

EXTRA_ARGS_KEY = "specrollout"
_KNOWN_KEYS = ("seed", "prompt_index", "sample_index", "policy_version", "speculate", "prompt_length", "engine_seed")


@dataclass(frozen=True)
class RequestIdentity:
    """What a worker knows of a request.

    `seed` keys its noise; `group` is equal for siblings (samples of one prompt); `speculate` is false for a request
    that must be decoded plainly, as in an equality check.
    """

    seed: int
    group: int
    speculate: bool = True


def rollout_extra_args(
    prompt_index: int,
    sample_index: int,
    policy_version: int,
    *,
    speculate: bool = True,
    prompt_length: int | None = None,
) -> dict[str, dict[str, int | bool]]:
    """`extra_args` for a rollout request; the worker derives the seed from them and the engine's seed.

    `prompt_length` is given where the prompt that the engine gets is followed by a part of the response.
    """
    identity: dict[str, int | bool] = {
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        "policy_version": policy_version,
        "speculate": speculate,
    }
    return {EXTRA_ARGS_KEY: identity if prompt_length is None else {**identity, "prompt_length": prompt_length}}


def resolve_identity(request_id: str, params: Any, prompt_token_ids: list[int], engine_seed: int) -> RequestIdentity:
    """The identity of a request, from the first of these that is there.

    1. `extra_args["specrollout"]["seed"]`;
    2. `extra_args["specrollout"]` with prompt_index, sample_index (default 0) and policy_version (default 0);
    3. `SamplingParams.seed` (vLLM gives the children of `n > 1` seed + index);
    4. greedy requests need none.

    An `engine_seed` in `extra_args["specrollout"]` replaces the engine's own seed, so that all engines sample alike.
    Raises ValueError otherwise: a seed made up from arrival order would make rollouts depend on scheduling.
    """
    given: dict[str, Any] = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
    for key in given:
        if key not in _KNOWN_KEYS:
            raise ValueError(
                f'request {request_id}: extra_args["{EXTRA_ARGS_KEY}"] has no key {key!r}; known: {", ".join(_KNOWN_KEYS)}'
            )
    engine_seed = int(given.get("engine_seed", engine_seed))
    group = content_hash(prompt_token_ids[: given.get("prompt_length")])
    speculate = bool(given.get("speculate", True))
    if "seed" in given:
        return RequestIdentity(int(given["seed"]) & (2**63 - 1), group, speculate)
    if "prompt_index" in given:
        indices = (given["prompt_index"], given.get("sample_index", 0), given.get("policy_version", 0))
        return RequestIdentity(request_seed(engine_seed, *map(int, indices)), group, speculate)
    if params.seed is not None:
        return RequestIdentity(combine(engine_seed, params.seed) >> 1, group, speculate)
    if params.temperature < 1e-5:
        return RequestIdentity(0, group, speculate)
    raise ValueError(
        f"request {request_id}: sampling at temperature {params.temperature} needs a seed that does not depend on arrival "
        f'order; set SamplingParams.seed, or extra_args={{"{EXTRA_ARGS_KEY}": {{"prompt_index": ..., "sample_index": ...}}}}'
    )
