# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: a run on a Slurm cluster, by NeMo-RL's own `ray.sub`; without torch."""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nemo_specrollout.cli import slurm
from nemo_specrollout.cli.check import read_nemo_rl_config
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_tree import Finding, at, size_at
from nemo_specrollout.config.strict import ConfigError, differences, raise_first_mistake
from nemo_specrollout.nemo_rl.code_folder import copy_code
from nemo_specrollout.storage.files import write_atomically

_KEYS_OF_FLAGS = {
    "cluster.num_nodes": "--nodes",
    "checkpointing.checkpoint_dir": "--run-dir",
    "logger.log_dir": "--run-dir",
}
_MAY_CHANGE = {"grpo.max_num_steps", "grpo.max_num_epochs", "checkpointing.checkpoint_must_save_by"}
"""Keys that may differ when a run is resumed: its length, and the end of each job."""
_SAVE_MARGIN_S = 25 * 60
"""Seconds between the last checkpoint and the time limit, also for the time before NeMo-RL's clock, the first step."""


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs; returns 0 if Slurm took all. Raises ConfigError.

    NeMo-RL adds checkpoints and logs. After the first submission, config and code stay the same.
    """
    for name, count in (("--nodes", args.nodes), ("--jobs", args.jobs)):
        raise_first_mistake("", (count < 1, name, f"{count} is out of range; it must be at least 1"))
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on this machine; launch from the cluster's login node, or look with --dry-run")
    settings = slurm.read_settings(args.cluster, {name: getattr(args, name) for name in slurm.CLUSTER_FLAGS})
    run = slurm.absolute(args.run_dir or Path("results", args.config.stem))
    slurm.check_mountable(run, "--run-dir")
    _enter_checkout(settings.nemo_rl)
    tree = _launched_tree(args.config, args.overrides, settings, args.nodes, run)
    block, notes = prepare_nemo_rl(tree)
    notes += _shared_gpus(tree["cluster"], settings.gpus_per_node, gpus_beside(block))
    has_checkpoints = tree["checkpointing"].get("enabled")
    if args.jobs > 1 and not has_checkpoints:
        raise ConfigError(f"--jobs: {args.jobs} jobs need checkpoints to resume from; set checkpointing.enabled=true")
    if not has_checkpoints:
        text = "false; a job that is preempted or submitted again starts at the first step"
        notes.append(Finding("checkpointing.enabled", text, "warning"))
    steps = at(tree, "grpo.max_num_steps")
    script = args.script or script_of(tree)
    node_gpus = settings.gpus_per_node or tree["cluster"]["gpus_per_node"]
    last_step = steps if isinstance(steps, int) else "last"
    _check_directory(Path(run), tree)
    _write(Path(run), tree, slurm.job_script(settings, run, node_gpus, last_step, script))
    for note in notes:
        print(f"{note.kind}: {note}")
    print(f"{'resumes' if _was_submitted(Path(run)) else 'run'}: {run}")
    command = slurm.sbatch_command(settings, run, args.nodes)
    for _ in range(args.jobs):
        if args.dry_run:
            print(shlex.join(command))
        else:
            job_id = _submit(Path(run), command)
            print(f"submitted job {job_id}; its driver writes {run}/slurm/{job_id}-logs/ray-driver.log")
    return 0


def _enter_checkout(nemo_rl: str) -> None:
    """Lets configs inherit from configs of the checkout `nemo_rl`; prints a note if the shell names another one."""
    named = os.environ.get(NEMO_RL_DIR)
    os.environ[NEMO_RL_DIR] = nemo_rl
    if named and os.path.realpath(os.path.expanduser(named)) != os.path.realpath(nemo_rl):
        text = f"{named} here, but nemo_rl of the cluster file is {nemo_rl}; the config and the job use the latter"
        print(f"note: {NEMO_RL_DIR}: {text}")


def _launched_tree(
    path: Path, overrides: list[str], settings: slurm.ClusterSettings, num_nodes: int, run: str
) -> dict[str, Any]:
    """Returns the config of the run directory `run`, resolved and complete. Raises ConfigError."""
    for override in overrides:
        flag = _KEYS_OF_FLAGS.get(override.partition("=")[0].lstrip("+"))
        raise_first_mistake("", (flag, override, f"launch sets it; use {flag}"))
    tree = read_nemo_rl_config(path, overrides)
    tree["runtime"] = "nemo_rl"
    for name in ("cluster", "checkpointing", "logger"):
        section = tree.setdefault(name, {})
        raise_first_mistake("", (not isinstance(section, dict), name, f"expected a block of keys, got {section!r}"))
    cluster = tree["cluster"]
    checkpointing = tree["checkpointing"]
    if cluster.get("gpus_per_node") is None:
        cluster["gpus_per_node"] = settings.gpus_per_node
    cluster["num_nodes"] = num_nodes
    text = "missing; set it there, or cluster.gpus_per_node, to the GPUs of one node"
    raise_first_mistake("", (cluster["gpus_per_node"] is None, "slurm.gpus_per_node", text))
    size_at(tree, "cluster.gpus_per_node")
    checkpointing["checkpoint_dir"] = f"{run}/checkpoints"
    if checkpointing.get("enabled"):
        checkpointing["checkpoint_must_save_by"] = _must_save_by(checkpointing, settings.time)
    tree["logger"]["log_dir"] = f"{run}/logs"
    return tree


def gpus_beside(block: SpecrolloutConfig | None) -> int:
    """Returns the GPUs that our actors take in addition to the GPUs of `cluster`, on all nodes together."""
    if block is None:
        return 0
    trainer = block.draft_refresh.trainer_gpus if block.draft_refresh else 0
    if block.remote is None or not block.remote.gpus:
        return trainer
    return trainer + math.ceil(block.remote.workers / math.floor(1 / block.remote.gpus))


def _shared_gpus(cluster: Mapping[str, Any], present: int | None, beside: int) -> list[Finding]:
    """Returns a note if NeMo-RL takes only a part of the `present` GPUs of each node, because our actors need `beside` GPUs.

    Raises ConfigError if the numbers do not fit: `ray.sub` wants all GPUs of a node for Ray.
    """
    taken = cluster["gpus_per_node"]
    nodes = cluster["num_nodes"]
    actors = "the head's trainer and remote drafters"
    if present is None and beside:
        text = f"missing; NeMo-RL takes {taken} GPUs of a node, and {actors} need {beside} more"
        raise ConfigError(f"slurm.gpus_per_node: {text}: set it to the GPUs of one node")
    if present is None or (taken == present and not beside):
        return []
    most = present - math.ceil(beside / nodes)
    fix = f"add cluster.gpus_per_node={most}" if most > 0 else "give more --nodes"
    need = f", of which {actors} need {beside} on {nodes} node{'s' * (nodes > 1)}" if beside else ""
    if taken > most or not beside:
        text = f"{taken}, but slurm.gpus_per_node (GPUS_PER_NODE) is {present}{need}"
        raise ConfigError(f"cluster.gpus_per_node: {text}; {fix}")
    others = nodes * (present - taken)
    text = f"NeMo-RL takes {taken} of the {present} GPUs of a node; {actors} take {beside} of the other {others}"
    return [Finding("cluster.gpus_per_node", text, "note")]


def _must_save_by(checkpointing: dict[str, Any], time: str) -> str:
    """Returns the time after which NeMo-RL saves and stops, as DD:HH:MM:SS: the user's own if there is one."""
    limit_s = slurm.seconds(time, "slurm.time")
    own = checkpointing.get("checkpoint_must_save_by")
    if own is None:
        minutes, rest = divmod(limit_s - min(_SAVE_MARGIN_S, limit_s // 2), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"
    parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(own))
    field, fix = "checkpointing.checkpoint_must_save_by", "remove it to have it set"
    if parts is None:
        raise ConfigError(f"{field}: {own!r} is not DD:HH:MM:SS; {fix}")
    days, hours, minutes, rest = map(int, parts.groups())
    if ((days * 24 + hours) * 60 + minutes) * 60 + rest >= limit_s:
        raise ConfigError(f"{field}: {own} is not before the time limit {time}; {fix}")
    return str(own)


def _was_submitted(run: Path) -> bool:
    """Returns whether a job of this run was submitted, or has left a checkpoint."""
    return (run / "submissions.jsonl").is_file() or any(run.glob("checkpoints/step_*"))


def _check_directory(run: Path, tree: dict[str, Any]) -> None:
    """Raises ConfigError if a run of the config `tree` cannot start or resume in the folder `run`."""
    existing = next(p for p in (run, *run.parents) if p.exists())
    is_unknown = existing == run and existing.is_dir() and not (run / "job.sh").is_file()
    for is_made, text in (
        (not existing.is_dir(), f"cannot be a folder: {existing} is a file"),
        (not os.access(existing, os.W_OK | os.X_OK), "cannot be written to"),
        (is_unknown and any(existing.iterdir()), "exists and is not the directory of a launched run"),
    ):
        raise_first_mistake("", (is_made, "--run-dir", f"{run} {text}; choose another"))
    if not _was_submitted(run):
        return
    try:
        earlier = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--run-dir: config.yaml of {run} cannot be read; choose another") from error
    keys = ", ".join(sorted(differences(earlier, tree) - _MAY_CHANGE)[:4])
    text = f"{run} holds a run of another config (it differs in {keys}); choose another"
    raise_first_mistake("", (keys, "--run-dir", text))


def _write(run: Path, tree: dict[str, Any], script: str) -> None:
    """Writes config and job script, and a copy of this package unless a submitted job uses it."""
    (run / "slurm").mkdir(parents=True, exist_ok=True)
    if not (_was_submitted(run) and (run / "addon").is_dir()):
        copy_code(run / "addon")
    write_atomically(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(tree)))
    write_atomically(run / "job.sh", script)


def _submit(run: Path, command: list[str]) -> str:
    """Submits a job; returns its id. Raises ConfigError with Slurm's own words if it refuses."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"sbatch refused {shlex.join(command)}: {' '.join(done.stderr.split())}")
    job_id = done.stdout.strip().split(";")[0]
    record = {"job_id": job_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
    with (run / "submissions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return job_id
