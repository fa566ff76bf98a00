# SPDX-License-Identifier: Apache-2.0
"""Tells whether this package's local runner or NeMo-RL runs a config."""

from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.strict import ConfigError, nearest

RUNTIMES = ("local", "nemo_rl")


def runtime_of(tree: Mapping[str, Any]) -> str:
    """Returns `local` or `nemo_rl`: what the key `runtime` says, else what the config is written for.

    NeMo-RL's own configs have no such key. All of them name the GPUs of a node, which the local runner does not use.
    Raises ConfigError for another value.
    """
    runtime = tree.get("runtime", "nemo_rl" if _has_gpus(tree) else "local")
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: {runtime!r} is not available{nearest(str(runtime), RUNTIMES)}")
    return str(runtime)


def _has_gpus(tree: Mapping[str, Any]) -> bool:
    cluster = tree.get("cluster")
    return isinstance(cluster, Mapping) and bool(cluster.get("gpus_per_node"))
