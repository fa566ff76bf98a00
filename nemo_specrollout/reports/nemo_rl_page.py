# SPDX-License-Identifier: Apache-2.0
"""`report.html` and `picture.png` of a run in NeMo-RL, made from its `<log_dir>/specrollout` alone."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.reports.head_panels import refreshes
from nemo_specrollout.reports.nemo_rl_charts import charts_of, picture
from nemo_specrollout.reports.nemo_rl_run import NemoRlRun
from nemo_specrollout.reports.nemo_rl_words import COLUMNS, HOW_TO_READ, TITLES
from nemo_specrollout.reports.page import (
    alarm_list,
    card,
    cards,
    chart,
    facts,
    folded,
    head_section,
    in_digits,
    page,
    pair,
    table,
)
from nemo_specrollout.reports.records import Record, naming_damage, number, reward_window, series

MOST_ROWS = 200
"""Rows of a table, and alarms in the list: a run in NeMo-RL may have thousands of steps."""


def write_pages(folder: Path) -> tuple[Path, Path]:
    """Writes both into `folder` and returns their paths; a reader never sees half a file.

    Raises OSError, ConfigError for records that are damaged.
    """
    report, image = folder / "report.html", folder / "picture.png"
    with naming_damage(folder, "metrics.jsonl, timing.jsonl or samples.jsonl"):
        run = NemoRlRun.read(folder)
        write_atomically(report, _page(run, folder.resolve().parent.name))
        picture(run, image)
    return report, image


def _page(run: NemoRlRun, name: str) -> str:
    parts = [cards(_cards(run)), alarm_list(run.alarms[-MOST_ROWS:]), *_charts(run), *_tables(run)] if run.steps else []
    return page(f"Run {name}", _status(run), [*parts, _block(run), _versions(run)])


def _status(run: NemoRlRun) -> str:
    if not run.steps:
        return "no finished step yet"
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    which = f"steps {first} to {last}" if first != last else f"step {first}"
    return f"NeMo-RL with specrollout, {len(run.steps)} finished step{'s' * (len(run.steps) > 1)}: {which}"


def _cards(run: NemoRlRun) -> Iterator[str]:
    """Those that have a figure, and the alarms."""
    yield from _speed_cards(run)
    yield from _training_cards(run)
    yield from _worker_cards(run)
    num_alarms = len(run.alarms)
    listed = "listed below" if num_alarms <= MOST_ROWS else f"the last {MOST_ROWS} are listed below"
    note, kind = (listed, "bad") if num_alarms else ("none raised", "")
    yield card("Alarms", str(num_alarms), note, kind)


def _speed_cards(run: NemoRlRun) -> Iterator[str]:
    speedup, tokens, share = map(run.mean, ("speedup_estimate", "tokens_per_request_step", "generation_share"))
    if math.isfinite(speedup):
        note = "of decoding over plain, by estimate; mean of steps"
        yield card("Decoding speedup", in_digits(speedup, ".2f", "x"), note, "good" * (speedup > 1))
    if math.isfinite(tokens):
        note = "tokens a request gains in an engine step; 1 is plain"
        yield card("Acceptance length", in_digits(tokens, ".2f"), note)
    if math.isfinite(share):
        note = f"of a step's {in_digits(run.mean('step_s'), '.3g', ' s')}, mean of steps"
        yield card("Generation", in_digits(share, ".0%"), note)


def _training_cards(run: NemoRlRun) -> Iterator[str]:
    rewards, window = series(run.steps, "reward"), reward_window(len(run.steps))
    if np.isfinite(rewards).any():
        first, last = (in_digits(_mean(part), ".2f") for part in (rewards[:window], rewards[-window:]))
        yield card("Reward", f"{first} \N{RIGHTWARDS ARROW} {last}", "means of the first and last fifth")
    gap, bound = run.most("logprob_gap.mean"), run.alarm_bound
    if math.isfinite(gap):
        note = f"nats a token, the largest; alarm above {in_digits(bound, 'g')}"
        yield card("Log-prob gap", in_digits(gap, ".1e"), note, "bad" if gap > bound else "")
    trained_on, begun = run.mean("avg_trajectory_age"), run.mean("policy_lag_mean")
    if math.isfinite(trained_on):
        yield card("Staleness", in_digits(trained_on, ".2f"), "training steps behind, of the samples trained on; mean")
    elif math.isfinite(begun):
        note = f"training steps behind, mean; at most {in_digits(run.most('policy_lag_max'), 'd')}"
        yield card("Staleness", in_digits(begun, ".2f"), note)


def _worker_cards(run: NemoRlRun) -> Iterator[str]:
    published, refused = run.total("heads_published"), run.total("heads_refused")
    if published + refused > 0:
        yield card("Draft heads", f"{published:.0f} of {published + refused:.0f}", "judged heads were published")
    moves, races, saved_s = map(run.total, ("tail/moves", "tail/races", "tail/saved_s"))
    if math.isfinite(moves):
        note = f"estimate; moves: {moves:.0f}, races: {in_digits(races, 'd')}"
        yield card("Saved in the tail", in_digits(saved_s, "+.1f", " s"), note)
    if supplied := [step for step in run.steps if number(step, "drafters") > 0]:
        yield _supply_card(run, supplied[-1])
    if (made_up := run.total("seeds_made_up")) > 0:
        yield card("Seeds made up", f"{made_up:,.0f}", "requests without a seed, whose engine is part of it")


def _supply_card(run: NemoRlRun, last: Record) -> str:
    ready, named = number(last, "drafters_ready"), number(last, "drafters")
    supply = last.get("draft_supply", {})
    in_time = in_digits(run.mean("draft_occupancy"), ".0%")
    note = f"drafters answer; drafts in time {in_time}; bottleneck: {supply.get('bottleneck') or 'not known'}"
    return card("Remote drafters", f"{in_digits(ready, 'd')} of {named:.0f}", note, "bad" * (ready < named))


def _charts(run: NemoRlRun) -> Iterator[str]:
    """Narrow ones side by side, two that follow one another."""
    narrow: list[str] = []
    for title, svg, is_wide in charts_of(run):
        section = chart(title, svg, HOW_TO_READ[title])
        section = _with_refreshes(run, section) if title == "Draft head" else section
        if is_wide or len(narrow) == 2:
            yield from [pair(*narrow)] if narrow else []
            narrow = []
        if is_wide:
            yield section
        else:
            narrow.append(section)
    yield from [pair(*narrow)] if narrow else []


def _with_refreshes(run: NemoRlRun, section: str) -> str:
    said = [str(step["draft_refresh"].get("decision", "")) for step in run.steps if "draft_refresh" in step]
    return head_section(section, refreshes(run.steps), said[-1]) if said else section


def _tables(run: NemoRlRun) -> Iterable[str]:
    shown = run.steps[-MOST_ROWS:]
    which = f", the last {MOST_ROWS} of {len(run.steps)} steps" if len(shown) < len(run.steps) else ", step by step"
    for title in TITLES:
        columns = {h: c for h, c in COLUMNS[title].items() if c[0] == "step" or _has(shown, c[0])}
        if len(columns) > 1:
            yield table(title + which, columns, shown, _is_bad)


def _is_bad(step: Record, key: str) -> bool:
    return key == "logprob_gap.mean" and number(step, "logprob_gap_alarm") == 1.0


def _has(steps: Sequence[Record], key: str) -> bool:
    return bool(np.isfinite(series(steps, key)).any())


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _block(run: NemoRlRun) -> str:
    text = yaml.safe_dump(dict(run.block), sort_keys=False) if run.block else ""
    return folded("policy.generation.specrollout", text, "summary.json is missing, or has no block")


def _versions(run: NemoRlRun) -> str:
    versions = run.summary.get("versions")
    known = dict(sorted(versions.items())) if isinstance(versions, Mapping) else {}
    return facts("How this run was made", known, "summary.json is missing, or has no versions")
