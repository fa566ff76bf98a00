# SPDX-License-Identifier: Apache-2.0
"""Puts seeds into sampling parameters, where the engine's worker looks for them."""

import secrets
from collections.abc import Sequence
from typing import Any

from nemo_specrollout.generation.compat import RolloutSamplingParams
from nemo_specrollout.generation.identity import EXTRA_ARGS_KEY

# vLLM adds a child's number to the seed of a request that asks for several samples; the sum must stay below 2^63.
_SEED_BITS = 62


class RequestSeeds:
    """Gives every request of an engine a seed. Owns how many had to be made up.

    NeMo-RL's rollouts and validation bring one each. Requests that come another way (its HTTP server, `generate_text`)
    get a random one, as in vLLM itself: exact samples, but not reproducible.
    """

    def __init__(self) -> None:
        self.num_made_up = 0

    def of_one(self, params: Any, seeds: Sequence[int] | None) -> Any:
        """Returns `params` with the only seed of `seeds`."""
        (seeded,) = self.of_batch(params, 1, seeds)
        return seeded

    def of_batch(self, params: Any, num_requests: int, seeds: Sequence[int] | None) -> list[Any]:
        """Returns one object for each request, from one for all or one for each."""
        each = list(params) if isinstance(params, Sequence) else [params] * num_requests
        if seeds is None:
            return [self._made_up(p) for p in each]
        return [_with_seed(p, seed) for p, seed in zip(each, seeds, strict=True)]

    def _made_up(self, params: Any) -> Any:
        if params.seed is not None or EXTRA_ARGS_KEY in (params.extra_args or {}):
            return RolloutSamplingParams.of(params)
        self.num_made_up += 1
        return _with_seed(params, secrets.randbits(_SEED_BITS))


def _with_seed(params: Any, seed: int) -> Any:
    """Returns a copy of `params` that carries `seed`; the samples of one request (`n` above 1) differ.

    vLLM copies `extra_args` to all samples of a request unchanged. `SamplingParams.seed` is what it changes for each.
    """
    seeded = RolloutSamplingParams.of(params)
    if params.n > 1:
        seeded.seed = seed & (2**_SEED_BITS - 1)
    else:
        seeded.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: {"seed": seed}}
    return seeded
