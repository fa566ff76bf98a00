# SPDX-License-Identifier: Apache-2.0
"""Stops vLLM engines without breaking other engines of the same process.

vLLM expects a single engine in a process. When that engine stops, vLLM destroys the communication groups and the workspace of
the process, without which no other engine could make an engine step. Here only the last engine that stops releases this shared
state.
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
"""Functions of vLLM that release state which all engines of the process share. Each is given by the module in which vLLM looks
it up and by its name."""
_running: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engine-core clients of all engines that were started in this process and have not stopped."""


def started(llm: Any) -> None:
    """Notes that the engine of `llm` runs and uses the state that the engines of this process share."""
    _running.add(llm.llm_engine.engine_core)


def stop(llm: Any) -> None:
    """Stops the engine of `llm`. If another engine of this process still runs, the state that they share is kept.

    Which engines run is known from `started`, so it must be called for each engine. All engines of a process must start and
    stop in the same thread.
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
    """Does nothing. It takes the place of the functions in `_RELEASES` while another engine runs."""
