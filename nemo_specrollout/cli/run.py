# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: runs or resumes a training in NeMo-RL."""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from nemo_specrollout.cli.check import read_nemo_rl_config
from nemo_specrollout.cli.command_line import EXIT_FAILED
from nemo_specrollout.cli.nemo_rl_environment import entry
from nemo_specrollout.cli.run_length import is_complete, newest_step
from nemo_specrollout.cli.run_owner import EXIT_LOST, watch
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_rules import unknown_overrides
from nemo_specrollout.config.nemo_rl_tree import Tree, at
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.installed.versions import can_run_nemo_rl
from nemo_specrollout.reports.start_facts import BEGAN, NAME_OF_START


def run(parsed: argparse.Namespace) -> int:
    """Runs NeMo-RL's own script with our block in effect, and returns the exit code.

    The run resumes from `checkpointing.checkpoint_dir`. If this Python has no NeMo-RL, this process becomes the same command
    in the environment of NeMo-RL's driver. The exit code is 0 if the script has ended without an error. In this case the file
    `parsed.when_done` is made if the run is complete, but not if its time was up. After an error of the run, the last line of
    the output says how to continue, and the exit code is `EXIT_LOST` if Ray has lost a process. In a job of `launch`, the
    process ends when a later start of the job has taken over the run. Raises ConfigError for a config that cannot run.
    """
    os.environ.setdefault(BEGAN, str(int(time.time())))  # the value survives the change to NeMo-RL's environment
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
    from nemo_specrollout.nemo_rl.ray_calls import is_loss_of_a_process

    began, first_step = time.monotonic(), newest_step(tree)
    try:
        run_nemo_rl(tree, None if parsed.script is None else Path(parsed.script))
    except (ConfigError, OSError, ModuleNotFoundError):  # the command line turns these into a sentence
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"nemo-specrollout: {_how_to_go_on(tree)}", file=sys.stderr, flush=True)
        return EXIT_LOST if is_loss_of_a_process(error) else EXIT_FAILED
    made_steps = newest_step(tree) - first_step
    if parsed.when_done is not None and is_complete(tree, made_steps, time.monotonic() - began):
        parsed.when_done.touch()
    return 0


def _how_to_go_on(tree: Tree) -> str:
    """Returns a sentence for the user about how to continue a run that has ended with an error, such as a lost node."""
    newest = newest_step(tree)
    command = "`nemo-specrollout launch` line" if NAME_OF_START in os.environ else "command"
    if newest == 0:
        return f"the error above ended the run, which has no checkpoint, so the same {command} starts at the first step"
    return f"the error above ended the run; the same {command} goes on after its newest checkpoint, step {newest}"
