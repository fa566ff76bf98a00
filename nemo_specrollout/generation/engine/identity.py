# SPDX-License-Identifier: Apache-2.0
"""Reads what a request says about itself in `extra_args`, and derives its `RequestIdentity`. vLLM is not imported.

`check_request` is called before a request reaches an engine, because an error in an engine step would end the engine and all
of its other requests.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as shortened
from typing import Any, NamedTuple

from nemo_specrollout.config.strict import nearest
from nemo_specrollout.generation.engine.ahead_branches import TOKEN_BYTES, unpack
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, RequestIdentity
from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

_FIELD = f'extra_args["{EXTRA_ARGS_KEY}"]'
_GREEDY = 1e-5
"""Below this temperature vLLM samples greedily."""


@dataclass(frozen=True)
class GivenIdentity:
    """The fields of `extra_args["specrollout"]`. A request may leave out any of them."""

    seed: int | None = None
    """Seed of the request's noise."""
    prompt_index: int | None = None
    """Number of the prompt. If there is no `seed`, the seed of the request's noise is derived from `prompt_index`,
    `sample_index` and `policy_version`."""
    sample_index: int | None = None
    policy_version: int | None = None
    speculate: bool = True
    """False for a request that must be decoded without drafts."""
    prompt_length: int | None = None
    """Number of tokens at the beginning of the prompt that determine the request's group. Requests that begin with the same
    tokens are a group. If the number exceeds the prompt's length, all of the prompt's tokens count."""
    engine_seed: int | None = None
    """Seed that takes the place of the engine's own seed, so that all engines sample alike."""
    ahead: bytes = b""
    """Token ids of the text that is expected after the prompt, as int32 numbers."""
    branches: bytes = b""
    """Other texts that may follow the prompt instead of `ahead`, packed by `ahead_branches.pack`."""
    ties: int | None = None
    """Number under which the engine keeps the request's near-ties, or None if they are not needed. Two requests that run at
    once in an engine must have different numbers."""
    early: bool = False
    """True for a request of a coming training step, or for a branch of a request. The statistics of samples leave out such
    requests."""


class _Rule(NamedTuple):
    """A rule for the values of one field. `holds` tests a value, and `wanted` says in words which values are allowed."""

    holds: Callable[[Any], bool]
    wanted: str


def _whole(low: int, high: int, words: str) -> _Rule:
    """Returns a rule that allows whole numbers from `low` to `high`. `words` describes them.

    The rule does not allow bools, although Python counts them among the ints.
    """

    def holds(value: Any) -> bool:
        # Nearly all numbers are plain ints, and a check against the abstract class takes ten times as long.
        is_whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
        return is_whole and low <= int(value) <= high

    return _Rule(holds, words)


def _are_branches(value: Any) -> bool:
    if not isinstance(value, bytes) or len(value) % TOKEN_BYTES:
        return False
    try:
        unpack(value)
    except ValueError:
        return False
    return True


