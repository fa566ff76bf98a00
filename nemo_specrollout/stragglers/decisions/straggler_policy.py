# SPDX-License-Identifier: Apache-2.0
"""The tail policy, which decides which requests move to another engine, which are raced, and which racers give up.

docs/concepts/racing.md says why moves and races favour no response over another. In Algorithm 3 of SpecActor (arXiv
2511.16193), free engines get the requests with the worst acceptance rate. The tail policy instead makes a change only if the
change is expected to end the rollout earlier. It predicts this from measured speeds, including the time of the prefill that
the change needs.

Shapes: R requests, E engines.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.stragglers.decisions.speed_table import SpeedModel
from nemo_specrollout.stragglers.decisions.tail_forecast import TailForecast, TailObservation

NUM_LAST = 4
"""Number of requests of an engine that are considered for a move or a race. They are those that will end last."""
MAX_CHANGES = 64
"""Number of attempts that a decision may start or stop. When the number is reached, no further plan is made, but the last
plan may go beyond it."""
MAX_UNIMPROVABLE = 16
"""A decision looks at the engines in turn, the last to end first. When it has found no useful change for this number of
engines, it looks at no more."""
LEAST_CHANCE = 0.05
"""Probability of winning below which a racer gives up."""
RACE_PREMIUM = 0.01
"""Handicap of races against moves, because a move frees a slot of the source engine, and a race does not. A race is preferred
only if it gains more by at least this share of the seconds until the source engine ends."""


@dataclass(frozen=True)
class TailDecision:
    """Attempts to start and to stop, as pairs (request, engine). A request that is both stopped and started moves."""

    starts: tuple[tuple[int, int], ...] = ()
    stops: tuple[tuple[int, int], ...] = ()
    num_declined: int = 0
    """Number of moves and races that would end the rollout earlier, but would cost more time in later rollouts. They would
    leave engines less time to decode requests of coming steps."""


@dataclass(frozen=True)
class _Plan:
    """A plan to move requests from engine `source` to engine `target`, or to let `target` race for one of them."""

    requests: tuple[int, ...]
    source: int
    target: int
    is_race: bool
    end_s: float
    """Predicted time, in seconds from now, at which both engines will have ended their requests."""


class TailPolicy(Protocol):
    """Decides which requests move to another engine, and which are raced by several."""

    def decide(self, seen: TailObservation) -> TailDecision:
        """Returns which engines should start and stop to work on which requests."""


class FastestOfN:
    """The tail policy that moves and races stragglers. It has no state, so equal observations give equal decisions.

    It decides in this order:
    1. Each waiting request starts on the engine where it would end first.
    2. A racer whose chance of winning is below `LEAST_CHANCE` gives up.
    3. The engine that will end last moves requests to another engine, or another engine races for its last request. This is
       repeated until no such change brings the end of both engines forward by at least the share `config.min_gain`.

    With `run_ahead`, an idle engine can decode requests of coming steps. A change leaves it less time for that. The time that
    is lost in later rollouts is subtracted from the gain of the change (`idle_time.py`).

    For example, engines 0 and 1 each make 100 tokens per second for a single request, and 50 for each of two. Engine 0 decodes
    request 0, which needs 600 tokens, and request 1, which needs 500. They would end after 11 s and 10 s. If request 0 moves
    to the idle engine 1, both have ended after 6 s. So the decision is `starts=((0, 1),), stops=((0, 0),)`.
    """

    def __init__(self, config: FastestOfNConfig, speeds: SpeedModel) -> None:
        self.config = config
        self.speeds = speeds

    def decide(self, seen: TailObservation) -> TailDecision:
        """Returns which engines should start and stop to work on which requests."""
        forecast = TailForecast(seen, self.speeds)
        if not (seen.capacity_E > 0).any():
            return TailDecision()
        for request in forecast.waiting():
            forecast.start(request, forecast.best_engine(request))
        for request, racer in forecast.raced_attempts():
            if forecast.chance(request, racer) < LEAST_CHANCE:
                forecast.stop(request, racer)
        unimprovable: set[int] = set()
        num_declined = 0
        while len(forecast.changes) < MAX_CHANGES and len(unimprovable) < MAX_UNIMPROVABLE:
            if (engine := forecast.last_engine(unimprovable)) is None:
                break
            plan = self._best_plan(forecast, engine)
            if plan is None:
                num_declined += (
                    forecast.seen.idle.has_worth and self._best_plan(forecast, engine, alone=True) is not None
                )
                unimprovable.add(engine)
                continue
            for request in plan.requests:
                if not plan.is_race:
                    forecast.stop(request, plan.source)
                forecast.start(request, plan.target)
        return TailDecision(*forecast.net_changes(), num_declined)

    def _best_plan(self, forecast: TailForecast, engine: int, *, alone: bool = False) -> _Plan | None:
        """Returns the plan for requests of `engine` that gains most, or None if no plan gains enough.

        Plans that move several requests are tried only if no plan for a single request gains enough. With `alone`, plans are
        judged as if engines could not decode requests of coming steps.
        """
        single = [
            plan
            for request in forecast.by_end(engine)[:NUM_LAST]
            for target in forecast.targets(request)
            for plan in self._plans(forecast, request, engine, target)
        ]
        return self._worthwhile(forecast, single, alone) or self._worthwhile(
            forecast, self._bundles(forecast, engine), alone
        )

    def _worthwhile(self, forecast: TailForecast, plans: Iterable[_Plan], alone: bool) -> _Plan | None:
        """Returns the plan that gains most, or None if no plan gains enough.

        The gain of a plan is the time by which both engines will have ended earlier. It must exceed the delay of an order. It
        must also exceed the share `min_gain` of the time that is left, because forecasts have errors. Finally, it must exceed
        the time that later rollouts lose, because the plan leaves engines less time to decode requests of coming steps. With
        `alone`, this last condition is left out.
        """
        best: _Plan | None = None
        best_s = 0.0
        for plan in plans:
            end_s = forecast.end_s(plan.source)
            gain_s = end_s - plan.end_s
            if gain_s <= max(self.config.min_gain * end_s, forecast.seen.handover_s):
                continue
            if not alone:
                gain_s -= self._early_lost_s(forecast, plan)
            ranked_s = gain_s - (RACE_PREMIUM * end_s if plan.is_race else 0.0)
            if gain_s > 0.0 and (best is None or ranked_s > best_s):
                best, best_s = plan, ranked_s
        return best

    def _early_lost_s(self, forecast: TailForecast, plan: _Plan) -> float:
        engines = plan.source, plan.target
        return forecast.early_lost_s(plan.requests, engines, plan.end_s, is_race=plan.is_race)

    def _plans(self, forecast: TailForecast, request: int, engine: int, target: int) -> Iterator[_Plan]:
        """Yields the plan to move a single request and the plan to race for it, if the config and the engines allow them."""
        engines = forecast.engines_of(request)
        methods = forecast.seen.method_E
        if self.config.moving and len(engines) == 1:
            yield _Plan((request,), engine, target, False, forecast.end_after_move((request,), engine, target))
        is_new = methods[target] not in methods[list(engines)]
        if is_new and len(engines) < self.config.max_racers and forecast.by_end(engine)[0] == request:
            yield _Plan((request,), engine, target, True, forecast.end_after_race(request, engine, target))

    def _bundles(self, forecast: TailForecast, engine: int) -> Iterator[_Plan]:
        """Yields plans that move the 2, 4, 8, ... requests of `engine` that end last.

        They are needed if many requests end at about the same time, because then the move of one request hardly changes the
        engine's end.
        """
        if not self.config.moving:
            return
        movable = [r for r in forecast.by_end(engine) if len(forecast.engines_of(r)) == 1]
        size = 2
        while size <= min(len(movable), MAX_CHANGES // 2):
            bundle = tuple(movable[:size])
            for target in forecast.targets(bundle[0], size):
                yield _Plan(bundle, engine, target, False, forecast.end_after_move(bundle, engine, target))
            size *= 2
