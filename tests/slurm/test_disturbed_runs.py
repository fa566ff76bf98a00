# SPDX-License-Identifier: Apache-2.0
"""What users, sites and failures do to runs on a real Slurm, beyond `test_real_slurm.py`: most of it went wrong once."""

import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from real_slurm import ENDED, RealSlurm
from slurm_site import NOBODY, Site, python_of_all_users, site, slurm

from nemo_specrollout.cli.check import read_nemo_rl_config
from nemo_specrollout.cli.run_length import MUST_SAVE_BY, RunLength, length_of
from nemo_specrollout.cli.run_owner import EXIT_LOST
from nemo_specrollout.config.nemo_rl_tree import at

pytestmark = pytest.mark.integration
__all__ = ["site", "slurm"]  # fixtures

UNLESS_TEST = 'for option; do [[ "$option" == --test-only ]] && exec "$REAL" "$@"; done'
"""The beginning of a site's sbatch that leaves --test-only alone."""


def records(site: Site) -> list[str | None]:
    return [json.loads(line)["job_id"] for line in (site.run / "submissions.jsonl").read_text().splitlines()]


def start_again(site: Site, job_id: str) -> None:
    """Starts a requeued job, which Slurm would let wait for two minutes. A node takes no job in the second that killed it.

    Slurm sets the two minutes when all processes of the job are gone, and it may call the job pending before that.
    """
    assert site.slurm.wait_for_state(job_id, "PENDING", *ENDED)["JobState"] == "PENDING"
    while site.slurm.job(job_id)["JobState"] == "PENDING":
        site.slurm.command(["scontrol", "update", f"JobId={job_id}", "StartTime=now+2seconds"])
        time.sleep(4)


# Launches that meet.


def test_two_launches_at_the_same_moment_do_not_mix_their_configs(site: Site) -> None:
    block = f'{UNLESS_TEST}\nif mkdir "$HERE/first"; then until [[ -e "$HERE/go" ]]; do sleep 0.1; done; fi\nexec "$REAL" "$@"'
    variables = site.wrap("sbatch", block)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(site.product, *site.arguments(), **variables)
        while not (site.folder / "site_bin" / "first").exists():
            time.sleep(0.05)
        config = (site.run / "config.yaml").read_text()
        others = [site.product(*site.arguments(*more), **variables) for more in (("grpo.seed=2",), ())]
        (site.folder / "site_bin" / "go").touch()
        assert first.result().returncode == 0
    assert [other.returncode for other in others] == [2, 2]
    assert "holds a run of another config (it differs in grpo.seed)" in others[0].stderr
    assert f"--run-dir: another launch works in {site.run}; wait until it has ended" in others[1].stderr
    assert (site.run / "config.yaml").read_text() == config and len(records(site)) == 1


def test_a_waiting_job_keeps_its_length_when_the_run_is_launched_again(site: Site) -> None:
    """Else the first job would stop at the shorter length, and note that all steps of the longer one are done."""
    site.set(sbatch_args=["--gres=gpu:8", "--hold"])
    site.allow(3)
    lengths = (("grpo.max_num_steps=3", "--time=2:00:00"), ("grpo.max_num_steps=2", "--time=1:00:00"))
    jobs = [site.launch(*length)[-1] for length in lengths]
    found = []
    for job_id in jobs:
        site.scontrol("release", job_id)
        assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
        driver = site.run / "slurm" / f"{job_id}-logs" / "driver"
        if driver.exists():
            arguments = driver.read_text().split()
            tree = read_nemo_rl_config(Path(arguments[5]), arguments[6 : arguments.index("--script")])
            found.append((length_of(tree), at(tree, MUST_SAVE_BY), arguments[-1]))
    assert found == [(RunLength(3, None), "00:01:35:00", f"{site.run}/done-3-steps-None-epochs")]
    assert (site.run / "slurm" / f"{jobs[1]}.out").read_text() == "nemo-specrollout: all steps are done\n"


