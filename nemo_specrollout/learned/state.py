# SPDX-License-Identifier: Apache-2.0
"""Reads what an object has learned as plain JSON values, and puts these values into another object of the same class.

A class lists the names of the fields that it learns in `LEARNED`. The value of such a field is a number, an array of numbers,
a dictionary of both, or another object whose class has `LEARNED`. A value that is unknown or not finite becomes null in JSON.
If a new object gets null for a field, it keeps the value that it has.

In this project, the capital letters at the end of an array's name stand for its dimensions. So if two arrays of an object
share a letter, they must have the same size in this dimension.

A class may also have two methods. `is_sound` tells whether the fields are consistent. `fade` lowers the weight of what was
learned compared with new data, because the policy or the machine may have changed since.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LARGEST = 1e12
"""Upper bound of the absolute value of a learned number. A larger number means that the state is damaged."""
_LETTERS = re.compile(r"_([A-Z]+)$")


class Unfit(ValueError):
    """The error that says that a learned state does not fit an object. The message names the field that does not fit."""


def state_of(thing: Any) -> dict[str, Any]:
    """Returns the learned state of an object, which is its learned fields by name, as JSON values."""
    return {name: _plain(getattr(thing, name)) for name in learned_fields(thing)}


def learned_fields(thing: Any) -> tuple[str, ...]:
    """Returns the names of the fields that an object learns, as its class lists them in `LEARNED`. Empty if there are none."""
    return tuple(getattr(type(thing), "LEARNED", ()))


def begin_with(given: Iterable[tuple[Any, Any]]) -> None:
    """Puts learned states into objects, so that they begin with what earlier objects of the same classes have learned.

    `given` has pairs of an object and the state for it. After all states are set, `fade` is called on each object that has
    this method. Raises Unfit if a state does not fit an object. In this case no object has changed.
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
    """Sets the learned fields of the object `thing` from `state`. Raises Unfit if the state does not fit.

    It appends each changed field with its old value to `changed`, so that the change can be undone. It appends the object, and
    the objects in its fields, to `begun`.
    """
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
    """Returns the size of each dimension of an object's arrays, by the letter that stands for it in their names.

    `names` are the names of the fields to look at.
    """
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
    """Converts the value `given` from a learned state to the type of the field's present value `now`, and returns it.

    Raises Unfit if `given` is no possible value of this field. `where` is the field's name in the message. `sizes` has the
    size of each dimension by its letter.
    """
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
