# SPDX-License-Identifier: Apache-2.0
"""Entry point `nemo-specrollout COMMAND CONFIG [key=value ...]`. A user's mistake is one sentence and exit code 2."""

import argparse
import errno
import io
import os
import select
import signal
import sys
import warnings
from contextlib import nullcontext

from lab.cli.prepare import EXIT_BAD_INPUT, EXIT_FAILED, prepare
from nemo_specrollout.cli.commands import Command, parse
from nemo_specrollout.cli.terminal import Interrupts, Terminated, complain, scratch_folder
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.strict import ConfigError

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""
EXIT_NO_READER = 141
"""Exit code if the reader of standard output has ended."""
EXIT_TERMINATED = 143
"""Exit code after SIGTERM."""
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
"""Full disks, used-up quotas, and disks that broke or are read-only: finished work is kept."""
_PATH_ERRORS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP
}  # fmt: skip
"""Paths that the user named and that cannot be used."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command, parsed = parse(arguments)
    # Megatron-Core warns that Apex and Transformer Engine are missing, and vLLM of deprecated names in torch.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        _resolve_nemo_rl_dir()
        with Interrupts(), scratch_folder() if command.in_scratch_folder else nullcontext():
            return command.run(parsed)
    except ModuleNotFoundError as error:
        if (sentence := _lack_of(error, command)) is None:
            raise
        complain(_mistake_in(parsed, command) or sentence)
        return EXIT_BAD_INPUT
    except (ConfigError, KeyboardInterrupt, SystemExit, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_NO_READER
        if (end := _end_of(error)) is None:
            raise
        sentence, code = end
        complain(sentence)
        return code


def _resolve_nemo_rl_dir() -> None:
    """Makes NEMO_RL_DIR an absolute path for all that reads it, here and in child processes. An empty one counts as unset."""
    named = os.environ.pop(NEMO_RL_DIR, "")
    if named:
        os.environ[NEMO_RL_DIR] = os.path.abspath(os.path.expanduser(named))


def _lack_of(error: ModuleNotFoundError, command: Command) -> str | None:
    """Returns a sentence about the package that `command` lacks; None in NeMo-RL, and for a module of this package."""
    package = str(error.name).partition(".")[0]
    if package in ("nemo_specrollout", "lab.vllm_on_cpu") or "nemo_rl" in sys.modules:
        return None
    where = f"nemo-specrollout {command.name} needs the Python package {package}, which is not installed here"
    extra = f"[{command.extra}]" if command.extra else ""
    return f"{where}; in the checkout: pip install '.{extra}'"


def _mistake_in(parsed: argparse.Namespace, command: Command) -> str:
    """Returns the mistake in the config of a command for one machine, which matters before its packages; empty without one."""
    if command.extra == "local":
        try:
            prepare(parsed.config, parsed.overrides)
        except ConfigError as error:
            return str(error)
    return ""


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
    """Returns the sentence and the exit code for an error that is no fault of the program; None for any other."""
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


if __name__ == "__main__":
    sys.exit(main())
