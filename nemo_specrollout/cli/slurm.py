# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a Slurm cluster for `launch`, and writes the job script and the `sbatch` command of a run.

The job script runs NeMo-RL's `ray.sub`, which starts Ray on the nodes and then the driver.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from string import Template
from typing import Any

import yaml

from nemo_specrollout.cli.run_length import length_of, values_of_a_job
from nemo_specrollout.cli.run_owner import EXIT_LOST
from nemo_specrollout.cli.slurm_options import option_fault
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_tree import Tree
from nemo_specrollout.config.strict import ConfigError, bounded, build, nearest, raise_first_mistake
from nemo_specrollout.nemo_rl.code_folder import NUMBA_CACHE
from nemo_specrollout.storage.files import read_regular

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
"""The environment variable for each setting of a cluster. Most of these variables have a meaning for NeMo-RL or Slurm too."""
CLUSTER_FLAGS = {
    "account": "Slurm account",
    "partition": "Slurm partition",
    "time": "time limit of one job, such as 4:00:00",
    "container": "image or .sqsh file of NeMo-RL's container",
}
"""Flags of `launch` that give settings of the cluster, with their help texts."""
_NOT_IN_A_MOUNT = re.compile(r"[\s,:*?\[\]$`\\\"']")
_NOT_IN_A_FOLDER = re.compile(r"[^\w/.+@=~^-]")
"""Characters that a folder's path may not have, because they are special to a shell, in mounts, or in Slurm's patterns."""
_NOT_IN_A_CONTAINER = re.compile(r"[\s*?\[\]]")
_TO_REACH_SLURM = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"}
_OF_AN_ALLOCATION = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SPANK|PMI|PMI2|PMIX)_.*")
"""Environment variables that Slurm sets in an allocation, or that stand for options of its commands. A job gets its own."""
_OF_THIS_MACHINE = {
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "RAY_ADDRESS",
    "TMPDIR",
    "HOSTNAME",
    "XDG_RUNTIME_DIR",
}
"""Environment variables whose values are only valid on one machine."""
_ON_EVERY_MACHINE = {"HOSTNAME", "XDG_RUNTIME_DIR"}
"""Variables of `_OF_THIS_MACHINE` that every login shell sets. Users need no note that the job does not get them."""
_MEANT = _OF_THIS_MACHINE | {"SLURM_CLUSTERS"}
"""Variables that the job does not get, although a user may have set them on purpose. `withheld_variables` adds those whose
names begin with SBATCH_."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


class _ShellTemplate(Template):
    delimiter = "@"  # `$` is the shell's


_JOB = _ShellTemplate(Path(__file__).with_name("job.sh.template").read_text(encoding="utf-8"))
_VARIABLES_SET_BY_LAUNCH = re.findall(r"^export (\w+)", _JOB.template, re.MULTILINE)
_UNSET_IN_THE_JOB = " ".join(re.findall(r"^unset (.+)", _JOB.template, re.MULTILINE)).split()


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of a Slurm cluster and of the NeMo-RL on it. All paths are absolute.

    Names and paths may not have special characters, because `ray.sub` writes them into scripts without quotes.
    """

    account: str
    partition: str
    time: str
    """Time limit of one job in Slurm's form, such as 4:00:00."""
    container: str
    """NeMo-RL's container, which is the name of an image or the path of a .sqsh file."""
    nemo_rl: str
    """Folder of a checkout of NeMo-RL, at the same commit as in the container, on a file system that all nodes see."""
    gpus_per_node: int | None = bounded(None, low=1)
    """Number of GPUs that one node has. If None, it is `cluster.gpus_per_node` of the config."""
    mounts: tuple[str, ...] = ()
    """Folders that the container mounts in addition to the run directory and NeMo-RL's checkout, each as `SOURCE:TARGET`."""
    setup_command: str = ""
    """Shell commands that each node runs in the container before Ray starts."""
    sbatch_args: tuple[str, ...] = ()
    """Further arguments for `sbatch`, such as `--gres=gpu:8`."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Environment variables for every process of the job, such as `HF_HOME`.

    They are written into the run directory, so they may not contain secrets.
    """

    def check(self, path: str) -> None:
        """Raises ConfigError if Slurm or `ray.sub` cannot handle a value. Messages name a setting by `path` and its name."""
        check_folder(self.nemo_rl, f"{path}.nemo_rl")
        raise_first_mistake(path, *self._mistakes())
        for part in (part for mount in self.mounts for part in mount.split(":")):
            _refuse(_NOT_IN_A_MOUNT, part, f"{path}.mounts")
        _refuse(_NOT_IN_A_CONTAINER, self.container, f"{path}.container")
        seconds(self.time, f"{path}.time")

    def _mistakes(self) -> Iterator[tuple[object, str, str]]:
        for name in ("account", "partition"):
            value = getattr(self, name)
            yield re.search(r"\s", value), name, f"{value!r} has a space in it; remove it"
        no_script = not Path(self.nemo_rl, "ray.sub").is_file()
        yield no_script, "nemo_rl", f"{self.nemo_rl} has no ray.sub; name the root of a NeMo-RL checkout"
        is_relative = self.container.startswith(("~", "./", "../"))
        yield is_relative, "container", f"{self.container} is no absolute path; write one, or the name of an image"
        for mount in self.mounts:
            is_pair = re.match(r"/[^:]*:/", mount)
            text = f"{mount!r} is no SOURCE:TARGET of two absolute paths; write e.g. /shared:/shared"
            yield not is_pair, "mounts", text
        for argument in self.sbatch_args:
            fault = option_fault(argument)
            yield fault, "sbatch_args", f"{argument!r} {fault}"
        for name, value in self.environment.items():
            is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
            field = f"environment.{name}"
            yield not is_name, "environment", f"{name!r} is no name of a variable; use letters, digits and _"
            yield name in _VARIABLES_SET_BY_LAUNCH, field, "launch sets it; remove it"
            yield value is None, field, "no value; write '' for an empty one, or remove it"
            yield not isinstance(value, str), field, f"expected one value, got {value!r}"


