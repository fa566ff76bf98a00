# SPDX-License-Identifier: Apache-2.0
"""Table of the commands: help line, flags, and the function that runs each, which is imported when it is called."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_specrollout.cli.refresh_draft import add_arguments as add_refresh_flags

DEFAULT_ACCEPTANCE = 0.8
"""Assumed share of right draft tokens (`plan`, `explain`)."""
CLUSTER_FLAGS = {
    "account": "Slurm account",
    "partition": "Slurm partition",
    "time": "time limit of one job, e.g. 4:00:00",
    "container": "NeMo-RL's container: image or .sqsh file",
}
"""Flags of `launch` that take precedence over the cluster file, which takes precedence over the environment."""


Flag = tuple[str, dict[str, Any]]
"""Name and options of one `argparse.ArgumentParser.add_argument` call."""


def _flag(name: str, metavar: str | None, text: str, **options: Any) -> Flag:
    """Returns a flag. A default is added to the help text, and gives the flag its type."""
    if options.get("default"):
        text += f"; default: {options['default']}"
        options.setdefault("type", type(options["default"]))
    if metavar is not None:
        options["metavar"] = metavar
    return name, {"help": text, **options}


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    name: str
    text: str
    """Help line."""
    function: str
    """`MODULE.FUNCTION` within `nemo_specrollout.cli`. It takes the parsed arguments and returns the exit code."""
    flags: tuple[Flag, ...] = ()
    more_flags: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds flags that are derived from a record."""
    extra: str = ""
    """Extra of `pyproject.toml` whose packages the command needs."""
    in_scratch_folder: bool = False
    """Whether the command starts engines, so that its temporary files go into a folder that is removed at its end."""

    def run(self, parsed: argparse.Namespace) -> int:
        """Imports the command's function and calls it; returns the exit code."""
        module, _, name = self.function.partition(".")
        return int(getattr(import_module(f"nemo_specrollout.cli.{module}"), name)(parsed))


_CONFIG = _flag("config", "CONFIG", "a NeMo-RL-shaped YAML file", type=Path)
_OVERRIDES = _flag("overrides", "key=value", "e.g. grpo.max_num_steps=3", nargs="*", default=[])
_RUN = (_CONFIG, _OVERRIDES)
_DEVICE = _flag("--device", "NAME", "of a NeMo-RL config: the GPU, e.g. H100")
_PROFILE = _flag("--profile", "FILE", "times that `profile` measured", type=Path)
_SCRIPT = _flag("--script", "FILE", "NeMo-RL's script, from its checkout; default: the one that fits CONFIG")

