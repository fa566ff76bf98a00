# SPDX-License-Identifier: Apache-2.0
"""Derives the seed of each request from what the request is, and never from when or where it runs.

If a constant or a formula in this module changes, the tokens of every rollout change (`docs/concepts/exactness.md`). The
module does not import torch, so that processes without torch can use it.
"""

import hashlib
from array import array
from collections.abc import Iterable

MASK_64 = (1 << 64) - 1
"""A number whose lowest 64 bits are 1, and all others 0."""
GAMMA = 0x9E3779B97F4A7C15
"""Increment of the random number generator SplitMix64 (Steele, Lea, Flood 2014)."""
MIX_1 = 0xBF58476D1CE4E5B9
"""First multiplier of SplitMix64's output function."""
MIX_2 = 0x94D049BB133111EB
"""Second multiplier of SplitMix64's output function."""


def mix64_int(z: int) -> int:
    """Applies the output function of SplitMix64 to the lowest 64 bits of `z`, and returns the result, in [0, 2^64)."""
    z &= MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def combine(*parts: int) -> int:
    """Mixes several integers into one number in [0, 2^64). It depends on all of them and on their order."""
    state = 0
    for part in parts:
        state = mix64_int(state + GAMMA + mix64_int(part + GAMMA))
    return state


def request_seed(engine_seed: int, prompt_index: int, sample_index: int, policy_version: int) -> int:
    """Returns the seed of a request of a rollout, in [0, 2^63). Equal arguments give equal seeds in every process.

    The samples of one prompt, which are a group in GRPO, differ in `sample_index`.
    """
    return combine(engine_seed, prompt_index, sample_index, policy_version) >> 1


def content_hash(token_ids: Iterable[int]) -> int:
    """Returns a hash of a token sequence, in [0, 2^63). It can stand for a prompt that has no index."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
