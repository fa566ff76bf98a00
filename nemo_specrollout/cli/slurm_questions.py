# SPDX-License-Identifier: Apache-2.0
"""Asks Slurm whether a partition can ever run a job, before `launch` writes or submits anything.

`sbatch` accepts some jobs that can never start, for example a job with more nodes than the partition has. Such a job waits for
ever. Other faults, such as a wrong number of GPUs or a missing PMIx, end a job only when it has got its nodes, which may be
days later.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.cli.slurm import (
    ClusterSettings,
    options_of_another_cluster,
    question_environment,
    seconds,
    submission_environment,
)
from nemo_specrollout.cli.submission import lacks_an_answer
from nemo_specrollout.config.nemo_rl_tree import Finding
from nemo_specrollout.config.strict import ConfigError

_FACTS = "%D|%l|%s|%G"
"""Output format for `sinfo`: the number of nodes, the time limit, the nodes that a job may have, and the generic resources."""
_GPUS = re.compile(r"\bgpu:(?:[^:,()]+:)?(\d+)")
"""Pattern for the number of GPUs in a list of generic resources, such as gpu:8, gpu:h100:8(S:0-1) or nic:2,gpu:4."""
_ASKED_MPI = re.compile(r"--mpi=(\w+)")
"""Pattern for the kind of MPI in an option of `srun`."""
_PRESENT_MPI = re.compile(r"^\s+(\w+)$", re.MULTILINE)
"""Pattern for a kind of MPI in the output of `srun --mpi=list`. The output has a headline, and below it a kind on each
line."""


@dataclass(frozen=True)
class Partition:
    """The sizes and limits of a partition, as Slurm's `sinfo` tells them."""

    num_nodes: int
    """Number of nodes of the partition, including nodes that are down."""
    time_limit: str | None
    """Maximum time of a job in Slurm's form, such as 4:00:00, or None if there is no limit."""
    most_nodes: int | None
    """Maximum number of nodes of a job, or None if there is no limit."""
    gpus: frozenset[int]
    """The different numbers of GPUs that nodes of the partition have. Empty if Slurm does not manage GPUs there."""


def ask(
    settings: ClusterSettings, command: Sequence[str], script: str, num_nodes: int, gpus: int, is_dry: bool
) -> list[Finding]:
    """Asks Slurm about a job without submitting it, and returns warnings if the job may wait for a long time or may fail.

    The result is empty if this machine has no Slurm, which may happen in a dry run. Partitions of another cluster
    (`--clusters`) are not looked at. Raises ConfigError if the job can never run, or if Slurm does not answer. But in a dry
    run, it returns a warning if Slurm does not answer.

    Args:
        settings: the settings of the cluster.
        command: the `sbatch` command that would submit the job. Its last word is the path of the job's script.
        script: the text of the job's script.
        num_nodes: number of nodes of the job.
        gpus: number of GPUs that each node should have.
        is_dry: whether this is a dry run.
    """
    if shutil.which("sbatch") is None:
        return []
    complaint = _complaint(command, script)
    if lacks_an_answer(complaint):
        if not is_dry:
            text = f"Slurm does not answer, so nothing was written or submitted: {complaint}"
            raise ConfigError(f"{text}; launch again when `sinfo` answers")
        return [Finding("slurm", f"does not answer, so the partition was not looked at: {complaint}", "warning")]
    if _is_final(complaint):
        raise ConfigError(f"sbatch would refuse the job: {complaint}")
    partition = None if options_of_another_cluster(settings) else read_partition(settings.partition)
    found = [] if partition is None else list(_judge(partition, settings, num_nodes, gpus, complaint))
    if complaint:
        text = f"{settings.partition}; `sbatch --test-only` says: {complaint}"
        end = (
            "a job waits for nodes that are down or drained"
            if "node" in complaint.lower()
            else "sbatch may refuse the job"
        )
        found.append(Finding("slurm.partition", f"{text}; {end}", "warning"))
    return [*found, *_missing_mpi(settings)]


def _is_final(complaint: str) -> bool:
    """Tells whether a complaint of `sbatch --test-only` means that Slurm will never accept the job.

    Slurm will never accept a job with an invalid value or an option that it does not know. But a complaint with the words
    "allocation failure" may be about nodes that will be free later.
    """
    return "invalid" in complaint.lower() or ("sbatch: " in complaint and "allocation failure" not in complaint)


