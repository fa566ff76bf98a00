# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: a run on a Slurm cluster, by NeMo-RL's own `ray.sub`. Torch is not loaded."""

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from nemo_specrollout.cli.launch_config import launched_config
from nemo_specrollout.cli.launch_directory import LaunchDirectory
from nemo_specrollout.cli.slurm_script import Job
from nemo_specrollout.cli.slurm_settings import absolute, check_mountable, read_settings
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl
from nemo_specrollout.config.nemo_rl_scripts import script_of
from nemo_specrollout.config.strict import ConfigError

_FLAGS = {
    "account": "Slurm account",
    "partition": "Slurm partition",
    "time": "time limit of one job, e.g. 4:00:00",
    "container": "NeMo-RL's container: image or .sqsh file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command; the caller that makes the parser adds CONFIG and key=value."""
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes; sets cluster.num_nodes")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="on a disk that all nodes see; default: results/NAME_OF_CONFIG"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="K", help="jobs, one after another, for a run longer than one"
    )
    parser.add_argument("--dry-run", action="store_true", help="write the run directory and print the sbatch line")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="settings as in slurm/cluster.example.yaml")
    parser.add_argument(
        "--script", metavar="FILE", help="NeMo-RL's script, from its checkout; else the one that CONFIG fits"
    )
    for name, text in _FLAGS.items():
        parser.add_argument(
            f"--{name}", metavar=name.upper(), help=f"{text}; else of the file, else of the environment"
        )


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs; 0 if Slurm took all. Raises ConfigError."""
    _check_counts(args)
    settings = read_settings(args.cluster, {name: getattr(args, name) for name in _FLAGS})
    run = absolute(args.run_dir or Path("results", args.config.stem))
    check_mountable(run, "--run-dir")
    os.environ[NEMO_RL_DIR] = settings.nemo_rl  # configs inherit NeMo-RL's own by it
    config = launched_config(args.config, args.overrides, settings, args.nodes, run)
    tree = yaml.safe_load(config)
    findings = prepare_nemo_rl(tree)
    _check_resumes(tree, args.jobs)
    script = args.script or script_of(tree)
    directory = LaunchDirectory(run)
    directory.check(config)
    job = Job(settings, run, args.nodes, tree["cluster"]["gpus_per_node"], _max_num_steps(tree), script)
    directory.write({"config.yaml": config, **job.files()})
    for finding in findings:
        print(f"{finding.kind}: {finding}")
    if not tree["checkpointing"].get("enabled"):
        print(
            "warning: checkpointing.enabled: false; a job that is preempted or submitted again starts at the first step"
        )
    return _submit(directory, job, args.jobs, args.dry_run)


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("nodes", "jobs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}: {getattr(args, name)} is out of range; it must be at least 1")
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on this machine; launch from the cluster's login node, or look with --dry-run")


def _check_resumes(tree: dict[str, Any], num_jobs: int) -> None:
    if num_jobs > 1 and not tree["checkpointing"].get("enabled"):
        raise ConfigError(f"--jobs: {num_jobs} jobs need checkpoints to go on from; set checkpointing.enabled=true")


def _max_num_steps(tree: dict[str, Any]) -> int | None:
    grpo = tree.get("grpo")
    steps = grpo.get("max_num_steps") if isinstance(grpo, dict) else None
    return steps if isinstance(steps, int) else None


def _submit(directory: LaunchDirectory, job: Job, num_jobs: int, dry_run: bool) -> int:
    command = job.sbatch()
    print(f"{'goes on' if directory.submitted else 'run'}: {directory.path}")
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
