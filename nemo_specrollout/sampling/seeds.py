# SPDX-License-Identifier: Apache-2.0
"""Derives the seed of each request from the request's identity, and never from when or where it runs.

Changing a constant or a formula here changes every rollout (`docs/concepts/exactness.md`). The module does not import torch,
so that processes without torch can import it too.
"""

import hashlib
from array import array
from collections.abc import Iterable

MASK_64 = (1 << 64) - 1
"""The bits of a 64-bit number."""
GAMMA = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 stream (Steele, Lea, Flood 2014)."""
MIX_1 = 0xBF58476D1CE4E5B9
"""First multiplier of SplitMix64's output function."""
MIX_2 = 0x94D049BB133111EB
"""Second multiplier of SplitMix64's output function."""


def mix64_int(z: int) -> int:
    """Returns SplitMix64's output function of a Python integer, modulo 2^64."""
    z &= MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def combine(*parts: int) -> int:
    """Returns one 64-bit number that depends on several integers and their order."""
    state = 0
    for part in parts:
        state = mix64_int(state + GAMMA + mix64_int(part + GAMMA))
    return state


def request_seed(engine_seed: int, prompt_index: int, sample_index: int, policy_version: int) -> int:
    """Returns the seed of a rollout request, in [0, 2^63).

    Equal arguments give equal seeds in every process. The samples of a GRPO group differ in `sample_index`.
    """
    return combine(engine_seed, prompt_index, sample_index, policy_version) >> 1


def content_hash(token_ids: Iterable[int]) -> int:
    """Returns a 63-bit hash of a token sequence. It tells prompts apart where they have no index."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
