# SPDX-License-Identifier: Apache-2.0
"""Classes for a command-line program with several commands. They parse arguments, run a command, and choose the exit code.

A mistake of the user is reported in one sentence instead of a stack trace.
"""

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
"""Exit code if standard output is a pipe whose reader has ended."""
EXIT_TERMINATED = 143
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ETIMEDOUT}
"""Error numbers of a disk that is full, read-only or broken, of a quota that is used up, and of a wait that was too long."""
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
"""Error numbers that mean that a path cannot be used, usually because the user named a wrong one."""
Flag = tuple[str, dict[str, Any]]
"""The arguments of one call of `argparse.ArgumentParser.add_argument`: the flag's name, and the keyword arguments."""


def flag(name: str, metavar: str | None, text: str, **options: Any) -> Flag:
    """Returns a flag or a positional argument of a command.

    `text` is its help text, and `options` are further arguments of `argparse.ArgumentParser.add_argument`. A default value is
    also shown in the help text, and its type becomes the type of the flag.
    """
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
    """The function to run, as `MODULE:FUNCTION`. It takes the parsed arguments and returns the exit code.

    The module is imported only when the command runs.
    """
    flags: tuple[Flag, ...] = ()
    extra: str = ""
    """Name of the extra in `pyproject.toml` whose packages the command needs, or empty."""
    in_scratch_folder: bool = False
    """True if the command starts engines. Its temporary files then go into a folder that is removed when the command ends."""

    def run(self, parsed: argparse.Namespace) -> int:
        return int(resolve_name(self.function)(parsed))


@dataclass(frozen=True)
class Program:
    """A command-line program with several commands."""

    name: str
    text: str
    commands: tuple[Command, ...]
    installation: str
    """Shell command that installs missing packages. In it, `{extra}` stands for the `extra` of a command, in brackets."""

    def parse(self, arguments: list[str] | None) -> tuple[Command, argparse.Namespace]:
        """Returns the command that the arguments name, and its parsed arguments. Wrong arguments end the process.

        Flags may come before and after overrides such as `grpo.max_num_steps=3`. If `arguments` is None, those of the process
        are taken.
        """
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
        """Runs the command that the arguments name, and returns its exit code.

        If the command fails by a mistake of the user or a fault of the machine, prints one sentence about it.
        """
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
        """Returns a sentence and an exit code if `error` says that a Python package is not installed, and otherwise None.

        Also returns None if a module of this repository is missing, or if NeMo-RL was already imported, because these errors
        deserve a stack trace.
        """
        package = str(getattr(error, "name", "")).partition(".")[0]
        ours = {module.partition(".")[0] for module in (__name__, command.function)}
        if not isinstance(error, ModuleNotFoundError) or package in ours or "nemo_rl" in sys.modules:
            return None
        where = f"{self.name} {command.name} needs the Python package {package}, which is not installed here"
        fix = self.installation.format(extra=f"[{command.extra}]" if command.extra else "")
        return f"{where}; in the checkout: {fix}", EXIT_BAD_INPUT


def is_shown_as_sentence(error: OSError) -> bool:
    """Returns whether an error is about a path that the user named, a disk, or a wait that was too long.

    `Program.run` turns such an error into a sentence. An error that came from another process has no number, so it is none.
    """
    return error.errno in _PATH_ERRORS | _MACHINE_ERRORS


def check_out(path: Path, name: str = "--out") -> None:
    """Raises ConfigError if `path` cannot be written as a file. `name` is the flag by which the user named the path."""
    folder = path.absolute().parent
    is_no_file = (path.exists() and not path.is_file()) or not folder.is_dir()
    raise_first_mistake(
        "",
        (is_no_file, name, f"{path} cannot be a file there; name one in a folder that exists"),
        (not os.access(folder, os.W_OK | os.X_OK), name, f"{path} cannot be written to; choose another"),
    )


def use_threads(count: int = 1) -> None:
    """Sets the number of OpenMP threads, unless the environment sets it. Must be called before torch is imported.

    Threads of OpenMP wait for each other in a busy loop. So if an engine on a CPU has two threads, any other load on the
    machine can make its steps ten times slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def _resolve_nemo_rl_dir() -> None:
    """Makes the environment variable NEMO_RL_DIR an absolute path, or deletes it if it is empty."""
    named = os.environ.pop(NEMO_RL_DIR, "")
    if named:
        os.environ[NEMO_RL_DIR] = os.path.abspath(os.path.expanduser(named))


def _output_is_closed() -> bool:
    """Tells whether standard output is a pipe whose reader has ended, for example `head`."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # a stream in memory has no file descriptor
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_of(error: BaseException) -> tuple[str, int] | None:
    """Returns a sentence and an exit code if `error` is not the program's fault, and otherwise None.

    Such errors are mistakes of the user, signals, and faults of disks.
    """
    if isinstance(error, ConfigError):
        return str(error), EXIT_BAD_INPUT
    # Ray's own SIGTERM handler exits with the number of the signal.
    if isinstance(error, Terminated) or (isinstance(error, SystemExit) and error.code == signal.SIGTERM):
        return "terminated by SIGTERM", EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if not isinstance(error, OSError) or not is_shown_as_sentence(error):
        return None
    name = error.filename or ("the current folder" if error.errno == errno.ENOENT else "")
    what = f"{str(name)[:200]}: {error.strerror}" if name else str(error.strerror)
    if error.errno in _PATH_ERRORS:
        return f"{what}; mend that, or name another path", EXIT_BAD_INPUT
    return f"{what}; what was finished is kept: mend that and run it again", EXIT_FAILED
