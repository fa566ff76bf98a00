# SPDX-License-Identifier: Apache-2.0
"""A user's folder on the cluster of `real_slurm.py`, and the commands with which tests launch runs and disturb them.

NeMo-RL and Ray take no part. `stand_ins/ray.sub` occupies the nodes, and `stand_ins/uv` makes "steps", which are empty
checkpoints, as far as the test allows. So a test depends neither on time nor on luck.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from real_slurm import HERE, RealSlurm, reason_against, slurm_in_a_temporary_folder

RECIPE = "grpo-qwen3-8b-1n8g-megatron-specrollout.yaml"
BASE = """
grpo: {max_num_steps: 100, num_prompts_per_step: 4, seed: 1}
policy:
  max_total_sequence_length: 512
  generation: {backend: vllm, vllm_cfg: {max_model_len: 512, precision: bfloat16}}
checkpointing: {enabled: false, checkpoint_dir: results, save_period: 1, checkpoint_must_save_by: null}
logger: {log_dir: logs}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
"""In place of NeMo-RL's config from which the recipe inherits: the keys that `launch` reads."""
NOBODY = 65534


class Site:
    """A user's folder on the cluster: recipes and cluster file as the page makes them, a checkout, and one run."""

    def __init__(self, slurm: RealSlurm, folder: Path, user: int = 0, python: str = sys.executable) -> None:
        self.slurm, self.folder, self.user, self.python = slurm, folder, user, python
        self.recipes, self.run, self.checkout = folder / "my_recipes", folder / "runs" / "first", folder / "RL"
        configs = self.checkout / "examples" / "configs"
        configs.mkdir(parents=True)
        (configs / "grpo_math_8B_megatron.yaml").write_text(BASE)
        shutil.copy(HERE / "stand_ins" / "ray.sub", self.checkout)
        shutil.copytree(HERE / "stand_ins", folder / "bin", ignore=shutil.ignore_patterns("ray.sub"))
        self.allow(0)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)
        assert self.product("examples", str(self.recipes)).returncode == 0
        self.set(
            account="acc", partition="batch", time="1:00:00", container="nvcr#nemo-rl:1", nemo_rl=str(self.checkout),
            mounts=[], environment={"STEPS": "3", "PATH": f"{folder}/bin:/usr/bin:/bin"},
        )  # fmt: skip

    def set(self, **values: object) -> None:
        """Writes values into the cluster file."""
        file = self.recipes / "cluster.example.yaml"
        old = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
        file.write_text(yaml.safe_dump({**old, **values}))

    def product(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs `nemo-specrollout` on the login node."""
        variables = {
            "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}",
            "NEMO_RL_DIR": str(self.checkout),
            "HOME": str(self.folder),
            **environment,
        }
        command = [self.python, "-B", "-m", "nemo_specrollout", *arguments]
        return self.slurm.command(command, variables, self.user, self.folder)

    def arguments(self, *more: str, nodes: int = 1) -> list[str]:
        """Returns the page's `launch` line, of a run of three steps."""
        files = [f"{self.recipes}/{RECIPE}", f"--nodes={nodes}", f"--cluster={self.recipes}/cluster.example.yaml"]
        length = ["checkpointing.enabled=true", "grpo.max_num_steps=3"]
        return ["launch", *files, f"--run-dir={self.run}", *length, *more]

    def launch(self, *more: str, nodes: int = 1, **environment: str) -> list[str]:
        """Launches the run; returns the ids of all its jobs so far."""
        done = self.product(*self.arguments(*more, nodes=nodes), **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line)["job_id"] for line in (self.run / "submissions.jsonl").read_text().splitlines()]

    def refused(self, *more: str, nodes: int = 1) -> str:
        """Launches a run that must be refused, sees that nothing was written or submitted, and returns the sentence."""
        before = sorted(self.folder.rglob("*"))
        done = self.product(*self.arguments(*more, nodes=nodes))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
        assert sorted(self.folder.rglob("*")) == before
        assert self.queue() == []
        return done.stderr

    def wrap(self, command: str, script: str) -> dict[str, str]:
        """Puts a script of the site in place of one of Slurm's commands, as `$REAL`; returns the variables that do so."""
        wrapper = self.folder / "site_bin" / command
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f"#!/bin/bash\nREAL={shutil.which(command)} HERE={wrapper.parent}\n{script}\n")
        wrapper.chmod(0o755)
        return {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}

    def queue(self) -> list[str]:
        """Returns the ids of the jobs that wait or run."""
        return self.slurm.command(["squeue", "--noheader", "--format=%i"]).stdout.split()

    def allow(self, steps: int) -> None:
        """Lets the run go on until this step."""
        (self.checkout / "allowed").write_text(f"{steps}\n")

    def wait_for_step(self, step: int) -> None:
        """Waits until the checkpoint of a step is there."""
        while not (self.run / "checkpoints" / f"step_{step}").exists():
            time.sleep(0.05)

    def steps(self) -> list[tuple[str, ...]]:
        """Returns job, number of requeues and step of each step that was made."""
        return [tuple(line.split()) for line in (self.run / "steps").read_text().splitlines()]

    def environment(self, logs: str) -> dict[str, str]:
        """Returns the variables that ray.sub had."""
        lines = (self.run / "slurm" / logs / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def scontrol(self, *arguments: str) -> None:
        done = self.slurm.command(["scontrol", *arguments])
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        """Ends what is left of the jobs, and sees that no process of theirs stays on a node."""
        for job_id in self.queue():
            self.slurm.command(["scancel", job_id])
        self.slurm.wait_for_idle_nodes()
        for name in self.slurm.names:
            self.slurm.wait_until_empty(name)


def python_of_all_users(slurm: RealSlurm) -> str:
    """Returns a Python like this one that another user may run. Skips where there is none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}"):
        if slurm.command([python, "-c", ""], user=NOBODY).returncode == 0:
            return python
    pytest.skip(
        f"user {NOBODY} can run neither {sys.executable} nor /usr/bin/{version}; make one readable for all users"
    )


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    if reason := reason_against():
        pytest.skip(reason)
    with slurm_in_a_temporary_folder() as cluster:
        yield cluster


@pytest.fixture
def site(slurm: RealSlurm) -> Iterator[Site]:
    made = Site(slurm, Path(tempfile.mkdtemp(prefix="user-", dir=slurm.folder)))
    yield made
    made.end()
