# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: a run on a Slurm cluster, by NeMo-RL's own `ray.sub`; without torch."""

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nemo_specrollout.cli.commands import CLUSTER_FLAGS
from nemo_specrollout.cli.slurm import ClusterSettings, Job, absolute, check_mountable, read_settings, seconds
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.code_folder import copy_code
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.load import NEMO_RL_DIR, load_config
from nemo_specrollout.config.nemo_rl_config import effective_config, prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_tree import Finding, at, runtime_of
from nemo_specrollout.config.strict import ConfigError, differences, refuse

_KEYS_OF_FLAGS = {
    "cluster.num_nodes": "--nodes",
    "checkpointing.checkpoint_dir": "--run-dir",
    "logger.log_dir": "--run-dir",
}
"""Keys of the config that a flag sets."""
_MAY_CHANGE = {"grpo.max_num_steps", "grpo.max_num_epochs", "checkpointing.checkpoint_must_save_by"}
"""Keys that may differ when a run is resumed: its length, and the end of each job."""
_SAVE_MARGIN_S = 25 * 60
"""Time between the last checkpoint and the time limit, in seconds, as in NeMo-RL's own recipes; half the limit at most.

It also covers the time before the first step, because NeMo-RL's clock starts there.
"""


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs; returns 0 if Slurm took all. Raises ConfigError."""
    for name in ("nodes", "jobs"):
        count = getattr(args, name)
        refuse("", (count < 1, f"--{name}", f"{count} is out of range; it must be at least 1"))
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on this machine; launch from the cluster's login node, or look with --dry-run")
    settings = read_settings(args.cluster, {name: getattr(args, name) for name in CLUSTER_FLAGS})
    run = absolute(args.run_dir or Path("results", args.config.stem))
    check_mountable(run, "--run-dir")
    _enter_checkout(settings.nemo_rl)
    tree = _launched_tree(args.config, args.overrides, settings, args.nodes, run)
    notes = prepare_nemo_rl(tree)
    notes += _shared_gpus(tree["cluster"], settings.gpus_per_node, gpus_beside(effective_config(tree)))
    has_checkpoints = tree["checkpointing"].get("enabled")
    if args.jobs > 1 and not has_checkpoints:
        raise ConfigError(f"--jobs: {args.jobs} jobs need checkpoints to resume from; set checkpointing.enabled=true")
    steps = at(tree, "grpo.max_num_steps")
    script = args.script or script_of(tree)
    node_gpus = settings.gpus_per_node or tree["cluster"]["gpus_per_node"]
    job = Job(settings, run, args.nodes, node_gpus, steps if isinstance(steps, int) else None, script)
    directory = LaunchDirectory(run)
    directory.check(tree)
    directory.write({"config.yaml": OmegaConf.to_yaml(OmegaConf.create(tree)), **job.files()})
    for note in notes:
        print(f"{note.kind}: {note}")
    if not has_checkpoints:
        print(
            "warning: checkpointing.enabled: false; a job that is preempted or submitted again starts at the first step"
        )
    return _submit(directory, job.sbatch(), args.jobs, args.dry_run)


def _enter_checkout(nemo_rl: str) -> None:
    """Lets configs inherit from the configs of the checkout `nemo_rl`; prints a note if the shell names another one."""
    named = os.environ.get(NEMO_RL_DIR)
    os.environ[NEMO_RL_DIR] = nemo_rl
    if named and os.path.realpath(os.path.expanduser(named)) != os.path.realpath(nemo_rl):
        text = f"{named} here, but nemo_rl of the cluster file is {nemo_rl}; the config and the job use the latter"
        print(f"note: {NEMO_RL_DIR}: {text}")


def _launched_tree(
    path: Path, overrides: list[str], settings: ClusterSettings, num_nodes: int, run: str
) -> dict[str, Any]:
    """Returns the config of the run directory `run`, resolved and complete. Raises ConfigError."""
    for override in overrides:
        flag = _KEYS_OF_FLAGS.get(override.partition("=")[0].lstrip("+"))
        refuse("", (flag, override, f"launch sets it; use {flag}"))
    tree = load_config(path, overrides)
    if runtime_of(tree) != "nemo_rl":
        raise ConfigError(f"runtime: {tree.get('runtime', 'local')!r} is not for a cluster; set runtime=nemo_rl")
    tree["runtime"] = "nemo_rl"
    for name in ("cluster", "checkpointing", "logger"):
        section = tree.setdefault(name, {})
        refuse("", (not isinstance(section, dict), name, f"expected a block of keys, got {section!r}"))
    cluster, checkpointing = tree["cluster"], tree["checkpointing"]
    cluster["gpus_per_node"] = _gpus_per_node(cluster.get("gpus_per_node"), settings.gpus_per_node)
    cluster["num_nodes"] = num_nodes
    checkpointing["checkpoint_dir"] = f"{run}/checkpoints"
    if checkpointing.get("enabled"):
        checkpointing["checkpoint_must_save_by"] = _must_save_by(checkpointing, settings.time)
    tree["logger"]["log_dir"] = f"{run}/logs"
    return tree


def _gpus_per_node(asked: Any, present: int | None) -> int:
    """Returns the GPUs of a node that NeMo-RL takes: the config's number, else the cluster's. Raises ConfigError."""
    value = present if asked is None else asked
    refuse(
        "",
        (value is None, "slurm.gpus_per_node",
         "missing; set it there, or cluster.gpus_per_node, to the GPUs of one node"),
        (not isinstance(value, int) or value < 1, "cluster.gpus_per_node",
         f"{value!r}; set it to the number of GPUs of one node"),
    )  # fmt: skip
    return int(value or 0)


def gpus_beside(block: SpecrolloutConfig | None) -> int:
    """Returns the GPUs that our actors take in addition to the GPUs of `cluster`, on all nodes together."""
    if block is None:
        return 0
    trainer = block.draft_refresh.trainer_gpus if block.draft_refresh else 0
    if block.remote is None or not block.remote.gpus:
        return trainer
    return trainer + math.ceil(block.remote.workers / math.floor(1 / block.remote.gpus))


def _shared_gpus(cluster: Mapping[str, Any], present: int | None, beside: int) -> list[Finding]:
    """Returns a note if NeMo-RL takes only a part of each node, because our actors need `beside` GPUs.

    `ray.sub` wants all GPUs of a node, `present`, for Ray. NeMo-RL then takes as many as `cluster` says. Raises ConfigError
    if the two numbers do not fit.
    """
    taken, nodes = cluster["gpus_per_node"], cluster["num_nodes"]
    actors = "the head's trainer and remote drafters"
    refuse(
        "",
        (beside and present is None, "slurm.gpus_per_node",
         f"missing; NeMo-RL takes {taken} GPUs of a node, and {actors} need {beside} more: set it to the GPUs of one node"),
    )  # fmt: skip
    if present is None or (taken == present and not beside):
        return []
    most = present - math.ceil(beside / nodes)
    fix = f"add cluster.gpus_per_node={most}" if most > 0 else "give more --nodes"
    need = f", of which {actors} need {beside} on {nodes} node{'s' * (nodes > 1)}" if beside else ""
    refuse(
        "",
        (taken > most or not beside, "cluster.gpus_per_node",
         f"{taken}, but slurm.gpus_per_node (GPUS_PER_NODE) is {present}{need}; {fix}"),
    )  # fmt: skip
    others = nodes * (present - taken)
    text = f"NeMo-RL takes {taken} of the {present} GPUs of a node; {actors} take {beside} of the other {others}"
    return [Finding("cluster.gpus_per_node", text, "note")]


def _must_save_by(checkpointing: dict[str, Any], time: str) -> str:
    """Returns the time after which NeMo-RL saves and stops, as DD:HH:MM:SS: the user's own if there is one."""
    limit_s = seconds(time, "slurm.time")
    own = checkpointing.get("checkpoint_must_save_by")
    if own is None:
        minutes, rest = divmod(limit_s - min(_SAVE_MARGIN_S, limit_s // 2), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24:02d}:{hours % 24:02d}:{minutes:02d}:{rest:02d}"
    parts = str(own).split(":")
    is_time = len(parts) == 4 and all(part.isdecimal() for part in parts)
    asked_s = sum(int(part) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True)) if is_time else 0
    refuse(
        "checkpointing",
        (not is_time, "checkpoint_must_save_by", f"{own!r} is not DD:HH:MM:SS; remove it to have it set"),
        (asked_s >= limit_s, "checkpoint_must_save_by",
         f"{own} is not before the time limit {time}; remove it to have it set"),
    )  # fmt: skip
    return str(own)


class LaunchDirectory:
    """Owns `config.yaml`, `env.sh`, `job.sh`, `addon/` and `submissions.jsonl`; NeMo-RL adds checkpoints and logs.

    Invariant: after the first submission, config and code of the run stay the same. Until then they may be written again.
    `addon/` is a copy of this package, so that an edit of the original cannot change a run. Each file is written as a whole.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @property
    def submitted(self) -> bool:
        """Whether a job of this run was submitted, or has left a checkpoint."""
        return (self.path / "submissions.jsonl").is_file() or any(self.path.glob("checkpoints/step_*"))

    def check(self, tree: dict[str, Any]) -> None:
        """Raises ConfigError if a run of the config `tree` cannot start or resume here."""
        existing = next(p for p in (self.path, *self.path.parents) if p.exists())
        is_foreign = existing == self.path and not (self.path / "job.sh").is_file()
        refuse(
            "",
            (not existing.is_dir(), "--run-dir",
             f"{self.path} cannot be a folder: {existing} is a file; choose another"),
            (not os.access(existing, os.W_OK | os.X_OK), "--run-dir",
             f"{self.path} cannot be written to; choose another"),
            (is_foreign and existing.is_dir() and any(existing.iterdir()), "--run-dir",
             f"{self.path} exists and is not the directory of a launched run; choose another"),
        )  # fmt: skip
        if not self.submitted:
            return
        try:
            earlier = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--run-dir: config.yaml of {self.path} cannot be read; choose another") from error
        keys = ", ".join(sorted(differences(earlier, tree) - _MAY_CHANGE)[:4])
        text = f"{self.path} holds a run of another config (it differs in {keys}); choose another"
        refuse("", (keys, "--run-dir", text))

    def write(self, files: Mapping[str, str]) -> None:
        """Writes `files`, texts by name, in their order, and the code unless a submitted job uses it."""
        (self.path / "slurm").mkdir(parents=True, exist_ok=True)
        if not (self.submitted and (self.path / "addon").is_dir()):
            copy_code(self.path / "addon")
        for name, text in files.items():
            write_atomically(self.path / name, text)


def _submit(directory: LaunchDirectory, command: list[str], num_jobs: int, dry_run: bool) -> int:
    print(f"{'resumes' if directory.submitted else 'run'}: {directory.path}")
    if dry_run:
        print("\n".join([shlex.join(command)] * num_jobs))
        return 0
    for _ in range(num_jobs):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(f"sbatch refused {shlex.join(command)}: {' '.join(done.stderr.split())}")
        job_id = done.stdout.strip().split(";")[0]
        record = {"job_id": job_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
        with (directory.path / "submissions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"submitted job {job_id}; its driver writes {directory.path}/slurm/{job_id}-logs/ray-driver.log")
    return 0
