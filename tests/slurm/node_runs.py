# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's GRPO on the nodes of `real_slurm.py`, launched as docs/get-started/slurm.md says, by NeMo-RL's own `ray.sub`.

Each run has a Slurm of its own, and a reference: the same settings on this machine without Slurm and without drafts. The
machine must be quiet, because Ray gives up if it does not start in 30 s.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from nemo_rl_host import ROOT, VARIABLES, Host, Run
from real_slurm import ENDED, HERE, RealSlurm, slurm_in_a_temporary_folder

CONFIG = HERE / "grpo_on_nodes.yaml"
GPUS = 1
"""GPUs of a node."""
_OF_THIS_MACHINE = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "NEMO_RL_CPU_LOGICAL_GPUS")


def reason_against_pmix() -> str | None:
    """Returns why `srun --mpi=pmix` of NeMo-RL's `ray.sub` cannot work on this machine; None if it can."""
    if any(Path("/usr/lib").glob("*/pmix*/lib/libpmix.so")):
        return None
    return "no PMIx on this machine, which NeMo-RL's ray.sub asks srun for; install Debian's package libpmix-dev"


class Launched:
    """A run on a cluster while it goes on: what a user at the login node can do to it, and what happens to its nodes."""

    def __init__(self, slurm: RealSlurm, host: Host, folder: Path, plan: "NodeRun") -> None:
        self.slurm, self.host, self.folder, self.plan = slurm, host, folder, plan
        self.run = slurm.small_disk / "run" if plan.is_on_a_small_disk else folder / "run"
        self.jobs: list[str] = []
        self.ends: dict[str, tuple[str, str]] = {}
        """State and number of requeues of each job that has ended. Slurm itself forgets a job after five minutes."""

    def launch(self, *more: str) -> str:
        """Submits the run by the user's command; returns the id of the last job."""
        command = [
            sys.executable, "-B", "-m", "nemo_specrollout", "launch", str(CONFIG), f"--nodes={self.plan.nodes}",
            f"--extra-nodes={self.plan.extra_nodes}", f"--cluster={self.folder}/cluster.yaml", f"--run-dir={self.run}",
            *self.plan.overrides, *more,
        ]  # fmt: skip
        variables = {**self.host.environment, "PYTHONPATH": str(ROOT), **self.plan.shell}
        variables["NEMO_RL_DIR"] = self.host.environment["NEMO_RL_SRC"]
        done = self.slurm.command(command, variables)
        print(done.stdout, done.stderr, flush=True)
        assert done.returncode == 0, done.stderr
        self.jobs += re.findall(r"submitted job (\d+);", done.stdout)
        return self.jobs[-1] if self.jobs else ""  # none after a dry run

    def wait_for_step(self, step: int) -> None:
        """Waits until the checkpoint of a step is there. Fails if the jobs end before."""
        while self.slurm.command(["test", "-d", f"{self.run}/checkpoints/step_{step}"]).returncode != 0:
            assert any(self.slurm.job(job)["JobState"] not in ENDED for job in self.jobs), self.log
            time.sleep(0.5)

    def wait_for_end(self, job: str) -> None:
        """Waits until a job has ended."""
        record = self.slurm.wait_for_state(job, *ENDED)
        self.ends[job] = (record["JobState"], record["Restarts"])

    def hosts(self, job: str) -> list[str]:
        """Returns the nodes of a job, the one with Ray's head first."""
        nodes = self.slurm.job(job)["NodeList"]
        return self.slurm.command(["scontrol", "show", "hostnames", nodes]).stdout.split()

    def start_again_now(self, job: str) -> None:
        """Ends the two minutes for which Slurm lets a requeued job wait."""
        self.slurm.wait_for_state(job, "PENDING")
        self.scontrol("update", f"JobId={job}", "StartTime=now")

    def scontrol(self, *arguments: str) -> None:
        done = self.slurm.command(["scontrol", *arguments])
        assert done.returncode == 0, done.stderr

    @property
    def log(self) -> str:
        """The last lines of the drivers."""
        return self.slurm.command(["bash", "-c", f"tail -c 3000 {self.run}/slurm/*-logs/ray-driver.log"]).stdout


def let_it_run(run: Launched) -> None:
    """Launches the run and does nothing to it."""
    run.wait_for_end(run.launch())


