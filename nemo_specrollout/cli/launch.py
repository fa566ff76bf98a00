# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: checks a config and submits Slurm jobs that run it with NeMo-RL's own `ray.sub`.

It does not import torch, which a login node may lack.
"""

import argparse
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemo_specrollout.cli import slurm, slurm_questions, submission
from nemo_specrollout.cli.launch_config import launched_config, written_config
from nemo_specrollout.cli.run_length import MAY_CHANGE
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_config import prepare_nemo_rl, script_of
from nemo_specrollout.config.nemo_rl_tree import Finding
from nemo_specrollout.config.strict import ConfigError, differences, raise_first_mistake
from nemo_specrollout.nemo_rl.code_folder import copy_code
from nemo_specrollout.reports.jobs import SUBMISSIONS
from nemo_specrollout.storage.files import LOCK, lock_folder, write_atomically


def launch(args: argparse.Namespace) -> int:
    """Writes the run directory and submits `args.jobs` jobs that continue the run one after another. Returns 0.

    The run directory has the config, the job's script and a copy of this package. NeMo-RL adds checkpoints and logs to it. If
    a job of this run was submitted before, the copy stays as it is, and the new config may differ from the old one only in the
    run's length and in the end of each job (`MAY_CHANGE`). Raises ConfigError if the run cannot be launched, or if Slurm does
    not accept a job.
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
    job = slurm.job_script(settings, run, node_gpus, tree, script)
    notes += slurm_questions.ask(settings, command, job, num_nodes, node_gpus, args.dry_run)
    with _claimed(Path(run)):
        _check_directory(Path(run), tree, settings)  # again, because another launch may have written in the meantime
        known = None if args.dry_run else submission.jobs_of(run, settings)
        submission.refuse_jobs_of_others(run, known or ())
        _write(Path(run), config.written, job)
        for note in notes:
            print(f"{note.kind}: {note}")
        print(f"{'resumes' if _was_submitted(Path(run)) else 'run'}: {run}")
        if args.dry_run:
            print("\n".join([shlex.join(command)] * args.jobs))
        else:
            ids = None if known is None else [known_job.job_id for known_job in known]
            _submit_all(Path(run), command, settings, args.jobs, ids)
    return 0


def _submit_all(
    run: Path, command: list[str], settings: slurm.ClusterSettings, jobs: int, known: list[str] | None
) -> None:
    """Submits `jobs` jobs of a run. `known` are the ids of its earlier jobs, or None if Slurm did not tell them.

    Raises ConfigError if Slurm does not accept a job.
    """
    for number in range(jobs):
        try:
            job_id = submission.submit(run, command, settings, known)
        except ConfigError as error:
            if number == 0:
                raise
            text = f"{number} of {jobs} jobs {'was' if number == 1 else 'were'} submitted"
            raise ConfigError(f"{text}, and then: {error}; --jobs={jobs - number} adds the others later") from error
        if known is not None:
            known = [*known, job_id]
        print(f"submitted job {job_id}; its driver writes {run}/slurm/{job_id}-logs/ray-driver.log")


def _enter_checkout(nemo_rl: str) -> None:
    """Sets NEMO_RL_DIR to the checkout `nemo_rl`, from whose configs a config can inherit.

    Prints a note if NEMO_RL_DIR named another checkout.
    """
    named = os.environ.get(NEMO_RL_DIR)
    os.environ[NEMO_RL_DIR] = nemo_rl
    if named and os.path.realpath(os.path.expanduser(named)) != os.path.realpath(nemo_rl):
        text = f"{named} here, but nemo_rl of the cluster file is {nemo_rl}; the config and the job use the latter"
        print(f"note: {NEMO_RL_DIR}: {text}")


def _container(settings: slurm.ClusterSettings, is_dry: bool) -> list[Finding]:
    """Checks that the container's file exists, if the container is a path and not the name of an image.

    If the file is missing, a dry run (`is_dry`) returns a note about it, and a real launch raises ConfigError.
    """
    file = settings.container
    if not file.startswith("/") or os.path.isfile(file):
        return []
    if not is_dry:
        raise ConfigError(f"slurm.container: {file} does not exist; name an image or a .sqsh file")
    return [Finding("slurm.container", f"{file} does not exist on this machine; the job needs it", "note")]


def _withheld() -> list[Finding]:
    """Returns a note if this shell has variables that the job will not get, although the user may expect that it gets them."""
    names = slurm.withheld_variables()
    text = "of this shell is not handed to the job; write what the job needs into `environment` or `sbatch_args`"
    return [Finding(", ".join(names), text, "note")] if names else []


def _checkpoints(tree: Mapping[str, Any], num_jobs: int) -> list[Finding]:
    """Returns a warning if the config `tree` writes no checkpoints. Raises ConfigError if several jobs would need them."""
    if tree["checkpointing"].get("enabled"):
        return []
    if num_jobs > 1:
        raise ConfigError(f"--jobs: {num_jobs} jobs need checkpoints to resume from; set checkpointing.enabled=true")
    text = "false; a job that is preempted or submitted again starts at the first step"
    return [Finding("checkpointing.enabled", text, "warning")]


