# SPDX-License-Identifier: Apache-2.0
"""State of vLLM that all engines of a process share, and that only the last one to stop releases.

vLLM expects one engine in a process. When an engine stops, it destroys the process's communication groups and resets the
process's workspace, so that other engines in the process could make no further engine step.
"""

import weakref
from types import ModuleType
from typing import Any

from vllm.v1.engine import core
from vllm.v1.worker import workspace

_RELEASES: tuple[tuple[ModuleType, str], ...] = (
    (core, "cleanup_dist_env_and_memory"),
    (workspace, "reset_workspace_manager"),
)
"""Functions by which a stopping engine releases what others may use, each by the module and name where vLLM looks it up."""
_running: weakref.WeakSet[Any] = weakref.WeakSet()
"""Clients of the engine cores of all engines that were started in this process and have not stopped."""


def started(llm: Any) -> None:
    """Counts an engine as one that uses the shared state."""
    _running.add(llm.llm_engine.engine_core)


def stop(llm: Any) -> None:
    """Stops an engine. The shared state stays if another engine that `started` has counted still runs.

    Engines of one process must start and stop in the same thread.
    """
    client = llm.llm_engine.engine_core
    _running.discard(client)
    kept = [(module, name, getattr(module, name)) for module, name in _RELEASES] if _running else []
    for module, name, _ in kept:
        setattr(module, name, _release_nothing)
    try:
        client.shutdown()
    finally:
        for module, name, release in kept:
            setattr(module, name, release)


def _release_nothing() -> None:
    """Takes the place of a function of `_RELEASES` while another engine runs."""
