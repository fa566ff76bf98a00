# SPDX-License-Identifier: Apache-2.0
"""Makes the config of a run that `launch` submits, both as text for the job and with the values that the job will compute."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_specrollout.cli import slurm
from nemo_specrollout.cli.check import check_runtime
from nemo_specrollout.cli.run_length import MUST_SAVE_BY, save_by_s
from nemo_specrollout.config.interpolation import environment_variables
from nemo_specrollout.config.load import merge_config, resolve_config
from nemo_specrollout.config.nemo_rl_tree import Finding, size_at
from nemo_specrollout.config.overrides import parse_override
from nemo_specrollout.config.strict import ConfigError, raise_first_mistake

_KEYS_OF_FLAGS = {
    "cluster.num_nodes": "--nodes",
    "checkpointing.checkpoint_dir": "--run-dir",
    "logger.log_dir": "--run-dir",
}
_SAVE_MARGIN_S = 25 * 60
"""Seconds before a job's time limit at which NeMo-RL is told to save and stop.

NeMo-RL measures time only from the end of its start. So these seconds have to cover the start too.
"""


@dataclass(frozen=True)
class LaunchedConfig:
    """The config of a run that `launch` submits."""

    written: str
    """The config as YAML. It keeps values such as ${oc.env:HF_HOME} as the user wrote them, so that the job computes them."""
    tree: dict[str, Any]
    """The config with the values that the job will compute, as far as `launch` knows the job's environment variables."""
    findings: list[Finding]
    """Notes and warnings about values that depend on environment variables of the job that `launch` does not know."""


def launched_config(
    path: Path, overrides: Sequence[str], settings: slurm.ClusterSettings, num_nodes: int, run: str
) -> LaunchedConfig:
    """Reads the config at `path`, and returns it with the values that `launch` sets for a run in the run directory `run`.

    `num_nodes` is the number of NeMo-RL's nodes. Raises ConfigError if the config cannot be read or launched.
    """
    _refuse_keys_of_flags(overrides)
    config = merge_config(path, overrides)
    variables = slurm.job_environment(settings)
    tree, _ = _computed(config, path, overrides, variables)
    check_runtime(tree)
    for key, value in _decisions(tree, settings, num_nodes, run).items():
        OmegaConf.update(config, key, value, force_add=True)
    tree, unknown = _computed(config, path, overrides, variables)
    return LaunchedConfig(OmegaConf.to_yaml(config), tree, _unknown_variables(unknown))


def written_config(run: Path, settings: slurm.ClusterSettings) -> dict[str, Any]:
    """Returns the config that an earlier launch wrote into `run`, with the values that a job would compute.

    Raises ConfigError if it cannot be read.
    """
    path = run / "config.yaml"
    return _computed(merge_config(path), path, (), slurm.job_environment(settings))[0]


def _computed(
    config: DictConfig, path: Path, overrides: Sequence[str], variables: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the config with the values that a job with the environment `variables` would compute, as nested dictionaries.

    Also returns a dictionary of the variables that `variables` lacks. Each key of the config whose value needs such a variable
    has the variable's name there. `path` and `overrides` are where the config comes from. Raises ConfigError if a value cannot
    be computed.
    """
    with environment_variables(variables) as unknown:
        try:
            return resolve_config(config, path, overrides), unknown
        except ConfigError as error:
            if not unknown:
                raise
            names = ", ".join(sorted(set(unknown.values())))
            raise ConfigError(f"{error}; set {names} in `environment` of the cluster file") from error


def _unknown_variables(unknown: Mapping[str, str]) -> list[Finding]:
    """Returns a note or a warning about each key whose value needs an environment variable that `launch` does not know.

    `unknown` has the variable's name for each such key.
    """
    found = []
    for key, name in unknown.items():
        # Slurm gives each job its own values of these, and those of this shell are not passed on.
        if name.startswith("SLURM") or name in os.environ:
            found.append(Finding(key, f"reads {name}, whose value in the job is not known here", "note"))
        else:
            text = f"reads {name}, which neither `environment` of the cluster file nor this shell sets"
            found.append(Finding(key, f"{text}; unless the container does, the job ends at once", "warning"))
    return found


def _refuse_keys_of_flags(overrides: Sequence[str]) -> None:
    """Raises ConfigError if an override sets a key that `launch` itself sets, directly or by a block with this key."""
    for text in overrides:
        override = parse_override(text)
        for key, flag in _KEYS_OF_FLAGS.items():
            inner = key.removeprefix(f"{override.key}.")
            is_inside = isinstance(override.value, dict) and inner != key and inner in override.value
            raise_first_mistake("", (key == override.key or is_inside, text, f"launch sets it; use {flag}"))


def _decisions(tree: Mapping[str, Any], settings: slurm.ClusterSettings, num_nodes: int, run: str) -> dict[str, Any]:
    """Returns the values that `launch` sets in the config `tree`, by key. Raises ConfigError if they do not fit the config."""
    sections = {name: tree.get(name, {}) for name in ("cluster", "checkpointing", "logger")}
    for name, section in sections.items():
        raise_first_mistake("", (not isinstance(section, dict), name, f"expected a block of keys, got {section!r}"))
    decided: dict[str, Any] = {
        "runtime": "nemo_rl",
        "cluster.num_nodes": num_nodes,
        "checkpointing.checkpoint_dir": f"{run}/checkpoints",
        "logger.log_dir": f"{run}/logs",
    }
    if sections["cluster"].get("gpus_per_node") is None:
        text = "missing; set it there, or cluster.gpus_per_node, to the GPUs of one node"
        raise_first_mistake("", (settings.gpus_per_node is None, "slurm.gpus_per_node", text))
        decided["cluster.gpus_per_node"] = settings.gpus_per_node
    size_at(tree, "cluster.gpus_per_node")
    if sections["checkpointing"].get("enabled"):
        decided[MUST_SAVE_BY] = _must_save_by(tree, settings.time)
    return decided


def _must_save_by(tree: Mapping[str, Any], time: str) -> str:
    """Returns the time after which NeMo-RL saves and stops, as DD:HH:MM:SS.

    It is the config's own value if there is one, and otherwise follows from the job's time limit `time`. Raises ConfigError if
    the config's own value is not before the time limit.
    """
    limit_s = slurm.seconds(time, "slurm.time")
    own_s = save_by_s(tree)
    if own_s is None:
        minutes, rest = divmod(limit_s - min(_SAVE_MARGIN_S, limit_s // 2), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"
    own = str(tree["checkpointing"]["checkpoint_must_save_by"])
    if own_s >= limit_s:
        raise ConfigError(f"{MUST_SAVE_BY}: {own} is not before the time limit {time}; remove it to have it set")
    return own
