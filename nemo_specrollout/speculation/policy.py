# SPDX-License-Identifier: Apache-2.0
"""Speculation policies, which are pure objects that decide what the drafters of an engine do in each step.

A speculation policy reads no clock, so all ranks of an engine that get the same costs and counts decide alike.

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
"""Number of requests, summed over steps, after which a look ends at the latest and an estimate is trusted to stop a model."""
PLANNED_STEPS = 4
"""Number of steps for which a depth is planned, if the number of requests keeps its bit length and the model's drafts are well
known. A look beyond graphs takes as many steps."""
JUDGED_STEPS = 8
"""Number of steps between two judgements of a model, or of a look beyond the graphs. A look at a dormant model also takes no
more steps than this."""
LOOK_SHARE = 0.004
"""Share of the engine's time that looks at a dormant model may take. When the batch changes, a look at drafters without
weights may take the same share of the time that the running requests still need."""
REST_SHARE = 0.001
"""Share of the engine's time for looks at resting drafters without weights, and again as much for looks beyond the graphs."""
PATIENCE = 4
"""Number of steps in a row without useful drafts after which drafters without weights rest."""


class SpeculationPolicy(ABC):
    """Decides for an engine how deep its model drafts, how many draft tokens it verifies, and when its drafters rest.

    A step first calls `requests_arrived`, then `num_drafts` for the drafts that it verifies, `plan` for the drafts of the
    next step, `observe` for what was proposed, and finally `ends_step`.
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
    """True if the model follows no new requests. It can draft for a request only if it has read its beginning."""

    @abstractmethod
    def num_drafts(self, num_requests: int, most: int) -> int:
        """Returns how many draft tokens the next step of `num_requests` requests verifies, between 0 and `most`."""

    @abstractmethod
    def plan(self, num_requests: int, num_followed: int) -> int:
        """Returns how deep the model drafts, or 0 if it only reads. It follows `num_followed` of the requests."""

    def observe(self, spread: Spread) -> None:  # noqa: B027
        """Notes the latest proposals."""

    def requests_arrived(self, num_new: int, num_read: int = 0) -> None:  # noqa: B027
        """Notes new requests, of which the step has read `num_read` tokens.

        Unless the model is dormant afterwards, it follows them from their first token on, so it has to read these tokens too.
        """

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        """Counts a step. Returns whether the next steps need no drafts."""
        return False

    def model_changed(self) -> None:  # noqa: B027
        """Treats the model like a new one, because its weights have changed, or because the tasks may have changed."""


class FixedPolicy(SpeculationPolicy):
    """Drafts up to `k` tokens of each request in every step, and verifies as many of them as were submitted a step before.

    With a drafter that always finds `k` tokens this is vLLM's own fixed `num_speculative_tokens`. Other drafters find more
    tokens in some steps than in others, and the host learns the number of submitted tokens one step late, because it does not
    wait for the device. On a GPU, a step therefore verifies at most as many drafts as the step before had submitted, and it
    takes the likeliest ones. So after a rise some drafts are not verified for one step, and after a fall some rows are
    computed without a draft. On a CPU the number is never late. No token depends on it.
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
    """A time budget for looks, which are tries of drafts that the decision would leave out.

    Owns the seconds that were saved for looks, and the cost of the most expensive look that was asked for.
    """

    LEARNED: ClassVar = ("_saved_s", "_dearest_s")

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if the saved seconds are not negative."""
        return self._saved_s >= 0.0 and self._dearest_s >= 0.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved_s = 0.0
        self._dearest_s = np.inf

    def earn(self, seconds: float) -> None:
        """Saves a share of a step that took `seconds`.

        The savings never exceed twice the cost of the most expensive look. Otherwise a long time without looks would later
        pay for many of them in a row. Before the first look there is no such limit.
        """
        self._saved_s = min(self._saved_s + self._share * seconds, 2.0 * self._dearest_s)

    def pays(self, cost_s: float, keeps: bool = False) -> bool:
        """Returns whether the savings pay for a look of `cost_s` seconds, and takes its cost from them if they do.

        With `keeps`, the look is only paid for if enough is left afterwards for another one at the highest cost so far.
        """
        self._dearest_s = max(self._dearest_s, cost_s) if np.isfinite(self._dearest_s) else cost_s
        is_paid = cost_s + keeps * self._dearest_s <= self._saved_s
        self._saved_s -= cost_s * is_paid
        return is_paid


class BeyondGraphs:
    """Tries steps that no CUDA graph holds, where otherwise a guess would keep drafts within the graphs.

    The time of such a step depends on the host, so it is unknown until there was one, and a stall in it would deter all later
    ones. So while drafts fill the largest graph and more of them wait, a few steps are decided as if the host took no time to
    launch them, and the step model learns from these steps. Owns the clock that pays for such looks. The first look needs no
    payment, because until then every decision rests on a guess.
    """

    LEARNED: ClassVar = ("_clock", "_has_looked")

    def __init__(self) -> None:
        self._clock = LookClock(REST_SHARE)
        self._has_looked = False
        self._num_left = 0
        """Number of steps that are left of the current look."""
        self._until_asked = 0
        """Number of steps that fill the largest graph until a look is considered again, which costs the host some time."""

    def earn(self, seconds: float) -> None:
        """Saves a share of a step that took `seconds`."""
        self._clock.earn(seconds)

    def seen_from(self, costs: StepCosts) -> StepCosts:
        """Returns the costs with which the next step is decided, and counts a step of a look."""
        if self._num_left <= 0:
            return costs
        self._num_left -= 1
        return costs.with_graphs_of_any_size()

    def filled(self, steps: Steps, costs: StepCosts, weigh: Callable[[StepCosts], Steps]) -> None:
        """Begins a look if it is due. By these `costs`, `steps` fill the largest graph. `weigh` finds the best steps."""
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

    The model either follows all new requests or is dormant. It becomes dormant when its drafts will probably save less time
    until the running requests end than it needs to read their texts, or when arriving requests will end before its drafts
    have saved the time for reading their prompts. A look wakes it as soon as `LookClock` can pay for that. It then follows
    the requests that arrive, and drafts for some steps. Drafters without weights rest when their drafts save less time than
    they take to make. Looks at these drafters, and at steps beyond the CUDA graphs, work in the same way.
    """

    LEARNED: ClassVar = (
        "_forecast", "_sizes", "_lives", "_won_s", "_clock", "_rest_clock", "_beyond", "_to_look_at", "_enough", "is_dormant"
    )  # fmt: skip

    def __init__(self, margin: float, num_positions: int, deepest: int) -> None:
        """`margin` is the share by which drafts must beat no drafts. `deepest` is the most tokens that a model may draft."""
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
        """Number of requests, summed over steps, after which the evidence of a look is trusted to stop the model."""
        self._planned = 0
        """Number of steps for which the planned depth still holds."""
        self._judged = 0
        """Number of steps until the model is judged again."""
        self._num_refused = 0.0
        """Number of steps in a row whose drafts saved less time than they cost. It may be a fraction."""
        self._rests = False
        """Whether the drafters without weights rest."""
        self._has_changed = True
        """Whether the batch size has another bit length than in the step before, or at least half of its requests are new."""

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if a look will end."""
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
        """Returns whether drafters without weights may be tried again for a few steps, because the batch has changed.

        With short requests the batch changes so often that this would be expensive. Then a look has to wait for the clock.
        """
        assert self.costs is not None
        look_s = PATIENCE * (self.costs.text_s + self.costs.verify_s)
        return look_s <= LOOK_SHARE * self._lives.life_steps * self.costs.plain_s(num_requests)

    def _refused(self, num_requests: int, num_drafts: int, steps: Steps) -> float:
        """Returns in how many steps in a row, including this one, drafters without weights have saved less than their time."""
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
        """Returns the depth for a model that follows requests. Judges the model from time to time."""
        if self.costs is None or self.costs.drafting is None:
            return self._deepest  # in order to measure it
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
        """Returns the best use of a model whose seconds are known."""
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
