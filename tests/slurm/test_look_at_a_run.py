# SPDX-License-Identifier: Apache-2.0
"""How a user looks at a run on a real Slurm by docs/get-started/slurm.md: `doctor` in the container, `report` at any time.

`doctor` looks at NeMo-RL itself where the variables of CONTRIBUTING.md name it, else at this Python, which has none.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from nemo_rl_host import HERE as NEMO_RL_TESTS
from nemo_rl_host import VARIABLES
from real_slurm import ENDED, HERE, RealSlurm, reason_against, slurm_in_a_temporary_folder
from slurm_site import Site, site

pytestmark = pytest.mark.integration

__all__ = ["site"]  # a fixture

GIVEN = {name: os.environ.get(name, "") for name in VARIABLES}
HAS_NEMO_RL = all(GIVEN.values())
BINARIES = Path(GIVEN["NEMO_RL_PYTHON"] if HAS_NEMO_RL else sys.executable).parent
SHARED = [ROOT, BINARIES.parents[1], *(Path(GIVEN[name]).resolve() for name in VARIABLES[:3] if HAS_NEMO_RL)]
STEP = ["srun", "--nodes=1", "--ntasks=1", "--gres=gpu:8", "--no-container-mount-home"]
"""What both of the page's lines for `doctor` begin with."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    if reason := reason_against():
        pytest.skip(reason)
    with slurm_in_a_temporary_folder(num_nodes=2, shared=SHARED) as cluster:
        yield cluster


def doctor(site: Site, *options: str, variables: str = "") -> str:
    """Runs the page's line with these options of `srun`, and returns what `doctor` says.

    A folder of programs is the container. `--no-self-test` saves the start of two engines.
    """
    sources = (NEMO_RL_TESTS / "cpu_host", GIVEN[VARIABLES[0]], f"{GIVEN[VARIABLES[1]]}/src", GIVEN[VARIABLES[2]])
    path = ":".join(map(str, [f"{site.run}/addon", *(sources if HAS_NEMO_RL else ())]))
    workdir = GIVEN["NEMO_RL_SRC"] or str(site.checkout)
    settings = [*([variables] if variables else []), f"PYTHONPATH={path}"]
    command = ["uv", "run", "python", "-m", "nemo_specrollout", "doctor", "--no-self-test"]
    image = {
        **GIVEN,
        "PATH": f"{HERE}/container:{BINARIES}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "NEMO_RL_DIR": workdir,
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(ROOT / ".pytest_cache" / "bytecode"),
    }
    done = site.slurm.command([*STEP, *options, f"--container-workdir={workdir}", "env", *settings, *command], image)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "Traceback" not in done.stderr and ", 0 fail" in done.stdout
    return done.stdout


def test_doctor_in_the_container_names_what_the_actors_have(site: Site) -> None:
    assert site.product(*site.arguments("--dry-run")).returncode == 0
    image = ["--container-image=nvcr#nemo-rl:1", "--container-mounts=/shared:/shared"]
    said = doctor(site, "--account=acc", "--partition=batch", *image)
    assert f"in {site.run}/addon/nemo_specrollout" in said
    assert ("finds this package; vLLM" if HAS_NEMO_RL else "NeMo-RL  not in this environment") in said


def test_doctor_beside_a_running_job_leaves_it_alone(site: Site) -> None:
    (job_id,) = site.launch(nodes=2)
    site.allow(1)
    site.wait_for_step(1)
    squeue = f"squeue --noheader --job={job_id} --format=%N"
    head = site.slurm.command(["bash", "-c", f'scontrol show hostnames "$({squeue})" | sort | head -1']).stdout.strip()
    beside = [f"--jobid={job_id}", "--overlap", f"--nodelist={head}", "--container-name=ray-head"]
    said = doctor(site, *beside, variables="CUDA_VISIBLE_DEVICES=")
    assert f"in {site.run}/addon/nemo_specrollout" in said
    site.allow(3)
    job = site.slurm.wait_for_state(job_id, *ENDED)
    assert (job["JobState"], job["Restarts"], head) == ("COMPLETED", "0", "n1")
    assert [step for *_, step in site.steps()] == ["1", "2", "3"]


def report(site: Site) -> str:
    """Returns what `report` says of the run, whose page has the same status."""
    done = site.product("report", str(site.run))
    assert done.returncode == 0, done.stdout + done.stderr
    status = done.stdout.splitlines()[2]
    assert f'<p class="status">{status}</p>' in (site.run / "report.html").read_text()
    return done.stdout


def test_a_report_follows_the_run_through_wait_requeue_and_end(site: Site) -> None:
    site.set(sbatch_args=["--gres=gpu:8", "--hold"])
    (job_id,) = site.launch()
    waiting = site.product("report", str(site.run))
    assert waiting.returncode == 2 and f"no records yet: job {job_id} was submitted at 20" in waiting.stderr
    site.scontrol("release", job_id)
    first = site.run / "logs" / "exp_001" / "specrollout"
    while not (first / "run.json").exists():
        time.sleep(0.05)
    said = report(site)
    assert "no finished step yet; 1 start\n" in said and f"  exp_001 (job {job_id}): no step yet\n" in said
    site.allow(1)
    site.wait_for_step(1)
    (site.checkout / "saves_nothing").touch()
    site.allow(2)
    while (first / "metrics.jsonl").read_text().count("\n") != 2:
        time.sleep(0.05)
    assert "2 finished steps: steps 1 to 2; 1 start\n" in report(site)
    site.scontrol("requeue", job_id)
    site.slurm.wait_for_state(job_id, "PENDING")
    (site.checkout / "saves_nothing").unlink()
    site.scontrol("release", job_id)  # `--hold` holds it again
    site.scontrol("update", f"JobId={job_id}", "StartTime=now")
    site.allow(3)
    assert site.slurm.wait_for_state(job_id, *ENDED)["JobState"] == "COMPLETED"
    said = report(site)
    assert "3 finished steps: steps 1 to 3; 2 starts, 1 step made again\n" in said
    lines = {line.split(":")[0].strip(): line for line in said.splitlines()[3:]}
    interrupted, last = lines[f"exp_001 (job {job_id})"], lines[f"exp_002 (job {job_id}, requeue 1)"]
    assert "steps 1-2; step 2 made again later; " in interrupted and " s until its first step; " in interrupted
    assert interrupted.endswith("ended by Slurm: due to job requeue") and "steps 2-3; " in last and "Slurm" not in last
