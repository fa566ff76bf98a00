# SPDX-License-Identifier: Apache-2.0
"""Entry point of `nemo-specrollout COMMAND CONFIG [key=value ...]`, with the table of the commands."""

import sys
from pathlib import Path

from nemo_specrollout.cli.command_line import CONFIG, OVERRIDES, Command, Program, flag
from nemo_specrollout.cli.refresh_draft import REFRESH_FLAGS
from nemo_specrollout.cli.slurm import CLUSTER_FLAGS

_CLI = "nemo_specrollout.cli"
_RUN = (CONFIG, OVERRIDES)
_RUN_DIR = flag(
    "run_dir",
    "RUN_DIR",
    "the run directory of `launch` or the logger.log_dir, or the exp_NNN of one start",
    type=Path,
)
_SCRIPT = flag("--script", "FILE", "NeMo-RL's script, from its checkout; default: the one that fits CONFIG")

COMMANDS = (
    Command(
        "check",
        "validates a config, says what will run, and names known faults that it meets; loads no torch",
        f"{_CLI}.check:check",
        _RUN,
    ),
    Command(
        "doctor",
        "checks whether this package can work here, for a bug report; tries an engine with a random model",
        f"{_CLI}.doctor:doctor",
        (
            flag("config", "CONFIG", "a NeMo-RL-shaped YAML file to check too", type=Path, nargs="?"),
            OVERRIDES,
            flag("--json", "FILE", "file for the same facts, and for logs of what failed", type=Path),
            flag("--no-self-test", None, "starts no engine", action="store_true"),
            flag(
                "--in-nemo-rl",
                None,
                "looks inside the environment of NeMo-RL's driver, by `uv` and NEMO_RL_DIR",
                action="store_true",
            ),
        ),
    ),
    Command(
        "run",
        "a training run in NeMo-RL; resumes from checkpointing.checkpoint_dir",
        f"{_CLI}.run:run",
        (
            *_RUN,
            _SCRIPT,
            flag("--when-done", "FILE", "make FILE when the whole run is done, not when its time was up", type=Path),
        ),
    ),
    Command(
        "launch",
        "such a run on a Slurm cluster",
        f"{_CLI}.launch:launch",
        (
            *_RUN,
            flag("--nodes", "N", "nodes; sets cluster.num_nodes", type=int, required=True),
            flag("--extra-nodes", "M", "more nodes, for the head's trainer and remote drafters with GPUs", default=0),
            flag("--run-dir", "DIR", "on a disk that all nodes see; default: results/NAME_OF_CONFIG"),
            flag("--jobs", "K", "jobs, one after another, for a run longer than one", default=1),
            flag("--dry-run", None, "write the run directory and print the sbatch line", action="store_true"),
            flag("--cluster", "FILE", "settings as in the cluster.example.yaml that `examples` copies", type=Path),
            _SCRIPT,
            *(
                flag(f"--{name}", name.upper(), f"{text}; default: from the cluster file or the environment")
                for name, text in CLUSTER_FLAGS.items()
            ),
        ),
    ),
    Command(
        "report",
        "writes report.html and picture.png of a run directory again, also while it runs",
        f"{_CLI}.report:report",
        (_RUN_DIR,),
    ),
    Command(
        "audit",
        "computes rows of a run again from its weights, and says whether the policy sampled them",
        f"{_CLI}.audit:audit",
        (
            _RUN_DIR,
            flag("--steps", "N,N", "steps to audit; default: the newest one whose weights are at hand"),
            flag("--rows", "N", "rows of each step, spread evenly", default=64),
            flag(
                "--weights",
                "FOLDER",
                "the weights of the rows' policy; VERSION=FOLDER, once for each, if there are several",
                action="append",
                default=[],
            ),
            flag("--json", "FILE", "file for the verdict with all figures", type=Path),
            flag("--device", "DEVICE", "where to compute, such as cpu or cuda:1; default: a GPU if there is one"),
        ),
        extra="heads",
    ),
    Command(
        "refresh-draft",
        "trains an EAGLE-3 draft head for a policy, or refreshes one",
        f"{_CLI}.refresh_draft:refresh_draft",
        REFRESH_FLAGS,
        extra="heads",
    ),
    Command(
        "serve-drafter",
        "a drafter for engines that name its address",
        f"{_CLI}.drafter_commands:serve_drafter",
        (
            *_RUN,
            flag("--address", "tcp://HOST:PORT", "where to listen", default="tcp://127.0.0.1:5570"),
        ),
        extra="engine",
        in_scratch_folder=True,
    ),
    Command(
        "publish-draft",
        "gives remote drafters new weights, by the folder that they look at or by their addresses",
        f"{_CLI}.drafter_commands:publish_draft",
        (
            *_RUN,
            flag(
                "--weights",
                "DIR",
                "a checkpoint of the draft model; with addresses, at this path for each drafter too",
                required=True,
            ),
            flag(
                "--address",
                "tcp://HOST:PORT",
                "where a drafter listens, once for each drafter; default: weights_from, else addresses, of CONFIG",
                action="append",
                default=[],
            ),
            flag("--version", "N", "number of the weights; default: the time, in seconds", type=int),
        ),
        extra="engine",
    ),
    Command(
        "examples",
        "copies the recipes and the cluster file into a folder",
        f"{_CLI}.examples:copy_examples",
        (flag("folder", "DIR", "the folder, which may exist", type=Path),),
    ),
)
PROGRAM = Program(
    "nemo-specrollout", "Faster RL rollouts that are the same rollouts.", COMMANDS, "pip install '.{extra}'"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command, and returns its exit code."""
    return PROGRAM.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
