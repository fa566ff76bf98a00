# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout refresh-draft`: trains a new draft head for a policy, or trains an existing one further.

It imports torch only after it has checked its flags.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from nemo_specrollout.cli.command_line import Flag, flag
from nemo_specrollout.cli.terminal import Interrupts, progress_bar
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.heads.refresh.refresh_options import RefreshOptions

if TYPE_CHECKING:
    from nemo_specrollout.heads.refresh.candidate import Judgement

EXIT_REFUSED = 3
"""Exit code if the publish gate refused the trained head."""
_FIELDS = {field.name: field for field in dataclasses.fields(RefreshOptions)}
_EXCLUSIVE = (
    ("steps", "minutes", "--steps and --minutes are both given"),
    ("draft", "draft_vocab", "--draft-vocab belongs to a new head, and --draft has its own"),
    ("draft", "layer_ids", "--layer-ids belong to a new head, and --draft has its own"),
)
"""Pairs of fields of `RefreshOptions` that exclude each other, with the reason."""


def refresh_draft(parsed: argparse.Namespace) -> int:
    """Trains a new draft head, or an existing one further, and saves it at `--out` if it passes the publish gate.

    Returns the exit code, which is 0 if the head was saved, and 3 if the gate refused it. Raises ConfigError if a flag or a
    file cannot be used, and KeyboardInterrupt if the user interrupts it.
    """
    options = _options_of(parsed)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))  # nothing else competes for the cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from nemo_specrollout.heads.refresh.offline_refresh import refresh_offline

        with Interrupts() as interrupts:
            published = refresh_offline(options, TerminalView(), interrupts.check)
    except KeyboardInterrupt:
        partial = f"{options.out}.partial"
        print(f"nemo-specrollout: the same command goes on from what is in {partial}", file=sys.stderr)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0 if published else EXIT_REFUSED


def _options_of(parsed: argparse.Namespace) -> RefreshOptions:
    """Returns the parsed flags as `RefreshOptions`. Raises ConfigError for a wrong flag, with its value and a fix."""
    given = {name: getattr(parsed, name) for name in _FIELDS if getattr(parsed, name) is not None}
    try:
        options = build(RefreshOptions, {name: _value(name, value) for name, value in given.items()}, "")
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        raise ConfigError(f"{_flag_of(name)}:{rest}") from error
    if not options.rollouts:
        raise ConfigError("--rollouts: nothing to learn from; give rollouts of the policy, e.g. NeMo-RL's logs")
    for one, other, reason in _EXCLUSIVE:
        if getattr(options, one) not in (None, ()) and getattr(options, other) not in (None, ()):
            raise ConfigError(f"{reason}; leave out one of them")
    return options


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(name: str, field: dataclasses.Field[Any]) -> Flag:
    """Returns the flag of the command line that sets a field of `RefreshOptions`."""
    options: dict[str, Any] = {"nargs": "+"} if name == "rollouts" else {}
    if "bool" in str(field.type):
        options["action"] = "store_true"
    elif field.default is dataclasses.MISSING:
        options["required"] = True
    elif field.default not in (None, ()):
        options["default"] = field.default
    return flag(_flag_of(name), field.metadata["metavar"] or None, field.metadata["help"].replace("%", "%%"), **options)


REFRESH_FLAGS = tuple(_flag(name, field) for name, field in _FIELDS.items())


def _value(name: str, given: Any) -> Any:
    """Converts the text of a flag to the type of its field in `RefreshOptions`.

    Returns a text that cannot be converted as it is, so that `build` refuses it later.
    """
    if name == "layer_ids":
        return [int(i) if i.strip().lstrip("-").isdecimal() else i for i in given.split(",")]
    if "int" in str(_FIELDS[name].type) and isinstance(given, str) and given.lstrip("-").isdecimal():
        return int(given)
    return given


class TerminalView:
    """Prints the output of `refresh-draft`: lines of text, progress bars on a terminal, and a table at the end."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True, markup=False)

    def say(self, text: str) -> None:
        self.console.print(text)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow")

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows `text` with a spinner on a terminal while the `with` block runs."""
        with self.console.status(text):
            yield

    @contextmanager
    def bar(self, text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """Shows a progress bar on a terminal while the `with` block runs.

        Yields the function that moves the bar. It is called as `move(done)` or `move(done, total=..., description=...)`.
        """
        with progress_bar(self.console) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done, **changes: progress.update(task, completed=done, **changes)

    def judged(self, judgement: "Judgement") -> None:
        """Prints a table of the head's acceptance rates on held-out prompts, before and after the training."""
        before = judgement.before
        after = judgement.after
        measured = [after] if before is None else [before, after]
        table = Table(title=f"held-out acceptance, {judgement.decision.num_samples} prompts", title_justify="left")
        for name in ("", "before", "after") if before else ("", "after"):
            table.add_column(name, justify="right" if name else "left")
        for k in range(len(after.acceptance_rate_K)):
            table.add_row(f"draft {k + 1}", *(f"{a.acceptance_rate_K[k]:.3f}" for a in measured))
        table.add_row("acceptance length", *(f"{a.expected_length:.3f}" for a in measured))
        self.console.print(table)
