# SPDX-License-Identifier: Apache-2.0
"""What an engine's work costs: one interface, and the two kinds that are figures of others; `roofline.py` has the third.

`TabledCosts` were measured by `nemo-specrollout profile`. `RoundCosts` and `LinearCosts` are the forms in which the two papers
give theirs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.strict import ConfigError, bounded, check_rising
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables, sizes_of

Rows = np.ndarray | float


class Costs(ABC):
    """Seconds of one engine's steps."""

    @abstractmethod
    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        """Of a step of `num_requests` with `num_rows` in all, drafts included; `context`: a request's mean length."""

    @abstractmethod
    def draft_s(self, num_requests: float, context: float) -> float:
        """Of one draft token for each request, by this engine itself."""

    @abstractmethod
    def prefill_s(self, num_tokens: float) -> float:
        """Of computing a text of `num_tokens` tokens."""


@dataclass(frozen=True)
class TabledCosts(Costs):
    """Of measured tables; they know nothing of the context. A prefill is a step of as many rows."""

    verify: CostCurve
    drafting: CostCurve | None = None

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        if isinstance(num_rows, np.ndarray):
            return np.array([self.verify.at(float(n)) for n in num_rows])
        return self.verify.at(num_rows)

    def draft_s(self, num_requests: float, context: float) -> float:
        return self.drafting.at(num_requests) if self.drafting else 0.0

    def prefill_s(self, num_tokens: float) -> float:
        return self.verify.at(num_tokens)


@dataclass(frozen=True)
class RoundCosts(Costs):
    """Paper B's figures (arXiv 2604.26779): what a round that drafts and verifies k tokens costs in plain steps, which is its
    acceptance length over its speedup; on straight lines from 1 at no drafts through what is known, and on beyond it.

    A plain step takes the same whatever the batch: the paper gives no more.
    """

    plain_step_s: float = bounded(above=0.0)
    """Seconds of a plain decode step."""
    num_drafts: tuple[int, ...] = bounded(low=1)
    """Of each request, rising."""
    plain_steps: tuple[float, ...] = bounded(low=1.0)
    """What a round of that number costs."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless the lists go together."""
        if not self.num_drafts or len(self.num_drafts) != len(self.plain_steps):
            raise ConfigError(
                f"{path}.plain_steps: {len(self.plain_steps)} for {len(self.num_drafts)} num_drafts; give one for each"
            )
        check_rising(f"{path}.num_drafts", self.num_drafts)

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        k = np.asarray(num_rows, float) / num_requests - 1.0
        ks, rounds = np.array([0, *self.num_drafts]), np.array([1.0, *self.plain_steps])
        slope = (rounds[-1] - rounds[-2]) / (ks[-1] - ks[-2])
        seconds = self.plain_step_s * (np.interp(k, ks, rounds) + slope * np.maximum(k - ks[-1], 0.0))
        return seconds if isinstance(num_rows, np.ndarray) else float(seconds)

    def draft_s(self, num_requests: float, context: float) -> float:
        return 0.0

    def prefill_s(self, num_tokens: float) -> float:
        return 0.0


@dataclass(frozen=True)
class LinearCosts(Costs):
    """SpecActor's form (arXiv 2511.16193): drafting one token is `b * D' + alpha`, verifying a window is `b * V' + beta`, here
    with V' per row, so that windows of all lengths are on one line. The paper's coefficients are not public."""

    verify_fixed_s: float = bounded(above=0.0)
    """Seconds of a step at no rows: beta."""
    verify_row_s: float = bounded(low=0.0)
    """Seconds of a row: V' of a window of one."""
    draft_fixed_s: float = bounded(0.0, low=0.0)
    """Seconds of a draft token at no requests: alpha."""
    draft_request_s: float = bounded(0.0, low=0.0)
    """Seconds of a draft token of one more request: D'."""

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        return self.verify_fixed_s + self.verify_row_s * num_rows

    def draft_s(self, num_requests: float, context: float) -> float:
        return self.draft_fixed_s + self.draft_request_s * num_requests

    def prefill_s(self, num_tokens: float) -> float:
        return self.verify_fixed_s + self.verify_row_s * num_tokens


def tabled(tables: CostTables, size: int, field: str) -> TabledCosts:
    """The costs of an engine of `size` threads or GPUs. Raises ConfigError if it was not measured."""
    verify = {curve.size: curve for curve in tables.verify_s}
    if size not in verify:
        raise ConfigError(f"{field}: {size}; measured were {sorted(sizes_of(tables.verify_s))}: take one of those")
    drafting = {curve.size: curve for curve in (*tables.coupled_draft_s,)}
    return TabledCosts(verify[size], drafting.get(size))
