# SPDX-License-Identifier: Apache-2.0
"""Speculation policies, which are pure objects that decide what the drafters of an engine do in each engine step.

A speculation policy reads no clock, so all ranks of an engine that get the same costs and counts decide alike.

In this file a step is an engine step, and the model is the drafter with weights. Its depth is the number of tokens that it
drafts for each request. A look is a try of drafts that the decision would leave out, because what does not pay now may pay
later.

Shapes: K draft positions, F = K + 1 depths of drafting from 0 on, Q bins of survival.
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
"""Number of requests, summed over steps, after which a look at the model ends at the latest. From so many requests its drafts
are known well enough to make it dormant."""
PLANNED_STEPS = 4
"""Number of steps for which a planned depth holds. It is planned anew at once when the batch has changed, and in every step
while the model's drafts are not well known. A look beyond the CUDA graphs takes as many steps."""
JUDGED_STEPS = 8
"""Number of steps after which it is judged again whether the model should be dormant, and whether a look beyond the CUDA
graphs is due. A look at a dormant model takes at most as many steps."""
LOOK_SHARE = 0.004
"""Share of the engine's time that looks at a dormant model may take. When the batch changes, a look at drafters without
weights may take the same share of the mean time of a request."""
REST_SHARE = 0.001
"""Share of the engine's time that looks at resting drafters without weights may take. Looks beyond the CUDA graphs may take as
much again."""
PATIENCE = 4
"""Number of steps in a row after which drafters without weights rest, if their drafts have not paid in these steps."""


class SpeculationPolicy(ABC):
    """Decides how deep an engine's drafter with weights drafts, how many draft tokens are verified, and when drafters rest.

    In each step the engine first calls `requests_arrived`, then `num_drafts` for the drafts that this step verifies, `plan`
    for the drafts of the next step, `observe` with what was proposed, and finally `ends_step`.
    """

    most_drafts: int
    """The most draft tokens of a request in a step."""
    costs: StepCosts | None = None
    """Predicted seconds of steps with the context lengths of the latest step, or None while unknown."""
    row_price = 0.0
    """Tokens that the engine generates in the time of one more row, not counting the row's attention to its context."""
    context_price = 0.0
    """Tokens that the engine generates in the time in which a row attends to one more token of its context."""
    mean_price = 0.0
    """Tokens that the engine generates in the time of one more row of a request whose context has the mean length."""
    is_dormant = False
    """Whether the model follows no new requests. It cannot draft for such a request later, because for that it must have read
    the request from its beginning."""

    @abstractmethod
    def num_drafts(self, num_requests: int, most: int) -> int:
        """Returns how many draft tokens the next step of `num_requests` requests verifies, between 0 and `most`."""

    @abstractmethod
    def plan(self, num_requests: int, num_followed: int) -> int:
        """Returns the depth for the next step, or 0 if the model only reads.

        It follows `num_followed` of the `num_requests` requests.
        """

    def observe(self, spread: Spread) -> None:  # noqa: B027
        """Learns from the histogram of the latest proposals."""

    def requests_arrived(self, num_new: int, num_read: int = 0) -> None:  # noqa: B027
        """Notes `num_new` new requests, of which the engine reads `num_read` tokens in this step.

        Unless the model is dormant afterwards, it follows these requests from their first token on, so it has to read these
        tokens too.
        """

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        """Notes the end of a step. Returns whether a drafting pause follows, in which no drafter proposes."""
        return False

    def model_changed(self) -> None:  # noqa: B027
        """Treats the model like a new one, because its weights or the tasks may have changed."""


