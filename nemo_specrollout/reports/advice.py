# SPDX-License-Identifier: Apache-2.0
"""Advises from a run's own records whether moving or racing requests, texts of coming steps, or remote drafters save time.

Each of these mechanisms uses time in which engines would be idle, or takes work out of their steps. A mechanism that is off
can save at most this time. Every run records the time, so the bound needs no knowledge of the policy or the hardware. A
mechanism that is on is judged by what the run has measured about it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.reports.records import Record, Run, number, ratio_of_sums, reduced, series

WORTHWHILE = 0.05
"""Smallest share of a rollout's seconds for which a mechanism is advised. Rollouts with equal work differ by about as much."""
DRAFT_MODELS = ("draft_model", "remote")
"""Types of drafters with weights that can run outside of the policy's engine."""
EXPERIMENTAL = "experimental, see docs/benchmarks/specactor.md"
"""Words about mechanisms that never paid in a measurement or simulation, or that never paid more than an alternative."""


class Advice(NamedTuple):
    """Advice on one mechanism in a run. `verdict` says in a few words whether it saves time, and `sentence` says why."""

    mechanism: str
    state: str
    """`on` if the run used the mechanism, or `off`."""
    verdict: str
    sentence: str


def advice_of(steps: Sequence[Record], block: Mapping[str, Any]) -> list[Advice]:
    """Returns advice on each mechanism, from a run's steps and its configuration `block`, or [] if no step has `rollout_s`."""
    if not math.isfinite(reduced(np.sum, series(steps, "rollout_s"))):
        return []
    return [*_moving(steps, block), *_racing(steps, block), *_ahead(steps, block), *_remote(steps, block)]


def advice_of_run(run: Run) -> list[Advice]:
    """Returns advice on each mechanism in a run, from the run's records."""
    return advice_of(run.steps, run.about.get("block") or {})


def lines_of(advice: Sequence[Advice]) -> Iterator[str]:
    """Yields a line for the terminal for each piece of advice."""
    for mechanism, state, verdict, sentence in advice:
        yield f"{mechanism} ({state}): {verdict}; {sentence}"


def idle_share(steps: Sequence[Record]) -> float:
    """Returns the share of the engines' time in which they waited for the last engine to end, or NaN with one engine."""
    shared = [step for step in steps if math.isfinite(number(step, "engine_idle_share"))]
    seconds = series(shared, "rollout_s")
    return reduced(np.sum, series(shared, "engine_idle_share") * seconds) / reduced(np.sum, seconds)


def _is_on(block: Mapping[str, Any], name: str) -> bool:
    section = block.get(name)
    return isinstance(section, Mapping) and bool(section.get("enabled", True))


def _bound(share: float, what: str) -> tuple[str, str]:
    """Returns verdict and sentence for a mechanism that is off and can save at most `share` of a rollout.

    The sentence is "WHAT SHARE of a rollout". So `what` has to say what the share is.
    """
    verdict = "may pay" if share >= WORTHWHILE else "would not pay"
    return verdict, f"{what} {share:.0%} of a rollout"


def _judged(saved_s: float, seconds: float) -> tuple[str, str]:
    """Returns verdict and sentence for a mechanism that is on and has saved `saved_s` in rollouts that took `seconds`."""
    if saved_s <= 0.0:
        return "does not pay", f"made rollouts {-saved_s / max(seconds, 1e-9):.0%} longer"
    share = saved_s / (seconds + saved_s)
    return "pays" if share >= WORTHWHILE else "hardly pays", f"made rollouts {share:.0%} shorter"


def _moving(steps: Sequence[Record], block: Mapping[str, Any]) -> Iterator[Advice]:
    name = "moving requests"
    if _is_on(block, "fastest_of_n"):
        saved_s = reduced(np.sum, series(steps, "tail.saved_s"))
        tails = [step for step in steps if math.isfinite(number(step, "tail.saved_s"))]
        seconds = reduced(np.sum, series(tails, "rollout_s"))
        moves = reduced(np.sum, series(steps, "tail.moves"))
        if not math.isfinite(saved_s):
            yield Advice(name, "on", "not known yet", "no rollout has had a move or a race")
            return
        verdict, sentence = _judged(saved_s, seconds)
        yield Advice(name, "on", verdict, f"{moves:.0f} moves {sentence}, by estimate")
        return
    share = idle_share(steps)
    if math.isfinite(share):
        what = "engines that end before the last one are idle for"
        verdict, sentence = _bound(share, what)
        yield Advice(name, "off", verdict, f"{sentence}, and fastest_of_n can save no more than that")


