# SPDX-License-Identifier: Apache-2.0
"""Runs a function before or after a module's first import, so that nothing is imported before its time."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Module name to "module:function"; an AFTER function gets the module. Several of them run in their order.
BEFORE: dict[str, str] = {}
AFTER: dict[str, str | tuple[str, ...]] = {}


def install() -> None:
    """Arms the hooks, once a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (before := BEFORE.pop(fullname, None)) is not None:
            _function(before)()
        if fullname not in AFTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            after = AFTER[fullname]
            spec.loader = _Loader(spec.loader, (after,) if isinstance(after, str) else after)
        return spec


class _Loader(Loader):
    def __init__(self, native: Any, after: tuple[str, ...]) -> None:
        self._native, self._after = native, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._native.exec_module(module)
        for name in self._after:
            _function(name)(module)
