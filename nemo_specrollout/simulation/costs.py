# SPDX-License-Identifier: Apache-2.0
"""Cost models of an engine: the interface, and the models with given numbers. `roofline.py` has the analytic model.

`nemo-specrollout profile` measures `TabledCosts`. `RoundCosts` and `LinearCosts` have the forms of the two papers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.strict import ConfigError, bounded, check_rising
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables, sizes_of

Rows = np.ndarray | float


class Costs(ABC):
    """Seconds of an engine's work."""

    @abstractmethod
    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        """Returns the seconds of a step with `num_rows` rows, including drafts, at a mean length of `context` tokens."""

    @abstractmethod
    def draft_s(self, num_requests: float, context: float) -> float:
        """Returns the seconds in which this engine makes one draft token for each request."""

    @abstractmethod
    def prefill_s(self, num_tokens: float) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens."""


@dataclass(frozen=True)
class TabledCosts(Costs):
    """Costs from measured tables, independent of the context. A prefill costs as much as a step of as many rows."""

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
    """Costs from the figures of Paper B (arXiv 2604.26779): the cost of a round of k drafts in plain steps.

    It is the acceptance length over the speedup, interpolated linearly from 1 at no drafts and extrapolated beyond the last
    figure. A plain step takes equally long for all batch sizes, because the paper gives no more.
    """

    plain_step_s: float = bounded(above=0.0)
    """Seconds of a plain decode step."""
    num_drafts: tuple[int, ...] = bounded(low=1)
    """Drafts of each request, ascending."""
    plain_steps: tuple[float, ...] = bounded(low=1.0)
    """Cost of a round with each number of drafts, in plain steps."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the lists differ in length, are empty or not ascending."""
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
    """Costs in the form of SpecActor (arXiv 2511.16193): `b * D' + alpha` to draft a token, `b * V' + beta` to verify a
    window.

    Here V' counts for each row, so that windows of all lengths lie on one line. The paper's coefficients are not public.
    """

    verify_fixed_s: float = bounded(above=0.0)
    """Seconds of a step without rows: beta."""
    verify_row_s: float = bounded(low=0.0)
    """Seconds of each row: V' of a window of one."""
    draft_fixed_s: float = bounded(0.0, low=0.0)
    """Seconds of a draft token without requests: alpha."""
    draft_request_s: float = bounded(0.0, low=0.0)
    """Seconds of a draft token for each request: D'."""

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        return self.verify_fixed_s + self.verify_row_s * num_rows

    def draft_s(self, num_requests: float, context: float) -> float:
        return self.draft_fixed_s + self.draft_request_s * num_requests

    def prefill_s(self, num_tokens: float) -> float:
        return self.verify_fixed_s + self.verify_row_s * num_tokens


def tabled(tables: CostTables, size: int, field: str) -> TabledCosts:
    """Returns the costs of an engine of `size` threads or GPUs. Raises ConfigError if the size was not measured."""
    verify = {curve.size: curve for curve in tables.verify_s}
    if size not in verify:
        raise ConfigError(f"{field}: {size}; measured were {sorted(sizes_of(tables.verify_s))}: take one of those")
    drafting = {curve.size: curve for curve in tables.coupled_draft_s}
    return TabledCosts(verify[size], drafting.get(size))
