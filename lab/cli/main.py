# SPDX-License-Identifier: Apache-2.0
"""Entry point of `specrollout-lab COMMAND CONFIG [key=value ...]`, which shows, measures and predicts on one machine."""

import sys
from pathlib import Path

from lab.cli.placement import DEFAULT_ACCEPTANCE
from nemo_specrollout.cli.command_line import CONFIG, OVERRIDES, Command, Program, flag

_RUN = (CONFIG, OVERRIDES)
_DEVICE = flag("--device", "NAME", "for a config of NeMo-RL, its GPU, such as H100")
_PROFILE = flag("--profile", "FILE", "times of engine steps that `profile` measured", type=Path)
_OUT = flag("--out", "FILE", "JSON file for what is measured", type=Path, required=True)

COMMANDS = (
    Command(
        "run",
        "trains a small policy with GRPO on this machine, and resumes the run in logger.log_dir",
        "lab.cli.run:run",
        _RUN,
    ),
    Command(
        "bench",
        "rolls out the same requests with and without speculation, taking turns",
        "lab.cli.measure:bench",
        _RUN,
        in_scratch_folder=True,
    ),
    Command(
        "report",
        "writes report.html and picture.png of a run again, also while it goes on",
        "lab.cli.report:report",
        (flag("run_dir", "RUN_DIR", "the logger.log_dir of a run", type=Path),),
    ),
    Command(
        "explain",
        "says what a config runs, which known faults it meets, and what gain to expect",
        "lab.cli.explain:explain",
        (
            *_RUN,
            _PROFILE,
            _DEVICE,
            flag("--ladder", "FILE", "decode speeds that `ladder` measured, or that a run kept", type=Path),
            flag(
                "--batch",
                "N",
                "with --profile, requests that run at a time (default: the requests of a step)",
                type=int,
            ),
            flag(
                "--devices", "N", "with --profile, threads or GPUs that generate (default: from the config)", type=int
            ),
            flag(
                "--acceptance",
                "P",
                "with --profile, the share of draft tokens that are right if all before them were",
                default=DEFAULT_ACCEPTANCE,
            ),
        ),
    ),
    Command(
        "simulate",
        "predicts how long a step takes on other hardware, and what each feature brings",
        "lab.cli.simulate:simulate",
        (
            flag(
                "config",
                "SCENARIO",
                "the name or file of a scenario, or the config of a run. `list` names the scenarios, "
                "and `papers` compares with two papers",
            ),
            flag(
                "overrides",
                "key=value",
                "values instead of those of the scenario, such as drafting.k=5",
                nargs="*",
                default=[],
            ),
            flag("--trace", "FILE", "measured response lengths, from the samples.jsonl of a run", type=Path),
            flag("--out", "DIR", "folder for simulation.json and simulation.png", type=Path),
            _DEVICE,
            _PROFILE,
        ),
    ),
    Command(
        "profile",
        "measures on this CPU how long engine steps take, for `explain` and for `placement: auto`",
        "lab.cli.measure:profile",
        (
            *_RUN,
            _OUT,
            flag(
                "--threads", "N,N", "numbers of threads of an engine (default: 1,2 if there are two cores)", default=""
            ),
            flag("--steps", "N", "steps to time for each number of requests", default=32),
        ),
        in_scratch_folder=True,
    ),
    Command(
        "ladder",
        "measures on this CPU how fast each draft method decodes, for a run to start from",
        "lab.cli.measure:ladder",
        (
            *_RUN,
            _OUT,
            flag("--task", "NAME", "task to measure (default: the config's)"),
            flag("--rounds", "N", "rounds over all methods", default=4),
            flag("--seconds", "S", "seconds of decoding for each method and batch size in a round", default=1.0),
        ),
        in_scratch_folder=True,
    ),
    Command(
        "rollouts",
        "lets the policy answer prompts, for `nemo-specrollout refresh-draft --rollouts`",
        "lab.cli.rollouts:rollouts",
        (
            *_RUN,
            flag(
                "--out",
                "FILE",
                "file of JSON lines for the rollouts, which is continued if it is there",
                type=Path,
                required=True,
            ),
            flag("--num", "N", "number of prompts, of bench.workloads in turn, or else of data", default=256),
            flag("--prompts", "FILE", "file with a prompt a line, to answer instead of these", type=Path),
            flag("--samples", "N", "responses to each prompt", default=4),
            flag("--seed", "N", "seed of the prompts and of the noise", type=int, default=0),
        ),
        in_scratch_folder=True,
    ),
)
PROGRAM = Program(
    "specrollout-lab", "Shows, measures and predicts nemo_specrollout on one machine.", COMMANDS, "make setup"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    return PROGRAM.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
