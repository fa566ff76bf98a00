# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch` on a real Slurm by docs/get-started/slurm.md, and what clusters do to its jobs (`slurm_site.py`).

README.md says how NeMo-RL itself runs here. `test_disturbed_runs.py` has the rest.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from real_slurm import ENDED, RealSlurm
from slurm_site import NOBODY, RECIPE, Site, python_of_all_users, site, slurm

pytestmark = pytest.mark.integration
__all__ = ["site", "slurm"]  # fixtures
NEMO_RL_SRC = os.environ.get("NEMO_RL_SRC")

# A run as the page starts it.


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_run_has_its_nodes_and_its_settings(site: Site, nodes: int) -> None:
    assert site.product("check", f"{site.recipes}/{RECIPE}").returncode == 0
    dry = site.product(*site.arguments("--dry-run", nodes=nodes))
    assert dry.returncode == 0 and "\nsbatch --parsable" in dry.stdout and site.queue() == []
    site.allow(3)
    (job_id,) = site.launch(nodes=nodes)
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", str(nodes))
    assert site.steps() == [(job_id, "0", step) for step in "123"]
    environment = site.environment(f"{job_id}-logs")
    assert environment["CONTAINER"] == "nvcr#nemo-rl:1" and environment["GPUS_PER_NODE"] == "8"
    assert environment["SLURM_JOB_NUM_NODES"] == str(nodes) and environment["SLURM_JOB_ACCOUNT"] == "acc"
    logs = site.run / "slurm" / f"{job_id}-logs"
    workers = [path.read_text().split()[:3] for path in sorted(logs.glob("worker-*.log"))]
    assert sorted(workers) == [[f"n{node}", str(site.checkout), "0,1,2,3,4,5,6,7"] for node in range(1, nodes + 1)]
    assert (logs / "driver").read_text().split() == [
        "run", "python", "-m", "nemo_specrollout", "run", f"{site.run}/config.yaml",
        "checkpointing.checkpoint_must_save_by=00:00:35:00", "grpo.max_num_steps=3",
        "--script", "examples/run_grpo.py", "--when-done", f"{site.run}/done-3-steps-None-epochs",
    ]  # fmt: skip


def test_another_user_than_root_launches(slurm: RealSlurm) -> None:
    python = python_of_all_users(slurm)
    site = Site(slurm, Path(tempfile.mkdtemp(prefix="user-", dir=slurm.folder)), NOBODY, python)
    site.allow(3)
    (job_id,) = site.launch(nodes=2)
    job = slurm.wait_for_state(job_id, *ENDED)
    assert job["JobState"] == "COMPLETED" and job["UserId"].endswith(f"({NOBODY})")
    assert {path.stat().st_uid for path in site.run.rglob("*")} == {NOBODY}
    site.end()


@pytest.mark.parametrize(
    "options", [["--gres=gpu:8"], ["--gpus-per-node=8"], ["--gpus=16"], ["--gpus=16", "--ntasks-per-gpu=1"]]
)
def test_gpus_may_be_asked_for_in_all_of_slurms_ways(site: Site, options: list[str]) -> None:
    """Slurm hands options of the job on to each srun as variables, and ray.sub's name the GPUs by --gres."""
    site.set(sbatch_args=options)
    site.allow(3)
    (job_id,) = site.launch(nodes=2)
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"


@pytest.mark.skipif(NEMO_RL_SRC is None, reason="set NEMO_RL_SRC to a NeMo-RL checkout to run its real ray.sub")
@pytest.mark.parametrize("gpus", ["--gres=gpu:8", "--gpus=16"])
def test_nemo_rls_own_ray_sub_runs_on_this_slurm(site: Site, gpus: str) -> None:
    """Ray and uv are stand-ins, so that this is about ray.sub's lines for srun, scontrol and sinfo."""
    assert NEMO_RL_SRC is not None
    if "pmix" not in site.slurm.command(["srun", "--mpi=list"]).stdout:
        pytest.skip("this Slurm has no PMIx, for which ray.sub asks")
    shutil.copy(Path(NEMO_RL_SRC) / "ray.sub", site.checkout)
    logs = site.run / "slurm" / "of_stand_ins"
    variables = {"STEPS": "3", "PATH": f"{site.folder}/bin:/usr/bin:/bin", "LOGS": str(logs)}
    site.set(environment=variables, setup_command="mkdir -p $LOGS", sbatch_args=[gpus])
    site.allow(3)
    (job_id,) = site.launch(nodes=2)
    out = site.run / "slurm" / f"{job_id}.out"
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED", out.read_text()[-2000:]
    starts = [line.split() for line in (logs / "ray").read_text().splitlines()]
    assert [node for node, *_ in starts] == ["n1", "n2"] and "--head" in starts[0]
    assert (logs / "driver").exists()


