# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout COMMAND CONFIG [key=value ...]`: one short file per command; a user's mistake is a sentence, exit 2."""

import argparse
import errno
import io
import os
import select
import signal
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

from nemo_specrollout.cli.consoles import complain
from nemo_specrollout.cli.doctor_options import add_arguments as add_doctor_arguments
from nemo_specrollout.cli.explain_options import add_arguments as add_explain_arguments
from nemo_specrollout.cli.interrupts import Interrupts, Terminated
from nemo_specrollout.cli.ladder_options import add_arguments as add_ladder_arguments
from nemo_specrollout.cli.launch import add_arguments
from nemo_specrollout.cli.plan_options import add_plan_arguments, add_profile_arguments
from nemo_specrollout.cli.prepare import EXIT_BAD_INPUT, EXIT_FAILED
from nemo_specrollout.cli.publish_draft import add_arguments as add_publish_arguments
from nemo_specrollout.cli.refresh_draft_options import add_arguments as add_refresh_arguments
from nemo_specrollout.cli.run import add_arguments as add_run_arguments
from nemo_specrollout.cli.scratch import scratch_folder
from nemo_specrollout.cli.serve_drafter import add_arguments as add_serve_arguments
from nemo_specrollout.cli.simulate_options import add_arguments as add_simulate_arguments
from nemo_specrollout.config.strict import ConfigError

# Commands that start engines here; `run` may be NeMo-RL's, and sees to itself.
_WITH_ENGINES = ("bench", "ladder", "profile", "serve-drafter")
EXIT_INTERRUPTED, EXIT_NO_READER, EXIT_TERMINATED = 130, 141, 143
# Failures that no program can mend: a full disk, a used-up quota, a disk that broke or takes no writes.
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
# Of a path that a user named: it may not be read or written, is too long, or is of another kind than it should be.
_OF_A_PATH = {
    errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP
}  # fmt: skip
_FLAGS = {
    "run": add_run_arguments,
    "launch": add_arguments,
    "plan": add_plan_arguments,
    "profile": add_profile_arguments,
    "ladder": add_ladder_arguments,
    "explain": add_explain_arguments,
    "serve-drafter": add_serve_arguments,
    "publish-draft": add_publish_arguments,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no letter for a character shows its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parsed = _parse(arguments)
    # Megatron-Core warns eight times that Apex and Transformer Engine are missing, vLLM of deprecated names in torch.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        with Interrupts(), scratch_folder() if parsed.command in _WITH_ENGINES else nullcontext():
            return _command(parsed)
    except (ConfigError, KeyboardInterrupt, SystemExit, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_NO_READER
        end = _end_of(error)
        if end is None:
            raise
        sentence, code = end
        complain(sentence)
        return code


def _output_is_closed() -> bool:
    """Returns whether standard output is a pipe whose reader has ended, as `head` does."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # of a stream in memory
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_of(error: BaseException) -> tuple[str, int] | None:
    """Returns the sentence and the exit code of an error that is no fault of the program; None for any other."""
    if isinstance(error, ConfigError):
        return str(error), EXIT_BAD_INPUT
    # Ray sets a handler of SIGTERM of its own, which exits with the number of the signal.
    if isinstance(error, Terminated) or (isinstance(error, SystemExit) and error.code == signal.SIGTERM):
        return "terminated by SIGTERM", EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    return _end_of_os_error(error) if isinstance(error, OSError) else None


def _end_of_os_error(error: OSError) -> tuple[str, int] | None:
    """Returns the same of an error of the operating system."""
    where = f"{str(error.filename)[:200]}: " if error.filename else ""
    if error.errno in _OF_A_PATH:
        return f"{where}{error.strerror}; mend that, or name another path", EXIT_BAD_INPUT
    if error.errno in _OF_THE_MACHINE:
        return f"{where}{error.strerror}; what was finished is kept: mend that and run it again", EXIT_FAILED
    return None


def _command(parsed: argparse.Namespace) -> int:
    """Calls the function behind a command, of its own name in a file of that name; loads no more than it needs."""
    name = parsed.command.replace("-", "_")
    return int(getattr(import_module(f"nemo_specrollout.cli.{name}"), name)(parsed))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Flags may stand between CONFIG and key=value."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if unknown := [r for r in rest if r.startswith("-") or "overrides" not in parsed]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        parsed.overrides += rest
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nemo-specrollout", description="Faster RL rollouts that are the same rollouts.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("run", "a GRPO run; resumes the one in logger.log_dir"),
        ("bench", "the same rollouts with and without speculation, interleaved"),
        ("check", "validates a config and says what will run; loads neither torch nor vllm"),
        ("explain", "what a config would do and bring, and what to look out for; loads neither torch nor vllm"),
        ("launch", "a run in NeMo-RL on a Slurm cluster"),
        ("plan", "where to verify and where to draft, by measured times; loads neither torch nor vllm"),
        ("profile", "measures on this CPU the times that `plan` needs"),
        ("ladder", "measures on this CPU how fast each draft method decodes, ranked, for a run to start from"),
        ("serve-drafter", "a drafter for engines that name its address"),
        ("publish-draft", "drafters on other workers go on with other weights"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("config", type=Path, metavar="CONFIG", help="a NeMo-RL-shaped YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. grpo.max_num_steps=3")
        if name in _FLAGS:
            _FLAGS[name](command)
    text = "trains an EAGLE-3 draft head for a policy, or refreshes one"
    command = commands.add_parser("refresh-draft", help=text, description=text, allow_abbrev=False)
    add_refresh_arguments(command)
    text = "makes report.html and picture.png of a run directory again, also while it runs"
    command = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    command.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the logger.log_dir of a run, local or in NeMo-RL"
    )
    text = "what a step would take, and what each feature brings; loads neither torch nor vllm"
    command = commands.add_parser("simulate", help=text, description=text, allow_abbrev=False)
    add_simulate_arguments(command)
    text = "whether this package can work here, for a bug report; tries an engine with a random model"
    command = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    add_doctor_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
