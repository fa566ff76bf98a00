# SPDX-License-Identifier: Apache-2.0
"""Writes `report.html` and `picture.png` about a run of the lab or of NeMo-RL from its records."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_specrollout.reports.advice import advice_of_run
from nemo_specrollout.reports.charts import Draw, charts_of, save_picture
from nemo_specrollout.reports.page import (
    NONE,
    card,
    chart,
    facts,
    folded,
    grid,
    in_digits,
    page,
    step_list,
    table,
    text_table,
)
from nemo_specrollout.reports.records import (
    AUDITS,
    FOLDER,
    HISTORY,
    Record,
    Run,
    acceptance_totals,
    naming_damage,
    number,
    read_object_or_nothing,
    refreshes,
    summary_of,
)
from nemo_specrollout.reports.start_table import in_short, start_card, start_list
from nemo_specrollout.reports.starts import RunOfStarts
from nemo_specrollout.storage.files import write_atomically

PAGE, PICTURE = "report.html", "picture.png"
MAX_ROWS = 200
"""Maximum number of steps in a table and of alarms in the list. It is limited because a run may have thousands of steps."""
COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "response<br>tokens": ("mean_gen_tokens_per_sample", ".1f"),
    "step<br>s": ("step_s", ".1f"),
    "generation<br>s": ("generation_s", ".2f"),
    "rollout<br>s": ("rollout_s", ".2f"),
    "plain<br>est. s": ("plain_estimate_s", ".2f"),
    "speedup<br>est. x": ("speedup_estimate", ".2f"),
    "acceptance<br>length": ("acceptance_length", ".2f"),
    "with<br>drafts": ("steps_with_drafts", ".0%"),
    "our host<br>time": ("host_share", ".1%"),
    "log-prob<br>gap": ("logprob_gap", ".1e"),
    "tokens<br>checked": ("tokens_checked", ",d"),
    "<br>equal": ("tokens_equal", ",d"),
}
"""Columns of the table of steps. Each heading (HTML) has a key of the step and a number format."""


Extras = tuple[Sequence[str], Sequence[tuple[Draw, Any]]]
"""HTML sections that follow the charts of the page, and further panels of the picture, each with the data that it draws."""


def write_pages(folder: Path, extras_of: Callable[[Run], Extras] = lambda _: ((), ())) -> tuple[Path, Path]:
    """Writes report and picture of one start of a run into `folder`, which has the start's records.

    Returns their paths. `extras_of` is as in `write_pages_of`.
    """
    with naming_damage(folder):
        return write_pages_of(Run.read(folder), extras_of)


def write_pages_of(run: Run, extras_of: Callable[[Run], Extras] = lambda _: ((), ())) -> tuple[Path, Path]:
    """Writes report and picture into the run's folder, and returns their paths in this order.

    A file of an earlier call is replaced only when the new one is complete. `extras_of` returns the sections and the panels
    that a kind of run adds to the report and the picture. Raises ConfigError for damaged records, and OSError if a file cannot
    be written.
    """
    report = run.folder / PAGE
    picture = run.folder / PICTURE
    with naming_damage(run.folder):
        sections, panels = extras_of(run) if run.steps else ((), ())
        # A record may contain half of a surrogate pair, which is not valid Unicode. The page then shows its number.
        write_atomically(report, _page(run, sections).encode("utf-8", "backslashreplace"))
        save_picture(run, picture, panels)
    return report, picture


def _page(run: Run, sections: Sequence[str]) -> str:
    parts = list[str]()
    starts = start_list(run) if isinstance(run, RunOfStarts) else ""
    if run.steps:
        alarms = step_list("Alarms", run.alarms[-MAX_ROWS:], "alarms")
        charts = grid("charts", (chart(*shown) for shown in charts_of(run)))
        audits = step_list("Audits", _audits(run))
        began = step_list("What engines began with", run.began[-MAX_ROWS:])
        lists = [grid("cards", _cards(run)), alarms, _advice(run), starts, audits, began]
        parts = [*lists, charts, *sections, _head_decisions(run), _table(run)]
    else:
        parts = [starts]
    config = run.folder / "config.yaml"
    if config.is_file() and not isinstance(run, RunOfStarts):  # the config of `launch` is not resolved
        parts.append(folded("Resolved config", config.read_text(encoding="utf-8", errors="replace")))
    else:
        parts.append(folded("policy.generation.specrollout", yaml.safe_dump(run.about.get("block"), sort_keys=False)))
    known = {key: run.about[key] for key in ("command", "started", "commit") if run.about.get(key)}
    parts.append(facts("How this run was made", known | _versions(run)))
    folder = run.folder.resolve()
    return page(f"Run {folder.parent.name if folder.name == 'specrollout' else folder.name}", status_of(run), parts)


def _versions(run: Run) -> dict[str, str]:
    """Returns the version of each package that the run has used.

    If a version changed between starts of the run, all versions are named in order.
    """
    abouts = [start.about for start in run.starts] if isinstance(run, RunOfStarts) else [run.about]
    found: dict[str, dict[str, None]] = {}
    for about in abouts:
        versions = about.get("versions")
        for name, version in versions.items() if isinstance(versions, Mapping) else ():
            found.setdefault(str(name), {})[str(version)] = None
    return {name: ", then ".join(found[name]) for name in sorted(found)}


def status_of(run: Run) -> str:
    """Returns a line that says how many steps a run has finished."""
    starts = f"; {in_short(run)}" if isinstance(run, RunOfStarts) else ""
    if not run.steps:
        return f"no finished step yet{starts}"
    first = run.steps[0]["step"]
    last = run.steps[-1]["step"]
    which = f"steps {first} to {last}" if first != last else f"step {first}"
    state = ", completed" if run.summary.get("completed") else ""
    seconds = number(run.summary, "wall_s")
    in_all = f", {seconds:.0f} s in all" if math.isfinite(seconds) else ""
    return f"{len(run.steps)} finished step{'s' * (len(run.steps) > 1)}: {which}{state}{in_all}{starts}"


def _cards(run: Run) -> Iterator[str]:
    summary = summary_of(run.steps)
    yield from _rollout_cards(run, summary)
    yield from _training_cards(run, summary)
    yield from _engine_cards(run, summary)
    if isinstance(run, RunOfStarts):
        yield start_card(run)
    listed = "listed below" if len(run.alarms) <= MAX_ROWS else f"the last {MAX_ROWS} are listed below"
    yield card("Alarms", str(len(run.alarms)), *((listed, "bad") if run.alarms else ("none raised", "")))


def _rollout_cards(run: Run, summary: Record) -> Iterator[str]:
    speedup, length = (number(summary, key) for key in ("speedup_estimate", "acceptance_length"))
    if math.isfinite(speedup):
        yield card("Rollout speedup", in_digits(speedup, ".2f", "x"), "over the plain estimate", "good" * (speedup > 1))
    checked, equal = (number(summary, key) for key in ("tokens_checked", "tokens_equal"))
    if checked == 0:
        yield card("Tokens equal", NONE, "none was checked against a plain rollout")
    elif equal < checked:
        yield card("Tokens equal", f"{equal / checked:.3%}", f"{equal:,.0f} of {checked:,.0f} checked", "bad")
    elif equal == checked:
        yield card("Tokens equal", f"{equal:,.0f}", f"of {checked:,.0f} checked against a plain rollout", "good")
    if math.isfinite(length):
        note = "tokens per request and engine step; plain decoding has 1"
        yield card("Acceptance length", in_digits(length, ".2f"), note)
    if math.isfinite(share := run.mean("generation_share")):
        note = f"of a step's {in_digits(run.mean('step_s'), '.3g', ' s')}, mean of steps"
        yield card("Generation", in_digits(share, ".0%"), note)


def _training_cards(run: Run, summary: Record) -> Iterator[str]:
    first, last = (number(summary, key) for key in ("reward_first", "reward_last"))
    if math.isfinite(first) or math.isfinite(last):
        change = f"{in_digits(first, '.2f')} \N{RIGHTWARDS ARROW} {in_digits(last, '.2f')}"
        yield card("Reward", change, "means of the first and last fifth")
    gap = number(summary, "largest_logprob_gap")
    bound = run.alarm_bound
    if math.isfinite(gap):
        note = f"nats a token, the largest; alarm above {in_digits(bound, 'g')}"
        yield card("Log-prob gap", in_digits(gap, ".1e"), note, "bad" if gap > bound else "")


def _engine_cards(run: Run, summary: Record) -> Iterator[str]:
    if "refreshes" in summary:
        note = f"refreshes published; {in_digits(number(summary, 'refresh_share'), '.1%')} of the run's time"
        yield card("Draft heads", f"{summary['heads_published']} of {summary['refreshes']}", note)
    if "tail_moves" in summary:
        won = in_digits(number(summary, "tail_won_by_racer"), "d")
        note = f"estimate; moves: {summary['tail_moves']}, races: {summary['tail_races']}, won by the racer: {won}"
        yield card("Saved in the tail", in_digits(number(summary, "tail_saved_s"), "+.1f", " s"), note)
    if drafted := [step for step in run.steps if number(step, "draft_supply.num_drafters") > 0]:
        supply = drafted[-1]["draft_supply"]
        in_time = in_digits(run.mean("draft_supply.occupancy"), ".0%")
        ready = number(supply, "num_ready")
        named = number(supply, "num_drafters")
        note = f"drafters answer; drafts in time {in_time}; bottleneck: {supply.get('bottleneck') or 'not known'}"
        yield card("Remote drafters", f"{in_digits(ready, 'd')} of {named:.0f}", note, "bad" * (ready < named))
    totals = acceptance_totals(run.steps)
    if HISTORY in totals:
        yield _history_card(run, totals)
    if (derived := number(summary, "seeds_derived")) > 0:
        yield card("Seeds derived", f"{derived:,.0f}", "requests over HTTP without a seed of their own")


def _history_card(run: Run, totals: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Returns the card about draft tokens that came from earlier responses to the same prompts."""
    verified, accepted = (int(counts.sum()) for counts in totals[HISTORY])
    all_verified, all_accepted = (sum(int(of[i].sum()) for of in totals.values()) for i in (0, 1))
    note = f"of accepted drafts are from earlier responses, and {verified / all_verified:.0%} of all drafts"
    known = [step[HISTORY] for step in run.steps if step.get(HISTORY)]
    if known:
        read, kept = (int(known[-1].get(key, 0)) for key in ("num_read", "num_written"))
        note += f"; {read:,} responses were there at the start, {kept:,} came in"
    return card("From history", f"{accepted / max(all_accepted, 1):.0%}", note)