def test_a_run_that_another_users_job_holds_is_refused(slurm: RealSlurm) -> None:
    """Slurm's `singleton` knows the jobs of one user alone, so both would run at once."""
    site = Site(slurm, Path(tempfile.mkdtemp(prefix="user-", dir=slurm.folder)), NOBODY, python_of_all_users(slurm))
    (job_id,) = site.launch()
    site.slurm.wait_for_state(job_id, "RUNNING")
    site.user = 0  # root may write all files, as a colleague in a folder of a group may
    done = site.product(*site.arguments())
    said = f"--run-dir: job {job_id} of user nobody is RUNNING for {site.run}; Slurm would not let yours wait for it"
    assert done.returncode == 2 and said in done.stderr and site.queue() == [job_id]
    site.allow(3)
    assert slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    site.end()


def test_a_run_folder_that_is_only_half_open_to_another_user_is_refused(slurm: RealSlurm) -> None:
    """Else the job starts, cannot write `newest_start`, and fails."""
    site = Site(slurm, Path(tempfile.mkdtemp(prefix="user-", dir=slurm.folder)), 0, python_of_all_users(slurm))
    site.allow(3)
    (job_id,) = site.launch()
    assert slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    for folder in (site.folder, site.run):
        folder.chmod(0o777)
    site.user = NOBODY
    done = site.product(*site.arguments())
    said = f"{site.run}/submissions.jsonl cannot be written to; let its owner run `chmod -R g+w {site.run}`"
    assert done.returncode == 2 and said in done.stderr and records(site) == [job_id]
    site.end()


# Submissions that go wrong.


def test_a_job_that_slurm_took_although_sbatch_failed_is_recorded(site: Site) -> None:
    done = site.product(*site.arguments(), **site.wrap("sbatch", f'{UNLESS_TEST}\n"$REAL" "$@" > /dev/null; exit 1'))
    assert done.returncode == 0 and records(site) == site.queue()
    assert f"submitted job {records(site)[0]}; " in done.stdout


def test_a_job_of_which_slurm_does_not_say_whether_it_took_it_keeps_its_config(site: Site) -> None:
    """The controller answers neither sbatch in time nor squeue after it."""
    late = 'touch "$HERE/late"; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'
    variables = site.wrap("sbatch", f'{UNLESS_TEST}\n"$REAL" "$@" > /dev/null; {late}')
    site.wrap("squeue", '[[ ! -e "$HERE/late" ]] && exec "$REAL" "$@"; exit 1')
    done = site.product(*site.arguments(), **variables)
    name = site.slurm.job(site.queue()[0])["JobName"]
    said = "Slurm does not answer, and may have taken the job: sbatch: error: Socket timed out on send/recv operation; "
    assert done.returncode == 2 and f"{said}look with `squeue --me --name={name}`" in done.stderr
    assert records(site) == [None]
    other = site.product(*site.arguments("grpo.seed=2"))
    assert other.returncode == 2 and "holds a run of another config" in other.stderr


def test_a_site_that_prints_its_own_sentence_for_the_id(site: Site) -> None:
    plain = f'{UNLESS_TEST}\nid=$("$REAL" "$@") && echo "Submitted batch job $id"'
    done = site.product(*site.arguments(), **site.wrap("sbatch", plain))
    assert done.returncode == 0 and records(site) == site.queue()


def test_a_job_that_a_full_disk_keeps_from_being_recorded_is_named(site: Site) -> None:
    site.run = site.slurm.small_disk / site.folder.name
    site.set(sbatch_args=["--gres=gpu:8", "--hold"])
    fill = f'{UNLESS_TEST}\n"$REAL" "$@"; head --bytes=30M /dev/zero > {site.slurm.small_disk}/fill'
    try:
        done = site.product(*site.arguments(), **site.wrap("sbatch", fill))
        other = site.product(*site.arguments("grpo.seed=2"))
    finally:
        site.slurm.command(["rm", f"{site.slurm.small_disk}/fill"])
    (job_id,) = site.queue()
    said = f"submissions.jsonl: No space left on device, so job {job_id}, which was submitted, is not recorded there"
    assert done.returncode == 1 and f"{site.run}/{said}" in done.stderr
    assert other.returncode == 2 and "holds a run of another config" in other.stderr


