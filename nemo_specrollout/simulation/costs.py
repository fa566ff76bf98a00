# SPDX-License-Identifier: Apache-2.0
"""What an engine's work costs: one interface, and the two kinds that are figures of others; `roofline.py` has the third.

`TabledCosts` were measured by `nemo-specrollout profile`. `RoundCosts` and `LinearCosts` are the forms in which the two papers
give theirs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.strict import ConfigError, bounded
from nemo_specrollout.scheduling.cost_tables import CostCurve, CostTables, sizes_of

Rows = np.ndarray | float


class Costs(ABC):
    """Seconds of one engine's steps."""

    @abstractmethod
    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        """Of a step of so many requests with so many rows in all, drafts included; `context`: a request's mean length."""

    @abstractmethod
    def draft_s(self, num_requests: float, context: float) -> float:
        """Of one draft token for each request, by this engine itself."""

    @abstractmethod
    def prefill_s(self, num_tokens: float) -> float:
        """Of computing a text of so many tokens."""


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
    """Paper B's figures (arXiv 2604.26779): a round that verifies k drafts costs `fixed + per_draft * k` plain steps, its
    drafting included, and never less than one; a plain step takes the same whatever the batch, for the paper gives no more.
    """

    plain_step_s: float = bounded(above=0.0)
    """Seconds of a plain decode step."""
    fixed: float = bounded(1.0, low=0.0)
    """What a round of no drafts would cost on the line, in plain steps."""
    per_draft: float = bounded(0.0, low=0.0)
    """What one draft token a request adds, in plain steps."""

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        k = np.asarray(num_rows) / num_requests - 1.0
        rounds = np.where(k > 0.0, np.maximum(self.fixed + self.per_draft * k, 1.0), 1.0)
        return self.plain_step_s * rounds if isinstance(num_rows, np.ndarray) else self.plain_step_s * float(rounds)

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
