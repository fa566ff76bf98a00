# SPDX-License-Identifier: Apache-2.0
"""Settings of a Slurm cluster for `launch`: from flags, else the cluster file, else the environment."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_specrollout.config.strict import ConfigError, bounded, build

VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "time": "SBATCH_TIMELIMIT",
    "container": "CONTAINER",
    "nemo_rl": "NEMO_RL_DIR",
    "gpus_per_node": "GPUS_PER_NODE",
    "mounts": "MOUNTS",
    "setup_command": "SETUP_COMMAND",
}
"""Environment variables of settings, with NeMo-RL's and Slurm's own names where they exist."""
_SET_BY_LAUNCH = (
    "nodes", "account", "partition", "time", "job-name", "dependency", "requeue", "exclusive", "output", "error",
    "open-mode", "export", "parsable",
)  # fmt: skip
_VARIABLES_SET_BY_LAUNCH = (
    "BASE_LOG_DIR", "COMMAND", "CONTAINER", "DEDICATED_RAY_HEAD", "GPUS_PER_NODE", "MOUNTS", "SETUP_COMMAND",
    "SLURM_SUBMIT_DIR",
)  # fmt: skip
_NOT_IN_A_MOUNT = re.compile(r"[\s,:*?\[\]$`\\\"']")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class ClusterSettings:
    """A cluster and its NeMo-RL. Paths are absolute. `ray.sub` does not quote, so no value has special characters."""

    account: str
    """Slurm account."""
    partition: str
    """Slurm partition."""
    time: str
    """Time limit of one job, as Slurm writes it."""
    container: str
    """NeMo-RL's container: an image name or a .sqsh file."""
    nemo_rl: str
    """NeMo-RL checkout, at the container's commit, on a file system that all nodes see."""
    gpus_per_node: int | None = bounded(None, low=1)
    """GPUs of one node; without it, the config's `cluster.gpus_per_node`."""
    mounts: tuple[str, ...] = ()
    """`SOURCE:TARGET` folders of the container, beside the run directory and NeMo-RL."""
    setup_command: str = ""
    """Shell commands that each node runs in the container before Ray starts."""
    sbatch_args: tuple[str, ...] = ()
    """More arguments for `sbatch`, e.g. `--gres=gpu:8`."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of every process of the job, e.g. `HF_HOME`. No secrets: they are written into the run directory."""

    def check(self, path: str) -> None:
        """Raises ConfigError for a value that Slurm or `ray.sub` cannot handle."""
        for name in ("account", "partition", "container"):
            if re.search(r"\s", getattr(self, name)):
                raise ConfigError(f"{path}.{name}: {getattr(self, name)!r} has a space in it; remove it")
        check_mountable(self.nemo_rl, f"{path}.nemo_rl")
        if not Path(self.nemo_rl, "ray.sub").is_file():
            raise ConfigError(f"{path}.nemo_rl: {self.nemo_rl} has no ray.sub; name the root of a NeMo-RL checkout")
        if self.container.startswith("/") and not Path(self.container).is_file():
            raise ConfigError(f"{path}.container: {self.container} does not exist; name an image or a .sqsh file")
        for mount in self.mounts:
            _check_mount(mount, f"{path}.mounts")
        for argument in self.sbatch_args:
            _check_sbatch_argument(argument, f"{path}.sbatch_args")
        for name, value in self.environment.items():
            _check_variable(name, value, f"{path}.environment")
        seconds(self.time, f"{path}.time")


def read_settings(file: Path | None, flags: Mapping[str, str | None]) -> ClusterSettings:
    """Returns the settings, each from `flags`, else `file`, else the environment. Raises ConfigError."""
    environment = {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
    values: dict[str, Any] = {**environment, **_read_file(file), **{k: v for k, v in flags.items() if v}}
    for name in ("account", "partition", "time", "container", "nemo_rl"):
        if not values.get(name):
            fix = f"write `{name}:` into the file that --cluster names, or set {VARIABLES[name]}"
            raise ConfigError(f"slurm.{name}: missing; {fix}" + (f", or give --{name}" if name in flags else ""))
    if isinstance(values.get("mounts"), str):
        values["mounts"] = [mount for mount in values["mounts"].split(",") if mount]
    if str(values.get("gpus_per_node", "")).isdecimal():
        values["gpus_per_node"] = int(values["gpus_per_node"])
    if isinstance(values["nemo_rl"], str):
        values["nemo_rl"] = absolute(values["nemo_rl"])
    return build(ClusterSettings, values, "slurm")


def absolute(path: str | Path) -> str:
    """Returns the absolute path without resolving links: a link's target may have another name on the nodes."""
    return os.path.abspath(os.path.expanduser(path))


def check_mountable(path: str, field: str) -> None:
    """Raises ConfigError for a path that `ray.sub` would split, because it leaves mounts and log folders unquoted."""
    found = _NOT_IN_A_MOUNT.search(path)
    if found:
        raise ConfigError(f"{field}: {path!r} has {found.group()!r} in it, where NeMo-RL's ray.sub splits; rename it")


def seconds(time: str, field: str) -> int:
    """Returns the seconds of a Slurm time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. Raises ConfigError."""
    match = _TIME.fullmatch(time)
    parts = [int(part) for part in match["parts"].split(":")] if match else [0]
    days = int(match["days"]) if match and match["days"] else None
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    total = (days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if total == 0:
        raise ConfigError(f"{field}: {time!r} is no time limit; write e.g. 4:00:00 or 1-12:00:00")
    return total


def _read_file(file: Path | None) -> dict[str, Any]:
    """Returns the values of the cluster file as text, because YAML would read the time 4:00:00 as the number 14400."""
    if file is None:
        return {}
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--cluster: {file} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--cluster: {file} is no block of keys; start from slurm/cluster.example.yaml")
    return {name: value for name, value in values.items() if value != ""}


def _check_mount(mount: str, field: str) -> None:
    source, _, rest = mount.partition(":")
    target = rest.split(":")[0]
    if not (source.startswith("/") and target.startswith("/")):
        raise ConfigError(f"{field}: {mount!r} is no SOURCE:TARGET of two absolute paths; write e.g. /shared:/shared")
    for part in (source, *rest.split(":")):
        check_mountable(part, field)


def _check_sbatch_argument(argument: str, field: str) -> None:
    if not argument.startswith("-"):
        raise ConfigError(f"{field}: {argument!r} is no option; write e.g. --qos=long, one item for each")
    if argument.removeprefix("--").split("=")[0] in _SET_BY_LAUNCH:
        raise ConfigError(f"{field}: {argument!r} is set by launch itself; remove it")


def _check_variable(name: str, value: Any, field: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"{field}: {name!r} is no name of a variable; use letters, digits and _")
    if name in _VARIABLES_SET_BY_LAUNCH:
        raise ConfigError(f"{field}.{name}: launch sets it; remove it")
    if not isinstance(value, str):
        raise ConfigError(f"{field}.{name}: expected one value, got {value!r}")
