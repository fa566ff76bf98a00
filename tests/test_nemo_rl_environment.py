# SPDX-License-Identifier: Apache-2.0
"""Commands that enter NeMo-RL's Python environments, or describe them, with stand-ins for `uv` and NeMo-RL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from nemo_rl_standin import make_nemo_rl
from test_launch import BASE, CONFIG, STUBS

from nemo_specrollout.cli.run_owner import EXIT_LOST, EXIT_TAKEN_OVER
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.doctor.actors import diagnose_actors
from nemo_specrollout.doctor.diagnosis import State
from nemo_specrollout.nemo_rl.code_folder import code_folder, copy_code, is_on_pythonpath
from nemo_specrollout.nemo_rl.ray_calls import ENGINE_ACTOR, is_loss_of_a_process, python_of

pytestmark = pytest.mark.unit

COMMAND = [sys.executable, "-m", "nemo_specrollout"]
REGISTRY = """
ACTOR_ENVIRONMENT_REGISTRY = {PYTHONS}
def get_actor_python_env(name):
    return ACTOR_ENVIRONMENT_REGISTRY[name]
"""
VENVS = """
DEFAULT_VENV_DIR = {FOLDER!r}
def create_local_venv_on_each_node(command, name):
    return f"{DEFAULT_VENV_DIR}/{name}/bin/python"
