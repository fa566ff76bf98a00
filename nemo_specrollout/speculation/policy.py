# SPDX-License-Identifier: Apache-2.0
"""Speculation policies, which are pure objects that decide what the drafters of an engine do in each engine step.

A speculation policy reads no clock. So all ranks of an engine decide alike if they get the same costs and counts.

In this file a step is an engine step. The drafting depth of a step is the number of tokens that the drafter with weights
drafts for each request. A look is a try of drafts that would normally be left out. Drafts that save no time now may save some
later, and only a look shows that.

Shapes: K draft positions, F = K + 1 drafting depths from 0 on, Q bins of survival.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.speculation.decision import Choice, Steps, best_depth, best_steps
from nemo_specrollout.speculation.forecast import BatchSizes, Forecast
from nemo_specrollout.speculation.request_lives import RequestLives
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepCosts

ENOUGH = 64
"""Number of requests, summed over engine steps, after which a look ends at the latest. Such a look is a try of a dormant
drafter with weights. When it has drafted for so many requests, its acceptance rates are known well enough to make it dormant
again."""
PLANNED_STEPS = 4
"""Number of engine steps for which a planned drafting depth holds. The depth is planned again earlier if the batch has
changed, and in every step while the acceptance rates of the drafter with weights are not well known. A look at engine steps
beyond the CUDA graphs (`BeyondGraphs`) takes the same number of steps."""
JUDGED_STEPS = 8
"""Number of engine steps after which two decisions are made again. One is whether the drafter with weights should be dormant,
and the other is whether to try engine steps beyond the CUDA graphs. A try of a dormant drafter takes at most this number of
steps."""
LOOK_SHARE = 0.004
"""Share of the engine's time that may be spent on looks, which are tries of a dormant drafter with weights.

Drafters without weights are also looked at when the batch changes, if such a look takes at most this share of the mean time
that a request takes."""
REST_SHARE = 0.001
"""Share of the engine's time that may be spent on tries of resting drafters without weights. The same share may be spent in
addition on tries of engine steps beyond the CUDA graphs."""
PATIENCE = 4
"""Number of engine steps in a row without saved time, after which drafters without weights rest."""


class SpeculationPolicy(ABC):
    """Decides to what depth a drafter with weights drafts, how many draft tokens are verified, and when drafters rest.

    The engine calls the methods in this order in each engine step. `requests_arrived` comes first. `num_drafts` decides about
    the drafts that this step verifies, and `plan` about those that are drafted for the next step. `observe` gets what was
    proposed. `ends_step` comes last.
    """

    most_drafts: int
    """The largest number of draft tokens that a request may have in an engine step."""
    costs: StepCosts | None = None
    """Predicted seconds of engine steps whose contexts are as long as in the latest step. None while they are unknown."""
    row_price = 0.0
    """Number of tokens that the engine generates in the time that one more row takes, without the row's attention to its
    context."""
    context_price = 0.0
    """Number of tokens that the engine generates in the time in which a row attends to one more token of its context."""
    mean_price = 0.0
    """Number of tokens that the engine generates in the time that one more row with a context of mean length takes."""
    is_dormant = False
    """Whether the drafter with weights ignores new requests. It can never draft for a request that it has ignored at first,
    because it can only draft for requests that it has read from the beginning."""

    @abstractmethod
    def num_drafts(self, num_requests: int, most: int) -> int:
        """Returns how many draft tokens the next engine step of `num_requests` requests verifies, between 0 and `most`."""

    @abstractmethod
    def plan(self, num_requests: int, num_followed: int) -> int:
        """Returns the drafting depth for the next engine step, or 0 if the drafter with weights should only read.

        The step has `num_requests` requests, and the drafter with weights follows `num_followed` of them.
        """

    def observe(self, spread: Spread) -> None:  # noqa: B027
        """Learns from the survival histogram of the latest drafts."""

    def requests_arrived(self, num_new: int, num_read: int = 0) -> None:  # noqa: B027
        """Notes `num_new` new requests, of which the engine reads `num_read` tokens in total in this engine step.

        Unless this call makes the drafter with weights dormant, that drafter follows the new requests and has to read the same
        tokens.
        """

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        """Notes the end of an engine step. Returns whether a drafting pause follows, in which no drafter proposes."""
        return False

    def model_changed(self) -> None:  # noqa: B027
        """Forgets what was learned about the drafter with weights, because its weights or the run's tasks may have changed."""


