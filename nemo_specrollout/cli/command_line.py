# SPDX-License-Identifier: Apache-2.0
"""A program of several commands, with their table, parsing, and exit codes. A user's mistake is reported in one sentence."""

import argparse
import errno
import io
import os
import select
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nemo_specrollout.cli.terminal import Interrupts, Terminated, complain, scratch_folder
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.strict import ConfigError, raise_first_mistake

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
"""Exit code if the reader of standard output has ended."""
EXIT_TERMINATED = 143
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
"""Errors of full, read-only or broken disks and of used-up quotas, after which finished work is kept."""
_PATH_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ELOOP,
}
"""Errors of paths that the user named and that cannot be used."""
Flag = tuple[str, dict[str, Any]]
"""Name and options of one `argparse.ArgumentParser.add_argument` call."""


def flag(name: str, metavar: str | None, text: str, **options: Any) -> Flag:
    """Returns a flag. A default is added to the help text, and gives the flag its type."""
    if options.get("default", "") not in ("", []):
        text += f" (default: {options['default']})"
        options.setdefault("type", type(options["default"]))
    if metavar is not None:
        options["metavar"] = metavar
    return name, {"help": text, **options}


CONFIG = flag("config", "CONFIG", "a YAML file in the shape of NeMo-RL's configs", type=Path)
OVERRIDES = flag(
    "overrides", "key=value", "values instead of those of the file, such as grpo.max_num_steps=3", nargs="*", default=[]
)


@dataclass(frozen=True)
class Command:
    name: str
    text: str
    function: str
    """`MODULE:FUNCTION`, which is imported when it is called. It takes the parsed arguments and returns the exit code."""
    flags: tuple[Flag, ...] = ()
    extra: str = ""
    """Extra of `pyproject.toml` whose packages the command needs."""
    in_scratch_folder: bool = False
    """True if the command starts engines, so that its temporary files go into a folder that is removed at its end."""

    def run(self, parsed: argparse.Namespace) -> int:
        return int(resolve_name(self.function)(parsed))


@dataclass(frozen=True)
class Program:
    """A program, by the name that the user types."""

    name: str
    text: str
    commands: tuple[Command, ...]
    installation: str
    """Command that installs missing packages, in which `{extra}` stands for the extra of the user's command in brackets."""

    def parse(self, arguments: list[str] | None) -> tuple[Command, argparse.Namespace]:
        """Returns the command and its parsed arguments. Flags may precede key=value. Wrong arguments end the process."""
        parser = argparse.ArgumentParser(prog=self.name, description=self.text, allow_abbrev=False)
        subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for command in self.commands:
            text = command.text
            subparser = subparsers.add_parser(command.name, help=text, description=text, allow_abbrev=False)
            for name, options in command.flags:
                subparser.add_argument(name, **options)
        parsed, rest = parser.parse_known_args(arguments)
        if unknown := [text for text in rest if text.startswith("-") or "overrides" not in parsed]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if rest:
            parsed.overrides = [*parsed.overrides, *rest]
        parsed.given = sys.argv[1:] if arguments is None else arguments
        return next(command for command in self.commands if command.name == parsed.command), parsed

    def run(self, arguments: list[str] | None) -> int:
        """Runs a command, and returns its exit code."""
        for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks is shown by its number
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        command, parsed = self.parse(arguments)
        # Megatron-Core warns that Apex and Transformer Engine are missing, and vLLM of deprecated names in torch.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        try:
            _resolve_nemo_rl_dir()
            with Interrupts(), scratch_folder() if command.in_scratch_folder else nullcontext():
                return command.run(parsed)
        except (ConfigError, KeyboardInterrupt, SystemExit, OSError, ModuleNotFoundError) as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return EXIT_NO_READER
            if (end := self._lack(error, command) or _end_of(error)) is None:
                raise
            sentence, code = end
            complain(sentence, self.name)
            return code

    def _lack(self, error: BaseException, command: Command) -> tuple[str, int] | None:
        """Returns a sentence and an exit code if `error` is about a Python package that is not installed.

        Returns None for any other error, for a missing module of this repository, and once NeMo-RL is loaded.
        """
        package = str(getattr(error, "name", "")).partition(".")[0]
        ours = {module.partition(".")[0] for module in (__name__, command.function)}
        if not isinstance(error, ModuleNotFoundError) or package in ours or "nemo_rl" in sys.modules:
            return None
        where = f"{self.name} {command.name} needs the Python package {package}, which is not installed here"
        fix = self.installation.format(extra=f"[{command.extra}]" if command.extra else "")
        return f"{where}; in the checkout: {fix}", EXIT_BAD_INPUT


def check_out(path: Path, name: str = "--out") -> None:
    """Raises ConfigError, which begins with the flag `name`, if `path` cannot be written as a file."""
    folder = path.absolute().parent
    is_no_file = (path.exists() and not path.is_file()) or not folder.is_dir()
    raise_first_mistake(
        "",
        (is_no_file, name, f"{path} cannot be a file there; name one in a folder that exists"),
        (not os.access(folder, os.W_OK | os.X_OK), name, f"{path} cannot be written to; choose another"),
    )


def use_threads(count: int = 1) -> None:
    """Sets the number of OpenMP threads, unless the environment does. Call it before torch is loaded.

    Threads of OpenMP wait for each other in a busy loop. So with two threads, any other load on the machine makes an engine
    step ten times slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def _resolve_nemo_rl_dir() -> None:
    """Makes NEMO_RL_DIR an absolute path for this process and its children. An empty value counts as unset."""
    named = os.environ.pop(NEMO_RL_DIR, "")
    if named:
        os.environ[NEMO_RL_DIR] = os.path.abspath(os.path.expanduser(named))


def _output_is_closed() -> bool:
    """Returns whether standard output is a pipe whose reader has ended, as `head` does."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # a stream in memory has no file descriptor
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_of(error: BaseException) -> tuple[str, int] | None:
    """Returns the sentence and the exit code for an error that is not the program's fault, and None for any other."""
    if isinstance(error, ConfigError):
        return str(error), EXIT_BAD_INPUT
    # Ray's own SIGTERM handler exits with the number of the signal.
    if isinstance(error, Terminated) or (isinstance(error, SystemExit) and error.code == signal.SIGTERM):
        return "terminated by SIGTERM", EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if not isinstance(error, OSError) or error.errno not in _PATH_ERRORS | _MACHINE_ERRORS:
        return None
    name = error.filename or ("the current folder" if error.errno == errno.ENOENT else "")
    what = f"{str(name)[:200]}: {error.strerror}" if name else str(error.strerror)
    if error.errno in _PATH_ERRORS:
        return f"{what}; mend that, or name another path", EXIT_BAD_INPUT
    return f"{what}; what was finished is kept: mend that and run it again", EXIT_FAILED
