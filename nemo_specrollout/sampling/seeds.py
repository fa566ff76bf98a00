# SPDX-License-Identifier: Apache-2.0
"""Which seed a request samples with: a pure function of who it is, never of when or where it runs.

Integers only, no torch: drivers, workers and simulators agree on it.
"""

import hashlib
from array import array
from collections.abc import Iterable

from nemo_specrollout.sampling.constants import GAMMA, MASK_64, MIX_1, MIX_2


def mix64_int(z: int) -> int:
    """SplitMix64's output function on a Python integer, modulo 2^64."""
    z &= MASK_64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def combine(*parts: int) -> int:
    """One 64-bit number from several integers; order matters."""
    state = 0
    for part in parts:
        state = mix64_int(state + GAMMA + mix64_int(part + GAMMA))
    return state


def request_seed(engine_seed: int, prompt_index: int, sample_index: int, policy_version: int) -> int:
    """The seed of one rollout request, an integer in [0, 2^63).

    Equal for equal arguments on every worker; siblings of a GRPO group differ in `sample_index`.
    """
    return combine(engine_seed, prompt_index, sample_index, policy_version) >> 1


def content_hash(token_ids: Iterable[int]) -> int:
    """A 63-bit hash of a token sequence, for telling prompts apart without an index."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
