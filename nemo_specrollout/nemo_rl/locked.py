# SPDX-License-Identifier: Apache-2.0
"""A lock in an object that Ray copies to other processes."""

from threading import Lock
from typing import Any


class Locked:
    """Owns a lock, which stays in its process: a copy has one of its own."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """For Ray: all but the lock, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())