COMMANDS = (
    Command("run", "a training run; resumes the one in logger.log_dir", "run.run", (*_RUN, _SCRIPT), extra="local"),
    Command("bench", "the same rollouts with and without speculation, interleaved", "measure.bench", _RUN,
            extra="local", in_scratch_folder=True),
    Command("check", "validates a config and says what will run; loads neither torch nor vllm", "check.check", _RUN),
    Command("explain", "what a config would do and bring, and its known traps; loads neither torch nor vllm",
            "explain.explain", (
        *_RUN, _PROFILE, _DEVICE,
        _flag("--ladder", "FILE", "decode speeds that `ladder` measured, or that a run kept", type=Path),
    )),
    Command("launch", "a run in NeMo-RL on a Slurm cluster", "launch.launch", (
        *_RUN,
        _flag("--nodes", "N", "nodes; sets cluster.num_nodes", type=int, required=True),
        _flag("--run-dir", "DIR", "on a disk that all nodes see; default: results/NAME_OF_CONFIG"),
        _flag("--jobs", "K", "jobs, one after another, for a run longer than one", default=1),
        _flag("--dry-run", None, "write the run directory and print the sbatch line", action="store_true"),
        _flag("--cluster", "FILE", "settings as in the cluster.example.yaml that `examples` copies", type=Path),
        _SCRIPT,
        *(_flag(f"--{name}", name.upper(), f"{text}; default: from the cluster file or the environment")
          for name, text in CLUSTER_FLAGS.items()),
    )),
    Command("plan", "where to verify and where to draft, by measured times; loads neither torch nor vllm", "plan.plan", (
        *_RUN,
        _flag("--profile", "FILE", "times that `profile` measured", type=Path, required=True),
        _flag("--batch", "N", "requests that run at a time; default: the requests of a step", type=int),
        _flag("--devices", "N", "threads or GPUs that generate; default: from the config", type=int),
        _flag("--acceptance", "P", "share of right draft tokens after right ones", default=DEFAULT_ACCEPTANCE),
    )),
    Command("profile", "measures on this CPU the times that `plan` needs", "measure.profile", (
        *_RUN,
        _flag("--out", "FILE", "file for the measured times, JSON", type=Path, required=True),
        _flag("--threads", "N,N", "threads of an engine; default: 1,2 if there are two cores", default=""),
        _flag("--steps", "N", "steps to time for each number of requests", default=32),
    ), extra="local", in_scratch_folder=True),
    Command("ladder", "measures on this CPU how fast each draft method decodes, ranked, for a run to start from",
            "measure.ladder", (
        *_RUN,
        _flag("--out", "FILE", "file for the ladder, JSON", type=Path, required=True),
        _flag("--task", "NAME", "task to measure; default: the config's"),
        _flag("--rounds", "N", "rounds over all methods", default=4),
        _flag("--seconds", "S", "decoding of each method and batch size in a round", default=1.0),
    ), extra="local", in_scratch_folder=True),
    Command("serve-drafter", "a drafter for engines that name its address", "drafter_commands.serve_drafter", (
        *_RUN, _flag("--address", "tcp://HOST:PORT", "where to listen", default="tcp://127.0.0.1:5570"),
    ), extra="engine", in_scratch_folder=True),
    Command("publish-draft", "gives new weights to remote drafters", "drafter_commands.publish_draft", (
        *_RUN,
        _flag("--weights", "DIR", "a checkpoint of the draft model", type=Path, required=True),
        _flag("--version", None, "version of the weights; default: the time, in seconds", type=int),
    ), extra="engine"),
    Command("refresh-draft", "trains an EAGLE-3 draft head for a policy, or refreshes one", "refresh_draft.refresh_draft",
            extra="heads", more_flags=add_refresh_flags),
    Command("examples", "copies the recipes and the cluster file into a folder", "examples.copy_examples", (
        _flag("folder", "DIR", "the folder, which may exist", type=Path),
    )),
    Command("report", "writes report.html and picture.png of a run directory again, also while it runs", "run.report", (
        _flag("run_dir", "RUN_DIR", "the logger.log_dir of a run, local or in NeMo-RL", type=Path),
    )),
    Command("simulate", "what a step would take, and what each feature brings; loads neither torch nor vllm",
            "simulate.simulate", (
        _flag("config", "SCENARIO|CONFIG", "a scenario's name or file, or a run's config; `list` names the scenarios, "
             "`papers` compares with two papers"),
        _flag("overrides", "key=value", "of the scenario, e.g. drafting.k=5", nargs="*", default=[]),
        _flag("--trace", "FILE", "measured response lengths: a run's samples.jsonl", type=Path),
        _flag("--out", "DIR", "folder for simulation.json and simulation.png", type=Path),
        _DEVICE, _PROFILE,
    )),
    Command("doctor", "checks whether this package can work here, for a bug report; tries an engine with a random model",
            "doctor.doctor", (
        _flag("config", "CONFIG", "a NeMo-RL-shaped YAML file to check too", type=Path, nargs="?"),
        _OVERRIDES,
        _flag("--json", "FILE", "file for the same facts, and for logs of what failed", type=Path),
        _flag("--no-self-test", None, "starts no engine", action="store_true"),
        _flag("--in-nemo-rl", None, "looks inside the environment of NeMo-RL's driver, by `uv` and NEMO_RL_DIR",
              action="store_true"),
    )),
)  # fmt: skip


def parse(arguments: list[str] | None) -> tuple[Command, argparse.Namespace]:
    """Returns the command and its parsed arguments. Flags may stand between CONFIG and key=value.

    Prints the usage and exits with code 2 if no command takes the arguments.
    """
    parser = argparse.ArgumentParser(
        prog="nemo-specrollout",
        description="Faster RL rollouts that are the same rollouts.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.text, description=command.text, allow_abbrev=False)
        for name, options in command.flags:
            subparser.add_argument(name, **options)
        if command.more_flags is not None:
            command.more_flags(subparser)
    parsed, rest = parser.parse_known_args(arguments)
    if unknown := [text for text in rest if text.startswith("-") or "overrides" not in parsed]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return next(command for command in COMMANDS if command.name == parsed.command), parsed
