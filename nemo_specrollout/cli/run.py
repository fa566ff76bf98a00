# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout run`: runs NeMo-RL's training script with this package in effect, or resumes it from a checkpoint."""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from nemo_specrollout.cli.check import read_nemo_rl_config
from nemo_specrollout.cli.command_line import EXIT_FAILED, is_shown_as_sentence
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
    """Runs NeMo-RL's own script with the block `policy.generation.specrollout` in effect, and returns the exit code.

    If `checkpointing.checkpoint_dir` has a checkpoint, the run resumes from it. If this Python has no NeMo-RL, the process is
    replaced by the same command in the environment of NeMo-RL's driver. In a job of `launch`, the process ends as soon as a
    later start of the job has taken over the run.

    The exit code is 0 if the script ends without an error. If the run is then complete, the function makes the file
    `parsed.when_done`. It does not make the file if only the time of the job was up. If the script fails, the function prints
    how to continue the run. The exit code is then `EXIT_LOST` if Ray has lost a process, and otherwise `EXIT_FAILED`. Raises
    ConfigError if the config cannot run.
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
    # NeMo-RL's policy calls its workers once more when the interpreter ends. Ray is gone by then, but would start again, and
    # wait forever for a thread that the interpreter does not start any more.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    from nemo_specrollout.nemo_rl.native_script import run as run_nemo_rl
    from nemo_specrollout.nemo_rl.ray_calls import is_loss_of_a_process

    began, first_step = time.monotonic(), newest_step(tree)
    try:
        run_nemo_rl(tree, None if parsed.script is None else Path(parsed.script))
    except (ConfigError, ModuleNotFoundError):  # the command line turns these into a sentence
        raise
    except Exception as error:
        if isinstance(error, OSError) and is_shown_as_sentence(error):  # and these
            raise
        traceback.print_exc()
        print(f"nemo-specrollout: {_how_to_go_on(tree)}", file=sys.stderr, flush=True)
        return EXIT_LOST if is_loss_of_a_process(error) else EXIT_FAILED
    made_steps = newest_step(tree) - first_step
    if parsed.when_done is not None and is_complete(tree, made_steps, time.monotonic() - began):
        parsed.when_done.touch()
    return 0


def _how_to_go_on(tree: Tree) -> str:
    """Returns a sentence for the user that says how to continue a run that has ended with an error."""
    newest = newest_step(tree)
    command = "`nemo-specrollout launch` line" if NAME_OF_START in os.environ else "command"
    if newest == 0:
        return f"the error above ended the run, which has no checkpoint, so the same {command} starts at the first step"
    return f"the error above ended the run; the same {command} goes on after its newest checkpoint, step {newest}"
