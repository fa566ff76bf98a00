# SPDX-License-Identifier: Apache-2.0
"""Seeds of the rows (samples) that NeMo-RL's rollouts request. They do not depend on where or when a row is decoded.

NeMo-RL passes the tokens of a row to the generation, but no index. If it is known which sample a row belongs to
(`current_sample`), its seed follows from the sample. Otherwise the seed follows from the prompt's content, and from the number
of earlier rows with the same content under the same weights. So the samples of one prompt get different seeds, because they
arrive in order.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed

SEEDS_KEY = "specrollout_seeds"
"""Key of a generation's input. Its value has the seed of each row."""
ROOTS_KEY = "specrollout_prompt_lengths"
"""Key of a generation's input. Its value has for each row the length of its conversation's first prompt, in tokens."""
DRAFTS_KEY = "specrollout_speculate"
"""Key of a generation's input. Its value says for each row whether it may have drafts.

An HTTP request may have the same key in `vllm_xargs`. There the value 0 means that the request gets no drafts."""
RECORD_KEY = "specrollout_record"
"""Key of a generation's input. Its value says for each row whether it is recorded for an audit."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd
_MAX_PROMPTS = 1 << 16
"""Number of prompts that `Conversations` remembers. When there are more, the older half is forgotten."""
_EXTRA_BODY = "extra_body"
"""Key in the metadata of a NeMo-Gym row. Its value is JSON that the model server merges into every request of the row."""
_lock = Lock()
"""Guards all counts of this process, because several threads of NeMo-RL's trajectory collector use them."""


class SeedKind(IntEnum):
    """Kinds of seeds. Requests of different kinds get different seeds, even for the same prompt.

    A change of these numbers would change all rollouts.
    """

    ROLLOUT = 0
    VALIDATION = 1
    KNOWN_SAMPLE = 2  # of a rollout whose `Sample` is known
    GIVEN = 3  # of an HTTP request that brings a seed
    DERIVED = 4  # of an HTTP request that brings none


class Row(NamedTuple):
    """Facts about a row (sample) that NeMo-RL does not pass to its engines."""

    seed: int
    prompt_length: int
    """Length of the conversation's first prompt, in tokens."""
    speculate: bool = True
    """Whether the row may have drafts."""
    is_recorded: bool = False
    """Whether the row is recorded for an audit. Rows of validations are not recorded."""


@dataclass(frozen=True)
class Sample:
    """Identity of a sample.

    It is the index of the prompt in the dataset, the number of the sample among those of its prompt, and the epoch.
    """

    prompt: int
    index: int
    epoch: int = 0
    prompt_length: int | None = None
    """Number of tokens of the conversation's first prompt, or None if it is not known."""


current_sample: ContextVar[Sample | None] = ContextVar("specrollout_current_sample", default=None)
"""The sample that the current asyncio task rolls out. The task requests one row for each turn of the conversation."""


class RowSeeds:
    """Gives rows (samples) their seeds. Owns how often each content was requested under the current policy version.

    Equal calls in equal order give equal seeds, whatever the number of engines. A new policy version resets the counts. So a
    resumed run samples the same as a run without interruption.
    """

    def __init__(self, run_seed: int, policy_version: int = 0) -> None:
        self._run_seed = run_seed
        self._policy_version = policy_version
        self._seen: Counter[tuple[SeedKind, int]] = Counter()

    def begin_version(self, policy_version: int) -> None:
        """Sets the policy version. If it is a new one, the counts of earlier rows with the same content begin at 0 again."""
        with _lock:
            if policy_version != self._policy_version:
                self._policy_version = policy_version
                self._seen.clear()

    def seeds(self, rows: Iterable[Sequence[int]], kind: SeedKind = SeedKind.ROLLOUT, *stream: int) -> list[int]:
        """Returns a seed in [0, 2^63) for each row of token ids. Different numbers in `stream` give different seeds."""
        sample = current_sample.get()
        if sample is not None:
            return [sample_seed(self._run_seed, sample, row) for row in rows]
        run = combine(self._run_seed, kind, *stream)
        seeds = []
        with _lock:
            for content in map(content_hash, rows):
                seeds.append(request_seed(run, content, self._seen[kind, content], self._policy_version))
                self._seen[kind, content] += 1
        return seeds


