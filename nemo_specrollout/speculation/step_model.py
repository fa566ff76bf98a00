# SPDX-License-Identifier: Apache-2.0
"""The step model, which predicts the seconds of an engine step from the seconds of earlier ones.

In this file a step is an engine step.

There are three linear regressions. The first is for steps with and without drafts. The second is for drafting by a drafter
with weights. The third is for steps with more rows than the largest CUDA graph. A step that fits into a graph is replayed, so
it takes the time that the GPU needs. In a larger step the host launches each kernel of each layer, and the step takes as long
as the slower of host and GPU. That is why such steps have a regression of their own.

The regressions are Kalman filters, because contexts grow and machines slow down. A stall can make a step longer, but nothing
can make it shorter than it has to be. So a measured time is clipped if it is far above the prediction, but not if it is below.

The attention of a step takes longer if its requests have longer contexts. Some attention kernels read the context of a request
once for all of its rows, and others read it once for each row. In both cases the arithmetic of each row grows with its
context. So the regression has one term for the contexts of the requests and one for the contexts of the draft rows, and learns
how much time each of them takes.

Shapes: R row counts from 0 on, J row counts at which the seconds per row may change (knots), X terms of a regression, N draft
counts.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

NOISE = 0.1
"""Standard deviation of an engine step's seconds, as a share of the predicted seconds."""
COLD = 4.0
"""Factor on `NOISE` for the first engine step with a given number of rows, because its kernels and caches are cold."""
MEMORY = 64.0
"""Approximate number of the latest engine steps from which a coefficient is estimated after many steps."""
CLIP = 2.0
"""Number of standard deviations by which measured seconds may exceed the prediction. Larger values are clipped."""
NO_ROWS = np.zeros(0)
_CONTEXTS = slice(-2, None)
"""The last terms of a regression of steps, which are about contexts."""
OPTIMISM = 0.25
"""Share of an engine step's seconds that is assumed to grow with its rows before anything was measured. The guess is low on
purpose. If it is too low, steps with more rows are tried, and their seconds correct it. If it were too high, such steps might
never be tried."""
CONTEXT = 4096.0
"""Unit in which context lengths enter a regression, in tokens. With a context of this length, a row may spend about as much
time on attention as on everything else."""


class DraftCosts(NamedTuple):
    """Seconds that a drafter with weights takes to draft.

    The drafter makes several forward passes. In the first, it reads the tokens that it has not read yet, and drafts the first
    token of each request. In each further pass it drafts one more token of each request.
    """

    fixed_s: float = 0.0
    """Seconds of the first forward pass without the seconds that grow with the number of unread tokens."""
    row_s: float = 0.0
    """Seconds that the first forward pass takes for each unread token."""
    pass_s: float = 0.0
    """Seconds of each forward pass after the first one."""
    token_s: float = 0.0
    """Seconds that the drafter takes to sample one draft token of one request."""
    unsampled_s: float = 0.0
    """Seconds by which the first forward pass is shorter if the drafter only reads and drafts no token."""
    least_depth: int = 1
    """The smallest number of tokens that the drafter drafts for each request, if it drafts at all."""

    def seconds(self, num_requests: int, depth: int) -> float:
        """Returns the seconds to draft `depth` tokens for each request after an engine step without drafts.

        With a `depth` of 0 the drafter only reads.
        """
        first_s = self.fixed_s + self.row_s * num_requests
        if depth == 0:
            return max(first_s - self.unsampled_s, 0.0)
        depth = max(depth, self.least_depth)
        return first_s + (depth - 1) * self.pass_s + depth * num_requests * self.token_s


