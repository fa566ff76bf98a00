# SPDX-License-Identifier: Apache-2.0
"""Flags of `nemo-specrollout refresh-draft`. Does not load torch."""

import argparse
import dataclasses
from typing import Any

from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.training.refresh.refresh_options import RefreshOptions

_EXCLUSIVE = (
    ("rollouts", "prompts", "--rollouts and --prompts are both given"),
    ("steps", "minutes", "--steps and --minutes are both given"),
    ("draft", "draft_vocab", "--draft-vocab belongs to a new head, and --draft has its own"),
    ("draft", "layer_ids", "--layer-ids belong to a new head, and --draft has its own"),
)
"""Pairs of options that exclude each other, with the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `RefreshOptions`, which keeps the defaults."""
    for field in dataclasses.fields(RefreshOptions):
        flag, text = _flag_of(field.name), field.metadata["help"]
        if "bool" in str(field.type):
            parser.add_argument(flag, action="store_true", help=text)
            continue
        required = field.default is dataclasses.MISSING
        if not required and field.default not in (None, ()):
            text += f" (default {field.default})"
        several: dict[str, Any] = {"nargs": "+"} if field.name == "rollouts" else {}
        metavar = field.metadata["metavar"]
        parser.add_argument(flag, metavar=metavar, required=required, help=text.replace("%", "%%"), **several)


def options_of(parsed: argparse.Namespace) -> RefreshOptions:
    """Returns the parsed flags as a record. Raises ConfigError with flag, value and fix."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(RefreshOptions)}
    values = {n: _value(n, kind, getattr(parsed, n)) for n, kind in kinds.items() if getattr(parsed, n) is not None}
    try:
        options = build(RefreshOptions, values, "")
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        raise ConfigError(f"{_flag_of(name)}:{rest}") from error
    if not options.rollouts and options.prompts is None:
        raise ConfigError("nothing to learn from; give --rollouts PATH, or --prompts FILE that the policy will answer")
    for one, other, reason in _EXCLUSIVE:
        if getattr(options, one) not in (None, ()) and getattr(options, other) not in (None, ()):
            raise ConfigError(f"{reason}; leave out one of them")
    return options


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(name: str, kind: str, given: Any) -> Any:
    """Converts the text of a flag to the type of its field; `build` refuses what cannot be converted."""
    if name == "layer_ids":
        return [int(i) if i.strip().lstrip("-").isdigit() else i for i in given.split(",")]
    if "int" in kind and isinstance(given, str):
        return int(given) if given.lstrip("-").isdigit() else given
    return given
