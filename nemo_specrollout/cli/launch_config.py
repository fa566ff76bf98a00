# SPDX-License-Identifier: Apache-2.0
"""The config of a launched run: the user's, with what the cluster and the run directory decide."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_specrollout.cli.slurm_settings import ClusterSettings, seconds
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.runtime import runtime_of
from nemo_specrollout.config.strict import ConfigError

# Keys that a flag decides.
_FLAGS = {
    "cluster.num_nodes": "--nodes",
    "checkpointing.checkpoint_dir": "--run-dir",
    "logger.log_dir": "--run-dir",
}
# Between the last checkpoint and the time limit, as in NeMo-RL's own recipes; it also covers what comes before the first
# step, because NeMo-RL's clock starts there. Of short jobs, half.
_SAVE_MARGIN_S = 25 * 60


def launched_config(path: Path, overrides: list[str], settings: ClusterSettings, num_nodes: int, run: str) -> str:
    """The text of `config.yaml` in the run directory `run`: resolved, so it needs nothing beside it. Raises ConfigError."""
    for override in overrides:
        flag = _FLAGS.get(override.partition("=")[0].lstrip("+"))
        if flag is not None:
            raise ConfigError(f"{override}: launch sets it; use {flag}")
    tree = load_config(path, overrides)
    if runtime_of(tree) != "nemo_rl":
        raise ConfigError(f"runtime: {tree.get('runtime', 'local')!r} is not for a cluster; set runtime=nemo_rl")
    tree["runtime"] = "nemo_rl"
    cluster = _section(tree, "cluster")
    cluster["gpus_per_node"] = _gpus_per_node(cluster.get("gpus_per_node"), settings.gpus_per_node)
    cluster["num_nodes"] = num_nodes
    checkpointing = _section(tree, "checkpointing")
    checkpointing["checkpoint_dir"] = f"{run}/checkpoints"
    if checkpointing.get("enabled"):
        checkpointing["checkpoint_must_save_by"] = _must_save_by(checkpointing, settings.time)
    _section(tree, "logger")["log_dir"] = f"{run}/logs"
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected a block of keys, got {section!r}")
    return section


def _gpus_per_node(asked: Any, present: int | None) -> int:
    """GPUs of a node, on which the config and the cluster must agree. Raises ConfigError."""
    value = present if asked is None else asked
    if value is None:
        raise ConfigError(
            "slurm.gpus_per_node: missing; set it there, or cluster.gpus_per_node, to the GPUs of one node"
        )
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"cluster.gpus_per_node: {value!r}; set it to the number of GPUs of one node")
    if present is not None and value != present:
        raise ConfigError(
            f"cluster.gpus_per_node: {value}, but slurm.gpus_per_node (GPUS_PER_NODE) is {present}; "
            f"add cluster.gpus_per_node={present}"
        )
    return value


def _must_save_by(checkpointing: dict[str, Any], time: str) -> str:
    """NeMo-RL's DD:HH:MM:SS after the first step at which it saves and stops; the user's own if there is one."""
    limit_s = seconds(time, "slurm.time")
    own = checkpointing.get("checkpoint_must_save_by")
    if own is None:
        return _days_to_seconds(limit_s - min(_SAVE_MARGIN_S, limit_s // 2))
    match = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(own))
    if match is None:
        raise ConfigError(
            f"checkpointing.checkpoint_must_save_by: {own!r} is not DD:HH:MM:SS; remove it to have it set"
        )
    days, hours, minutes, rest = map(int, match.groups())
    if days * 86400 + hours * 3600 + minutes * 60 + rest >= limit_s:
        raise ConfigError(
            f"checkpointing.checkpoint_must_save_by: {own} is not before the time limit {time}; remove it to have it set"
        )
    return str(own)


def _days_to_seconds(total_s: int) -> str:
    minutes, rest = divmod(total_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"
