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

from nemo_specrollout.cli import slurm, slurm_questions
from nemo_specrollout.cli.launch_config import launched_config, written_config
from nemo_specrollout.cli.run_length import LENGTH_KEYS, MUST_SAVE_BY, length_of
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_tree import Finding
from nemo_specrollout.config.strict import ConfigError, differences, raise_first_mistake
from nemo_specrollout.nemo_rl.code_folder import copy_code
from nemo_specrollout.storage.files import write_atomically

_MAY_CHANGE = LENGTH_KEYS | {MUST_SAVE_BY}
"""Keys that may differ when a run is resumed: its length, and the end of each job."""


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs; returns 0 if Slurm took all. Raises ConfigError.

    NeMo-RL adds checkpoints and logs. After the first submission, config and code stay the same.
    """
    counts = (("--nodes", args.nodes, 1), ("--extra-nodes", args.extra_nodes, 0), ("--jobs", args.jobs, 1))
    for name, count, least in counts:
        raise_first_mistake("", (count < least, name, f"{count} is out of range; it must be at least {least}"))
    if not args.dry_run and shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on this machine; launch from the cluster's login node, or look with --dry-run")
    settings = slurm.read_settings(args.cluster, {name: getattr(args, name) for name in slurm.CLUSTER_FLAGS})
    run = slurm.absolute(args.run_dir or Path("results", args.config.stem))
    slurm.check_folder(run, "--run-dir")
    _enter_checkout(settings.nemo_rl)
    config = launched_config(args.config, args.overrides, settings, args.nodes, run)
    tree = config.tree
    block, notes = prepare_nemo_rl(tree)
    notes += [*config.findings, *_container(settings, args.dry_run), *_withheld()]
    notes += _shared_gpus(tree["cluster"], settings.gpus_per_node, gpus_beside(block), args.extra_nodes)
    notes += _checkpoints(tree, args.jobs)
    script = args.script or script_of(tree)
    node_gpus = settings.gpus_per_node or tree["cluster"]["gpus_per_node"]
    _check_directory(Path(run), tree, settings)
    num_nodes = args.nodes + args.extra_nodes
    command = slurm.sbatch_command(settings, run, num_nodes)
    job = slurm.job_script(settings, run, node_gpus, length_of(tree), script)
    notes += slurm_questions.ask(settings, command, job, num_nodes, node_gpus)
    _write(Path(run), config.written, job)
    for note in notes:
        print(f"{note.kind}: {note}")
    print(f"{'resumes' if _was_submitted(Path(run)) else 'run'}: {run}")
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


def _container(settings: slurm.ClusterSettings, is_dry: bool) -> list[Finding]:
    """Returns a note if a dry run here does not see the container's file. Raises ConfigError in a real launch."""
    file = settings.container
    if not file.startswith("/") or os.path.isfile(file):
        return []
    if not is_dry:
        raise ConfigError(f"slurm.container: {file} does not exist; name an image or a .sqsh file")
    return [Finding("slurm.container", f"{file} does not exist on this machine; the job needs it", "note")]


def _withheld() -> list[Finding]:
    """Returns a note about variables of this shell that the job does not get."""
    names = slurm.withheld_variables()
    text = "of this shell is not handed to the job; write what the job needs into `environment` or `sbatch_args`"
    return [Finding(", ".join(names), text, "note")] if names else []


def _checkpoints(tree: Mapping[str, Any], num_jobs: int) -> list[Finding]:
    """Returns a warning if the run has no checkpoints. Raises ConfigError if its jobs need them."""
    if tree["checkpointing"].get("enabled"):
        return []
    if num_jobs > 1:
        raise ConfigError(f"--jobs: {num_jobs} jobs need checkpoints to resume from; set checkpointing.enabled=true")
    text = "false; a job that is preempted or submitted again starts at the first step"
    return [Finding("checkpointing.enabled", text, "warning")]


def gpus_beside(block: SpecrolloutConfig | None) -> int:
    """Returns the GPUs that our actors take in addition to the GPUs of `cluster`, on all nodes together."""
    if block is None:
        return 0
    trainer = block.draft_refresh.trainer_gpus if block.draft_refresh else 0
    if block.remote is None or not block.remote.gpus:
        return trainer
    return trainer + math.ceil(block.remote.workers / math.floor(1 / block.remote.gpus))