_SEED = _whole(0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")
_INDEX = _whole(-(2**63), 2**63 - 1, "a whole number of 64 bits")
_LENGTH = _whole(0, 2**31 - 1, "a number of tokens")
_RULES = {
    "seed": _SEED,
    "prompt_index": _INDEX,
    "sample_index": _INDEX,
    "policy_version": _INDEX,
    "speculate": _Rule(lambda value: isinstance(value, bool), "true or false"),
    "prompt_length": _LENGTH,
    "engine_seed": _INDEX,
    "ahead": _Rule(
        lambda value: isinstance(value, bytes) and len(value) % TOKEN_BYTES == 0,
        "bytes of int32 numbers, which `requests.as_bytes` makes of token ids",
    ),
    "branches": _Rule(_are_branches, "branches, which `ahead_branches.pack` makes"),
    "ties": _whole(0, 2**63 - 1, "a whole number from 0 to 2^63 - 1"),
    "early": _Rule(lambda value: isinstance(value, bool), "true or false"),
}


def check_request(params: Any) -> GivenIdentity:
    """Returns what a request says about itself in vLLM's sampling parameters `params`.

    Raises ValueError, with field, value and fix, for a request that an engine could not sample reproducibly. Such a request
    has a malformed field, or it has nothing that determines its noise, or it asks for `n` samples that would all be equal.
    """
    given = given_identity(params)
    check_seed(params)
    names_one_sample = given.seed is not None or given.prompt_index is not None
    if params.n > 1 and names_one_sample:
        raise ValueError(
            f"n: {params.n} with a seed or prompt_index in {_FIELD}; all samples would be equal: set SamplingParams.seed, "
            "to which vLLM adds the number of the sample, or send a request for each sample"
        )
    if not names_one_sample and params.seed is None and params.temperature >= _GREEDY:
        raise ValueError(
            f"seed: None; sampling at temperature {params.temperature} needs a seed that does not depend on arrival order; "
            "set SamplingParams.seed to a number other than -1, which vLLM takes for none, or "
            f'extra_args={{"{EXTRA_ARGS_KEY}": {{"prompt_index": ..., "sample_index": ...}}}}'
        )
    return given


def given_identity(params: Any) -> GivenIdentity:
    """Returns the content of `extra_args["specrollout"]` in vLLM's sampling parameters `params`.

    Raises ValueError, with field, value and fix, if that content is malformed.
    """
    extra_args = {} if params.extra_args is None else params.extra_args
    if not isinstance(extra_args, Mapping):
        raise ValueError(f"extra_args: {shortened(extra_args)} is no mapping; send one, or leave it out")
    _check_keys(extra_args)
    given = extra_args.get(EXTRA_ARGS_KEY, {})
    if not isinstance(given, Mapping):
        raise ValueError(
            f'{_FIELD}: {shortened(given)} is no mapping; send one such as {{"seed": 1}}, or leave it out. Over HTTP, where '
            "vllm_xargs cannot hold a mapping, send `seed`"
        )
    for name, value in given.items():
        if name not in _RULES:
            raise ValueError(f"{_FIELD} has no key {shortened(name)}{_suggestion(name, _RULES)}")
        if not _RULES[name].holds(value):
            raise ValueError(
                f'{_FIELD}["{name}"]: {shortened(value)} is not {_RULES[name].wanted}; send that, or leave it out'
            )
    if "seed" not in given and "prompt_index" not in given:
        for name in ("sample_index", "policy_version"):
            if name in given:
                raise ValueError(f'{_FIELD}["{name}"]: {given[name]} without prompt_index; send both, or neither')
    return GivenIdentity(**given)


def _check_keys(extra_args: Mapping[Any, Any]) -> None:
    """Raises ValueError for a key that looks like a misspelt "specrollout", because vLLM ignores unknown keys silently."""
    for key in extra_args:
        if key != EXTRA_ARGS_KEY and isinstance(key, str) and key.startswith(EXTRA_ARGS_KEY):
            raise ValueError(
                f'extra_args["{key}"]: {shortened(extra_args[key])}; this engine knows the key "{EXTRA_ARGS_KEY}" only: '
                f"write {_FIELD}, with some of {', '.join(_RULES)}"
            )


def _suggestion(name: Any, known: Iterable[str]) -> str:
    return nearest(name, known) if isinstance(name, str) else f"; known: {', '.join(known)}"


def check_seed(params: Any) -> None:
    """Raises ValueError, with field, value and fix, if `params.seed` is neither None nor a valid seed."""
    if params.seed is not None and not _INDEX.holds(params.seed):
        raise ValueError(f"seed: {shortened(params.seed)} is not {_INDEX.wanted}; send one, or leave it out")


def resolve_identity(params: Any, prompt_token_ids: list[int], engine_seed: int) -> RequestIdentity:
    """Returns the identity of a request, which includes the seed of its noise.

    The seed comes from the first of these sources that the request has:

    1. `extra_args["specrollout"]["seed"]`.
    2. `extra_args["specrollout"]` with prompt_index, sample_index (default 0) and policy_version (default 0).
    3. `SamplingParams.seed`. With `n > 1`, vLLM gives each sample the sum of this seed and the sample's index.

    With sources 2 and 3, the seed also depends on the engine's own seed `engine_seed`, or on the one in
    `extra_args["specrollout"]["engine_seed"]` if the request gives one. A request that samples greedily needs no source.

    Raises ValueError if a request that samples at a temperature above 0 has no source. A seed that follows the order of
    arrival would make rollouts depend on scheduling.
    """
    given = check_request(params)
    engine_seed = engine_seed if given.engine_seed is None else int(given.engine_seed)
    group = content_hash(prompt_token_ids[: given.prompt_length])
    ties = None if given.ties is None else int(given.ties)
    rest = (group, given.speculate, given.ahead, unpack(given.branches), ties, given.early)
    if given.seed is not None:
        return RequestIdentity(int(given.seed), *rest)
    if given.prompt_index is not None:
        indices = (given.prompt_index, given.sample_index or 0, given.policy_version or 0)
        return RequestIdentity(request_seed(engine_seed, *map(int, indices)), *rest)
    if params.seed is not None:
        return RequestIdentity(combine(engine_seed, int(params.seed)) >> 1, *rest)
    return RequestIdentity(0, *rest)


def identity_of_unchecked(request_id: str) -> RequestIdentity:
    """Returns an identity for a bad request that has reached the engine although it should have been refused.

    Its noise is derived from its id. So different requests get different noise, as with vLLM's requests without a seed, and
    all ranks of an engine agree on it. The request gets no drafts.
    """
    own = content_hash(list(request_id.encode()))
    return RequestIdentity(own, own, speculate=False)
