# SPDX-License-Identifier: Apache-2.0
"""A request that was made elsewhere, with parameters of its own: what workers hand each other of NeMo-RL's batches."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardRequest:
    """One request of a worker's shard.

    `home` is that worker and the request's number there; `prompt_index` is equal for siblings; `params` are vLLM's sampling
    parameters, seed included, as msgpack: who hands it on has no vLLM. `prefix_token_ids` is the beginning of the response.
    """

    prompt_token_ids: Sequence[int]
    prompt_index: int
    home: tuple[int, int]
    params: bytes
    prefix_token_ids: Sequence[int] = ()