class FixedPolicy(SpeculationPolicy):
    """Drafts up to `k` tokens of each request in every step, and verifies as many of them as were submitted a step before.

    With a drafter that always finds `k` tokens this is vLLM's own fixed `num_speculative_tokens`. Other drafters find more
    tokens in some steps than in others, and the host learns the number of submitted tokens one step late, because it does not
    wait for the device. On a GPU, a step therefore verifies at most as many drafts as the step before had submitted, and it
    takes the likeliest ones. So after a rise some drafts are not verified for one step, and after a fall some rows are
    computed without a draft. On a CPU the number is never late. No sampled token depends on this number.
    """

    def __init__(self, k: int, num_positions: int) -> None:
        self.most_drafts = max(0, min(k, num_positions))
        self._num_submitted = 0
        """Number of submitted draft tokens in the latest histogram that has reached the host."""

    def observe(self, spread: Spread) -> None:
        self._num_submitted = int(spread.submitted_Q.sum())

    def num_drafts(self, num_requests: int, most: int) -> int:
        return max(0, min(most, self._num_submitted))

    def plan(self, num_requests: int, num_followed: int) -> int:
        return self.most_drafts


class LookClock:
    """Saves a share of the engine's time for looks, which are tries of drafts that the decision would leave out.

    Owns the seconds that were saved for looks and not spent yet, and the cost of the most expensive look that was asked for.
    """

    LEARNED: ClassVar = ("_saved_s", "_dearest_s")

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if the saved seconds are not negative."""
        return self._saved_s >= 0.0 and self._dearest_s >= 0.0

    def __init__(self, share: float) -> None:
        """`share` is the share of the engine's time that is saved."""
        self._share = share
        self._saved_s = 0.0
        self._dearest_s = np.inf

    def earn(self, seconds: float) -> None:
        """Saves the clock's share of the `seconds` that a step took.

        The savings never exceed twice the cost of the most expensive look. Otherwise a long time without looks would later
        pay for many of them in a row. Before the first look there is no such limit.
        """
        self._saved_s = min(self._saved_s + self._share * seconds, 2.0 * self._dearest_s)

    def pays(self, cost_s: float, keeps: bool = False) -> bool:
        """Returns whether the savings pay for a look of `cost_s` seconds, and takes its cost from the savings if they do.

        With `keeps`, they pay only if enough is left afterwards for another look at the highest cost so far.
        """
        self._dearest_s = max(self._dearest_s, cost_s) if np.isfinite(self._dearest_s) else cost_s
        is_paid = cost_s + keeps * self._dearest_s <= self._saved_s
        self._saved_s -= cost_s * is_paid
        return is_paid


