# SPDX-License-Identifier: Apache-2.0
"""Facts about one start of a run for the report, such as its first step, its job and when that began."""

import math
import time
from collections.abc import Mapping
from typing import Any

NAME_OF_START = "SPECROLLOUT_START"
"""Variable with the name of this start of a Slurm job, `JOB.REQUEUES`, which the job's script sets. Slurm's own variables do
not reach the driver, because NeMo-RL's `ray.sub` unsets them before it starts Ray."""
BEGAN = "SPECROLLOUT_BEGAN"
"""Variable with the seconds since 1970 at which the command `run` began. The command sets it."""
_JOB_BEGAN = "NRL_JOB_START_EPOCH"
"""Variable with the seconds since 1970 at which the Slurm job began, set by NeMo-RL's `ray.sub` in each start."""


def start_facts(variables: Mapping[str, str], first_version: int) -> dict[str, Any]:
    """Returns the facts about the start with the environment `variables`, before which `first_version` steps were made.

    Times include the zone, as in `2026-08-01T12:00:00+0000`. What the environment does not tell is left out.
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
    """Returns the number in a variable, or NaN for any other text and for a time that no calendar has."""
    try:
        seconds = float(text or "")
    except ValueError:
        return math.nan
    return seconds if 0 <= seconds < 1e11 else math.nan