def test_an_allocation_around_launch_leaves_no_trace_in_the_job(site: Site) -> None:
    command = [sys.executable, "-B", "-m", "nemo_specrollout", *site.arguments(nodes=2)]
    allocation = ["salloc", "--account=acc", "--ntasks=1", "--cpus-per-task=2", "--mem=1000"]
    variables = {"PYTHONPATH": str(ROOT), "NEMO_RL_DIR": str(site.checkout)}
    done = site.slurm.command([*allocation, *command], variables, cwd=site.folder)
    assert done.returncode == 0, done.stderr
    site.allow(3)
    job_id = json.loads((site.run / "submissions.jsonl").read_text())["job_id"]
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    environment = site.environment(f"{job_id}-logs")
    inherited = {"SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS"}
    assert not inherited & set(environment)
    assert environment["SLURM_JOB_CPUS_PER_NODE"] == "16(x2)"


def test_a_banner_before_the_id_is_no_id(site: Site) -> None:
    site.allow(3)
    (job_id,) = site.launch(BANNER_OF_THE_SITE="Welcome\n2026\nQuota: 3 of 9")
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobName"].startswith("specrollout-first-")


# What clusters do to jobs.


def test_a_chain_goes_on_after_a_cancelled_job(site: Site) -> None:
    jobs = site.launch("--jobs=3", nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    assert [site.slurm.job(job)["JobState"] for job in jobs] == ["RUNNING", "PENDING", "PENDING"]
    site.slurm.command(["scancel", jobs[1]])
    site.slurm.command(["scancel", jobs[0]])
    site.slurm.wait_for_state(jobs[2], "RUNNING")  # until then the driver of the first may make steps
    site.allow(3)
    assert site.slurm.wait_for_state(jobs[2], *ENDED)["JobState"] == "COMPLETED"
    ended = [site.slurm.wait_for_state(job, *ENDED)["JobState"] for job in jobs]  # the first may still be in COMPLETING
    assert ended == ["CANCELLED", "CANCELLED", "COMPLETED"]
    assert site.steps() == [(jobs[0], "0", "1"), (jobs[2], "0", "2"), (jobs[2], "0", "3")]


def test_a_chain_that_was_too_long_ends_at_once(site: Site) -> None:
    site.allow(3)
    jobs = site.launch("--jobs=2")
    assert [site.slurm.wait_for_state(job, *ENDED)["JobState"] for job in jobs] == ["COMPLETED"] * 2
    assert {job for job, *_ in site.steps()} == {jobs[0]}
    assert (site.run / "slurm" / f"{jobs[1]}.out").read_text() == "nemo-specrollout: all steps are done\n"


def test_a_requeued_job_goes_on_after_its_newest_checkpoint(site: Site) -> None:
    (job_id,) = site.launch(nodes=2)
    site.allow(2)
    site.wait_for_step(2)
    site.scontrol("requeue", job_id)
    site.slurm.wait_for_state(job_id, "PENDING")
    site.scontrol("update", f"JobId={job_id}", "StartTime=now")  # Slurm waits two minutes otherwise
    site.allow(3)
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    assert site.steps() == [(job_id, "0", "1"), (job_id, "0", "2"), (job_id, "1", "3")]
    assert (site.run / "slurm" / f"{job_id}-1-logs" / "environment").exists()


def test_a_run_whose_time_was_up_goes_on_by_the_same_line(site: Site) -> None:
    (first,) = site.launch("--time=0:01:00", nodes=2)
    site.allow(1)
    assert site.slurm.wait_for_state(first, *ENDED)["JobState"] == "TIMEOUT"
    assert "DUE TO TIME LIMIT" in (site.run / "slurm" / f"{first}.out").read_text()
    site.allow(3)
    second = site.launch(nodes=2)[-1]
    assert site.slurm.wait_for_state(second, *ENDED)["JobState"] == "COMPLETED"
    assert site.steps() == [(first, "0", "1"), (second, "0", "2"), (second, "0", "3")]


def test_a_cancelled_job_leaves_nothing_and_goes_on_by_the_same_line(site: Site) -> None:
    (first,) = site.launch(nodes=4)
    site.allow(1)
    site.wait_for_step(1)
    assert all(site.slurm.processes_on(name) for name in site.slurm.names)
    site.slurm.command(["scancel", first])
    assert site.slurm.wait_for_state(first, *ENDED)["JobState"] == "CANCELLED"
    site.end()
    site.allow(3)
    second = site.launch(nodes=4)[-1]
    assert site.slurm.wait_for_state(second, *ENDED)["JobState"] == "COMPLETED"
    assert [step for *_, step in site.steps()] == ["1", "2", "3"]


def test_a_held_job_waits_until_it_is_released(site: Site) -> None:
    site.set(sbatch_args=["--gres=gpu:8", "--hold"])
    (job_id,) = site.launch()
    assert site.slurm.job(job_id)["Reason"] == "JobHeldUser"
    site.allow(3)
    site.scontrol("release", job_id)
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"


def test_two_launches_of_one_run_never_run_at_once(site: Site) -> None:
    site.launch()
    first, second = site.launch()
    site.slurm.wait_for_state(first, "RUNNING")
    assert site.slurm.job(second)["JobState"] == "PENDING" and site.slurm.job(second)["Dependency"].startswith(
        "singleton"
    )
    site.allow(3)
    assert site.slurm.wait_for_state(second, *ENDED)["JobState"] == "COMPLETED"
    assert {job for job, *_ in site.steps()} == {first}


def test_a_dead_node_requeues_the_job(site: Site) -> None:
    (job_id,) = site.launch(nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    hosts = site.slurm.command(["scontrol", "show", "hostnames", site.slurm.job(job_id)["NodeList"]])
    dead = hosts.stdout.split()[-1]
    site.slurm.kill_node(dead)
    try:
        site.slurm.wait_for_state(job_id, "PENDING")
        site.allow(3)
        site.scontrol("update", f"JobId={job_id}", "StartTime=now")
        assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
        now = site.slurm.command(["scontrol", "show", "hostnames", site.slurm.job(job_id)["NodeList"]])
        assert dead not in now.stdout.split()
    finally:
        site.slurm.start_node(dead)
    assert site.steps() == [(job_id, "0", "1"), (job_id, "1", "2"), (job_id, "1", "3")]


def test_a_network_that_is_gone_for_seconds_changes_nothing(site: Site) -> None:
    (job_id,) = site.launch(nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    host = site.slurm.job(job_id)["BatchHost"]
    site.slurm.cut_off(host)
    time.sleep(5)
    site.slurm.join_again(host)
    site.allow(3)
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")


def test_a_driver_on_a_node_that_slurm_gave_up_ends_when_the_job_runs_again(site: Site) -> None:
    """The node is cut off from Slurm, and its driver still reaches the run folder: without an end it would go on."""
    (job_id,) = site.launch(nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    host = site.slurm.job(job_id)["BatchHost"]
    site.slurm.cut_off(host)
    try:
        site.slurm.wait_for_state(job_id, "PENDING")
        site.scontrol("update", f"JobId={job_id}", "StartTime=now")
        logs = site.run / "slurm"
        while not (logs / f"{job_id}-1-logs" / "driver").exists():
            time.sleep(0.1)
        while any("bin/uv run" in command for command in site.slurm.processes_on(host)):
            time.sleep(0.1)
        site.allow(3)
        assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    finally:
        site.slurm.join_again(host)
    assert site.steps() == [(job_id, "0", "1"), (job_id, "1", "2"), (job_id, "1", "3")]
    said = f"job {job_id}.1 runs now, so this driver, of job {job_id}.0, ends"
    assert said in (logs / f"{job_id}-logs" / "ray-driver.log").read_text()


def test_a_full_run_folder_fails_the_job_and_keeps_its_checkpoints(site: Site) -> None:
    site.run = site.slurm.small_disk / site.folder.name
    steps = {"STEPS": "3", "PATH": f"{site.folder}/bin:/usr/bin:/bin", "CHECKPOINT_BYTES": str(6 << 20)}
    site.set(environment=steps)
    site.allow(3)

    def job_of_a_launch() -> str:
        done = site.product(*site.arguments())
        assert done.returncode == 0, done.stderr
        return done.stdout.split("submitted job ")[1].partition(";")[0]

    def checkpoints() -> list[str]:
        return site.slurm.command(["ls", f"{site.run}/checkpoints"]).stdout.split()

    assert site.slurm.wait_for_state(job_of_a_launch(), *ENDED)["JobState"] == "FAILED"
    assert checkpoints() == ["step_1", "step_2", "step_3.part"]
    site.slurm.command(["rm", "-r", f"{site.run}/checkpoints/step_1", f"{site.run}/checkpoints/step_3.part"])
    assert site.slurm.wait_for_state(job_of_a_launch(), *ENDED)["JobState"] == "COMPLETED"
    assert checkpoints() == ["step_2", "step_3"]


# What can never run.


def test_more_nodes_than_the_partition_has_are_refused(site: Site) -> None:
    said = site.refused(nodes=5)
    assert "--nodes: 5, but partition batch has 4, so the job would wait for ever (sbatch says: " in said
    assert "Requested node configuration is not available); give fewer, or name another partition" in said


def test_an_unknown_partition_or_account_is_refused_in_slurms_words(site: Site) -> None:
    assert "sbatch would refuse the job: sbatch: error: invalid partition specified: nix" in site.refused(
        "--partition=nix"
    )
    assert "Invalid account or account/partition combination specified" in site.refused("--account=other")


def test_an_option_that_this_slurm_does_not_know_is_refused_in_slurms_words(site: Site) -> None:
    site.set(sbatch_args=["--of-another-version=1"])
    assert "sbatch would refuse the job: sbatch: unrecognized option '--of-another-version=1'" in site.refused()


def test_nodes_with_fewer_gpus_than_the_file_says_are_refused(site: Site) -> None:
    said = site.refused("--partition=few_gpus")
    assert "slurm.gpus_per_node: 8, but nodes of partition few_gpus have 4 by Slurm's account" in said


def test_another_gres_count_than_the_nodes_have_is_refused(site: Site) -> None:
    site.set(gpus_per_node="16", sbatch_args=["--gres=gpu:16"])
    assert "slurm.gpus_per_node: 16, but nodes of partition batch have 8" in site.refused("cluster.gpus_per_node=16")
    site.set(gpus_per_node="4", sbatch_args=["--gres=gpu:4"])
    assert "slurm.gpus_per_node: 4, but nodes of partition batch have 8" in site.refused("cluster.gpus_per_node=4")


def test_a_partition_whose_gpus_slurm_does_not_count_is_a_warning(site: Site) -> None:
    site.set(partition="no_gpus", sbatch_args=[])
    done = site.product(*site.arguments("--dry-run"))
    assert (
        "warning: slurm.partition: no_gpus; Slurm counts no GPUs there, so see that its nodes have 8 each"
        in done.stdout
    )


def test_a_kind_of_mpi_that_slurm_lacks_is_a_warning(site: Site) -> None:
    with (site.checkout / "ray.sub").open("a") as ray_sub:
        ray_sub.write("# srun --mpi=none --mpi=of_no_slurm\n")
    done = site.product(*site.arguments("--dry-run"))
    said = "warning: slurm.nemo_rl: its ray.sub runs `srun --mpi=of_no_slurm`, but `srun --mpi=list` names only "
    assert done.returncode == 0 and done.stdout.count(said) == 1, done.stdout + done.stderr


def test_nodes_that_are_down_are_a_warning(site: Site) -> None:
    site.set(partition="few_gpus", gpus_per_node="4", sbatch_args=["--gres=gpu:4"])
    done = site.product(*site.arguments("--dry-run", "cluster.gpus_per_node=4"))
    assert done.returncode == 0 and "; a job waits for nodes that are down or drained" in done.stdout


def test_a_longer_time_than_the_partitions_is_a_warning(site: Site) -> None:
    done = site.product(*site.arguments("--dry-run", "--time=2-00:00:00"))
    said = "slurm.time: 2-00:00:00, but a job of partition batch may take 1-00:00:00, unless a QOS allows more"
    assert done.returncode == 0 and said in done.stdout