class FixedPolicy(SpeculationPolicy):
    """Drafts up to `k` tokens of each request in every engine step, and verifies as many as were submitted a step before.

    If every drafter always finds `k` tokens, this equals a fixed `num_speculative_tokens` of vLLM. But some drafters find more
    tokens in some steps than in others. On a GPU the host does not wait for the device, so it learns only one step late how
    many tokens were submitted. Therefore a step verifies at most as many drafts as the step before has submitted, and chooses
    the likeliest ones. When more drafts are submitted than before, some are left out for one step. When fewer are submitted,
    some rows are computed without a draft. On a CPU the host knows the number in time. The number never changes which tokens
    are sampled.
    """

    def __init__(self, k: int, num_positions: int) -> None:
        self.most_drafts = max(0, min(k, num_positions))
        self._num_submitted = 0
        """Number of submitted draft tokens by the latest survival histogram that has reached the host."""

    def observe(self, spread: Spread) -> None:
        self._num_submitted = int(spread.submitted_Q.sum())

    def num_drafts(self, num_requests: int, most: int) -> int:
        return max(0, min(most, self._num_submitted))

    def plan(self, num_requests: int, num_followed: int) -> int:
        return self.most_drafts


class LookClock:
    """Saves a share of the engine's time to pay for looks, which are tries of drafts that would normally be left out.

    Owns the seconds that are saved and not yet spent, and the cost of the most expensive look that was asked for.
    """

    LEARNED: ClassVar = ("_saved_s", "_dearest_s")

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid, which means that no seconds are negative."""
        return self._saved_s >= 0.0 and self._dearest_s >= 0.0

    def __init__(self, share: float) -> None:
        """`share` is the share of the engine's time that is saved for looks."""
        self._share = share
        self._saved_s = 0.0
        self._dearest_s = np.inf

    def earn(self, seconds: float) -> None:
        """Adds this clock's share of the `seconds` of an engine step to the savings.

        The savings are limited to twice the cost of the most expensive look. Otherwise a long time without looks would later
        pay for many of them in a row. Before the first look there is no limit.
        """
        self._saved_s = min(self._saved_s + self._share * seconds, 2.0 * self._dearest_s)

    def pays(self, cost_s: float, keeps: bool = False) -> bool:
        """Returns whether the savings pay for a look of `cost_s` seconds. If so, subtracts `cost_s` from the savings.

        With `keeps`, the savings must also leave enough for another look at the highest cost so far.
        """
        self._dearest_s = max(self._dearest_s, cost_s) if np.isfinite(self._dearest_s) else cost_s
        is_paid = cost_s + keeps * self._dearest_s <= self._saved_s
        self._saved_s -= cost_s * is_paid
        return is_paid


