# SPDX-License-Identifier: Apache-2.0
"""Computes the figures of `lab.bench.tail_bench`, which are errors of forecasts and a row for each way to treat stragglers.

Shapes: R requests, E engines, as in `stragglers/decisions/straggler_policy.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from lab.local.statistics import count_equal
from lab.local.timeline import Timeline
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.stragglers.attempts import AttemptOutcome
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN, TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import TailForecast, TailObservation

IN_VAIN = (AttemptOutcome.BEATEN, AttemptOutcome.GAVE_UP)


@dataclass(frozen=True)
class Foreseen:
    """What the straggler policy forecasts about the end of a rollout.

    The forecast is made at the first decision that moves or races a request. If an engine runs out of requests before that,
    the forecast is made at the next decision.
    """

    at_s: float
    """Time of the decision at which the forecast is made, on the clock of the engines."""
    stays_s: float
    """Seconds from the decision to the end of the rollout, if nothing moves or races."""
    ends_s: float
    """Seconds from the decision to the end of the rollout, if the decision is carried out."""


class Watched:
    """A straggler policy that records its first forecast of a rollout in `foreseen`, which is None until then."""

    def __init__(self, policy: FastestOfN, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self.foreseen: Foreseen | None = None

    def decide(self, seen: TailObservation) -> TailDecision:
        decision = self._policy.decide(seen)
        running = set(seen.request_A.tolist())
        changes = any(request in running for request, _ in decision.starts)
        has_idle = bool(len(seen.engine_A)) and len(set(seen.engine_A.tolist())) < int((seen.capacity_E > 0).sum())
        if self.foreseen is None and (changes or has_idle):
            forecast = TailForecast(seen, self._policy.speeds)
            stays_s = _last_end_s(forecast)
            for request, engine in decision.stops:
                forecast.stop(request, engine)
            for request, engine in decision.starts:
                forecast.start(request, engine)
            self.foreseen = Foreseen(self._clock(), stays_s, _last_end_s(forecast))
        return decision


def _last_end_s(forecast: TailForecast) -> float:
    return max(map(forecast.end_s, range(len(forecast.seen.capacity_E))))


@dataclass(frozen=True)
class Timed:
    """One measured rollout of a way."""

    requests: Sequence[RolloutRequest]
    rollouts: list[Rollout]
    seconds: float
    """Seconds until the last token."""
    engine_s: float
    """CPU seconds of all engines during the rollout."""
    timeline: Timeline
    foreseen: Foreseen | None
    began_s: float
    """Time at which the rollout began, on the clock of the engines."""

    @property
    def forecast_error(self) -> float | None:
        """Returns the error of `foreseen` as a share of the seconds that really remained, or None without a forecast.

        It is positive if the forecast was too long.
        """
        if self.foreseen is None:
            return None
        left_s = self.began_s + self.seconds - self.foreseen.at_s
        return self.foreseen.ends_s / left_s - 1.0 if left_s > 0.0 else None

    @property
    def num_repeated(self) -> int:
        """Returns how many prompt and response tokens were computed again, because requests moved or were raced."""
        begun: set[int] = set()
        repeated = 0
        for span in sorted(self.timeline.spans, key=lambda s: s.start_s):
            if span.request in begun:
                repeated += len(self.requests[span.request].prompt_token_ids) + span.first_token
            begun.add(span.request)
        return repeated

    @property
    def lost_s(self) -> float:
        """Returns the seconds of attempts in vain. An attempt is in vain if it lost a race or was given up."""
        return sum(s.end_s - s.start_s for s in self.timeline.spans if s.outcome in IN_VAIN)

    @property
    def tail_share(self) -> float:
        """Returns the share of the rollout's seconds in which at least one engine had no more work until the end."""
        engines = range(len(self.timeline.methods))
        lasts = [max((s.end_s for s in self.timeline.spans if s.engine == e), default=0.0) for e in engines]
        return 1.0 - min(lasts) / max(lasts)