def test_a_slurm_that_does_not_answer_refuses_before_anything_is_written(site: Site) -> None:
    with site.slurm.without_munge():
        done = site.product(*site.arguments())
        assert done.returncode == 2 and not site.run.exists()
    assert "Slurm does not answer, so nothing was written or submitted: " in done.stderr
    assert done.stderr.endswith("; launch again when `sinfo` answers\n")


def test_a_chain_of_which_slurm_takes_only_a_part_says_how_to_go_on(site: Site) -> None:
    closed = site.slurm.folder / "closed"
    try:
        done = site.product(*site.arguments("--jobs=3"), LAST_JOB_OF_THE_USER="1")
    finally:
        closed.unlink(missing_ok=True)
    assert done.returncode == 2 and records(site) == site.queue()
    assert "1 of 3 jobs was submitted, and then: sbatch refused " in done.stderr
    assert "The site takes no more jobs of yours." in done.stderr
    assert done.stderr.endswith("; --jobs=2 adds the others later\n")


def test_odd_variables_names_and_folders_change_nothing(site: Site) -> None:
    (site.folder / "real").mkdir()
    (site.folder / "läufe").symlink_to(site.folder / "real")
    site.run = site.folder / "läufe" / "größe"
    site.set(partition="no_gpus,batch")
    site.allow(3)
    odd = {
        "SBATCH_DEPENDENCY": "afterok:1", "SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1", "SBATCH_EXPORT": "NONE",
        "SBATCH_NO_REQUEUE": "1", "SBATCH_SIGNAL": "B:USR1@60", "SLURM_EXIT_ERROR": "7", "SLURM_CLUSTERS": "other",
        "SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%x", "SQUEUE_STATES": "CD", "SQUEUE_USERS": "nobody",
        "SINFO_FORMAT": "%x", "SINFO_PARTITION": "nix", "LC_ALL": "C", "LANG": "de_DE",
    }  # fmt: skip
    done = site.product(*site.arguments(), **odd)
    withheld = "SBATCH_NO_REQUEUE, SBATCH_SIGNAL, SBATCH_WAIT, SLURM_CLUSTERS: of this shell is not handed to the job"
    assert done.returncode == 0 and withheld in done.stdout
    (job_id,) = records(site)
    assert job_id is not None
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["Partition"], job["Requeue"]) == ("COMPLETED", "batch", "1")
    assert [step for *_, step in site.steps()] == ["1", "2", "3"]


# What the cluster does while a job waits or runs.


def test_a_preempted_job_with_a_grace_time_is_requeued(site: Site) -> None:
    """Slurm ends the driver at the beginning of the grace time. A job that ends by itself then counts as failed."""
    site.set(partition="low")
    (job_id,) = site.launch(nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    taker = site.slurm.command(["sbatch", "--parsable", "--partition=high", "--account=acc", "--nodes=4", "--exclusive",
                                "--output=/dev/null", "--wrap=sleep 1"]).stdout.strip()  # fmt: skip
    assert site.slurm.wait_for_state(taker, *ENDED)["JobState"] == "COMPLETED"
    start_again(site, job_id)
    site.allow(3)
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    assert site.steps() == [(job_id, "0", "1"), (job_id, "1", "2"), (job_id, "1", "3")]
    said = "nemo-specrollout: Slurm wants the nodes for another job, so this job asks to be requeued\n"
    assert said in (site.run / "slurm" / f"{job_id}.out").read_text()


def test_a_driver_that_misses_a_node_before_slurm_does_is_requeued(site: Site) -> None:
    """Ray gives a node up after half a minute, and Slurm by default after five. The next failure, with all nodes, is final."""
    fail = 'until [[ -e "$NEMO_RL_DIR/lost" ]]; do sleep 0.1; done; exit 1'
    site.set(environment={"END": fail, "PATH": f"{site.folder}/bin:/usr/bin:/bin"})
    (job_id,) = site.launch(nodes=2)
    while not (site.run / "slurm" / f"{job_id}-logs" / "ray-driver.log").exists():
        time.sleep(0.05)
    hosts = site.slurm.command(["scontrol", "show", "hostnames", site.slurm.job(job_id)["NodeList"]])
    dead = hosts.stdout.split()[-1]
    site.slurm.kill_node(dead)
    try:
        (site.checkout / "lost").touch()
        start_again(site, job_id)
        job = site.slurm.wait_for_state(job_id, *ENDED)
    finally:
        site.slurm.start_node(dead)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "1", "1:0")
    said = (site.run / "slurm" / f"{job_id}.out").read_text()
    assert said.count("the driver failed and a node does not answer; waiting until Slurm requeues the job\n") == 1


