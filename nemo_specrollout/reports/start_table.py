# SPDX-License-Identifier: Apache-2.0
"""Describes the starts of a run's driver, in a card and a table for the page and in lines for the terminal."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_specrollout.reports.page import NONE, card, text_table
from nemo_specrollout.reports.records import Record, in_ranges
from nemo_specrollout.reports.starts import RunOfStarts, Start

TITLE = "Starts of this run"
HOW_TO_READ = (
    "Each start of the driver goes on after the newest checkpoint. Steps that an earlier start had made beyond it are made "
    "again, and the later ones count. The time until the first step goes to container, Ray, engines and checkpoint. A dotted "
    "line in a chart is where a later start goes on."
)
COLUMNS = ("start", "job", "steps", "made<br>again later", "until its<br>first step", "began", "ended by Slurm")
"""Headings (HTML) of the table of starts."""


@dataclass(frozen=True)
class Row:
    """The words about one start in the table of starts. What is not known is empty."""

    start: str
    job: str
    steps: str
    made_again: str
    before_first_step: str
    began: str
    end: str
    problem: str
    """Why the records of the start cannot be read, or empty if they can."""

    @property
    def cells(self) -> Sequence[str]:
        """Cells of the table for this start, in the order of `COLUMNS`."""
        return (self.start, self.job, self.steps, self.made_again, self.before_first_step, self.began, self.end)


def rows_of(run: RunOfStarts) -> list[Row]:
    """Returns a row of the table for each start of a run, the oldest first."""
    return [_row(run, start) for start in run.starts]


def _row(run: RunOfStarts, start: Start) -> Row:
    requeues = f", requeue {start.num_requeues}" if start.num_requeues else ""
    none = "none yet" if start is run.starts[-1] else "none"
    return Row(
        start.name,
        start.job + requeues,
        _numbers(start.steps) or ("not readable" if start.problem else none),
        _numbers(run.lost[start.name]),
        duration(start.before_first_step_s) if math.isfinite(start.before_first_step_s) else "",
        start.began.replace("T", " ")[:19],
        run.end_of(start).lower(),
        start.problem,
    )


def in_short(run: RunOfStarts) -> str:
    """Returns part of a sentence that says how often the run was started and how many of its steps were made again."""
    count = len(run.starts)
    again = f", {run.num_lost} step{'s' * (run.num_lost > 1)} made again" if run.num_lost else ""
    return f"{count} start{'s' * (count > 1)}{again}"


def start_card(run: RunOfStarts) -> str:
    """Returns the card about steps that a later start had to make again, or "" if there are none."""
    if not run.num_lost:
        return ""
    lost = f"{duration(run.lost_s)} of work" if math.isfinite(run.lost_s) else "work"
    return card("Steps made again", str(run.num_lost), f"{lost} of earlier starts was not in a checkpoint")


def start_list(run: RunOfStarts) -> str:
    """Returns the section with a row for each start of a run, and a sentence for each job that has made no start.

    Columns that are empty in all rows are left out.
    """
    rows = rows_of(run)
    shown = [i for i in range(len(COLUMNS)) if any(row.cells[i] for row in rows)]
    notes = [f"{row.start} cannot be read: {row.problem}." for row in rows if row.problem]
    notes += [f"Job {job.id} {job.state}." for job in run.jobs_without_start]
    cells = [([row.cells[i] for i in shown], bool(row.problem)) for row in rows]
    return text_table(TITLE, HOW_TO_READ, [COLUMNS[i] for i in shown], cells, notes)


def lines_of(run: RunOfStarts) -> Iterator[str]:
    """Yields a line for the terminal about each start of a run, and about each job that has made no start."""
    for row in rows_of(run):
        of_job = f" (job {row.job})" if row.job else ""
        parts = [
            f"cannot be read: {row.problem}" if row.problem else _named(row.steps),
            f"{_named(row.made_again)} made again later" if row.made_again else "",
            f"{row.before_first_step} until its first step" if row.before_first_step else "",
            f"ended by Slurm: {row.end}" if row.end else "",
        ]
        yield f"{row.start}{of_job}: {'; '.join(filter(None, parts))}"
    for job in run.jobs_without_start:
        yield f"job {job.id} {job.state}"


def _named(steps: str) -> str:
    if steps.startswith("none"):
        return steps.replace("none", "no step")
    return f"step{'' if steps.isdecimal() else 's'} {steps}"


def _numbers(steps: Sequence[Record]) -> str:
    return in_ranges([step["step"] for step in steps])


def duration(seconds: float) -> str:
    """Returns a number of seconds in words such as "42 s", "3 min 07 s" and "2 h 05 min", or a dash for NaN."""
    if not math.isfinite(seconds):
        return NONE
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