"""
COLLECTOR = "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector"
ASYNC_ENGINE = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of NeMo-RL with a config to inherit from, named by NEMO_RL_DIR, and stubs on PATH."""
    folder = tmp_path / "RL"
    for part in ("nemo_rl", "examples/configs"):
        (folder / part).mkdir(parents=True)
    (folder / "examples" / "configs" / "base.yaml").write_text(BASE)
    (tmp_path / "record").mkdir()
    monkeypatch.setenv("NEMO_RL_DIR", str(folder))
    monkeypatch.setenv("STUB_RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("STUB_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{STUBS}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/already/there")
    monkeypatch.setenv("VIRTUAL_ENV", "/of/this/python")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return folder


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`. The code is found by the current folder of the interpreter alone."""
    start = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from nemo_specrollout.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_run_becomes_the_same_command_in_the_drivers_python(checkout: Path, tmp_path: Path) -> None:
    arguments = ("run", "config.yaml", "grpo.max_num_steps=3", "--script", "examples/run_grpo.py")
    done = ended(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    record = tmp_path / "record"
    started = ["run", "--project", str(checkout), "python", "-m", "nemo_specrollout", *arguments]
    assert (record / "uv").read_text().splitlines() == started
    assert (record / "uv.folder").read_text().strip() == str(tmp_path), "relative paths keep their meaning"
    (code,) = (tmp_path / "logs").glob("addon-*")
    assert {path.name for path in code.iterdir()} == {"nemo_specrollout"}
    environment = (record / "uv.environment").read_text().splitlines()
    assert f"PYTHONPATH={code}:/already/there" in environment and f"NEMO_RL_DIR={checkout}" in environment
    assert not [line for line in environment if line.startswith("VIRTUAL_ENV=")]
    assert [line for line in environment if line.startswith("NUMBA_CACHE_DIR=")], "no kernels beside the copy"
    assert (record / "uv.addon").read_text().strip() == str(code / "nemo_specrollout" / "__init__.py")


def test_doctor_looks_inside(checkout: Path, tmp_path: Path) -> None:
    assert ended(tmp_path, "doctor", "config.yaml", "--in-nemo-rl", "--no-self-test").returncode == 0
    arguments = (tmp_path / "record" / "uv").read_text().splitlines()
    assert arguments[-3:] == ["doctor", "config.yaml", "--no-self-test"]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("NEMO_RL_DIR", "/nowhere", "/nowhere is no checkout of it; set NEMO_RL_DIR"),
        ("PATH", "/usr/bin:/bin", "uv is not on PATH"),
    ],
)
def test_what_is_missing_is_a_sentence(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = ended(tmp_path, "doctor", "--in-nemo-rl")
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_a_copy_is_made_once_for_each_content(tmp_path: Path) -> None:
    first = code_folder(tmp_path)
    (first / "mark").touch()
    assert code_folder(tmp_path) == first and (first / "mark").exists()
    copy_code(first)
    assert not (first / "mark").exists() and not list(tmp_path.glob(".*"))


def test_the_code_is_on_pythonpath_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not is_on_pythonpath()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert is_on_pythonpath()


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A NeMo-RL that has only its table of environments. Returns the folder of the environments that exist."""
    package, environments = tmp_path / "standin" / "nemo_rl", tmp_path / "environments"
    for part in ("distributed", "utils"):
        (package / part).mkdir(parents=True)
        (package / part / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "package_info.py").write_text("MAJOR = 0\nMINOR = 6\nPATCH = 0\n")
    pythons = {ENGINE_ACTOR: "uv run --extra vllm", ASYNC_ENGINE: "uv run --extra vllm", COLLECTOR: sys.executable}
    registry = package / "distributed" / "ray_actor_environment_registry.py"
    registry.write_text(REGISTRY.replace("{PYTHONS}", repr(pythons)))
    (package / "utils" / "venvs.py").write_text(VENVS.replace("{FOLDER!r}", repr(str(environments))))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
    yield environments
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def make_python(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_doctor_says_which_actors_see_the_package(nemo_rl: Path) -> None:
    make_python(nemo_rl / ENGINE_ACTOR / "bin" / "python", f'exec "{sys.executable}" -S "$@"')
    found = {d.name: d for d in diagnose_actors()}
    without_packages = found["VllmGenerationWorker"]
    assert without_packages.state is State.FAIL and "vLLM is not there" in without_packages.found
    assert found["VllmAsyncGenerationWorker"].found.endswith("NeMo-RL makes it when it first needs it")
    assert "finds this package; vLLM 0.32.0" in found["AsyncTrajectoryCollector"].found


def test_doctor_says_which_actors_do_not(nemo_rl: Path) -> None:
    make_python(nemo_rl / ENGINE_ACTOR / "bin" / "python", f'cd / && exec "{sys.executable}" -S -E "$@"')
    make_python(nemo_rl / ASYNC_ENGINE / "bin" / "python", "exit 3")
    found = {d.name: d for d in diagnose_actors()}
    assert found["VllmGenerationWorker"].found.endswith("does not find nemo_specrollout")
    assert "does not answer" in found["VllmAsyncGenerationWorker"].found


def test_an_engine_gets_the_environment_of_nemo_rl_s_actor(nemo_rl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nemo_rl / ENGINE_ACTOR / "bin" / "python"
    assert python_of(COLLECTOR) == sys.executable
    assert python_of(ENGINE_ACTOR) == str(path), "no Python is on this node"
    make_python(path, f'cd / && exec "{sys.executable}" -S "$@"')
    with pytest.raises(ConfigError, match="which runs VllmGenerationWorker, does not find nemo_specrollout"):
        python_of(ENGINE_ACTOR)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert python_of(ENGINE_ACTOR) == str(path)


SCRIPT = """
import json, sys
from pathlib import Path
from omegaconf import OmegaConf

def setup(config): ...

def main():
    config = OmegaConf.to_container(OmegaConf.load(sys.argv[sys.argv.index("--config") + 1]), resolve=True)
    Path("seen.json").write_text(json.dumps(config["logger"]["name"]))
    for step in range(config["steps"]):
        Path(f"checkpoints/step_{step + 1}").mkdir(parents=True)
"""
RUN = """
grpo: {max_num_steps: 1000000, max_num_epochs: 1}
policy: {model_name: m, generation: {backend: vllm, vllm_cfg: {async_engine: false}}}
cluster: {gpus_per_node: 1, num_nodes: 1}
checkpointing: {enabled: true, checkpoint_dir: checkpoints, checkpoint_must_save_by: "00:01:00:00"}
logger: {log_dir: logs, name: 'costs \\${x} \\\\\\${y} C:\\dir\\ $z'}
"""


def run_a_script(folder: Path, script: str, steps: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `nemo-specrollout run` with a script of a NeMo-RL that is only its name."""
    make_nemo_rl(folder)
    (folder / "nemo_rl" / "package_info.py").write_text("MAJOR = 0\nMINOR = 8\nPATCH = 0\n")
    (folder / "examples").mkdir()
    (folder / "examples" / "script.py").write_text(script)
    config = folder / "config.yaml"
    config.write_text(f"{RUN}steps: {steps}\n")
    command = ["run", str(config), "--script", "examples/script.py", "--when-done", "done"]
    own = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "nemo_specrollout", *command],
        env={**os.environ, **own, **environment}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
def test_a_script_gets_every_text_as_it_is_and_a_complete_run_is_marked(tmp_path: Path, steps: int) -> None:
    (tmp_path / "newest_start").write_text("7.1\n")
    job = {"SPECROLLOUT_NEWEST_START": "newest_start", "SPECROLLOUT_START": "7.1"}
    done = run_a_script(tmp_path, SCRIPT, steps, **job)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "seen.json").read_text()) == "costs ${x} \\${y} C:\\dir\\ $z"
    assert (tmp_path / "done").exists() is (steps > 0)


@pytest.mark.parametrize(
    ("steps", "job", "said"),
    [
        (0, {}, "ended the run, which has no checkpoint, so the same command starts at the first step"),
        (2, {}, "ended the run; the same command goes on after its newest checkpoint, step 2"),
        (
            2,
            {"SPECROLLOUT_START": "7.0"},
            "the same `nemo-specrollout launch` line goes on after its newest checkpoint",
        ),
    ],
)
def test_the_last_line_of_a_run_that_failed_says_how_to_go_on(
    tmp_path: Path, steps: int, job: dict[str, str], said: str
) -> None:
    failing = SCRIPT + "    raise RuntimeError('a node is lost')\n"
    done = run_a_script(tmp_path, failing, steps, **job)
    assert done.returncode == 1
    *_, error, last = done.stderr.splitlines()
    assert error == "RuntimeError: a node is lost"
    assert last.startswith("nemo-specrollout: ") and said in last


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("TimeoutError('no answer')", EXIT_LOST),
        ("FileNotFoundError(2, 'No such file or directory', 'rewards.json')", 1),
    ],
)
def test_an_error_of_an_actor_is_shown_whole_even_if_it_is_of_the_system(tmp_path: Path, error: str, code: int) -> None:
    """The class of Ray's error is then that of the actor's error, too, which the command line would cut to a sentence."""
    failing = f"    from ray.exceptions import RayTaskError\n    raise RayTaskError('stream', 'of the actor', {error})"
    done = run_a_script(tmp_path, SCRIPT + failing + ".as_instanceof_cause()\n", 2)
    assert done.returncode == code
    assert "of the actor" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("the same command goes on after its newest checkpoint, step 2")


def test_a_driver_that_calls_ray_when_it_ends_does_not_start_ray_again(tmp_path: Path) -> None:
    """A policy of NeMo-RL does so in `__del__`, after Ray has ended. A Ray that starts then lets the driver hang."""
    policy = """
import atexit

def shuts_down():
    import ray
    try:
        ray.put(1)
    except ray.exceptions.RaySystemError:
        print("Ray is not there")

atexit.register(shuts_down)
"""
    done = run_a_script(tmp_path, SCRIPT + "    raise RuntimeError('a node is lost')\n" + policy, 2)
    assert done.returncode == 1
    assert done.stdout.endswith("Ray is not there\n")


def test_a_lost_process_is_told_from_an_error_of_the_program() -> None:
    from ray import exceptions

    def raised(error: BaseException, *, of: BaseException | None = None) -> BaseException:
        try:
            raise error from of
        except BaseException as caught:
            return caught

    lost = exceptions.ActorDiedError()
    in_an_actor = exceptions.RayTaskError("generate", "Traceback", lost)
    assert is_loss_of_a_process(lost)
    assert is_loss_of_a_process(in_an_actor)
    assert is_loss_of_a_process(raised(RuntimeError("no weights"), of=in_an_actor.as_instanceof_cause()))
    assert is_loss_of_a_process(exceptions.RpcError("deadline exceeded"))
    assert is_loss_of_a_process(exceptions.RayTaskError("stream_weights", "Traceback", TimeoutError("no answer")))
    own = exceptions.RayTaskError("generate", "Traceback", ValueError("a reward"))
    assert not is_loss_of_a_process(own)
    assert not is_loss_of_a_process(raised(RuntimeError("no weights"), of=own))


def test_a_driver_ends_when_a_later_start_of_its_job_has_taken_the_run_over(tmp_path: Path) -> None:
    (tmp_path / "newest_start").write_text("7.1\n")
    endless = SCRIPT + "    while True: __import__('time').sleep(1)\n"
    done = run_a_script(tmp_path, endless, 0, SPECROLLOUT_NEWEST_START="newest_start", SPECROLLOUT_START="7.0")
    assert done.returncode == EXIT_TAKEN_OVER
    said = "job 7.1 runs now, so this driver, of job 7.0, ends; Slurm may have lost its node for a while"
    assert done.stderr.endswith(f"nemo-specrollout: {said}\n")
    assert not (tmp_path / "done").exists()