def _racing(steps: Sequence[Record], block: Mapping[str, Any]) -> Iterator[Advice]:
    section = block.get("fastest_of_n")
    methods = section.get("methods") if isinstance(section, Mapping) else None
    if not _is_on(block, "fastest_of_n") or not methods:
        return
    races, won = (reduced(np.sum, series(steps, f"tail.{key}")) for key in ("races", "won_by_racer"))
    if not races > 0:
        yield Advice("racing requests", "on", "does nothing", f"no request was raced ({EXPERIMENTAL})")
        return
    verdict = "helps some" if won > 0 else "does not pay"
    yield Advice("racing requests", "on", verdict, f"{won:.0f} of {races:.0f} races were won ({EXPERIMENTAL})")


def _ahead(steps: Sequence[Record], block: Mapping[str, Any]) -> Iterator[Advice]:
    name = "texts of coming steps"
    if not _is_on(block, "run_ahead"):
        share = idle_share(steps)
        if math.isfinite(share):
            verdict, sentence = _bound(share, "engines that end before the last one are idle for")
            yield Advice(name, "off", verdict, f"{sentence}, in which run_ahead would work")
        return
    saved_s, delay_s = (reduced(np.sum, series(steps, f"ahead_{key}_s")) for key in ("saved", "delay"))
    if not math.isfinite(saved_s):
        yield Advice(name, "on", "not known yet", "no step had texts that were made for it")
        return
    seconds = reduced(np.sum, series(steps, "rollout_s"))
    net_s = saved_s - (delay_s if math.isfinite(delay_s) else 0.0)
    verdict, sentence = _judged(net_s, seconds)
    yield Advice(name, "on", verdict, f"they {sentence}, by estimate and less what they delayed{_order(steps)}")


def _order(steps: Sequence[Record]) -> str:
    """Returns the end of a sentence about what idle engines won by decoding requests of coming steps.

    It says how many seconds each second of this work saved later, and how many moves and races of stragglers were left out for
    the work. The result is "" if the run has not measured this.
    """
    worth = reduced(np.mean, series(steps, "tail.early_worth"))
    if not math.isfinite(worth):
        return ""
    declined = reduced(np.sum, series(steps, "tail.declined"))
    return f"; a second of an idle engine spared it {worth:.2f} s later, for which {declined:.0f} moves or races were left out"


def _remote(steps: Sequence[Record], block: Mapping[str, Any]) -> Iterator[Advice]:
    name = "remote drafters"
    types = {str(d.get("type")) for d in block.get("drafters") or () if isinstance(d, Mapping)}
    if "remote" in types:
        in_time = reduced(np.mean, series(steps, "draft_supply.occupancy"))
        speedup = ratio_of_sums(steps, "plain_estimate_s", "rollout_s")
        known = math.isfinite(in_time) and math.isfinite(speedup)
        verdict = "not known yet" if not known else "pays" if speedup > 1 + WORTHWHILE else "does not pay"
        text = (
            f"drafts were there in time for {in_time:.0%} of the steps, and rollouts took 1/{speedup:.2f} of plain time"
        )
        yield Advice(name, "on", verdict, f"{text if known else 'nothing measured'} ({EXPERIMENTAL})")
        return
    if not types & set(DRAFT_MODELS):
        return
    share = ratio_of_sums(steps, "draft_s", "rollout_s")
    engines = reduced(np.max, series(steps, "num_engines"))
    cost = 1.0 / ((engines if math.isfinite(engines) else 1.0) + 1.0)
    if not share > 0:
        return
    verdict = "may pay" if share > cost + WORTHWHILE else "would not pay"
    yield Advice(
        name,
        "off",
        verdict,
        f"drafting takes {share:.0%} of a rollout, which is all that it could save, and a drafter as large as an engine takes "
        f"{cost:.0%} of the devices ({EXPERIMENTAL})",
    )
