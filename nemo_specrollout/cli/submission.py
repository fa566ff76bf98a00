# SPDX-License-Identifier: Apache-2.0
"""Submits the jobs of a run to Slurm, and finds out whether Slurm has accepted a job if `sbatch` does not say so.

`sbatch` may fail although Slurm has accepted the job. For example, a busy controller may answer too late, or a wrapper script
of the cluster may fail afterwards. All jobs of a run directory share a unique name, by which Slurm can be asked for them.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from nemo_specrollout.cli.slurm import (
    ClusterSettings,
    job_name,
    options_of_another_cluster,
    question_environment,
    submission_environment,
)
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.jobs import SUBMISSIONS

_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""Slurm's states of a job that neither waits nor runs."""
_ID = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?")
"""Pattern for a job's id as `sbatch --parsable` prints it (`ID` or `ID;CLUSTER`), or as `sbatch` prints it otherwise."""
_NO_ANSWER = re.compile(
    r"unable to contact|communication|zero bytes|timed out|authentication error|standby mode|configuration (?:source|file)",
    re.I,
)
"""Pattern for error messages which say that Slurm could not be asked.

The reason may be that its controller does not answer, that its authentication service (munge) is down, or that this machine
belongs to no cluster.
"""


@dataclass(frozen=True)
class Job:
    """A job of a run, as Slurm lists it."""

    job_id: str
    user_id: int
    user: str
    state: str


def lacks_an_answer(complaint: str) -> bool:
    """Tells whether `complaint`, which is the error output of a Slurm command, means that Slurm has not answered."""
    return _NO_ANSWER.search(complaint) is not None


def jobs_of(run: str, settings: ClusterSettings) -> list[Job] | None:
    """Returns all jobs of the run directory `run` that Slurm lists, or None if Slurm does not answer.

    Slurm also lists jobs that have ended recently.
    """
    if shutil.which("squeue") is None:
        return None
    command = [
        "squeue",
        "--noheader",
        "--states=all",
        f"--name={job_name(run)}",
        "--format=%i|%U|%u|%T",
        *options_of_another_cluster(settings),
    ]
    done = subprocess.run(command, capture_output=True, env=question_environment(), check=False)
    if done.returncode != 0:
        return None
    rows = [line.strip().split("|") for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [Job(row[0], int(row[1]), row[2], row[3]) for row in rows if len(row) == 4 and row[1].isdecimal()]


def refuse_jobs_of_others(run: str, jobs: Iterable[Job]) -> None:
    """Raises ConfigError if a job of another user waits or runs for this run directory.

    With the option `--dependency=singleton`, a job waits only for jobs of the same user. So jobs of two users would run at the
    same time and write the same checkpoints.
    """
    for job in jobs:
        if job.user_id != os.getuid() and job.state not in _ENDED:
            text = (
                f"job {job.job_id} of user {job.user} is {job.state} for {run}; Slurm would not let yours wait for it"
            )
            raise ConfigError(f"--run-dir: {text}, so launch when it has ended, or choose another")


def submit(run: Path, command: list[str], settings: ClusterSettings, known: Iterable[str] | None) -> str:
    """Submits a job by `command`, records it in the run directory `run`, and returns its id.

    `known` are the ids of the run's earlier jobs, or None if Slurm did not tell them. Raises ConfigError with Slurm's own
    words if Slurm refuses the job. Also raises ConfigError if it is not known whether Slurm has accepted the job. In this case
    the job is recorded without an id, so that later launches do not change the config that this job may read.
    """
    path = run / SUBMISSIONS
    is_first = not path.exists()
    with path.open("ab", buffering=0) as file:  # opened first, so that a full quota is found before the job exists
        answer = _answer(str(run), command, settings, known)
        if answer.is_refusal:
            if is_first:
                path.unlink()
            raise ConfigError(answer.complaint)
        record = {"job_id": answer.job_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
        try:
            file.write(f"{json.dumps(record)}\n".encode())
        except OSError as error:
            text = f"{error.strerror}, so job {answer.job_id}, which was submitted, is not recorded there"
            raise OSError(error.errno, text, str(path)) from error
    if answer.job_id is None:
        raise ConfigError(answer.complaint)
    return answer.job_id


@dataclass(frozen=True)
class _Answer:
    """The outcome of submitting a job."""

    job_id: str | None
    complaint: str = ""
    is_refusal: bool = False
    """True if Slurm has not accepted the job. If this is False and `job_id` is None, it is not known what Slurm has done."""


def _answer(run: str, command: list[str], settings: ClusterSettings, known: Iterable[str] | None) -> _Answer:
    done = subprocess.run(command, capture_output=True, env=submission_environment(), check=False)
    said, complaint = (" ".join(text.decode("utf-8", "replace").split()) for text in (done.stdout, done.stderr))
    job_id = _job_id(done.stdout)
    if done.returncode == 0 and job_id is not None:
        return _Answer(job_id)
    jobs = jobs_of(run, settings)
    if jobs is not None and known is not None:
        new = {job.job_id for job in jobs if job.user_id == os.getuid()} - set(known)
        if new:
            return _Answer(max(new, key=int))
    look = f"look with `squeue --me --name={job_name(run)}` whether it took the job"
    if lacks_an_answer(complaint) or (known is not None and jobs is None):
        text = f"Slurm does not answer, and may have taken the job: {complaint or said}; {look}"
        return _Answer(None, f"{text}. If it did, the same line would submit one more, which waits for the first")
    if done.returncode != 0:
        return _Answer(None, f"sbatch refused {join(command)}: {complaint or said}", is_refusal=True)
    text = f"sbatch named no job, but said {said!r} {complaint!r}"
    return _Answer(None, f"{text}; {look}, and with --dry-run at the command", is_refusal=True)


def _job_id(output: bytes) -> str | None:
    """Returns the job's id in the output of `sbatch`, or None if there is none.

    The id is in the last line that has one, because a wrapper script of the cluster may print other lines first.
    """
    lines = output.decode("utf-8", "replace").splitlines()
    found = (_ID.fullmatch(line.strip()) for line in reversed(lines))
    return next((match[1] for match in found if match), None)
