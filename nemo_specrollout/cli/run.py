# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: a run in NeMo-RL, resumable."""

import argparse
import os
import time
from pathlib import Path

from nemo_specrollout.cli.check import read_nemo_rl_config
from nemo_specrollout.cli.nemo_rl_environment import entry
from nemo_specrollout.cli.run_length import is_complete, newest_step
from nemo_specrollout.cli.run_owner import watch
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_rules import unknown_overrides
from nemo_specrollout.config.nemo_rl_tree import at
from nemo_specrollout.installed.versions import can_run_nemo_rl


def run(parsed: argparse.Namespace) -> int:
    """Runs NeMo-RL's own script with our block in effect; returns 0 when all steps are done. Raises ConfigError.

    It resumes from `checkpointing.checkpoint_dir`. If this Python has no NeMo-RL, this process becomes the same command in the
    environment of NeMo-RL's driver. The file `parsed.when_done` is made if the run is complete, and not if its time was up.
    In a job of `launch`, the process ends when a later start of the job has taken the run over.
    """
    tree = read_nemo_rl_config(parsed.config, parsed.overrides)
    findings = [*prepare_nemo_rl(tree)[1], *unknown_overrides(parsed.config, parsed.overrides)]
    if not can_run_nemo_rl():
        log_dir = Path(str(at(tree, "logger.log_dir", "logs"))).absolute()
        command, environment = entry(parsed.given, log_dir)
        os.execvpe(command[0], command, environment)
    for finding in findings:
        print(f"{finding.kind}: {finding}")
    watch(os.environ)
    from nemo_specrollout.nemo_rl.native_script import run as run_nemo_rl

    began, first_step = time.monotonic(), newest_step(tree)
    run_nemo_rl(tree, None if parsed.script is None else Path(parsed.script))
    made_steps = newest_step(tree) - first_step
    if parsed.when_done is not None and is_complete(tree, made_steps, time.monotonic() - began):
        parsed.when_done.touch()
    return 0
