# SPDX-License-Identifier: Apache-2.0
"""Builds frozen dataclasses from the nested mappings of a config, and checks the values.

A mistake raises ConfigError, which names the field, the value and a fix.
"""

import collections.abc
import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Field = dataclasses.Field[Any]


class ConfigError(ValueError):
    """The error that says that a value of the user cannot be used.

    Its message names the field or flag, the value, and what to write instead.
    """


def raise_first_mistake(path: str, *mistakes: tuple[object, str, str]) -> None:
    """Raises ConfigError for the first of `mistakes` that was made, or does nothing if none was made.

    A mistake is a tuple of three entries. They are a condition that is truthy if the mistake was made, the field relative to
    `path`, and a text with the value and the fix. An empty field stands for `path` itself.
    """
    for is_made, field, text in mistakes:
        if is_made:
            raise ConfigError(f"{join(path, field) if field else path}: {text}")


def nearest(name: str, known: Iterable[str], most_listed: int = 20) -> str:
    """Returns a hint for a message about an unknown name, such as "; did you mean 'x'?".

    If no known name resembles `name`, the hint lists all known names. But it is empty if there are more than `most_listed` of
    them.
    """
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(options)}" if len(options) <= most_listed else ""


def join(path: str, key: object) -> str:
    """Returns the dotted path of `key` in the block at `path`. An empty `path` stands for the top of the config."""
    return f"{path}.{key}" if path else str(key)


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """Returns the paths of the keys at which two configs differ. An absent key equals a key with null."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        is_same = one == other or (one != one and other != other)  # noqa: PLR0124 - NaN
        return set() if is_same else {path}
    keys = one.keys() | other.keys()
    return set().union(*(differences(one.get(key), other.get(key), join(path, key)) for key in keys))


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Returns a dataclass field for a number with bounds, which `build` checks.

    The number must be finite, at least `low`, at most `high`, greater than `above` and less than `below`. None means that a
    bound is not set.
    """
    bounds = {"at least": low, "above": above, "at most": high, "below": below}
    return dataclasses.field(default=default, metadata={"bounds": {k: v for k, v in bounds.items() if v is not None}})


def choice(
    *options: str, default: Any = dataclasses.MISSING, withdrawn: Mapping[str, str] = types.MappingProxyType({})
) -> Any:
    """Returns a dataclass field whose value must be one of `options`, which `build` checks.

    `withdrawn` has values that earlier versions accepted, each with a text that tells the user what to write instead.
    """
    return dataclasses.field(default=default, metadata={"options": options, "withdrawn": withdrawn})


AUTO = "auto"
"""The value in a config that lets the package choose a number itself."""


def auto_or_bounded(*, low: int, high: int) -> Any:
    """Returns a dataclass field of type `int | str`, whose value must be "auto" or an integer from `low` to `high`.

    The default is "auto".
    """
    return dataclasses.field(default=AUTO, metadata={"auto": range(low, high + 1)})


def required(fix: str) -> Any:
    """Returns a dataclass field without a default. If a config lacks it, the error tells the user to do `fix`."""
    return dataclasses.field(metadata={"fix": fix})


def tagged(variants: Mapping[str, type], *, default: Any) -> Any:
    """Returns a dataclass field for a list of blocks, each of which `build_tagged` turns into one of `variants`."""
    return dataclasses.field(default=default, metadata={"variants": variants})


def build(cls: type[T], values: Any, path: str) -> T:
    """Returns an instance of the dataclass `cls` with the values of the block `values` at `path` of a config.

    If the class has a method `check`, it is called with `path`. Raises ConfigError if a key is unknown or missing, or if a
    value is wrong.
    """
    fields = _fields(cls)
    hints = typing.get_type_hints(cls)
    _check_keys(values, fields, path)
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], join(path, name), field)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{join(path, name)}: missing; {field.metadata.get('fix', 'it has no default')}")
    instance = cls(**arguments)
    if hasattr(instance, "check"):
        instance.check(path)
    return instance


def build_tagged(variants: Mapping[str, type[T]], values: Any, path: str) -> T:
    """Returns an instance of the dataclass in `variants` that the key `type` of the block `values` names.

    `values` may have a key that only another variant has, but only with the default value that it has there. Such a key is
    ignored. Raises ConfigError if it has another value, and in the same cases as `build`.
    """
    _check_keys(values, {name for cls in variants.values() for name in _fields(cls)}, path)
    if "type" not in values:
        raise ConfigError(f"{join(path, 'type')}: missing; write one of {', '.join(variants)}")
    tag = _convert_scalar(str, values["type"], join(path, "type"))
    if tag not in variants:
        raise ConfigError(f"{join(path, 'type')}: {tag!r} is not available{nearest(tag, variants)}")
    own = _fields(variants[tag])
    for key, value in values.items():
        owners = {name: fields[key] for name, cls in variants.items() if key in (fields := _fields(cls))}
        if key not in own and not any(_is_default(value, field) for field in owners.values()):
            fix = f"type {tag} does not have it: remove it, or use type {' or '.join(owners)}"
            raise ConfigError(f"{join(path, key)}: {value!r}; {fix}")
    return build(variants[tag], {key: value for key, value in values.items() if key in own}, path)


def _fields(cls: type) -> dict[str, Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def _is_default(value: Any, field: Field) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool((tuple(value) if isinstance(value, list) else value) == default)


def _check_keys(values: Any, known: Iterable[str], path: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}: expected a block of keys, got {values!r}")
    for key in values:
        if key not in known:
            raise ConfigError(f"{join(path, key)}: unknown key{nearest(str(key), known)}")


def _convert(hint: Any, value: Any, path: str, field: Field) -> Any:
    if dataclasses.is_dataclass(hint):
        variants = field.metadata.get("variants")
        return build_tagged(variants, value, path) if variants else build(typing.cast(type, hint), value, path)
    if "auto" in field.metadata:
        return _auto_or_number(value, path, field.metadata["auto"])
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is collections.abc.Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected a block of keys, got {value!r}")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], item, f"{path}[{i}]", field) for i, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _convert(arguments[0], value, path, field)
    return _check_bounds(_convert_scalar(hint, value, path), path, field)


def _auto_or_number(value: Any, path: str, numbers: range) -> int | str:
    if value == AUTO or (type(value) is int and value in numbers):
        chosen: int | str = value
        return chosen
    raise ConfigError(
        f"{path}: {value!r} is not available; write {AUTO}, or a number from {numbers[0]} to {numbers[-1]}"
    )


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # of a string, because YAML 1.1 reads 1e-4 as one
        except (ValueError, OverflowError):
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}")
    return value


_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def _check_bounds(value: Any, path: str, field: Field) -> Any:
    options = field.metadata.get("options")
    bounds = field.metadata.get("bounds", {})
    withdrawn = field.metadata.get("withdrawn", {})
    if isinstance(value, str) and value in withdrawn:
        raise ConfigError(f"{path}: {value!r} is no longer available; {withdrawn[value]}")
    if options is not None and value not in options:
        raise ConfigError(f"{path}: {value!r} is not available{nearest(str(value), options)}")
    if not all(_HOLDS[kind](value, bound) for kind, bound in bounds.items()):
        limits = " and ".join(f"{kind} {bound}" for kind, bound in bounds.items())
        raise ConfigError(f"{path}: {value!r} is out of range; it must be {limits}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value!r} is not a finite number")
    return value
