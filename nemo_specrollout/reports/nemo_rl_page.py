# SPDX-License-Identifier: Apache-2.0
"""Writes `report.html` and `picture.png` of a run in NeMo-RL from the records in `<log_dir>/exp_NNN/specrollout`."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import yaml

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.reports.charts import has_any
from nemo_specrollout.reports.nemo_rl_charts import charts_of, picture
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
from nemo_specrollout.reports.panels import refreshes
from nemo_specrollout.reports.records import NemoRlRun, Record, naming_damage, number, reduced, reward_window, series

MOST_ROWS = 200
"""Rows of a table, and alarms in the list. A run in NeMo-RL may have thousands of steps."""
COLUMNS = {
    "Steps": {
        "step": ("step", "d"),
        "reward": ("reward", ".3f"),
        "loss": ("loss", ".4f"),
        "step<br>s": ("step_s", ".1f"),
        "generation<br>s": ("generation_s", ".1f"),
        "<br>share": ("generation_share", ".0%"),
        "log-prob<br>s": ("logprob_s", ".1f"),
        "train<br>s": ("train_s", ".1f"),
        "refit<br>s": ("refit_s", ".1f"),
        "log-prob<br>gap": ("logprob_gap.mean", ".1e"),
        "KL<br>error": ("gen_kl_error", ".1e"),
        "steps<br>behind": ("policy_lag_mean", ".2f"),
        "<br>trained on": ("avg_trajectory_age", ".2f"),
        "response<br>tokens": ("mean_gen_tokens_per_sample", ".1f"),
    },
    "Engines": {
        "step": ("step", "d"),
        "speedup<br>est. x": ("speedup_estimate", ".2f"),
        "tokens<br>a step": ("tokens_per_request_step", ".2f"),
        "drafts<br>a step": ("draft_tokens_per_request_step", ".2f"),
        "engine<br>steps": ("engine_steps", ",d"),
        "with<br>drafts": ("steps_with_drafts", ".0%"),
        "decode<br>engine s": ("decode_s", ".2f"),
        "our host<br>engine s": ("draft_host_s", ".3f"),
        "refits": ("weight_updates", ".3g"),
        "seeds<br>derived": ("seeds_derived", ",d"),
        "<br>made up": ("seeds_made_up", ",d"),
        "head<br>age": ("head_age", "d"),
        "moves": ("tail/moves", "d"),
        "races": ("tail/races", "d"),
        "saved<br>est. s": ("tail/saved_s", "+.2f"),
        "drafters<br>ready": ("drafters_ready", "d"),
        "drafts<br>in time": ("draft_occupancy", ".0%"),
    },
}
"""Tables: title -> columns, each a heading (HTML) with the key of the step and a format."""


def write_pages(folder: Path) -> tuple[Path, Path]:
    """Writes report and picture into `folder`, each atomically, and returns their paths.

    Raises ConfigError for damaged records, and OSError.
    """
    report, image = folder / "report.html", folder / "picture.png"
    with naming_damage(folder, "metrics.jsonl or timing.jsonl"):
        run = NemoRlRun.read(folder)
        write_atomically(report, _page(run, folder.resolve().parent.name))
        picture(run, image)
    return report, image


def _page(run: NemoRlRun, name: str) -> str:
    parts = [cards(_cards(run)), alarm_list(run.alarms[-MOST_ROWS:]), *_charts(run), *_tables(run)] if run.steps else []
    text = yaml.safe_dump(dict(run.block), sort_keys=False) if run.block else ""
    block = folded("policy.generation.specrollout", text, "summary.json is missing, or has no block")
    versions = run.summary.get("versions")
    known = dict(sorted(versions.items())) if isinstance(versions, Mapping) else {}
    made = facts("How this run was made", known, "summary.json is missing, or has no versions")
    return page(f"Run {name}", _status(run), [*parts, block, made])


def _status(run: NemoRlRun) -> str:
    if not run.steps:
        return "no finished step yet"
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    which = f"steps {first} to {last}" if first != last else f"step {first}"
    return f"NeMo-RL with specrollout, {len(run.steps)} finished step{'s' * (len(run.steps) > 1)}: {which}"


def _cards(run: NemoRlRun) -> Iterator[str]:
    """Yields the cards for which the run has numbers, and the card of alarms."""
    yield from _speed_cards(run)
    yield from _training_cards(run)
    yield from _engine_cards(run)
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
        first, last = (in_digits(reduced(np.mean, part), ".2f") for part in (rewards[:window], rewards[-window:]))
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


def _engine_cards(run: NemoRlRun) -> Iterator[str]:
    published, refused = run.total("heads_published"), run.total("heads_refused")
    if published + refused > 0:
        yield card("Draft heads", f"{published:.0f} of {published + refused:.0f}", "judged heads were published")
    moves, races, saved_s = map(run.total, ("tail/moves", "tail/races", "tail/saved_s"))
    if math.isfinite(moves):
        note = f"estimate; moves: {moves:.0f}, races: {in_digits(races, 'd')}"
        yield card("Saved in the tail", in_digits(saved_s, "+.1f", " s"), note)
    if drafted := [step for step in run.steps if number(step, "drafters") > 0]:
        yield _drafters_card(run, drafted[-1])
    if (made_up := run.total("seeds_made_up")) > 0:
        yield card("Seeds made up", f"{made_up:,.0f}", "requests without a seed, whose engine is part of it")


def _drafters_card(run: NemoRlRun, last: Record) -> str:
    ready, named = number(last, "drafters_ready"), number(last, "drafters")
    stats = last.get("draft_supply", {})
    in_time = in_digits(run.mean("draft_occupancy"), ".0%")
    note = f"drafters answer; drafts in time {in_time}; bottleneck: {stats.get('bottleneck') or 'not known'}"
    return card("Remote drafters", f"{in_digits(ready, 'd')} of {named:.0f}", note, "bad" * (ready < named))


def _charts(run: NemoRlRun) -> Iterator[str]:
    """Yields the sections of charts. Narrow charts that follow one another share a row, two at a time."""
    narrow: list[str] = []
    for title, svg, how_to_read, is_wide in charts_of(run):
        section = chart(title, svg, how_to_read)
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
    for title, columns in COLUMNS.items():
        known = {h: c for h, c in columns.items() if c[0] == "step" or has_any(shown, c[0])}
        if len(known) > 1:
            yield table(title + which, known, shown, _is_bad)


def _is_bad(step: Record, key: str) -> bool:
    return key == "logprob_gap.mean" and number(step, "logprob_gap_alarm") == 1.0