class BeyondGraphs:
    """Looks at steps with more rows than the largest CUDA graph, which might otherwise be avoided for a wrong reason.

    The time of such a step depends on the host. So before the first such step it can only be guessed, and after a stall in one
    it may be predicted so long that none is tried again. Therefore looks are made while drafts fill the largest graph and more
    drafts could be verified. In a look a few steps are decided as if the host took no time to launch them, and the step model
    learns from these steps.

    Owns the clock that pays for such looks. The first look needs no payment, because before it all decisions rest on a guess.
    """

    LEARNED: ClassVar = ("_clock", "_has_looked")

    def __init__(self) -> None:
        self._clock = LookClock(REST_SHARE)
        self._has_looked = False
        self._num_left = 0
        """Number of steps that are left of the current look."""
        self._until_asked = 0
        """Number of steps that must fill the largest graph before a look is considered again. To consider it costs the host
        some time."""

    def earn(self, seconds: float) -> None:
        """Saves a share of the `seconds` that a step took."""
        self._clock.earn(seconds)

    def seen_from(self, costs: StepCosts) -> StepCosts:
        """Returns the costs with which the next step is decided. Without a look these are `costs`.

        During a look they leave out the time of launches, and the step is counted as one of the look.
        """
        if self._num_left <= 0:
            return costs
        self._num_left -= 1
        return costs.with_graphs_of_any_size()

    def filled(self, steps: Steps, costs: StepCosts, weigh: Callable[[StepCosts], Steps]) -> None:
        """Begins a look if one is due. It is called when the best `steps` by `costs` fill the largest graph.

        `weigh` returns the best steps by other costs.
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
    """Chooses what gives the most tokens per second, from measured seconds and the draft board's estimates.

    The drafter with weights (the model) either follows all new requests or is dormant. It becomes dormant in two cases. In the
    first, its drafts will probably save less time until the running requests end than it takes to read their texts. In the
    second, arriving requests will probably end before its drafts have saved the time of reading their prompts. A look wakes
    the model as soon as `LookClock` can pay for that. The model then follows the requests that arrive, and drafts for some
    steps.

    Drafters without weights rest when their drafts save less time than it takes to propose them. Looks at these drafters, and
    at steps beyond the CUDA graphs, work in the same way.
    """

    LEARNED: ClassVar = (
        "_forecast", "_sizes", "_lives", "_won_s", "_clock", "_rest_clock", "_beyond", "_to_look_at", "_enough", "is_dormant"
    )  # fmt: skip

    def __init__(self, margin: float, num_positions: int, deepest: int) -> None:
        """`margin` is the share by which a step with drafts must exceed the tokens per second of one without.

        A request has up to `num_positions` draft tokens, of which the model drafts at most `deepest`.
        """
        self.most_drafts = num_positions
        self._deepest = deepest
        self._margin = margin
        self._forecast = Forecast(deepest)
        self._sizes = BatchSizes()
        self._lives = RequestLives()
        self._won_s = np.inf
        """Seconds that the model saves per step and request, by the latest judgement."""
        self._clock = LookClock(LOOK_SHARE)
        self._rest_clock = LookClock(REST_SHARE)
        self._beyond = BeyondGraphs()
        self._submitted_Q = np.zeros(1)
        """Draft tokens that were submitted last, per request, by bin of survival."""
        self._depth = 0
        """Tokens that the model drafts for each request, or 0 if it only reads."""
        self._num_requests = 0
        """Number of requests in the latest step."""
        self._num_new = 0
        """Number of requests that have arrived since that step."""
        self._to_look_at = ENOUGH
        """Number of requests, summed over steps, for which the current look at the model still has to draft."""
        self._enough = ENOUGH
        """Number of requests, summed over steps, from which the drafts must be known before the model may become dormant."""
        self._planned = 0
        """Number of steps for which the planned depth still holds."""
        self._judged = 0
        """Number of steps until the model is judged again."""
        self._num_refused = 0.0
        """Number of steps in a row in which drafters without weights saved less time than they took. It may be a fraction."""
        self._rests = False
        """Whether the drafters without weights rest."""
        self._has_changed = True
        """Whether the batch size has another bit length than in the step before, or at least half of its requests are new."""

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if the current look will end."""
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
        """Returns whether a look at drafters without weights is cheap enough to be made because the batch has changed.

        With short requests it is not, because the batch then changes very often. Such a look has to wait for the clock.
        """
        assert self.costs is not None
        look_s = PATIENCE * (self.costs.text_s + self.costs.verify_s)
        return look_s <= LOOK_SHARE * self._lives.life_steps * self.costs.plain_s(num_requests)

    def _refused(self, num_requests: int, num_drafts: int, steps: Steps) -> float:
        """Returns `_num_refused` after this step. It rises by 1 if the step has no drafts.

        Otherwise it falls by the time that the drafts save, in units of the time that it took to propose them, or rises by at
        most 1 if they save none.
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
        """Returns the depth for a model that follows requests. Decides from time to time whether the model becomes dormant."""
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
        """Returns the best depth for a batch. The seconds of drafting must be known."""
        assert self.costs is not None
        return best_depth(self._forecast.counts(num_requests, num_followed), num_requests, self.costs, self._margin)

    def _judge(self, num_requests: int) -> None:
        """Makes the model dormant if it will save no time until the requests end, provided that there is enough evidence."""
        sizes = self._sizes.until_the_end(num_requests)
        won_s = sum(share * self._best(size, size).won_s for size, share in sizes)
        self._won_s = won_s / sum(share * size for size, share in sizes)
        self.is_dormant = self._forecast.num_seen >= self._enough and won_s <= 0.0


def build_policy(config: BudgetConfig, num_positions: int, deepest: int | None = None) -> SpeculationPolicy:
    """Returns the speculation policy that `config.policy` names.

    A request has up to `num_positions` draft tokens, of which a model drafts at most `deepest`.
    """
    deepest = num_positions if deepest is None else min(deepest, num_positions)
    if config.policy == "fixed":
        return FixedPolicy(config.k, deepest)
    return AutoPolicy(config.margin, num_positions, deepest)