class BeyondGraphs:
    """Makes looks at engine steps with more rows than the largest CUDA graph, which might otherwise be avoided without reason.

    The host must launch the kernels of such a step, so the time of the step depends on the host. Before the first such step
    this time is only a guess. After a stall of the host, the predicted time may be so long that no such step is ever tried
    again. Therefore looks are made in steps whose drafts fill the largest graph, if more drafts could be verified. During a
    look, a few steps are decided as if launches took no time, and the step model learns how long these steps really take.

    Owns the clock that pays for such looks. The first look is free, because all decisions before it rest on a guess.
    """

    LEARNED: ClassVar = ("_clock", "_has_looked")

    def __init__(self) -> None:
        self._clock = LookClock(REST_SHARE)
        self._has_looked = False
        self._num_left = 0
        """Number of engine steps that remain in the current try of steps beyond the CUDA graphs."""
        self._until_asked = 0
        """Number of engine steps that must fill the largest CUDA graph before the next look is considered. It is not
        considered in every step, because that costs the host some time."""

    def earn(self, seconds: float) -> None:
        """Saves a share of the `seconds` of an engine step for looks."""
        self._clock.earn(seconds)

    def seen_from(self, costs: StepCosts) -> StepCosts:
        """Returns the costs with which the next engine step is to be decided.

        Outside a look these are `costs` unchanged. During a look they are `costs` without the time of launches, and each call
        counts as one step of the look.
        """
        if self._num_left <= 0:
            return costs
        self._num_left -= 1
        return costs.with_graphs_of_any_size()

    def filled(self, steps: Steps, costs: StepCosts, weigh: Callable[[StepCosts], Steps]) -> None:
        """Begins a look at engine steps beyond the largest CUDA graph, if one is due.

        Call it when the engine step that is best at these `costs` fills the largest graph. `steps` is this step. `weigh`
        returns the step that is best at other costs.
        """
        self._until_asked -= 1
        if self._num_left > 0 or self._until_asked > 0 or costs.launch_s <= 0.0:
            return
        self._until_asked = JUDGED_STEPS
        longer = weigh(costs.with_graphs_of_any_size())
        if longer.num_drafts_F[0] <= steps.num_drafts_F[0]:
            return
        lost_s = float(longer.seconds_F[0]) + costs.launch_s - float(longer.tokens_F[0] / steps.rate_F[0])
        if self._clock.pays(PLANNED_STEPS * max(lost_s, 0.0)) or not self._has_looked:
            self._has_looked = True
            self._num_left = PLANNED_STEPS


