# SPDX-License-Identifier: Apache-2.0
"""What an exchange tells those who come to it. Plain data."""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.racing.turns import Orders, Request

Starts = tuple[tuple[int, Request], ...]
"""Runs to begin at once, whose tokens are told in the reports of whatever turns follow."""


class ExchangeFailed(Exception):
    """The exchange is of no more use: everybody goes on alone with what is theirs."""


@dataclass(frozen=True)
class Made:
    """The response to a worker's request of that number: tokens int32 [N], log-probs float32 [N]. If it was refused, none:
    natively it will be too."""

    number: int
    tokens_N: np.ndarray
    logprobs_N: np.ndarray
    finish_reason: str | None

    @classmethod
    def of(cls, number: int, rollout: Rollout | None) -> "Made":
        """For the wire."""
        if rollout is None:
            return cls(number, np.zeros(0, np.int32), np.zeros(0, np.float32), None)
        tokens_N, logprobs_N = np.array(rollout.token_ids, np.int32), np.array(rollout.logprobs, np.float32)
        return cls(number, tokens_N, logprobs_N, rollout.finish_reason)

    @property
    def rollout(self) -> Rollout | None:
        """From the wire."""
        if self.finish_reason is None:
            return None
        return Rollout(self.tokens_N.tolist(), self.logprobs_N.tolist(), self.finish_reason)


@dataclass(frozen=True)
class Reply:
    """To a report: further turns, responses to the worker's own requests, and whether nothing is left to do for anybody."""

    orders: tuple[Orders, ...]
    made: tuple[Made, ...]
    is_over: bool