def read_settings(file: Path | None, flags: Mapping[str, str | None]) -> ClusterSettings:
    """Returns the settings of the cluster from the flags of `launch`, the cluster file and the environment variables.

    A flag takes precedence over the file, and the file over an environment variable. Raises ConfigError if a setting is
    missing or not valid.
    """
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


class _TextLoader(yaml.BaseLoader):
    """YAML loader that reads every value except null as text. YAML itself would read the time 4:00:00 as the number 14400."""


_TextLoader.add_implicit_resolver("null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_TextLoader.add_constructor("null", lambda loader, node: None)


def _read_file(file: Path | None) -> dict[str, Any]:
    """Returns the values in the cluster file by key, without keys that have no value. Empty if `file` is None.

    Raises ConfigError if the file cannot be read, or has an unknown key.
    """
    if file is None:
        return {}
    try:
        values = yaml.load(read_regular(file).decode("utf-8-sig"), Loader=_TextLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise ConfigError(f"--cluster: {file} cannot be read: {reason}; name a YAML file") from error
    if not isinstance(values, dict):
        text = "start from the cluster.example.yaml that `nemo-specrollout examples DIR` makes"
        raise ConfigError(f"--cluster: {file} is no block of keys; {text}")
    known = {field.name for field in dataclasses.fields(ClusterSettings)}
    for name in values:  # also a key without a value, which would otherwise count as missing
        raise_first_mistake("slurm", (name not in known, name, f"unknown key{nearest(str(name), known)}"))
    return {name: value for name, value in values.items() if value not in (None, "")}


def absolute(path: str | Path) -> str:
    """Returns the absolute path of `path`. Links are not resolved, because their targets may have other paths on the nodes."""
    return os.path.abspath(os.path.expanduser(path))


def check_folder(path: str, field: str) -> None:
    """Raises ConfigError if a path has special characters, because `ray.sub` writes it into scripts without quotes.

    `field` is the name of the setting in the message.
    """
    _refuse(_NOT_IN_A_FOLDER, path, field)


def _refuse(characters: re.Pattern[str], value: str, field: str) -> None:
    if found := characters.search(value):
        raise ConfigError(
            f"{field}: {value!r} has {found.group()!r} in it, which NeMo-RL's ray.sub does not quote; rename it"
        )


def seconds(time: str, field: str) -> int:
    """Returns the seconds of a time limit that is written as M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises ConfigError if `time` has another form or is 0. `field` is the name of the setting in the message.
    """
    match = _TIME.fullmatch(time)
    parts = [int(part) for part in match["parts"].split(":")] if match else [0]
    days = int(match["days"]) if match and match["days"] else None
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    total = (days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if total == 0:
        raise ConfigError(f"{field}: {time!r} is no time limit; write e.g. 4:00:00 or 1-12:00:00")
    return total


def submission_environment() -> dict[str, str]:
    """Returns the environment variables of this process that `sbatch` and the job get.

    They do not get variables of a Slurm allocation in which this process may run, nor variables that are only valid on this
    machine.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _TO_REACH_SLURM or not (_OF_AN_ALLOCATION.fullmatch(name) or name in _OF_THIS_MACHINE)
    }


def options_of_another_cluster(settings: ClusterSettings) -> list[str]:
    """Returns those of `sbatch_args` that name another cluster than the login node's, such as `--clusters=big`."""
    return [argument for argument in settings.sbatch_args if argument.startswith(("-M", "--cluster"))]


def question_environment() -> dict[str, str]:
    """Returns the environment variables for commands that query Slurm, such as `squeue`.

    Variables such as SQUEUE_STATES are left out, because they would filter the output or change its format.
    """
    return {k: v for k, v in submission_environment().items() if not k.startswith(("SQUEUE_", "SINFO_"))}


def job_environment(settings: ClusterSettings) -> dict[str, str]:
    """Returns the environment variables that the job's driver will have, except those that the container or Slurm will set."""
    kept = {name: value for name, value in submission_environment().items() if name not in _UNSET_IN_THE_JOB}
    return {**kept, **_own_variables(settings)}


def withheld_variables() -> list[str]:
    """Returns the names of this process's environment variables that the job does not get.

    Variables that no user expects in the job are left out.
    """
    own = set(os.environ) - set(submission_environment()) - set(VARIABLES.values()) - _ON_EVERY_MACHINE
    return sorted(name for name in own if name in _MEANT or name.startswith("SBATCH_"))


def _own_variables(settings: ClusterSettings) -> dict[str, str]:
    return {**NUMBA_CACHE, **settings.environment, NEMO_RL_DIR: settings.nemo_rl}


def job_name(run: str) -> str:
    """Returns the name that all jobs of the run directory `run` have, and no other jobs.

    Slurm's option `--dependency=singleton` runs jobs of the same name one after another.
    """
    word = re.sub(r"[^A-Za-z0-9._-]", "-", Path(run).name)
    return f"specrollout-{word}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def sbatch_command(settings: ClusterSettings, run: str, num_nodes: int) -> list[str]:
    """Returns the command that submits a job of the run directory `run` for `num_nodes` nodes.

    It has all options of the job, because an environment variable SBATCH_* would overrule an option in the job's script.
    """
    return [
        "sbatch",
        "--parsable",
        f"--nodes={num_nodes}",
        "--exclusive",
        f"--account={settings.account}",
        f"--partition={settings.partition}",
        f"--time={settings.time}",
        f"--job-name={job_name(run)}",
        "--dependency=singleton",
        "--requeue",
        "--open-mode=append",
        "--export=ALL",
        f"--output={run}/slurm/%j.out",
        *settings.sbatch_args,
        f"{run}/job.sh",
    ]


def job_script(settings: ClusterSettings, run: str, gpus_per_node: int, tree: Tree, script: str) -> str:
    """Returns the text of a job's script.

    The script repeats the config's values of the keys in `MAY_CHANGE`, which are the run's length and the time after which
    NeMo-RL saves and stops. A later launch may write other values into `config.yaml` while the job waits.

    Args:
        settings: the settings of the cluster.
        run: the run directory.
        gpus_per_node: number of GPUs that a node has.
        tree: the config.
        script: the training script of NeMo-RL, relative to NeMo-RL's checkout.
    """
    length = length_of(tree)
    mounts = [f"{run}:{run}", f"{settings.nemo_rl}:{settings.nemo_rl}", *settings.mounts]
    done = f"{run}/done-{length.name}"
    # Variables of a container's image override the job's, but not those on the command line of the driver, which passes its
    # own to all workers.
    own = [f"{name}={quote(value)}" for name, value in _own_variables(settings).items()]
    own.append(f"PYTHONPATH={quote(f'{run}/addon')}${{PYTHONPATH:+:$PYTHONPATH}}")
    arguments = [f"{run}/config.yaml", *values_of_a_job(tree), "--script", script, "--when-done", done]
    values = {
        "run": run,
        "last_step": length.steps or "last",
        "done": done,
        "newest_start": f"{run}/slurm/newest_start",
        "exit_lost": EXIT_LOST,
        "container": settings.container,
        "mounts": ",".join(dict.fromkeys(mounts)),
        "gpus_per_node": gpus_per_node,
        "setup_command": settings.setup_command,
        "command": f"{' '.join(own)} uv run python -m nemo_specrollout run {join(arguments)}",
        "nemo_rl": settings.nemo_rl,
    }
    exports = [f"export {name}={quote(value)}" for name, value in {**NUMBA_CACHE, **settings.environment}.items()]
    return _JOB.substitute({k: quote(str(v)) for k, v in values.items()}, environment="\n".join(exports))