class AutoPolicy(SpeculationPolicy):
    """Chooses the drafts that give the most tokens per second, from measured seconds and the draft board's acceptance rates.

    The drafter with weights either follows all new requests or is dormant. It becomes dormant in two cases. In the first, it
    will probably take more time to read the tokens of the running requests than its drafts save. In the second, new requests
    will probably end before its drafts have saved the time of reading their prompts. While it is dormant, a share of the
    engine's time is saved for looks (`LookClock`). When enough time is saved, the drafter follows the requests that arrive
    next, and drafts for some engine steps.

    Drafters without weights rest when their drafts save less time than it takes to propose them. There are looks at these
    drafters too, and looks at engine steps beyond the CUDA graphs. Time is saved for both in the same way.
    """

    LEARNED: ClassVar = (
        "_forecast", "_sizes", "_lives", "_won_s", "_clock", "_rest_clock", "_beyond", "_to_look_at", "_enough", "is_dormant"
    )  # fmt: skip

    def __init__(self, margin: float, num_positions: int, deepest: int) -> None:
        """`margin` is the share by which an engine step with drafts must exceed the tokens per second of one without.

        A request has up to `num_positions` draft tokens, of which a drafter with weights drafts at most `deepest`.
        """
        self.most_drafts = num_positions
        self._deepest = deepest
        self._margin = margin
        self._forecast = Forecast(deepest)
        self._sizes = BatchSizes()
        self._lives = RequestLives()
        self._won_s = np.inf
        """Seconds that the drafter with weights saves per engine step and request, by the latest estimate."""
        self._clock = LookClock(LOOK_SHARE)
        self._rest_clock = LookClock(REST_SHARE)
        self._beyond = BeyondGraphs()
        self._submitted_Q = np.zeros(1)
        """Mean number of draft tokens per request that were submitted last, by bin of survival."""
        self._depth = 0
        """Number of tokens that the drafter with weights drafts for each request, or 0 if it only reads."""
        self._num_requests = 0
        """Number of requests in the latest engine step."""
        self._num_new = 0
        """Number of requests that have arrived since the latest engine step."""
        self._to_look_at = ENOUGH
        """Number of requests, summed over engine steps, for which the drafter with weights must still draft in the current
        look."""
        self._enough = ENOUGH
        """Number of requests, summed over engine steps, whose drafts must be known before the drafter with weights may become
        dormant."""
        self._planned = 0
        """Number of engine steps for which the planned drafting depth still holds."""
        self._judged = 0
        """Number of engine steps until it is judged again whether the drafter with weights should be dormant."""
        self._num_refused = 0.0
        """Number of engine steps in a row in which drafters without weights saved less time than they took. It may be a
        fraction."""
        self._rests = False
        """Whether the drafters without weights rest."""
        self._has_changed = True
        """Whether the batch has changed much since the engine step before. It has if the bit length of its size has changed,
        or if at least half of its requests are new."""

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid, so that the current look ends at some time."""
        return self._to_look_at <= ENOUGH and 0 <= self._enough <= ENOUGH

    def observe(self, spread: Spread) -> None:
        self._forecast.observe(spread)
        if spread.num_requests > 0:
            self._submitted_Q = spread.submitted_Q / spread.num_requests

    def num_drafts(self, num_requests: int, most: int) -> int:
        if self.costs is None or most <= 0:
            return 0
        costs = self._beyond.seen_from(self.costs)
        drafting = costs.drafting
        count_1Q = num_requests * self._submitted_Q[None, :]
        draft_s = 0.0
        read_s = 0.0
        if drafting is not None and self._depth > 0:
            draft_s = drafting.seconds(num_requests, self._depth)
            read_s = drafting.row_s
        weigh = partial(best_steps, count_1Q, num_requests, margin=self._margin, draft_s_F=np.array([draft_s]))
        steps = weigh(costs, read_row_s=read_s)
        num_drafts = min(int(steps.num_drafts_F[0]), most)
        self._beyond.earn(float(steps.seconds_F[0]))
        if num_requests + num_drafts == costs.most_graph_rows:
            self._beyond.filled(steps, costs, partial(weigh, read_row_s=read_s))
        self._num_refused = self._refused(num_requests, num_drafts, steps)
        some = min(num_drafts or num_requests, costs.most_drafts(num_requests))
        seconds_2 = costs.seconds(num_requests, np.array([0.0, some]))
        price = float(steps.rate_F[0] * (seconds_2[1] - seconds_2[0])) / max(some, 1)
        of_context = min(float(steps.rate_F[0]) * costs.draft_context_s * costs.context, price)
        self.mean_price = price
        self.row_price = price - of_context
        self.context_price = of_context / max(costs.context, 1.0)
        return num_drafts

    def plan(self, num_requests: int, num_followed: int) -> int:
        has_changed = num_requests.bit_length() != self._num_requests.bit_length() or 2 * self._num_new >= num_requests
        self._num_requests = num_requests
        self._num_new = 0
        self._has_changed = has_changed
        self._sizes.count(num_requests)
        self._lives.stepped(num_requests)
        if self.costs is not None:
            step_s = self.costs.plain_s(num_requests)
            self._clock.earn(step_s)
            self._rest_clock.earn(step_s)
        self._depth = self._planned_depth(num_requests, num_followed, has_changed) if self.costs and num_followed else 0
        return self._depth

    def requests_arrived(self, num_new: int, num_read: int = 0) -> None:
        self._num_new += num_new
        self._lives.arrived(num_new, num_read)
        if num_new == 0 or self.costs is None or self.costs.drafting is None:
            return
        read_s = num_read * self.costs.drafting.row_s
        if not self.is_dormant:
            self.is_dormant = self._to_look_at <= 0 and num_new * self._lives.life_steps * self._won_s < read_s
            return
        num_requests = min(self._num_requests + num_new, 2 * max(self._num_requests, num_new))
        to_look_at = min(ENOUGH, JUDGED_STEPS * num_new)
        look_s = self.costs.drafting.seconds(num_requests, 1) * (1 + to_look_at / num_new) + read_s
        if self._clock.pays(look_s, keeps=2 * num_new < num_requests):
            self.model_changed()
            self._to_look_at = to_look_at
            self._enough = to_look_at

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        if num_followed or self.costs is None or (self._has_changed and self._is_worth_a_look(num_requests)):
            self._num_refused = 0.0
        rested = self._rests
        self._rests = self._num_refused >= PATIENCE
        if (
            rested
            and self._rests
            and self.costs
            and self._rest_clock.pays(2.0 * (self.costs.text_s + self.costs.verify_s))
        ):
            self._num_refused = PATIENCE - 2.0
            self._rests = False
        return self._rests

    def _is_worth_a_look(self, num_requests: int) -> bool:
        """Returns whether a look at drafters without weights is cheap enough to be made whenever the batch changes.

        It is too expensive if requests are short, because then the batch changes very often. In this case a look is only made
        when `LookClock` has saved enough time.
        """
        assert self.costs is not None
        look_s = PATIENCE * (self.costs.text_s + self.costs.verify_s)
        return look_s <= LOOK_SHARE * self._lives.life_steps * self.costs.plain_s(num_requests)

    def _refused(self, num_requests: int, num_drafts: int, steps: Steps) -> float:
        """Returns the new value of `_num_refused`, after an engine step with `num_drafts` drafts.

        The value rises by 1 if the step has no drafts. Otherwise it falls by the time that the drafts save, divided by the
        time that it took to propose them. If the drafts cost time instead of saving it, the value rises by the same quotient,
        but by at most 1.
        """
        assert self.costs is not None
        text_s = self.costs.text_s
        if num_drafts == 0:
            return self._num_refused + 1.0
        token_s = self.costs.plain_s(num_requests) / num_requests / (1.0 + self._margin)
        won_s = float(steps.tokens_F[0]) * token_s - float(steps.seconds_F[0])
        won_steps = max(won_s / text_s, -1.0) if text_s > 0.0 else PATIENCE
        return max(self._num_refused - won_steps, 0.0)

    def model_changed(self) -> None:
        self._forecast.forget_model()
        self.is_dormant = False
        self._won_s = np.inf
        self._to_look_at = ENOUGH
        self._enough = ENOUGH
        self._judged = 0

    def _planned_depth(self, num_requests: int, num_followed: int, has_changed: bool) -> int:
        """Returns the drafting depth for a drafter with weights that follows requests.

        Decides from time to time whether this drafter becomes dormant.
        """
        if self.costs is None or self.costs.drafting is None:
            return self._deepest  # in order to measure how long that takes
        self._planned = self._planned - 1
        self._judged = self._judged - 1
        depth = self._depth
        if self._planned <= 0 or has_changed or not self._forecast.is_well_known:
            self._planned = PLANNED_STEPS
            depth = self._best(num_requests, num_followed).depth
        if self._to_look_at > 0:
            self._to_look_at -= num_followed
            return min(max(depth, 1), self._deepest)
        if self._judged <= 0:
            self._judged = JUDGED_STEPS
            self._judge(num_requests)
        return depth

    def _best(self, num_requests: int, num_followed: int) -> Choice:
        """Returns the best drafting depth for a batch. `self.costs.drafting` must not be None."""
        assert self.costs is not None
        return best_depth(self._forecast.counts(num_requests, num_followed), num_requests, self.costs, self._margin)

    def _judge(self, num_requests: int) -> None:
        """Makes the drafter with weights dormant if it will save no time until the running requests end.

        It does not become dormant while it has drafted for too few requests to judge its drafts.
        """
        sizes = self._sizes.until_the_end(num_requests)
        won_s = sum(share * self._best(size, size).won_s for size, share in sizes)
        self._won_s = won_s / sum(share * size for size, share in sizes)
        self.is_dormant = self._forecast.num_seen >= self._enough and won_s <= 0.0


def build_policy(config: BudgetConfig, num_positions: int, deepest: int | None = None) -> SpeculationPolicy:
    """Returns the speculation policy that `config.policy` names.

    A request has up to `num_positions` draft tokens, of which a drafter with weights drafts at most `deepest`.
    """
    deepest = num_positions if deepest is None else min(deepest, num_positions)
    if config.policy == "fixed":
        return FixedPolicy(config.k, deepest)
    return AutoPolicy(config.margin, num_positions, deepest)
