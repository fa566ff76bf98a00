# SPDX-License-Identifier: Apache-2.0
"""Facts about one start of a run's driver for the report, such as its first step, its Slurm job, and when the job began."""

import math
import time
from collections.abc import Mapping
from typing import Any

NAME_OF_START = "SPECROLLOUT_START"
"""Environment variable with the name of this start of a Slurm job. The name is `JOB.REQUEUES`, the job's id and how often the
job was requeued. The job's script sets the variable. Slurm's own variables do not reach the driver, because NeMo-RL's
`ray.sub` unsets them before it starts Ray."""
BEGAN = "SPECROLLOUT_BEGAN"
"""Environment variable with the time at which the command `run` began, in seconds since 1970. The command sets it."""
_JOB_BEGAN = "NRL_JOB_START_EPOCH"
"""Environment variable with the time at which the Slurm job began, in seconds since 1970. NeMo-RL's `ray.sub` sets it in each
start."""


def start_facts(variables: Mapping[str, str], first_version: int) -> dict[str, Any]:
    """Returns facts about this start of a run's driver, from its environment `variables`, by their names in `run.json`.

    `first_version` is the number of steps that were made before this start. Times include the zone, as in
    `2026-08-01T12:00:00+0000`. Facts that the environment does not tell are left out.
    """
    facts: dict[str, Any] = {"first_step": first_version + 1}
    began_s = next((s for name in (_JOB_BEGAN, BEGAN) if math.isfinite(s := _seconds(variables.get(name)))), math.nan)
    if math.isfinite(began_s):
        facts["began"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began_s))
    job, _, requeues = variables.get(NAME_OF_START, "").partition(".")
    if job:
        facts |= {"job_id": job, "num_requeues": int(requeues) if requeues.isdecimal() else 0}
    return facts


def _seconds(text: str | None) -> float:
    """Returns the value of a variable as seconds since 1970, or NaN if it is not a number or not a possible time."""
    try:
        seconds = float(text or "")
    except ValueError:
        return math.nan
    return seconds if 0 <= seconds < 1e11 else math.nan
