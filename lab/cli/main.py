# SPDX-License-Identifier: Apache-2.0
"""Entry point `specrollout-lab COMMAND CONFIG [key=value ...]`: what shows, measures and predicts on one machine."""

import sys
from pathlib import Path

from lab.cli.placement import DEFAULT_ACCEPTANCE
from nemo_specrollout.cli.command_line import CONFIG, OVERRIDES, Command, Program, flag

_RUN = (CONFIG, OVERRIDES)
_DEVICE = flag("--device", "NAME", "of a NeMo-RL config: the GPU, e.g. H100")
_PROFILE = flag("--profile", "FILE", "times that `profile` measured", type=Path)
_OUT = flag("--out", "FILE", "file for what is measured, JSON", type=Path, required=True)

COMMANDS = (
    Command("run", "a GRPO run on this machine; resumes the one in logger.log_dir", "lab.cli.run:run", _RUN),
    Command(
        "bench",
        "the same rollouts with and without speculation, interleaved",
        "lab.cli.measure:bench",
        _RUN,
        in_scratch_folder=True,
    ),
    Command(
        "report",
        "writes report.html and picture.png of a run directory again, also while it runs",
        "lab.cli.report:report",
        (flag("run_dir", "RUN_DIR", "the logger.log_dir of a run", type=Path),),
    ),
    Command(
        "explain",
        "what a config runs, its known traps, and with times: gain, placement, races; loads no torch",
        "lab.cli.explain:explain",
        (
            *_RUN,
            _PROFILE,
            _DEVICE,
            flag("--ladder", "FILE", "decode speeds that `ladder` measured, or that a run kept", type=Path),
            flag(
                "--batch", "N", "with --profile: requests that run at a time; default: the requests of a step", type=int
            ),
            flag("--devices", "N", "with --profile: threads or GPUs that generate; default: from the config", type=int),
            flag(
                "--acceptance",
                "P",
                "with --profile: share of right draft tokens after right ones",
                default=DEFAULT_ACCEPTANCE,
            ),
        ),
    ),
    Command(
        "simulate",
        "what a step would take, and what each feature brings; loads no torch",
        "lab.cli.simulate:simulate",
        (
            flag(
                "config",
                "SCENARIO|CONFIG",
                "a scenario's name or file, or a run's config; `list` names the scenarios, "
                "`papers` compares with two papers",
            ),
            flag("overrides", "key=value", "of the scenario, e.g. drafting.k=5", nargs="*", default=[]),
            flag("--trace", "FILE", "measured response lengths: a run's samples.jsonl", type=Path),
            flag("--out", "DIR", "folder for simulation.json and simulation.png", type=Path),
            _DEVICE,
            _PROFILE,
        ),
    ),
    Command(
        "profile",
        "measures on this CPU the times of steps, by which `explain` and `placement: auto` place drafters",
        "lab.cli.measure:profile",
        (
            *_RUN,
            _OUT,
            flag("--threads", "N,N", "threads of an engine; default: 1,2 if there are two cores", default=""),
            flag("--steps", "N", "steps to time for each number of requests", default=32),
        ),
        in_scratch_folder=True,
    ),
    Command(
        "ladder",
        "measures on this CPU how fast each draft method decodes, ranked, for a run to start from",
        "lab.cli.measure:ladder",
        (
            *_RUN,
            _OUT,
            flag("--task", "NAME", "task to measure; default: the config's"),
            flag("--rounds", "N", "rounds over all methods", default=4),
            flag("--seconds", "S", "decoding of each method and batch size in a round", default=1.0),
        ),
        in_scratch_folder=True,
    ),
    Command(
        "rollouts",
        "a policy answers prompts, for `nemo-specrollout refresh-draft --rollouts`; continues FILE",
        "lab.cli.rollouts:rollouts",
        (
            *_RUN,
            flag("--out", "FILE", "file for the rollouts, JSON lines", type=Path, required=True),
            flag("--num", "N", "prompts, of bench.workloads in turn, or else of data", default=256),
            flag("--prompts", "FILE", "instead of these: a file with a prompt a line", type=Path),
            flag("--samples", "N", "responses to each prompt", default=4),
            flag("--seed", "N", "of the prompts and of the noise", type=int, default=0),
        ),
        in_scratch_folder=True,
    ),
)
PROGRAM = Program(
    "specrollout-lab", "Shows, measures and predicts nemo_specrollout on one machine.", COMMANDS, "make setup"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command. Returns its exit code."""
    return PROGRAM.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