def _complaint(command: Sequence[str], script: str) -> str:
    """Returns what `sbatch --test-only` complains about a job, or "" if Slurm would accept it now. Nothing is submitted."""
    options = list(command[1:-1])
    done = subprocess.run(
        ["sbatch", "--test-only", *options],
        input=script.encode(),
        capture_output=True,
        env=submission_environment(),
        check=False,
    )
    return "" if done.returncode == 0 else " ".join(done.stderr.decode("utf-8", "replace").split())


def _missing_mpi(settings: ClusterSettings) -> Iterator[Finding]:
    """Yields a warning if NeMo-RL's `ray.sub` uses a kind of MPI that this machine's Slurm does not have, such as PMIx."""
    if shutil.which("srun") is None:
        return
    asked = set(_ASKED_MPI.findall(Path(settings.nemo_rl, "ray.sub").read_text(encoding="utf-8", errors="replace")))
    if not asked:
        return
    done = subprocess.run(["srun", "--mpi=list"], capture_output=True, env=question_environment(), check=False)
    present = _PRESENT_MPI.findall(done.stdout.decode("utf-8", "replace"))
    if present and (missing := sorted(asked.difference(present))):
        text = f"its ray.sub runs `srun --mpi={missing[0]}`, but `srun --mpi=list` names only {', '.join(present)} here"
        fix = "if the nodes have no more, each job ends as soon as it starts; ask the site for Slurm's PMIx plugin"
        yield Finding("slurm.nemo_rl", f"{text}; {fix}", "warning")


def read_partition(name: str) -> Partition | None:
    """Returns the sizes and limits of a partition, or None if Slurm does not tell them or `name` is a list of partitions."""
    if shutil.which("sinfo") is None or "," in name:
        return None
    command = ["sinfo", "--noheader", f"--partition={name}", f"--format={_FACTS}"]
    done = subprocess.run(command, capture_output=True, env=question_environment(), check=False)
    return partition_of(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else None


def partition_of(said: str) -> Partition | None:
    """Returns the sizes and limits of a partition from the output of `sinfo` in the format `_FACTS`.

    The output has a line for each kind of nodes. Returns None if it has no such line.
    """
    lines = [line.strip().split("|") for line in said.splitlines()]
    rows = [line for line in lines if len(line) == 4 and line[0].isdecimal()]
    if not rows:
        return None
    _, time_limit, sizes, _ = rows[0]
    most = sizes.partition("-")[2]
    return Partition(
        num_nodes=sum(int(row[0]) for row in rows),
        time_limit=time_limit if time_limit[:1].isdecimal() else None,
        most_nodes=int(most) if most.isdecimal() else None,
        gpus=frozenset(int(count) for row in rows for count in _GPUS.findall(row[3])),
    )


def _judge(
    partition: Partition, settings: ClusterSettings, num_nodes: int, gpus: int, complaint: str
) -> Iterator[Finding]:
    name = settings.partition
    if num_nodes > partition.num_nodes:
        said = f" (sbatch says: {complaint})" if complaint else ""
        text = f"{num_nodes}, but partition {name} has {partition.num_nodes}, so the job would wait for ever{said}"
        raise ConfigError(f"--nodes: {text}; give fewer, or name another partition")
    if partition.gpus and gpus not in partition.gpus:
        present = " or ".join(map(str, sorted(partition.gpus)))
        text = (
            f"{gpus}, but nodes of partition {name} have {present} by Slurm's account, so NeMo-RL's ray.sub would end"
        )
        raise ConfigError(f"slurm.gpus_per_node: {text}; write all GPUs of a node, or name another partition")
    if not partition.gpus:
        text = f"{name}; Slurm counts no GPUs there, so see that its nodes have {gpus} each"
        yield Finding("slurm.partition", text, "warning")
    if partition.most_nodes is not None and num_nodes > partition.most_nodes:
        text = f"{num_nodes}, but a job of partition {name} may have {partition.most_nodes}, unless a QOS allows more"
        yield Finding("--nodes", f"{text}; else the job waits for ever", "warning")
    limit = partition.time_limit
    if limit is not None and seconds(settings.time, "slurm.time") > seconds(limit, "slurm.partition"):
        text = f"{settings.time}, but a job of partition {name} may take {limit}, unless a QOS allows more"
        yield Finding("slurm.time", f"{text}; else the job waits for ever", "warning")
