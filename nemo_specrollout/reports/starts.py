# SPDX-License-Identifier: Apache-2.0
"""Runs whose driver was started several times, by the jobs of a chain, by requeues, or by hand after an interruption.

NeMo-RL gives every start of its driver a folder `exp_NNN`. A start continues from the newest checkpoint, so it makes the steps
again that an earlier start had made after that checkpoint. If a step was made twice, the later record counts. The step of the
earlier record is called lost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_specrollout.reports.jobs import Job, Launch
from nemo_specrollout.reports.records import Record, Run, number, reduced, series
from nemo_specrollout.storage.text_files import whole_number

START = "start"
"""Key with two uses. In `run.json`, it has the facts about a start. In a step of a run with several starts, it has the name of
the start that made the step."""
ENDED = "ended_s"
"""Key in a step's record with the time at which the step ended, in seconds since 1970."""


@dataclass(frozen=True)
class Start:
    """The records of one start of a run's driver. `steps` may be empty, because a driver may be killed at any time."""

    folder: Path
    """NeMo-RL's log folder of the start, `exp_NNN`."""
    about: Record
    """Content of `run.json`, or empty if there is none yet."""
    steps: Sequence[Record]
    problem: str = ""
    """Why the records cannot be read, or empty if they can."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def first_step(self) -> int | None:
        """Number of the first step that the start makes, at least 1, or None if it is not known.

        Before the start has made a step, this number follows from the checkpoint from which the start continues.
        """
        facts = self.about.get(START)
        known = whole_number(facts.get("first_step")) if isinstance(facts, Mapping) else None
        first = self.steps[0]["step"] if self.steps else known
        return first if first is None or first >= 1 else None

    @property
    def job(self) -> str:
        """Id of the Slurm job of the start, or empty if it had no job or if the records do not name it."""
        return self._fact("job_id")

    @property
    def num_requeues(self) -> int:
        """How often Slurm had requeued the job before this start."""
        return int(self._fact("num_requeues")) if self._fact("num_requeues").isdecimal() else 0

    @property
    def began(self) -> str:
        """Time at which the job or the command `run` began, such as `2026-08-01T12:00:00+0000`, or empty if unknown."""
        return self._fact("began") if math.isfinite(seconds_of(self._fact("began"))) else ""

    @property
    def before_first_step_s(self) -> float:
        """Seconds from `began` until the first step begins, or NaN if they are not known.

        In this time the container, Ray and the engines start, and the checkpoint is loaded.
        """
        if not self.steps:
            return math.nan
        first = self.steps[0]
        return (
            max(number(first, ENDED) - number(first, "step_s") - seconds_of(self.began), 0.0)
            if self.began
            else math.nan
        )

    def _fact(self, name: str) -> str:
        facts = self.about.get(START)
        value = facts.get(name) if isinstance(facts, Mapping) else None
        return str(value) if isinstance(value, str | int) else ""


@dataclass(frozen=True)
class RunOfStarts(Run):
    """A run with several starts of its driver, or a run that the command `launch` has started.

    Its `steps` are in order and do not include lost steps, which a later start has made again.
    """

    starts: Sequence[Start] = ()
    """All starts, the oldest first."""
    launch: Launch | None = None
    """What `launch` and Slurm have left in the run directory, or None for a run that `launch` has not started."""

    @classmethod
    def of(cls, folder: Path, starts: Sequence[Start], launch: Launch | None = None) -> "RunOfStarts":
        """Returns the run of these starts. `folder` is the folder for the run's pages.

        Facts about the run, such as versions of packages, are those of its newest start.
        """
        steps = list[Record]()
        for start, bound in zip(starts, _bounds(starts), strict=True):
            steps += [{**step, START: start.name} for step in start.steps if step["step"] < bound]
        about = next((start.about for start in reversed(starts) if start.about), {})
        return cls(folder, about, steps, {}, starts, launch)

    @property
    def bounds(self) -> Sequence[float]:
        """For each start, the number of the first step that any later start makes, or infinity if there is no later start."""
        return _bounds(self.starts)

    @property
    def lost(self) -> Mapping[str, Sequence[Record]]:
        """Lost steps of each start by the start's name. A step is lost if a later start makes it again."""
        bounds = zip(self.starts, self.bounds, strict=True)
        return {start.name: [step for step in start.steps if step["step"] >= bound] for start, bound in bounds}

    @property
    def num_lost(self) -> int:
        """Number of lost steps. A step is lost if a later start makes it again."""
        return sum(map(len, self.lost.values()))

    @property
    def lost_s(self) -> float:
        """Seconds that all lost steps took, or NaN if they are not known. A later start made these steps again."""
        return reduced(sum, series([step for steps in self.lost.values() for step in steps], "step_s"))

    @property
    def jobs_without_start(self) -> Sequence[Job]:
        """Jobs of the run whose driver has recorded nothing.

        They wait in Slurm's queue, or their driver has not begun.
        """
        known = {start.job for start in self.starts}
        return [job for job in self.launch.jobs if job.id not in known] if self.launch else []

    def end_of(self, start: Start) -> str:
        """Returns Slurm's reason for ending a start, such as "DUE TO TIME LIMIT", or "" if Slurm wrote nothing."""
        ends = self.launch.ends.get(start.job, ()) if self.launch and start.job else ()
        of_job = [other for other in self.starts if other.job == start.job]
        after = next((other for other in of_job if other.num_requeues > start.num_requeues), None)
        begin_s = seconds_of(start.began)
        end_s = math.inf if after is None else seconds_of(after.began)
        return next((end.reason for end in ends if begin_s <= end.at_s < end_s), "")


def _bounds(starts: Sequence[Start]) -> list[float]:
    bounds = list[float]()
    bound = math.inf
    for start in reversed(starts):
        bounds.append(bound)
        bound = min(bound, start.first_step if start.first_step is not None else math.inf)
    return bounds[::-1]


def separate_runs(starts: Sequence[Start]) -> int:
    """Returns the number of runs to which the starts of a log folder belong.

    A start that makes the first step begins a new run, unless it is the first start of the folder.
    """
    begins = [start.first_step for start in starts if start.first_step is not None]
    return 1 + sum(first <= 1 for first in begins[1:])


def without_failed(starts: Sequence[Start]) -> Sequence[Start]:
    """Returns the starts of a log folder without those that failed before their first step.

    A start counts as failed if it began at step 1 and made no step. If all starts have failed, the newest is returned.
    """
    return [start for start in starts if start.steps or start.problem or (start.first_step or 1) > 1] or starts[-1:]


def seconds_of(time: Any) -> float:
    """Returns a time such as `2026-08-01T12:00:00+0000` as seconds since 1970, or NaN if it is not a valid time."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return math.nan
