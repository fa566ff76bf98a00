# SPDX-License-Identifier: Apache-2.0
"""Turns a plain mapping into a frozen dataclass, and a user's mistake into a sentence: field, value, fix."""

import collections.abc
import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A value that cannot be run; the message names the field, the value and what to write instead."""


def nearest(name: str, known: typing.Iterable[str], most_listed: int = 20) -> str:
    """ "; did you mean 'x'?" for the known name most like `name`, or else the list of all, unless they are too many."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(options)}" if len(options) <= most_listed else ""


def join(path: str, key: object) -> str:
    """The path of `key` inside the block at `path`, which is empty at the top."""
    return f"{path}.{key}" if path else str(key)


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """Returns the paths of the keys at which two config trees differ; an absent key equals null."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        is_same = one == other or (one != one and other != other)  # noqa: PLR0124 - NaN
        return set() if is_same else {path}
    keys = one.keys() | other.keys()
    return set().union(*(differences(one.get(key), other.get(key), join(path, key)) for key in keys))


def check_rising(path: str, values: typing.Sequence[int]) -> None:
    """Raises ConfigError unless the values at `path` go from small to large, each once."""
    if list(values) != sorted(set(values)):
        raise ConfigError(f"{path}: {list(values)}; write them from small to large, each once")


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field whose value must be finite and at least `low`, at most `high`, `above`, `below`; None is no bound."""
    bounds = {"at least": low, "above": above, "at most": high, "below": below}
    return dataclasses.field(default=default, metadata={"bounds": {k: v for k, v in bounds.items() if v is not None}})


def choice(*options: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field whose value must be one of `options`."""
    return dataclasses.field(default=default, metadata={"options": options})


def build(cls: type[T], values: Any, path: str) -> T:
    """An instance of dataclass `cls` from the mapping found at `path` of the config.

    Raises ConfigError for an unknown key, a missing one, a wrong type, or a value out of its bounds.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}: expected a block of keys, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"{join(path, key)}: unknown key{nearest(str(key), fields)}")
    hints = typing.get_type_hints(cls)
    arguments = {
        name: _convert(hints[name], values[name], join(path, name), field)
        for name, field in fields.items()
        if name in values
    }
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{join(path, name)}: missing; it has no default")
    instance = cls(**arguments)
    check: Callable[[str], None] | None = getattr(instance, "check", None)
    if check is not None:
        check(path)
    return instance


def _convert(hint: Any, value: Any, path: str, field: dataclasses.Field[Any]) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is collections.abc.Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected a block of keys, got {value!r}")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], item, f"{path}[{i}]", field) for i, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in arguments if a is not type(None))
        return _convert(hint, value, path, field)
    return _check_bounds(_convert_scalar(hint, value, path), path, field)


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}")
    return value


_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def _check_bounds(value: Any, path: str, field: dataclasses.Field[Any]) -> Any:
    options, bounds = field.metadata.get("options"), field.metadata.get("bounds", {})
    if options is not None and value not in options:
        raise ConfigError(f"{path}: {value!r} is not available{nearest(str(value), options)}")
    if not all(_HOLDS[kind](value, bound) for kind, bound in bounds.items()):
        limits = " and ".join(f"{kind} {bound}" for kind, bound in bounds.items())
        raise ConfigError(f"{path}: {value!r} is out of range; it must be {limits}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value!r} is not a finite number")
    return value
