# SPDX-License-Identifier: Apache-2.0
"""What a coordinator and a rollout worker tell each other: orders for a turn, and the report of it. Plain data.

Shapes: K runs that made tokens, N tokens of all of them.
"""

from dataclasses import dataclass, field

import numpy as np

from nemo_specrollout.generation.engine import RolloutRequest
from nemo_specrollout.generation.shard_request import ShardRequest

Request = RolloutRequest | ShardRequest
"""What may be under way: a sample that its indices identify, or one that came with parameters of its own."""


@dataclass(frozen=True)
class Orders:
    """For one turn: runs to begin, with a request whose prefix is what is known of the response; runs to stop; and how long to
    go on, unless all runs end before."""

    starts: tuple[tuple[int, Request], ...] = ()
    stops: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """New tokens of runs, one run after the other: keys int64 [K], how many of each int64 [K], tokens int32 [N], log-probs
    float32 [N]."""

    keys_K: np.ndarray
    counts_K: np.ndarray
    tokens_N: np.ndarray
    logprobs_N: np.ndarray

    @classmethod
    def of(cls, parts: dict[int, tuple[list[int], list[float]]]) -> "Progress":
        """From tokens and log-probs by run."""
        return cls(
            np.array(list(parts), np.int64),
            np.array([len(tokens) for tokens, _ in parts.values()], np.int64),
            np.array([t for tokens, _ in parts.values() for t in tokens], np.int32),
            np.array([x for _, logprobs in parts.values() for x in logprobs], np.float32),
        )

    def parts(self) -> dict[int, tuple[list[int], list[float]]]:
        """The inverse of `of`."""
        ends_K = np.cumsum(self.counts_K)
        tokens, logprobs = self.tokens_N.tolist(), self.logprobs_N.tolist()
        rows = zip(self.keys_K.tolist(), (ends_K - self.counts_K).tolist(), ends_K.tolist(), strict=True)
        return {key: (tokens[start:end], logprobs[start:end]) for key, start, end in rows}


@dataclass(frozen=True)
class Work:
    """Of the decode steps of a turn: seconds of steps, the same summed over the requests of each, tokens that they made; and
    seconds that computing texts took beyond such a step, and tokens of those texts."""

    decode_s: float = 0.0
    request_s: float = 0.0
    num_tokens: int = 0
    prefill_s: float = 0.0
    num_prefilled: int = 0

    @property
    def mean_batch(self) -> float:
        """Requests of a decode step."""
        return self.request_s / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Report:
    """Of one turn: what its runs made, why those that ended did (`stop` or `length`), what it cost."""

    progress: Progress
    finished: dict[int, str] = field(default_factory=dict)
    """Each of these is in `progress`, though it made nothing."""

    work: Work = Work()
    policy_version: int = 0
    """Of the weights that made it."""

    steady: tuple[int, ...] = ()
    """Runs that made tokens before, and went on through all of its decode steps."""

    refused: tuple[int, ...] = ()
    """Runs that the engine does not take; the request is to blame."""