def _advice(run: Run) -> str:
    """Returns a table that says which mechanisms would save time in this run, or "" if its records do not tell."""
    rows = [(advice, False) for advice in advice_of_run(run)]
    if not rows:
        return ""
    how = (
        "By the records of this run. A mechanism that is off is bounded by the time that it could fill, and one that is on is "
        "judged by what it has saved, by estimate."
    )
    return text_table("What would pay in this run", how, ["mechanism", "state", "verdict", "why"], rows)


def _audits(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the steps and the verdict of each audit as texts, the latest audit first."""
    folders = [run.folder, *(s.folder / FOLDER for s in run.starts)] if isinstance(run, RunOfStarts) else [run.folder]
    lists = [read_object_or_nothing(folder / AUDITS).get("audits") for folder in folders]
    audits = [audit for found in lists if isinstance(found, list) for audit in found if isinstance(audit, Mapping)]
    for audit in sorted(audits, key=lambda audit: str(audit.get("date", "")))[::-1]:
        steps = ", ".join(map(str, audit.get("steps", ())))
        gaps = audit.get("logprob_difference") or {}
        largest = f"; log-probs differ by at most {gaps['largest']:.2g} nats" if "largest" in gaps else ""
        skipped = f"; {len(audit['skipped']):,} rows could not be audited" if audit.get("skipped") else ""
        rows = f"{audit.get('rows', 0):,} rows, {audit.get('tokens', 0):,} tokens"
        yield steps, f"{audit.get('verdict')} ({rows}{largest}{skipped}; {audit.get('date', 'no date')})"


def _head_decisions(run: Run) -> str:
    """Returns a section with the decision of each refresh of the draft head, and with the latest decision about a refresh."""
    decided = [(step["step"], step["draft_refresh"]) for step in run.steps if "draft_refresh" in step]
    shown = dict([*refreshes(run.steps)[-MAX_ROWS:], *decided[-1:]])
    gates = {step: f"; gate: {record['gate']}" if "gate" in record else "" for step, record in shown.items()}
    said = [(step, f"{record.get('decision', NONE)}{gates[step]}") for step, record in shown.items()]
    return step_list("Decisions about the draft head", said)


def _table(run: Run) -> str:
    shown = run.steps[-MAX_ROWS:]
    title = f"The last {MAX_ROWS} of {len(run.steps)} steps" if len(shown) < len(run.steps) else "Step by step"
    columns = {heading: column for heading, column in COLUMNS.items() if column[0] == "step" or run.has(column[0])}
    return table(title, columns, shown, lambda step, key: _is_bad(run, step, key))


def _is_bad(run: Run, step: Record, key: str) -> bool:
    if key == "tokens_equal":
        return number(step, key) < number(step, "tokens_checked")
    return key == "logprob_gap" and number(step, key) > run.alarm_bound
