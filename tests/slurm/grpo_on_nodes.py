# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's GRPO on the nodes of `real_slurm.py`, launched as docs/get-started/slurm.md says, by NeMo-RL's own `ray.sub`.

    PYTHONPATH=tests .venv/bin/python tests/slurm/grpo_on_nodes.py DIR --nodes 2 [OVERRIDE ...]

needs root, the variables of CONTRIBUTING.md ("NeMo-RL on this machine"), and a machine on which nothing else runs, because
Ray gives up if it does not start in 30 s. DIR keeps the run. `--requeue-after STEP` requeues the job once that step's
checkpoint is there. The program ends with 0 if the job has ended well and no process of it is left on a node.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import yaml
from nemo_rl_host import ROOT, VARIABLES, Host, make_host
from real_slurm import HERE, RealSlurm, reason_against

CONFIG = HERE / "grpo_on_nodes.yaml"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_OF_THIS_MACHINE = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "NEMO_RL_CPU_LOGICAL_GPUS")


def write_cluster_file(file: Path, host: Host) -> None:
    """Writes a cluster file whose "container" is the environment of the tests with NeMo-RL."""
    binaries = Path(host.environment["NEMO_RL_PYTHON"]).parent
    environment = {name: value for name, value in host.environment.items() if name not in _OF_THIS_MACHINE}
    environment.update(
        PATH=f"{HERE}/container:{binaries}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        PYTHONPATH=host.environment["PYTHONPATH"],
        NEMO_RL_CPU_JOINS_RAY="1",
        RAY_OF_THE_CONTAINER=f"{binaries}/ray",
        RAY_AUTH_MODE="disabled",  # newer versions of Ray want a token that these nodes do not share
        RAY_memory_monitor_refresh_ms="0",
        GLOO_SOCKET_IFNAME="eth0",
    )
    settings = {
        "account": "acc", "partition": "batch", "time": "0:40:00", "container": "cpu-nodes", "gpus_per_node": "1",
        "nemo_rl": host.environment["NEMO_RL_SRC"], "sbatch_args": ["--gres=gpu:1"], "environment": environment,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(settings))


def launch(slurm: RealSlurm, host: Host, folder: Path, nodes: int, overrides: list[str]) -> str:
    """Launches the run below `folder`; returns the id of its job."""
    write_cluster_file(folder / "cluster.yaml", host)
    command = [
        sys.executable, "-B", "-m", "nemo_specrollout", "launch", str(CONFIG), f"--nodes={nodes}",
        f"--cluster={folder}/cluster.yaml", f"--run-dir={folder}/run", *overrides,
    ]  # fmt: skip
    variables = {**host.environment, "PYTHONPATH": str(ROOT), "NEMO_RL_DIR": host.environment["NEMO_RL_SRC"]}
    done = slurm.command(command, variables)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout.split("submitted job ")[1].partition(";")[0]


def requeue_after(slurm: RealSlurm, run: Path, job_id: str, step: int) -> None:
    """Requeues a job when the checkpoint of a step is there. Slurm lets it wait for two minutes, which this ends."""
    while not (run / "checkpoints" / f"step_{step}").exists():
        if slurm.job(job_id)["JobState"] in ENDED:
            return
        time.sleep(1)
    slurm.command(["scontrol", "requeue", job_id])
    slurm.wait_for_state(job_id, "PENDING")
    slurm.command(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the run stays")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--requeue-after", type=int, metavar="STEP")
    parser.add_argument("overrides", nargs="*", help="as of `nemo-specrollout launch`")
    asked = parser.parse_intermixed_args()
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        sys.exit(f"set {', '.join(missing)} (CONTRIBUTING.md)")
    if reason := reason_against():
        sys.exit(reason)
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    host = make_host(folder / "tiny")
    sources = [Path(host.environment[name]).resolve() for name in VARIABLES[:3]]
    environment = Path(host.environment["NEMO_RL_PYTHON"]).parents[2]
    cluster = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        shared = [ROOT, folder, *sources, environment]
        with RealSlurm(cluster, num_nodes=asked.nodes, gpus=1, shared=shared) as slurm:
            job_id = launch(slurm, host, folder, asked.nodes, asked.overrides)
            if asked.requeue_after is not None:
                requeue_after(slurm, folder / "run", job_id, asked.requeue_after)
            job = slurm.wait_for_state(job_id, *ENDED)
            slurm.wait_for_idle_nodes()
            left = {name: slurm.processes_on(name) for name in slurm.names}
    finally:
        shutil.rmtree(cluster)
    print(f"job {job_id}: {job['JobState']} {job['ExitCode']} after {job['RunTime']}; processes left: {left}")
    return int(job["JobState"] != "COMPLETED" or any(left.values()))


if __name__ == "__main__":
    sys.exit(main())