def sample_seed(run_seed: int, sample: Sample, row: Sequence[int] = ()) -> int:
    """Returns the seed for one turn of a sample's conversation, an integer in [0, 2^63).

    `row` has the token ids of the prompt of this turn. The seed does not depend on the policy version. So samples keep their
    seeds if they are rolled out again with other weights or on another engine.
    """
    run = combine(run_seed, SeedKind.KNOWN_SAMPLE, sample.prompt)
    return request_seed(run, content_hash(row), sample.index, sample.epoch)


class Conversations:
    """Finds out how long the first prompt of a conversation is, and remembers prompts for this.

    A conversation may have several turns. The prompt of a later turn consists of the prompt of the turn before, the response
    to it and the environment's answer. So it begins with the first prompt, which all samples of a dataset's prompt share.
    """

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}  # hash of a prompt -> length of its conversation's first prompt
        self._lengths: list[int] = []  # distinct lengths of all prompts, ascending

    def root_lengths(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns the length of each conversation's first prompt, in tokens, and remembers the prompts `rows`.

        A prompt that does not begin with a known prompt is the first of its conversation.
        """
        with _lock:
            return [self._root_length(row) for row in rows]

    def _root_length(self, row: Sequence[int]) -> int:
        hashes = prefix_hashes(row)
        ends = np.array(self._lengths[: bisect_right(self._lengths, len(row))], dtype=np.int64) - 1
        known = map(self._roots.get, hashes[ends].tolist())
        root = next((length for length in known if length is not None), len(row))
        if hashes.size:
            self._remember(int(hashes[-1]), len(row), root)
        return root

    def _remember(self, key: int, length: int, root: int) -> None:
        self._roots[key] = root
        place = bisect_left(self._lengths, length)
        if self._lengths[place : place + 1] != [length]:
            self._lengths.insert(place, length)
        if len(self._roots) > _MAX_PROMPTS:
            for oldest in list(self._roots)[: _MAX_PROMPTS // 2]:
                del self._roots[oldest]


def prefix_hashes(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns a 64-bit hash of each non-empty prefix of `tokens`, the shortest first; shape [tokens]."""
    tokens_T = np.asarray(tokens, dtype=np.uint64)
    with np.errstate(over="ignore"):
        powers_T = np.cumprod(np.full(tokens_T.size, _HASH_FACTOR, dtype=np.uint64))
        sums_T = np.cumsum((tokens_T + np.uint64(1)) * powers_T, dtype=np.uint64)
    return sums_T ^ (sums_T >> np.uint64(29))


def gym_contents(rows: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Returns for each row of NeMo-Gym the bytes from which its seed is made. They encode the question of the row.

    Rows that are samples of one question have equal bytes.
    """
    questions = [row["responses_create_params"].get("input") for row in rows]
    return [list(json.dumps(question, sort_keys=True, default=str).encode()) for question in questions]


def given_seed(run_seed: int, given: int, prompt: Sequence[int]) -> int:
    """Returns the seed with which an HTTP request samples, if its client has sent the seed `given`.

    It is an integer in [0, 2^63) that follows from `given`, the run's seed and the token ids of the prompt.
    """
    return request_seed(combine(run_seed, SeedKind.GIVEN), content_hash(prompt), 0, given)


def gym_row_with_seed(row: dict[str, Any], seed: int, draftless: Collection[str] = ()) -> dict[str, Any]:
    """Returns a copy of NeMo-Gym's `row` in which each request gets the OpenAI field `seed`. A row's own seed is kept.

    Requests of agents whose names are in `draftless` also get a field that turns drafts off.
    """
    params = row["responses_create_params"]
    metadata = dict(params.get("metadata") or {})
    body = {"seed": seed, **json.loads(metadata.get(_EXTRA_BODY) or "{}")}
    if (row.get("agent_ref") or {}).get("name") in draftless:
        body["vllm_xargs"] = {DRAFTS_KEY: 0, **body.get("vllm_xargs", {})}
    metadata[_EXTRA_BODY] = json.dumps(body)
    return {**row, "responses_create_params": {**params, "metadata": metadata}}


def gym_request_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields, such as `seed`, that `gym_row_with_seed` has added to each request of NeMo-Gym's `row`."""
    fields: dict[str, Any] = json.loads(row["responses_create_params"]["metadata"][_EXTRA_BODY])
    return fields


def may_draft(fields: Mapping[str, Any]) -> bool:
    """Returns whether a request with these fields may have drafts."""
    return (fields.get("vllm_xargs") or {}).get(DRAFTS_KEY, 1) == 1
