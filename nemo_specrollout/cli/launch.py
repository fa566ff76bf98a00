# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: a run on a Slurm cluster, by NeMo-RL's own `ray.sub`; without torch."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nemo_specrollout.cli.commands import CLUSTER_FLAGS
from nemo_specrollout.cli.launch_directory import LaunchDirectory
from nemo_specrollout.cli.slurm_script import Job
from nemo_specrollout.cli.slurm_settings import ClusterSettings, absolute, check_mountable, read_settings, seconds
from nemo_specrollout.config.load import NEMO_RL_DIR, load_config
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_tree import runtime_of
from nemo_specrollout.config.strict import ConfigError

_KEYS_OF_FLAGS = {
    "cluster.num_nodes": "--nodes",
    "checkpointing.checkpoint_dir": "--run-dir",
    "logger.log_dir": "--run-dir",
}
"""Keys of the config that a flag sets."""
_SAVE_MARGIN_S = 25 * 60
"""Time between the last checkpoint and the time limit, in seconds, as in NeMo-RL's own recipes; half the limit at most.

It also covers the time before the first step, because NeMo-RL's clock starts there.
"""


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs; returns 0 if Slurm took all. Raises ConfigError."""
    _check_counts(args)
    settings = read_settings(args.cluster, {name: getattr(args, name) for name in CLUSTER_FLAGS})
    run = absolute(args.run_dir or Path("results", args.config.stem))
    check_mountable(run, "--run-dir")
    os.environ[NEMO_RL_DIR] = settings.nemo_rl  # configs inherit from NeMo-RL's own configs by this variable
    config = _launched_config(args.config, args.overrides, settings, args.nodes, run)
    tree = yaml.safe_load(config)
    findings = prepare_nemo_rl(tree)
    has_checkpoints = tree["checkpointing"].get("enabled")
    if args.jobs > 1 and not has_checkpoints:
        raise ConfigError(f"--jobs: {args.jobs} jobs need checkpoints to resume from; set checkpointing.enabled=true")
    script = args.script or script_of(tree)
    directory = LaunchDirectory(run)
    directory.check(config)
    job = Job(settings, run, args.nodes, tree["cluster"]["gpus_per_node"], _max_num_steps(tree), script)
    directory.write({"config.yaml": config, **job.files()})
    for finding in findings:
        print(f"{finding.kind}: {finding}")
    if not has_checkpoints:
        print(
            "warning: checkpointing.enabled: false; a job that is preempted or submitted again starts at the first step"
        )
    return _submit(directory, job, args.jobs, args.dry_run)


def _launched_config(path: Path, overrides: list[str], settings: ClusterSettings, num_nodes: int, run: str) -> str:
    """Returns the text of `config.yaml` in the run directory `run`, resolved and complete. Raises ConfigError."""
    for override in overrides:
        flag = _KEYS_OF_FLAGS.get(override.partition("=")[0].lstrip("+"))
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
    """Returns the GPUs of a node, on which the config and the cluster must agree. Raises ConfigError."""
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
    """Returns the time after which NeMo-RL saves and stops, as DD:HH:MM:SS: the user's own if there is one."""
    limit_s = seconds(time, "slurm.time")
    own = checkpointing.get("checkpoint_must_save_by")
    if own is None:
        minutes, rest = divmod(limit_s - min(_SAVE_MARGIN_S, limit_s // 2), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"
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


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("nodes", "jobs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}: {getattr(args, name)} is out of range; it must be at least 1")
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on this machine; launch from the cluster's login node, or look with --dry-run")


def _max_num_steps(tree: dict[str, Any]) -> int | None:
    grpo = tree.get("grpo")
    steps = grpo.get("max_num_steps") if isinstance(grpo, dict) else None
    return steps if isinstance(steps, int) else None


def _submit(directory: LaunchDirectory, job: Job, num_jobs: int, dry_run: bool) -> int:
    command = job.sbatch()
    print(f"{'resumes' if directory.submitted else 'run'}: {directory.path}")
    if dry_run:
        print("\n".join([shlex.join(command)] * num_jobs))
        return 0
    for _ in range(num_jobs):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"sbatch refused {shlex.join(command)}: {' '.join(done.stderr.split())}")
        job_id = done.stdout.strip().split(";")[0]
        directory.note_submission(job_id, command)
        print(f"submitted job {job_id}; its driver writes {directory.path}/slurm/{job_id}-logs/ray-driver.log")
    return 0
