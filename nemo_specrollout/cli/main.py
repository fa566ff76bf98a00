# SPDX-License-Identifier: Apache-2.0
"""Entry point of the program `nemo-specrollout`, with the table of its commands and their flags."""

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
_SCRIPT = flag("--script", "FILE", "NeMo-RL's script, from its checkout (default: the one that fits CONFIG)")

COMMANDS = (
    Command(
        "check",
        "says what a config would run, what does not fit together in it, and which known faults it meets",
        f"{_CLI}.check:check",
        _RUN,
    ),
    Command(
        "doctor",
        "checks whether this package works in this environment, and collects the facts for a bug report",
        f"{_CLI}.doctor:doctor",
        (
            flag("config", "CONFIG", "a config that is checked too", type=Path, nargs="?"),
            OVERRIDES,
            flag("--json", "FILE", "file for the same facts, with logs of what failed", type=Path),
            flag("--no-self-test", None, "start no engine, and leave the self-test out", action="store_true"),
            flag(
                "--in-nemo-rl",
                None,
                "look inside the environment of NeMo-RL's driver, which `uv` and NEMO_RL_DIR find",
                action="store_true",
            ),
        ),
    ),
    Command(
        "run",
        "runs NeMo-RL's own training script with the block in effect, and resumes from its checkpoints",
        f"{_CLI}.run:run",
        (
            *_RUN,
            _SCRIPT,
            flag(
                "--when-done", "FILE", "make FILE when the whole run is done, but not when its time was up", type=Path
            ),
        ),
    ),
    Command(
        "launch",
        "checks a config, and starts its run on a Slurm cluster",
        f"{_CLI}.launch:launch",
        (
            *_RUN,
            flag("--nodes", "N", "nodes of NeMo-RL, as cluster.num_nodes", type=int, required=True),
            flag("--extra-nodes", "M", "more nodes, for the head's trainer and remote drafters with GPUs", default=0),
            flag("--run-dir", "DIR", "run directory, on a disk that all nodes see (default: results/NAME_OF_CONFIG)"),
            flag("--jobs", "K", "jobs that go on with the run one after another", default=1),
            flag(
                "--dry-run",
                None,
                "write the run directory and print the sbatch line, but submit nothing",
                action="store_true",
            ),
            flag("--cluster", "FILE", "cluster file, like the cluster.example.yaml that `examples` copies", type=Path),
            _SCRIPT,
            *(
                flag(f"--{name}", name.upper(), f"{text} (default: from the cluster file or the environment)")
                for name, text in CLUSTER_FLAGS.items()
            ),
        ),
    ),
    Command(
        "report",
        "writes report.html and picture.png of a run again, also while it goes on",
        f"{_CLI}.report:report",
        (_RUN_DIR,),
    ),
    Command(
        "audit",
        "computes rows of a run again from its weights, and says whether the policy sampled them",
        f"{_CLI}.audit:audit",
        (
            _RUN_DIR,
            flag("--steps", "N,N", "steps to audit (default: the newest one whose weights are at hand)"),
            flag("--rows", "N", "rows of each step, spread evenly over it", default=64),
            flag(
                "--weights",
                "FOLDER",
                "the weights of the rows' policy, or VERSION=FOLDER once for each policy if there are several",
                action="append",
                default=[],
            ),
            flag("--json", "FILE", "file for the verdict with all figures", type=Path),
            flag("--device", "DEVICE", "where to compute, such as cpu or cuda:1 (default: a GPU if there is one)"),
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
        "starts a remote drafter by hand, for engines that name its address",
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
        "gives remote drafters new weights, through the folder that they watch or by their addresses",
        f"{_CLI}.drafter_commands:publish_draft",
        (
            *_RUN,
            flag(
                "--weights",
                "DIR",
                "a checkpoint of the draft model, which with addresses each drafter must find at the same path",
                required=True,
            ),
            flag(
                "--address",
                "tcp://HOST:PORT",
                "where a drafter listens, once for each drafter (default: weights_from of CONFIG, else its addresses)",
                action="append",
                default=[],
            ),
            flag("--version", "N", "number of the weights (default: the time, in seconds)", type=int),
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
    """Runs the command that `arguments` name, by default those of this process, and returns its exit code."""
    return PROGRAM.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