def gpus_beside(block: SpecrolloutConfig | None) -> int:
    """Returns how many GPUs the run needs beside those that the config gives to NeMo-RL, on all nodes together.

    They are for this package's own actors, which are the trainer of the draft head and the remote drafters.
    """
    if block is None:
        return 0
    trainer = block.draft_refresh.trainer_gpus if block.draft_refresh else 0
    if block.remote is None or not block.remote.gpus:
        return trainer
    return trainer + math.ceil(block.remote.workers / math.floor(1 / block.remote.gpus))


def _shared_gpus(cluster: Mapping[str, Any], present: int | None, beside: int, extra_nodes: int) -> list[Finding]:
    """Checks the numbers of GPUs, and returns a note if NeMo-RL leaves some GPUs to this package's own actors.

    `ray.sub` gives all GPUs of a node to Ray. So NeMo-RL and the package's actors have to share them. Raises ConfigError if
    their numbers of GPUs do not add up.

    Args:
        cluster: the config's section `cluster`, which says how many GPUs NeMo-RL takes.
        present: number of GPUs that a node has, or None if it is not known.
        beside: number of GPUs that this package's actors need, on all nodes together.
        extra_nodes: number of nodes that the user has added for these actors.
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
    """Checks the number of nodes that are only for this package's own actors, and returns a note about them.

    Raises ConfigError if the numbers do not fit.

    Args:
        taken: number of GPUs that NeMo-RL takes on each of its nodes.
        present: number of GPUs that a node has.
        nodes: number of NeMo-RL's nodes.
        beside: number of GPUs that this package's actors need, on all nodes together.
        extra_nodes: number of nodes that the user has added for these actors.
    """
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
    """Tells whether a job of this run was ever submitted. If the run directory has a checkpoint, the result is True too."""
    return (run / SUBMISSIONS).is_file() or any(run.glob("checkpoints/step_*"))


def _check_directory(run: Path, tree: dict[str, Any], settings: slurm.ClusterSettings) -> None:
    """Raises ConfigError if the folder `run` cannot be the run directory of the config `tree`, or already has another run."""
    existing = next(p for p in (run, *run.parents) if p.exists())
    is_unknown = existing == run and existing.is_dir() and not (run / "job.sh").is_file()
    is_unknown = is_unknown and any(path.name != LOCK for path in existing.iterdir())
    for is_made, text in (
        (not existing.is_dir(), f"cannot be a folder: {existing} is a file"),
        (not os.access(existing, os.W_OK | os.X_OK), "cannot be written to"),
        (is_unknown, "exists and is not the directory of a launched run"),
    ):
        raise_first_mistake("", (is_made, "--run-dir", f"{run} {text}; choose another"))
    if not _was_submitted(run):
        return
    _check_owner(run)
    try:
        earlier = written_config(run, settings)
    except ConfigError as error:
        raise ConfigError(f"--run-dir: config.yaml of {run} cannot be read; choose another") from error
    keys = ", ".join(sorted(differences(earlier, tree) - MAY_CHANGE)[:4])
    text = f"{run} holds a run of another config (it differs in {keys}); choose another"
    raise_first_mistake("", (keys, "--run-dir", text))


def _check_owner(run: Path) -> None:
    """Raises ConfigError if a job has to write a file of the run directory, but this user may not write it."""
    for name in (SUBMISSIONS, LOCK, "slurm", "slurm/newest_start", "checkpoints", "logs"):
        path = run / name
        is_closed = path.exists() and not os.access(path, os.W_OK)
        fix = f"let its owner run `chmod -R g+w {run}`, or choose another"
        raise_first_mistake("", (is_closed, "--run-dir", f"{path} cannot be written to; {fix}"))


@contextmanager
def _claimed(run: Path) -> Iterator[None]:
    """Context in which the run directory exists and is locked, so that no other `launch` writes into it at the same time.

    If the launch fails before it has written anything, the folders that were made for it are removed. Raises ConfigError if
    another launch has the lock.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(run)
        except BlockingIOError as error:
            raise ConfigError(f"--run-dir: another launch works in {run}; wait until it has ended") from error
        with lock:
            yield
    except BaseException:
        if not (run / "job.sh").exists() and run in made:
            (run / LOCK).unlink(missing_ok=True)
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _write(run: Path, config: str, script: str) -> None:
    """Writes the config, the job's script and a copy of this package into the run directory.

    The copy of an earlier launch is kept if a job that uses it was submitted. If a write fails, for example because the disk
    is full, all files of a new run are removed.
    """
    is_new = not (run / "job.sh").is_file()
    try:
        (run / "slurm").mkdir(exist_ok=True)
        if not (_was_submitted(run) and (run / "addon").is_dir()):
            copy_code(run / "addon")
        write_atomically(run / "config.yaml", config)
        write_atomically(run / "job.sh", script)
    except BaseException:
        if is_new:
            _clear(run)
        raise


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