def row_of(name: str, timed: Sequence[Timed], base: Sequence[Timed], first: Sequence[Timed]) -> dict[str, Any]:
    """Returns the figures of a way over its rollouts, `timed`.

    `base` has the same rollouts without moves and races. `first` has the rollouts with which the tokens are compared.
    """
    pairs = list(zip(timed, base, strict=True))
    counts = [t.timeline.figures() for t in timed]
    equal = [count_equal(a.rollouts, b.rollouts) for a, b in zip(timed, first, strict=True)]
    estimates = [(t.timeline.saved_s, b.seconds - t.seconds, b.seconds) for t, b in pairs]
    known = [(guess, real, of_s) for guess, real, of_s in estimates if guess is not None]
    return {
        "way": name,
        "rollouts": len(timed),
        "seconds": spread(t.seconds for t in timed),
        "gain": spread(b.seconds / t.seconds for t, b in pairs),
        "tail_share": spread(t.tail_share for t in timed),
        "engine_s": spread(t.engine_s for t in timed),
        "engine_s_ratio": spread(t.engine_s / b.engine_s for t, b in pairs),
        "lost_s": sum(t.lost_s for t in timed),
        "moves": sum(c["moves"] for c in counts),
        "races": sum(c["races"] for c in counts),
        "won_by_newcomer": sum(c["won_by_racer"] for c in counts),
        "diverged": sum(c["diverged"] for c in counts),
        "repeated_tokens": sum(t.num_repeated for t in timed),
        "tokens_equal": sum(e for e, _ in equal),
        "tokens_total": sum(total for _, total in equal),
        "forecast_error": spread(e for t in timed if (e := t.forecast_error) is not None),
        "forecast_errors": [t.forecast_error for t in timed],
        "saved_estimate_s": spread(guess for guess, _, _ in known),
        "saved_s": spread(real for _, real, _ in known),
        "saved_error_share": spread((guess - real) / of_s for guess, real, of_s in known),
        "all_seconds": [t.seconds for t in timed],
        "all_saved": [[guess, real] for guess, real, _ in estimates],
    }


def spread(values: Any) -> list[float]:
    """Returns the least, the median and the greatest of some numbers, or an empty list if there are none."""
    ordered = sorted(values)
    return [ordered[0], statistics.median(ordered), ordered[-1]] if ordered else []


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the ways for the terminal. A cell has a sum, or the median and the range over rollouts."""
    table = Table(pad_edge=False)
    names = (
        "way",
        "seconds",
        "x neither",
        "engine s",
        "moves",
        "races (won)",
        "repeated",
        "forecast off",
        "saved: said, was",
    )
    for name in (*names, "tokens equal"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["way"],
            _cell(row["seconds"], "{:.1f}"),
            _cell(row["gain"], "{:.3f}"),
            _cell(row["engine_s"], "{:.1f}"),
            str(row["moves"]),
            f"{row['races']} ({row['won_by_newcomer']})",
            f"{row['repeated_tokens']:,}",
            _cell(row["forecast_error"], "{:+.0%}"),
            ", ".join(_cell(row[key][1:2], "{:.1f}") for key in ("saved_estimate_s", "saved_s")),
            f"{row['tokens_equal']:,} of {row['tokens_total']:,}",
        )
    return table


def _cell(values: Sequence[float], form: str) -> str:
    if len(values) < 3:
        return form.format(values[0]) if values else "-"
    low, middle, high = (form.format(v) for v in values)
    return f"{middle} ({low}-{high})"


def response_lengths(timed: Sequence[Timed]) -> dict[str, Any]:
    """Returns the number of responses of the rollouts, and their median and longest length in tokens."""
    lengths = np.array([len(r.token_ids) for t in timed for r in t.rollouts])
    return {"responses": len(lengths), "median": float(np.median(lengths)), "longest": int(lengths.max())}
