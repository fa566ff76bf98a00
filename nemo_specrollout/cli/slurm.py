# SPDX-License-Identifier: Apache-2.0
"""Slurm for `launch`: settings of a cluster, shell files and `sbatch` line of a run; NeMo-RL's `ray.sub` does the rest.

A setting is taken from the flags, else from the cluster file, else from the environment.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from nemo_specrollout.config.code_folder import NUMBA_CACHE
from nemo_specrollout.config.strict import ConfigError, bounded, build, nearest, refuse

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
_NULL = "tag:yaml.org,2002:null"
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_HEADER = (
    "# SPDX-License-Identifier: Apache-2.0\n# Written by `nemo-specrollout launch`, which overwrites it each time.\n"
)


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
    """All GPUs of one node; without it, the config's `cluster.gpus_per_node`."""
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
            value = getattr(self, name)
            refuse(path, (re.search(r"\s", value), name, f"{value!r} has a space in it; remove it"))
        check_mountable(self.nemo_rl, f"{path}.nemo_rl")
        refuse(
            path,
            (not Path(self.nemo_rl, "ray.sub").is_file(), "nemo_rl",
             f"{self.nemo_rl} has no ray.sub; name the root of a NeMo-RL checkout"),
            (self.container.startswith("/") and not Path(self.container).is_file(), "container",
             f"{self.container} does not exist; name an image or a .sqsh file"),
        )  # fmt: skip
        for mount in self.mounts:
            parts = mount.split(":")
            is_wrong = len(parts) < 2 or not all(part.startswith("/") for part in parts[:2])
            text = f"{mount!r} is no SOURCE:TARGET of two absolute paths; write e.g. /shared:/shared"
            refuse(path, (is_wrong, "mounts", text))
            for part in parts:
                check_mountable(part, f"{path}.mounts")
        for argument in self.sbatch_args:
            is_ours = argument.removeprefix("--").split("=")[0] in _SET_BY_LAUNCH
            refuse(
                f"{path}.sbatch_args",
                (
                    not argument.startswith("-"),
                    "",
                    f"{argument!r} is no option; write e.g. --qos=long, one item for each",
                ),
                (is_ours, "", f"{argument!r} is set by launch itself; remove it"),
            )
        for name, value in self.environment.items():
            is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
            refuse(
                f"{path}.environment",
                (not is_name, "", f"{name!r} is no name of a variable; use letters, digits and _"),
                (name in _VARIABLES_SET_BY_LAUNCH, name, "launch sets it; remove it"),
                (value is None, name, "no value; write '' for an empty one, or remove it"),
                (not isinstance(value, str), name, f"expected one value, got {value!r}"),
            )
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


class _TextLoader(yaml.BaseLoader):
    """Loads every value as text, except null. YAML itself would read the time 4:00:00 as the number 14400."""


_TextLoader.add_implicit_resolver(_NULL, re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_TextLoader.add_constructor(_NULL, lambda loader, node: None)


def _read_file(file: Path | None) -> dict[str, Any]:
    """Returns the values of the cluster file as text, without the keys that have none. Raises ConfigError."""
    if file is None:
        return {}
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_TextLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--cluster: {file} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        text = "start from the cluster.example.yaml that `nemo-specrollout examples DIR` makes"
        raise ConfigError(f"--cluster: {file} is no block of keys; {text}")
    known = {field.name for field in dataclasses.fields(ClusterSettings)}
    for name in values:  # also a key without a value, which would otherwise count as missing
        refuse("slurm", (name not in known, name, f"unknown key{nearest(str(name), known)}"))
    return {name: value for name, value in values.items() if value not in (None, "")}


@dataclass(frozen=True)
class Job:
    """One job of a run."""

    settings: ClusterSettings
    run: str
    """Absolute path of the run directory."""
    num_nodes: int
    gpus_per_node: int
    max_num_steps: int | None
    """Steps after which the run is complete; None if the config does not say."""
    script: str
    """NeMo-RL's script, relative to its checkout."""

    @property
    def name(self) -> str:
        """Job name, unique to the run directory. Slurm's `singleton` runs jobs of one name one after another."""
        word = re.sub(r"[^A-Za-z0-9._-]", "-", Path(self.run).name)
        return f"specrollout-{word}-{hashlib.sha256(self.run.encode()).hexdigest()[:8]}"

    def sbatch(self) -> list[str]:
        """Returns the command that submits the job, with all options: SBATCH_* variables overrule options in a script."""
        settings = self.settings
        return [
            "sbatch", "--parsable", f"--nodes={self.num_nodes}", "--exclusive", f"--account={settings.account}",
            f"--partition={settings.partition}", f"--time={settings.time}", f"--job-name={self.name}",
            "--dependency=singleton", "--requeue", "--open-mode=append", "--export=ALL",
            f"--output={self.run}/slurm/%j.out", *settings.sbatch_args, f"{self.run}/job.sh",
        ]  # fmt: skip

    def files(self) -> dict[str, str]:
        """Returns the text of each shell file by its name."""
        return {"env.sh": self._env(), "job.sh": self._job()}

    def _env(self) -> str:
        settings, run = self.settings, self.run
        mounts = [f"{run}:{run}", f"{settings.nemo_rl}:{settings.nemo_rl}", *settings.mounts]
        variables = {
            "CONTAINER": settings.container,
            "MOUNTS": ",".join(dict.fromkeys(mounts)),
            "GPUS_PER_NODE": str(self.gpus_per_node),
            "SETUP_COMMAND": settings.setup_command,
            "COMMAND": self._command(),
            "BASE_LOG_DIR": f"{run}/slurm",
            # Working folder of ray.sub in the container: `uv run` has to be called in the checkout.
            "SLURM_SUBMIT_DIR": settings.nemo_rl,
            # cluster.num_nodes counts every node, so the head is no extra one.
            "DEDICATED_RAY_HEAD": "0",
            **NUMBA_CACHE,
            **settings.environment,
        }
        literal = "# Values are taken as they are written.\n# shellcheck disable=SC2016\n"
        return _HEADER + literal + "".join(f"export {name}={quote(value)}\n" for name, value in variables.items())

    def _command(self) -> str:
        """Returns the command for ray.sub's head: NeMo-RL's driver, which passes its PYTHONPATH to all workers."""
        addon, config = quote(f"{self.run}/addon"), quote(f"{self.run}/config.yaml")
        path = f"PYTHONPATH={addon}${{PYTHONPATH:+:$PYTHONPATH}}"
        return f"{path} uv run python -m nemo_specrollout run {config} --script {quote(self.script)}"

    def _job(self) -> str:
        last = f"{self.run}/checkpoints/step_{self.max_num_steps}"
        stop = f"""
if [[ -d {quote(last)} ]]; then
  echo "nemo-specrollout: all {self.max_num_steps} steps are done"
  exit 0
fi
"""
        return f"""#!/bin/bash
{_HEADER}set -euo pipefail
{"" if self.max_num_steps is None else stop}
# These variables belong to the Python that ran `launch`. The container has its own.
unset OMP_NUM_THREADS PYTHONHOME PYTHONPATH VIRTUAL_ENV
# shellcheck source=/dev/null
source {quote(f"{self.run}/env.sh")}
exec bash {quote(f"{self.settings.nemo_rl}/ray.sub")}
"""