class StepCosts(NamedTuple):
    """Predicted seconds of engine steps whose requests have contexts of `context` tokens.

    An engine step has one row for each request and one for each draft token.
    """

    seconds_R: np.ndarray
    """Seconds of engine steps without drafters. Index r is for steps with r rows. The time for the contexts is not included.

    The seconds never fall from one number of rows to the next. Steps with more rows than the array covers are assumed to take
    as long as its last one."""
    graph_sizes: np.ndarray
    """Row counts of the CUDA graphs, ascending. The array is empty without graphs."""
    draft_row_s: float = 0.0
    """Seconds by which the row of a draft takes longer than the row of a request, or a negative number if it is faster."""
    verify_s: float = 0.0
    """Seconds that a step takes in addition if it verifies any drafts, whatever their number."""
    text_s: float = 0.0
    """Seconds that the drafters without weights take to propose drafts."""
    drafting: DraftCosts | None = None
    """Seconds that the drafter with weights takes, or None while they are unknown."""
    corners: np.ndarray = NO_ROWS
    """Row counts at which the seconds per further row change, ascending. All are above the rows of the largest CUDA graph."""
    launch_s: float = 0.0
    """Seconds by which the smallest step without a CUDA graph takes longer than the largest step with one."""
    context_s: float = 0.0
    """Seconds that a step takes for each token of each request's context, however many rows the request has."""
    draft_context_s: float = 0.0
    """Further seconds that each draft of a request takes for each token of the request's context."""
    context: float = 0.0
    """Mean context length, in tokens, of the requests in the steps that are predicted."""

    def at(self, context: float) -> "StepCosts":
        """Returns the same costs for engine steps whose requests have a mean context length of `context` tokens."""
        return self._replace(context=context)

    def plain_s(self, num_requests: int) -> float:
        """Returns the seconds of an engine step of `num_requests` requests without drafters."""
        rows_s = float(self.seconds_R[min(num_requests, len(self.seconds_R) - 1)])
        return rows_s + num_requests * self.context * self.context_s

    def plain_steps_s(self, most_requests: int) -> np.ndarray:
        """Returns the seconds of engine steps without drafters that have 0, 1, ..., `most_requests` requests.

        The array is shorter if `seconds_R` covers only smaller steps.
        """
        seconds_R = self.seconds_R[: most_requests + 1]
        return seconds_R + np.arange(len(seconds_R)) * (self.context * self.context_s)

    def seconds(self, num_requests: int, drafts_N: np.ndarray) -> np.ndarray:
        """Returns the seconds of engine steps with drafters that verify `drafts_N` draft tokens, float64 [N]."""
        rows_s_N = self.seconds_R.take(num_requests + drafts_N.astype(np.int64), mode="clip")
        rows_s_N += (drafts_N > 0) * self.verify_s + drafts_N * (self.draft_row_s + self.context * self.draft_context_s)
        others_s = self.text_s + num_requests * self.context * self.context_s
        return np.maximum(rows_s_N, self.seconds_R[min(num_requests, len(self.seconds_R) - 1)]) + others_s

    def most_drafts(self, num_requests: int) -> int:
        """Returns the largest number of drafts for which the seconds of a step of `num_requests` requests are known."""
        return max(len(self.seconds_R) - 1 - num_requests, 0)

    @property
    def most_graph_rows(self) -> int:
        """Number of rows of the largest CUDA graph. It is 0 if there are no graphs, or if every step fits into one of them."""
        largest = int(self.graph_sizes[-1]) if len(self.graph_sizes) else 0
        return largest if largest < len(self.seconds_R) - 1 else 0

    def with_graphs_of_any_size(self) -> "StepCosts":
        """Returns what the costs would be if the host took no time to launch an engine step without a CUDA graph."""
        seconds_R = self.seconds_R.copy()
        seconds_R[self.most_graph_rows + 1 :] -= self.launch_s
        return self._replace(seconds_R=seconds_R, launch_s=0.0)


def padded_rows(most_rows: int, graph_sizes: np.ndarray) -> np.ndarray:
    """Returns how many rows an engine step computes if it has 0, 1, ..., `most_rows` rows, float64 [R].

    With CUDA graphs, the rows of a step are padded to those of the smallest graph that is large enough. A step with more rows
    than the largest graph is not padded.
    """
    rows_R = np.arange(most_rows + 1.0)
    if not len(graph_sizes):
        return rows_R
    return np.maximum(graph_sizes[np.minimum(np.searchsorted(graph_sizes, rows_R), len(graph_sizes) - 1)], rows_R)


