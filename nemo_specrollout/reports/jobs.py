# SPDX-License-Identifier: Apache-2.0
"""Reads what `launch` and Slurm have left about a run's jobs in its run directory. Slurm itself is never asked."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.text_files import parse_json

SUBMISSIONS = "submissions.jsonl"
"""The file of a run directory with a line for each job, which `launch` writes."""
ALL_DONE = "nemo-specrollout: all steps are done"
"""What a job's script prints if nothing is left to do (`cli/job.sh.template`)."""
_MOST_OUTPUT_BYTES = 16 << 20
_END = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?: (DUE TO [^*]*?))? \*\*\*")
"""Line of slurmstepd in a job's output. Its time is the node's, without a time zone."""


@dataclass(frozen=True)
class Job:
    """A job of a run, according to the files of its run directory."""

    id: str
    submitted: str = ""
    """When `launch` submitted it, or empty if that is not recorded."""
    has_begun: bool = False
    """Whether Slurm has created the file for its output."""
    is_passed: bool = False
    """Whether a later job has begun. The jobs of a run begin in their order, unless one is held or cancelled."""
    found_all_done: bool = False
    """Whether it had nothing to do, because all steps were made before."""

    @property
    def state(self) -> str:
        """Description of the state of a job in which no driver has started."""
        if self.found_all_done:
            return "had nothing to do, because all steps were made"
        if self.has_begun:
            return f"has begun, and no driver of it has recorded anything; slurm/{self.id}.out says how far it came"
        when = f"was submitted at {self.submitted} and" if self.submitted else "was submitted and"
        if self.is_passed:
            return f"{when} never began, although a later job did, so it was cancelled or is held"
        return f"{when} has not begun; `squeue --me` says whether it waits"


@dataclass(frozen=True)
class End:
    """Why and when Slurm ended a job, according to the job's output."""

    at_s: float
    """Time in whole seconds since 1970."""
    reason: str
    """Slurm's words, such as "DUE TO TIME LIMIT", or "CANCELLED" if it gives none."""


@dataclass(frozen=True)
class Launch:
    """The jobs of a run in the order of their submission, and how Slurm ended them, by the job's id."""

    jobs: Sequence[Job] = ()
    ends: Mapping[str, Sequence[End]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> "Launch":
        """Reads a run directory. Missing or damaged files are ignored."""
        submitted = _submissions(run / SUBMISSIONS)
        outputs = {path.stem: path for path in (run / "slurm").glob("*.out") if path.stem.isdecimal()}
        texts = {job: _text(path) for job, path in outputs.items()}
        others = sorted(texts.keys() - submitted.keys(), key=int)
        listed = [*submitted, *others]
        last_begun = max((place for place, job in enumerate(listed) if job in texts), default=-1)
        jobs = [
            Job(job, submitted.get(job, ""), job in texts, place < last_begun, ALL_DONE in texts.get(job, ""))
            for place, job in enumerate(listed)
        ]
        return cls(jobs, {job: _ends(job, text) for job, text in texts.items()})


def _submissions(path: Path) -> dict[str, str]:
    """Returns the time of submission by the job's id. Incomplete lines are ignored."""
    found = {}
    for line in _text(path).splitlines():
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and str(record.get("job_id", "")).isdecimal():
                found[str(record["job_id"])] = str(record.get("time", ""))
    return found


def _ends(job: str, text: str) -> list[End]:
    found = list[End]()
    for match in _END.finditer(text):
        if match[1] == job:
            with suppress(ValueError, OverflowError):
                at_s = time.mktime(time.strptime(match[2], "%Y-%m-%dT%H:%M:%S"))
                found.append(End(at_s, match[3] or "CANCELLED"))
    return found


def _text(path: Path) -> str:
    """Returns the text of a file, or nothing if it cannot be read."""
    try:
        return read_regular(path, _MOST_OUTPUT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