@dataclass(frozen=True)
class NodeRun:
    """A run on nodes, and what happens to it."""

    nodes: int
    reference: str
    """Name in `REFERENCES` of the run with the same rows."""
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the cluster file."""
    shell: Mapping[str, str] = field(default_factory=dict)
    """Variables of the shell at the login node."""
    happens: Callable[[Launched], None] = let_it_run
    extra_nodes: int = 0
    """Nodes of the job beside NeMo-RL's."""
    spare_nodes: int = 0
    """Nodes of the cluster that the job does not have."""
    is_on_a_small_disk: bool = False
    """True for a run directory on a disk of 100 MiB."""


def write_cluster_file(file: Path, host: Host, plan: NodeRun) -> None:
    """Writes a cluster file whose "container" is the environment of the tests with NeMo-RL."""
    binaries = Path(host.environment["NEMO_RL_PYTHON"]).parent
    environment = {name: value for name, value in host.environment.items() if name not in _OF_THIS_MACHINE}
    environment.update(
        PATH=f"{HERE}/container:{binaries}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        PYTHONPATH=host.environment["PYTHONPATH"],
        NEMO_RL_CPU_JOINS_RAY="1",
        NEMO_RL_CPU_WEIGHTS=str(file.parent / "weights.jsonl"),
        NEMO_RL_CPU_KEPT_WEIGHTS=str(file.parent / "weights"),
        RAY_OF_THE_CONTAINER=f"{binaries}/ray",
        RAY_AUTH_MODE="disabled",  # newer versions of Ray want a token that these nodes do not share
        RAY_memory_monitor_refresh_ms="0",
        RAY_worker_niceness="0",
        GLOO_SOCKET_IFNAME="eth0",
        **plan.environment,
    )
    settings = {
        "account": "acc", "partition": "batch", "time": "0:40:00", "container": "cpu-nodes",
        "gpus_per_node": str(GPUS), "nemo_rl": host.environment["NEMO_RL_SRC"],
        "sbatch_args": [f"--gres=gpu:{GPUS}"], "environment": environment,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(settings))


def run_on_nodes(host: Host, folder: Path, plan: NodeRun) -> None:
    """Makes a run below `folder`, and writes into `result.json` there how its jobs ended and what they left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_cluster_file(folder / "cluster.yaml", host, plan)
    sources = [Path(host.environment[name]).resolve() for name in VARIABLES[:3]]
    shared = [ROOT, folder, host.tiny, *sources, Path(host.environment["NEMO_RL_PYTHON"]).parents[2]]
    began = time.monotonic()
    num_nodes = plan.nodes + plan.extra_nodes + plan.spare_nodes
    with slurm_in_a_temporary_folder(num_nodes=num_nodes, gpus=GPUS, shared=shared, disk_mib=100) as slurm:
        launched = Launched(slurm, host, folder, plan)
        plan.happens(launched)
        if plan.is_on_a_small_disk:  # which ends with the cluster
            slurm.command(["cp", "-r", str(launched.run), str(folder)])
        slurm.wait_for_idle_nodes()
        left = {name: found for name in slurm.names if (found := slurm.processes_on(name))}
        jobs = [[job, *launched.ends[job]] for job in launched.jobs]
    seconds = round(time.monotonic() - began)
    result = {"jobs": jobs, "left": left, "seconds": seconds}
    (folder / "result.json").write_text(json.dumps(result))
    print(f"=== {folder.name}: {result}", flush=True)


class RunOnNodes(Run):
    """A run on nodes that is over. Each of its jobs has a folder of logs."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of a JSON file of all jobs, in the order of the jobs."""
        found = sorted(self.folder.rglob(name))
        return [json.loads(line) for path in found for line in path.read_text().splitlines()]

    def samples(self, step: int) -> list[tuple[list[list[int]], list[list[int]]]]:
        """The rows of a step's training batch, of the job that made it last."""
        newest = sorted(self.folder.glob(f"run/logs/exp_*/train_data_step{step}.jsonl"))[-1]
        rows = (json.loads(line) for line in newest.read_text().splitlines())
        return [(row["token_ids"], row["token_loss_mask"]) for row in rows]

    @property
    def driver_log(self) -> str:
        """What the drivers of all jobs said."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("run/slurm/*-logs/ray-driver.log")))