class Regression:
    """A linear regression of seconds. A Kalman filter estimates its coefficients, which may drift.

    Owns the coefficients in seconds, and their covariance.

    Before the first sample the speed of this machine is unknown, so the first sample scales the prior. If a later sample takes
    less than a quarter of its predicted time, the first one was probably a stall. Then the regression starts again, with the
    later sample as its first.
    """

    LEARNED: ClassVar = ("is_known", "_scale_s", "coefficients_X", "covariance_XX")

    def __init__(self, mean_X: np.ndarray, deviation_X: np.ndarray) -> None:
        """`mean_X` and `deviation_X` are the prior means and standard deviations of the coefficients, without a unit.

        The first sample decides how many seconds their unit is.
        """
        self._mean_X = mean_X
        self._prior_XX = np.diag(deviation_X**2)
        self.is_known = False
        """Whether the regression has seen a sample."""
        self._scale_s = 0.0
        """Unit of the prior in seconds, which the first sample sets."""
        self.coefficients_X = mean_X
        self.covariance_XX = self._prior_XX

    def observe(self, terms_X: np.ndarray, seconds: float, noise: float = NOISE) -> None:
        """Learns from the `seconds` of a step with these terms.

        `noise` is the standard deviation of such samples, as a share of the prediction.
        """
        expected_s = float(terms_X @ self.coefficients_X)
        if not self.is_known or 4.0 * seconds < expected_s:
            self.is_known = True
            self._scale_s = max(seconds / max(float(terms_X @ self._mean_X), 1e-9), 1e-9)
            self.coefficients_X = self._scale_s * self._mean_X
            self.covariance_XX = self._prior_XX
            expected_s = float(terms_X @ self.coefficients_X)
        covariance_X = self.covariance_XX @ terms_X
        variance = float(terms_X @ covariance_X) + (noise * expected_s / self._scale_s) ** 2
        error_s = min(seconds - expected_s, CLIP * variance**0.5 * self._scale_s)
        self.coefficients_X = self.coefficients_X + covariance_X * (error_s / variance)
        left_XX = self.covariance_XX - np.outer(covariance_X, covariance_X) / variance
        self.covariance_XX = left_XX + (NOISE / MEMORY) ** 2 * (self._prior_XX - left_XX)

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid.

        They are valid if the unit of the prior is positive, and if samples can have turned the prior covariance into this one.
        Samples only ever reduce it.
        """
        covariance_XX = self.covariance_XX
        if self.is_known and not self._scale_s >= 1e-9:
            return False
        slack = 1e-6
        shrank = bool((np.diag(covariance_XX) <= np.diag(self._prior_XX) + slack).all())
        is_symmetric = np.allclose(covariance_XX, covariance_XX.T, atol=slack)
        return shrank and is_symmetric and bool((np.linalg.eigvalsh(covariance_XX) >= -slack).all())

    def fade(self) -> None:
        """Makes coefficients that an earlier start of the run has learned as uncertain as if they came from few engine steps.

        Their standard deviation is then at least the share `NOISE` of the prior's. So a few steps can correct them if the
        machine has become faster or slower.
        """
        self.covariance_XX = self.covariance_XX + NOISE**2 * (self._prior_XX - self.covariance_XX)

    def with_none_negative(self, terms: slice) -> np.ndarray:
        """Returns the coefficients as if none of those in the slice `terms` could be negative. Changes nothing in the object.

        Negative ones become 0. The others change as the covariance predicts, so that all together still fit the samples.
        """
        x = self.coefficients_X
        covariance_XX = self.covariance_XX
        for i in range(*terms.indices(len(x))):
            if x[i] < 0.0:
                share_X = covariance_XX[i] / covariance_XX[i, i]
                x = x - share_X * x[i]
                covariance_XX = covariance_XX - np.outer(share_X, covariance_XX[i])
        return np.concatenate([x[: terms.start], np.maximum(x[terms], 0.0)])


class StepModel:
    """Learns how many seconds engine steps and drafting take.

    Owns three regressions. They are for steps that fit into a CUDA graph, for larger steps, and for a drafter with weights.
    """

    LEARNED: ClassVar = ("_steps", "_launched", "_drafting", "_unit", "_unit_drafting")
    """Fields that a later start of the run takes over. The step sizes that were seen are not among them, because kernels and
    caches are cold again in each process."""

    def __init__(self, max_rows: int, graph_sizes: Sequence[int] = (), least_depth: int = 1) -> None:
        """`max_rows` is the largest number of rows of an engine step. `graph_sizes` are the row counts of the CUDA graphs.

        `least_depth` is the smallest number of tokens that a drafter with weights drafts for each request, if it drafts at
        all.
        """
        max_rows = max(max_rows, 2)  # a slope needs two knots
        self._least_depth = least_depth
        self._graph_sizes = np.unique(np.array(graph_sizes, np.float64))
        self._knots_J = np.unique(np.round(2.0 ** np.arange(0, np.log2(max_rows) + 0.5, 0.5)))
        self._knots_J[-1] = max_rows
        self._padded_R = padded_rows(max_rows, self._graph_sizes)
        num_knots = len(self._knots_J)
        has_edge = len(self._graph_sizes) > 0 and self._graph_sizes[-1] < max_rows
        self._edge = int(self._graph_sizes[-1]) if has_edge else max_rows
        """Number of rows of the largest CUDA graph, or `max_rows` if no step is larger than this graph or there are no
        graphs."""
        self._corners = self._knots_J[self._knots_J > self._edge]
        # Terms: 1, rows, a change of slope at each inner knot, drafts, any drafts, drafters at work, contexts of requests and
        # of draft rows.
        mean_X = np.concatenate([[1.0 - OPTIMISM, OPTIMISM], np.zeros(num_knots - 1), [0.02, 0.02], np.zeros(2)])
        deviation_X = np.concatenate([[0.5, 0.5], np.full(num_knots - 2, 0.5), [0.1, 0.1, 0.05], np.full(2, OPTIMISM)])
        self._steps = Regression(mean_X, deviation_X)
        # Terms: 1, rows beyond the largest graph, a change of slope at each inner corner.
        changes_J = np.full(max(len(self._corners) - 1, 0), 0.5)
        self._launched = Regression(
            np.concatenate([[1.0, 0.0], 0.0 * changes_J]), np.concatenate([[0.5, 0.5], changes_J])
        )
        # Terms: 1, rows, further passes, sampled tokens, nothing sampled.
        self._drafting = Regression(np.array([0.4, 0.1, 0.4, 0.1, -0.05]), np.array([0.4, 0.1, 0.4, 0.1, 0.2]))
        self._unit = 1.0
        """Number of rows of the first observed step, which is the unit in which rows enter the regression of steps."""
        self._unit_drafting = 1.0
        """Number of tokens read in the first observed drafting, which is the unit in which tokens enter the regression of
        drafting."""
        self._sizes_seen: set[tuple[int, bool]] = set()

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid.

        They are valid if both units are at least 1, and all predictions are finite.
        """
        if min(self._unit, self._unit_drafting) < 1.0:
            return False
        costs = self.costs()
        return costs is None or bool(np.isfinite(costs.seconds_R).all())

    def observe(
        self, num_requests: int, num_rows: int, seconds: float, has_drafters: bool = True, context: float = 0.0
    ) -> None:
        """Learns from the `seconds` of an engine step without prefill.

        The time of a drafter with weights must not be included. The step has `num_rows` rows, of which those beyond
        `num_requests` are drafts. `has_drafters` says whether drafters were at work in the step, and `context` is the mean
        context length of its requests in tokens.
        """
        if not self._steps.is_known:
            self._unit = float(max(num_rows, 1))
        size = (num_rows, num_rows > num_requests)
        noise = NOISE if size in self._sizes_seen else COLD * NOISE
        self._sizes_seen.add(size)
        num_drafts = num_rows - num_requests
        is_launched = min(num_rows, len(self._padded_R) - 1) > self._edge
        if not is_launched or not self._steps.is_known:
            terms_X = self._terms(num_requests, num_drafts, has_drafters, context)
            self._steps.observe(terms_X, seconds, noise)
        if is_launched:
            x = self._steps.coefficients_X
            draft_row_s, verify_s, text_s = self._surcharges(x)
            others_s = num_drafts * draft_row_s + (num_drafts > 0) * verify_s + has_drafters * text_s
            others_s += float(self._terms(num_requests, num_drafts, has_drafters, context)[_CONTEXTS] @ x[_CONTEXTS])
            self._launched.observe(self._launched_terms(num_rows), max(seconds - others_s, 1e-9), noise)

    def observe_drafting(self, num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        """Learns from the `seconds` in which a drafter with weights has drafted after an engine step.

        In this time it has read `num_rows` tokens, and drafted `depth` tokens for each of `num_requests` requests.
        """
        if not self._drafting.is_known:
            self._unit_drafting = float(max(num_rows, 1))
        rows = num_rows / self._unit_drafting
        tokens = depth * num_requests / self._unit_drafting
        self._drafting.observe(np.array([1.0, rows, max(depth - 1, 0), tokens, depth == 0]), seconds)

    def costs(self) -> StepCosts | None:
        """Returns the predicted seconds of engine steps with any number of rows, or None before the first sample."""
        if not self._steps.is_known:
            return None
        terms_JX = np.stack(list(map(partial(self._terms, 0, 0, False, 0.0), self._knots_J)))
        x = self._steps.with_none_negative(_CONTEXTS)
        variance_J = np.einsum("jx,xy,jy->j", terms_JX, self._steps.covariance_XX, terms_JX)
        seconds_J = isotonic_regression(np.maximum(terms_JX @ x, 1e-9), weights=1.0 / (variance_J + 1e-9)).x
        seconds_R = np.interp(self._padded_R, self._knots_J, seconds_J)
        launch_s = self._add_launches(seconds_R)
        known = *self._surcharges(x), self._draft_costs(), self._corners, launch_s
        contexts = (x[_CONTEXTS] / (self._unit * CONTEXT)).tolist()
        return StepCosts(seconds_R, self._graph_sizes, *known, *contexts)

    def _surcharges(self, x: np.ndarray) -> tuple[float, float, float]:
        """Returns `draft_row_s`, `verify_s` and `text_s` of `StepCosts`, computed from the coefficients `x`."""
        draft, verify, text = x[len(self._knots_J) : _CONTEXTS.start].tolist()
        return draft / self._unit, max(verify, 0.0), max(text, 0.0)

    def _add_launches(self, seconds_R: np.ndarray) -> float:
        """Adds the time of launches to the seconds of steps that are larger than the largest CUDA graph. Returns `launch_s`.

        This overwrites the entries of `seconds_R` for such steps. If there was no such step yet, it is assumed that the
        launches take as long as a step of the largest graph.
        """
        rows_R = np.arange(self._edge + 1, len(seconds_R))
        if not len(rows_R):
            return 0.0
        edge_s = float(seconds_R[self._edge])
        if self._launched.is_known:
            knots_J = np.array([self._edge, *self._corners])
            predicted_J = [float(self._launched_terms(rows) @ self._launched.coefficients_X) for rows in knots_J]
            rising_J = isotonic_regression(np.maximum(predicted_J, edge_s)).x
            seconds_R[rows_R] = np.interp(rows_R, knots_J, rising_J)
        else:
            seconds_R[rows_R] += edge_s
        return float(seconds_R[rows_R[0]]) - edge_s

    def _draft_costs(self) -> DraftCosts | None:
        if not self._drafting.is_known:
            return None
        fixed, row, further, token, unsampled = self._drafting.coefficients_X.tolist()
        unit = self._unit_drafting
        known = (fixed, row, further, token, -unsampled)
        fixed_s, row_s, pass_s, token_s, saved_s = (max(seconds, 0.0) for seconds in known)
        return DraftCosts(fixed_s, row_s / unit, pass_s, token_s / unit, saved_s, self._least_depth)

    def _terms(
        self, num_requests: int, num_drafts: int, has_drafters: bool, context: float = 0.0, rows: float | None = None
    ) -> np.ndarray:
        """Returns the values by which the regression of steps multiplies its coefficients to predict the seconds of a step.

        The comment in `__init__` names them. `rows` is the number of rows that the step computes, and by default follows from
        the other arguments. The term of a knot is the number of rows beyond it, as a share of the knot. So the prior of its
        coefficient has no unit.
        """
        if rows is None:
            rows = float(self._padded_R[min(num_requests + num_drafts, len(self._padded_R) - 1)])
        inner_J = self._knots_J[1:-1]
        contexts = context / (self._unit * CONTEXT)
        ends = (num_drafts / self._unit, num_drafts > 0, has_drafters, num_requests * contexts, num_drafts * contexts)
        return np.concatenate([(1.0, rows / self._unit), np.maximum(rows - inner_J, 0.0) / inner_J, ends])

    def _launched_terms(self, num_rows: float) -> np.ndarray:
        """Returns the same as `_terms` for the regression of the steps that are larger than the largest CUDA graph."""
        rows = min(num_rows, len(self._padded_R) - 1)
        inner_J = self._corners[:-1]
        return np.concatenate([(1.0, (rows - self._edge) / self._edge), np.maximum(rows - inner_J, 0.0) / inner_J])


def is_due(num_steps: int, gap: int) -> bool:
    """Returns whether a speculation policy gets new costs after `num_steps` engine steps.

    It gets them every `gap` steps, and also after 1, 2, 4, 8, ... steps, because the first steps of an engine are the most
    informative. Until the first costs, the time of drafting is unknown, so a drafter with weights drafts as many tokens as it
    can.
    """
    return num_steps % gap == 0 or num_steps & (num_steps - 1) == 0