def _shared_gpus(cluster: Mapping[str, Any], present: int | None, beside: int, extra_nodes: int) -> list[Finding]:
    """Returns a note about the GPUs that NeMo-RL leaves to our actors, which need `beside`. A node has `present`.

    Raises ConfigError if the numbers do not fit: `ray.sub` wants all GPUs of a node for Ray.
    """
    taken = cluster["gpus_per_node"]
    nodes = cluster["num_nodes"]
    actors = "the head's trainer and remote drafters"
    if extra_nodes:
        return _extra_nodes(taken, present or taken, nodes, beside, extra_nodes)
    if present is None and beside:
        text = f"missing; NeMo-RL takes {taken} GPUs of a node, and {actors} need {beside} more"
        fix = "set it to the GPUs of one node, or give them nodes of their own with --extra-nodes"
        raise ConfigError(f"slurm.gpus_per_node: {text}: {fix}")
    if present is None or (taken == present and not beside):
        return []
    most = present - math.ceil(beside / nodes)
    fix = f"add cluster.gpus_per_node={most}" if most > 0 else "give more --nodes"
    if beside:
        fix += f", or --extra-nodes {math.ceil(beside / present)}"
    need = f", of which {actors} need {beside} on {nodes} node{'s' * (nodes > 1)}" if beside else ""
    if taken > most or not beside:
        text = f"{taken}, but slurm.gpus_per_node (GPUS_PER_NODE) is {present}{need}"
        raise ConfigError(f"cluster.gpus_per_node: {text}; {fix}")
    others = nodes * (present - taken)
    text = f"NeMo-RL takes {taken} of the {present} GPUs of a node; {actors} take {beside} of the other {others}"
    return [Finding("cluster.gpus_per_node", text, "note")]


def _extra_nodes(taken: int, present: int, nodes: int, beside: int, extra_nodes: int) -> list[Finding]:
    """Returns a note about nodes that NeMo-RL does not count, for our actors. Raises ConfigError if the numbers do not fit."""
    if taken > present:
        text = f"{taken}, but slurm.gpus_per_node (GPUS_PER_NODE) is {present}"
        raise ConfigError(f"cluster.gpus_per_node: {text}; add cluster.gpus_per_node={present}")
    others = nodes * (present - taken) + extra_nodes * present
    needed = math.ceil(max(0, beside - nodes * (present - taken)) / present)
    if extra_nodes != needed:
        text = f"{extra_nodes}, but the head's trainer and remote drafters need {beside} GPUs, of {present} on a node"
        fix = f"give {needed}" if needed else "leave it out"
        raise ConfigError(f"--extra-nodes: {text}; {fix}")
    text = f"{extra_nodes}; the head's trainer and remote drafters take {beside} of {others} GPUs that NeMo-RL leaves"
    return [Finding("--extra-nodes", text, "note")]


def _was_submitted(run: Path) -> bool:
    """Returns whether a job of this run was submitted, or has left a checkpoint."""
    return (run / "submissions.jsonl").is_file() or any(run.glob("checkpoints/step_*"))


def _check_directory(run: Path, tree: dict[str, Any], settings: slurm.ClusterSettings) -> None:
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
        earlier = written_config(run, settings)
    except ConfigError as error:
        raise ConfigError(f"--run-dir: config.yaml of {run} cannot be read; choose another") from error
    keys = ", ".join(sorted(differences(earlier, tree) - _MAY_CHANGE)[:4])
    text = f"{run} holds a run of another config (it differs in {keys}); choose another"
    raise_first_mistake("", (keys, "--run-dir", text))


def _write(run: Path, config: str, script: str) -> None:
    """Writes config and job script, and a copy of this package unless a submitted job uses it.

    If it fails, as on a full disk, nothing of a new run is left behind.
    """
    is_new = not (run / "job.sh").is_file()
    made = next((folder for folder in (*reversed(run.parents), run) if not folder.exists()), None)
    try:
        (run / "slurm").mkdir(parents=True, exist_ok=True)
        if not (_was_submitted(run) and (run / "addon").is_dir()):
            copy_code(run / "addon")
        write_atomically(run / "config.yaml", config)
        write_atomically(run / "job.sh", script)
    except BaseException:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        elif is_new:
            _clear(run)
        raise


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _submit(run: Path, command: list[str]) -> str:
    """Submits a job; returns its id. Raises ConfigError with Slurm's own words if it refuses."""
    done = subprocess.run(command, capture_output=True, env=slurm.submission_environment(), check=False)
    said, complaint = (" ".join(text.decode("utf-8", "replace").split()) for text in (done.stdout, done.stderr))
    if done.returncode != 0:
        raise ConfigError(f"sbatch refused {shlex.join(command)}: {complaint}")
    job_id = _job_id(done.stdout)
    if job_id is None:
        text = f"sbatch named no job, but said {said!r} {complaint!r}"
        raise ConfigError(f"{text}; look with `squeue --me` whether it took the job, and with --dry-run at the command")
    record = {"job_id": job_id, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
    try:
        with (run / "submissions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        text = f"{error.strerror}, so job {job_id}, which was submitted, is not recorded there"
        raise OSError(error.errno, text, str(run / "submissions.jsonl")) from error
    return job_id


def _job_id(output: bytes) -> str | None:
    """Returns the id in the last line that has one, `ID` or `ID;CLUSTER`: a site's sbatch may greet the user first."""
    lines = output.decode("utf-8", "replace").splitlines()
    found = (re.fullmatch(r"(\d+)(;\S*)?", line.strip()) for line in reversed(lines))
    return next((match[1] for match in found if match), None)
