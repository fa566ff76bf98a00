# SPDX-License-Identifier: Apache-2.0
"""Reads what an object has learned as plain JSON values, and puts it into another object of the same class.

A class names the fields that it learns in `LEARNED`. The value of a field is a number, an array of numbers, a dictionary of
those, or another object whose class has `LEARNED`. A value that is unknown or not finite becomes null. When a new object gets
the state, null leaves the field as it is. As everywhere, the capital letters at the end of an array's name are its shape. So
arrays of an object that share a letter must have the same number of entries along it.

A class may also have two methods. `is_sound` returns whether its fields are consistent, and `fade` reduces the weight of what
was learned compared with new data, because the policy or the machine may have changed since.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LARGEST = 1e12
"""Upper bound of the absolute values of all learned numbers. A larger one must be damaged, and might overflow."""
_LETTERS = re.compile(r"_([A-Z]+)$")


class Unfit(ValueError):
    """Raised if a state does not fit the object for which it is meant. The message names the field that does not fit."""


def state_of(thing: Any) -> dict[str, Any]:
    """Returns the learned fields of an object by name, as JSON values."""
    return {name: _plain(getattr(thing, name)) for name in learned_fields(thing)}


def learned_fields(thing: Any) -> tuple[str, ...]:
    """Returns the names of the fields that an object learns, or none for an object that learns nothing."""
    return tuple(getattr(type(thing), "LEARNED", ()))


def begin_with(given: Iterable[tuple[Any, Any]]) -> None:
    """Puts states that other objects have learned into objects of the same classes, and then fades these objects.

    `given` has pairs of an object and its state. Raises Unfit if a state does not fit, in which case no object has changed.
    """
    changed: list[tuple[Any, str, Any]] = []
    begun: list[Any] = []
    try:
        for thing, state in given:
            _begin(thing, state, changed, begun)
        for thing in reversed(begun):  # parts come before the objects that own them
            if hasattr(thing, "is_sound") and not thing.is_sound():
                raise Unfit(f"{type(thing).__name__} has numbers that contradict each other")
    except BaseException:
        for thing, name, before in reversed(changed):
            setattr(thing, name, before)
        raise
    for thing in begun:
        if hasattr(thing, "fade"):
            thing.fade()


def _plain(value: Any) -> Any:
    if learned_fields(value):
        return state_of(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist() if np.isfinite(value).all() else None
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _begin(thing: Any, state: Any, changed: list[tuple[Any, str, Any]], begun: list[Any]) -> None:
    """Sets the learned fields of an object. Adds their old values to `changed`, and the object and its parts to `begun`."""
    where = type(thing).__name__
    names = learned_fields(thing)
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise Unfit(f"{where} learns other things")
    sizes = _sizes(thing, names)
    begun.append(thing)
    for name in names:
        now = getattr(thing, name)
        if learned_fields(now):
            _begin(now, state[name], changed, begun)
        elif state[name] is not None:
            value = _fitting(now, state[name], f"{where}.{name}", sizes)
            changed.append((thing, name, now))
            setattr(thing, name, value)


def _sizes(thing: Any, names: Iterable[str]) -> dict[str, int]:
    """Returns how many entries the arrays of an object have along each letter of their names."""
    sizes: dict[str, int] = {}
    for name in names:
        array = getattr(thing, name)
        if isinstance(array, np.ndarray) and len(letters := _letters(name)) == array.ndim:
            sizes |= dict(zip(letters, array.shape, strict=True))
    return sizes


def _letters(name: str) -> str:
    found = _LETTERS.search(name)
    return found[1] if found else ""


def _fitting(now: Any, given: Any, where: str, sizes: Mapping[str, int]) -> Any:
    """Returns the value `given` of a state in the type of the field's value `now`. Raises Unfit if it has another kind."""
    if isinstance(now, Mapping):
        if not isinstance(given, Mapping) or {str(key) for key in now} != set(given):
            raise Unfit(f"{where} has other keys")
        return {key: _fitting(item, given[str(key)], where, sizes) for key, item in now.items()}
    if now is None or isinstance(now, np.ndarray):
        return _fitting_array(now, given, where, sizes)
    if isinstance(now, bool) or isinstance(given, bool):
        if type(now) is not type(given):
            raise Unfit(f"{where} is no truth value on both sides")
        return given
    if not isinstance(given, int | float) or (isinstance(now, int) and not isinstance(given, int)):
        raise Unfit(f"{where} is no number of its kind")
    if not abs(given) <= LARGEST:  # also if it is NaN
        raise Unfit(f"{where} is {given}")
    return type(now)(given)


def _fitting_array(now: np.ndarray | None, given: Any, where: str, sizes: Mapping[str, int]) -> np.ndarray:
    try:
        array = np.asarray(given, np.float64 if now is None else now.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unfit(f"{where} is no array of numbers") from error
    letters = _letters(where)
    has_shape = array.ndim == len(letters) if now is None else array.shape == now.shape
    if not has_shape or any(
        sizes.get(letter, size) != size for letter, size in zip(letters, array.shape, strict=False)
    ):
        raise Unfit(f"{where} has the shape {array.shape}")
    if not bool((np.abs(array) <= LARGEST).all()):
        raise Unfit(f"{where} has numbers that are not finite, or far too large")
    return array
