# SPDX-License-Identifier: Apache-2.0
"""Reads what the command `launch` and Slurm have written about a run's jobs into its run directory.

Slurm itself is never asked.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.text_files import parse_json

SUBMISSIONS = "submissions.jsonl"
"""Name of the file in a run directory to which `launch` adds a line for each job."""
ALL_DONE = "nemo-specrollout: all steps are done"
"""Line that a job's script prints if nothing is left to do (`cli/job.sh.template`)."""
_MOST_OUTPUT_BYTES = 16 << 20
_END = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?: (DUE TO [^*]*?))? \*\*\*")
"""Pattern of the line that slurmstepd writes to a job's output when it ends the job. The time in the line is that of the node,
and has no time zone."""


@dataclass(frozen=True)
class Job:
    """A Slurm job of a run, as far as the files of the run directory tell."""

    id: str
    submitted: str = ""
    """Time at which `launch` submitted the job, or empty if it is not recorded."""
    has_begun: bool = False
    """True if Slurm has created the file for the job's output."""
    is_passed: bool = False
    """True if a later job of the run has begun. The jobs begin in order, unless one is held or cancelled."""
    found_all_done: bool = False
    """True if the job had nothing to do, because all steps had been made before."""

    @property
    def state(self) -> str:
        """Words about the state of a job whose driver has recorded nothing."""
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
    """When and why Slurm ended a job, as the job's output says."""

    at_s: float
    """Time in whole seconds since 1970."""
    reason: str
    """Slurm's words, such as "DUE TO TIME LIMIT", or "CANCELLED" if Slurm gave no reason."""


@dataclass(frozen=True)
class Launch:
    """The Slurm jobs of a run in the order of their submission.

    `ends` says why and when Slurm ended a job, by the job's id. A job that was requeued may have several ends.
    """

    jobs: Sequence[Job] = ()
    ends: Mapping[str, Sequence[End]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> "Launch":
        """Reads the files in the run directory `run`. Files that are missing or damaged are ignored."""
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
    """Returns the time at which each job was submitted, by the job's id. Incomplete lines of the file are ignored."""
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
    """Returns the text of a file, or "" if it cannot be read."""
    try:
        return read_regular(path, _MOST_OUTPUT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