def test_a_driver_that_has_lost_a_process_goes_on_as_long_as_it_makes_checkpoints(site: Site) -> None:
    """The first start makes a checkpoint and is requeued. The second makes none, so its failure is final."""
    fail = f'mkdir -p "$LOGS/../../checkpoints/step_1"; exit {EXIT_LOST}'
    site.set(environment={"END": fail, "PATH": f"{site.folder}/bin:/usr/bin:/bin"})
    (job_id,) = site.launch()
    log = site.run / "slurm" / f"{job_id}.out"
    asked = "nemo-specrollout: Ray has lost a process, so this job asks to be requeued\n"
    while not log.exists() or asked not in log.read_text():
        time.sleep(0.1)
    start_again(site, job_id)
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "1", f"{EXIT_LOST}:0")
    assert log.read_text().count(asked) == 1


def test_a_driver_that_is_killed_fails_the_job_once(site: Site) -> None:
    site.set(environment={"END": "kill -KILL $$", "PATH": f"{site.folder}/bin:/usr/bin:/bin"})
    (job_id,) = site.launch()
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "137:0", "0")


def test_a_controller_that_is_restarted_changes_nothing(site: Site) -> None:
    first, second = site.launch("--jobs=2", nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    with site.slurm.without_controller():
        site.allow(2)
        site.wait_for_step(2)
    assert site.slurm.job(second)["JobState"] == "PENDING"
    site.allow(3)
    assert [site.slurm.wait_for_state(job, *ENDED)["JobState"] for job in (first, second)] == ["COMPLETED"] * 2
    assert site.steps() == [(first, "0", step) for step in "123"]


def test_a_job_that_met_a_broken_node_waits_for_release(site: Site) -> None:
    broken = site.slurm.folder / "broken"
    broken.touch()
    try:
        (job_id,) = site.launch(nodes=2)
        while (job := site.slurm.job(job_id))["Reason"] != "launch_failed_requeued_held":
            assert job["JobState"] not in ENDED
            time.sleep(0.1)
    finally:
        broken.unlink()
    drained = site.slurm.command(["sinfo", "--noheader", "--list-reasons", "--format=%N %E"]).stdout.splitlines()
    (host,) = (line.split()[0] for line in drained if line.endswith("Prolog error"))
    try:
        site.scontrol("release", job_id)
        start_again(site, job_id)
        site.allow(3)
        assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    finally:
        site.scontrol("update", f"NodeName={host}", "State=RESUME")
    assert site.steps() == [(job_id, "1", step) for step in "123"]


def test_a_run_folder_that_was_removed_fails_its_job(site: Site) -> None:
    site.set(sbatch_args=["--gres=gpu:8", "--hold"])
    (job_id,) = site.launch()
    shutil.rmtree(site.run)
    site.scontrol("release", job_id)
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert job["JobState"] == "FAILED"
    if (job["ExitCode"], job["Reason"]) != (
        "0:53",
        "JobLaunchFailure",
    ):  # from version 23.02, Slurm makes the log's folder
        said = (site.run / "slurm" / f"{job_id}.out").read_text()
        assert said.startswith(f"nemo-specrollout: {site.run} was removed before this job began; remove what is left")
