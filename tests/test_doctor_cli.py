# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout doctor` as a user runs it: real engines, broken environments, and never a stack trace."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from processes import wait_for_child
from test_nemo_rl_config import CLEAN

from nemo_specrollout.cli.main import main
from nemo_specrollout.doctor.diagnosis import State
from nemo_specrollout.doctor.self_test import diagnose_self_test, try_engines

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "nemo_specrollout.cli.main", "doctor"]
# Prefixes of variables that the tests set for engines, but users do not.
OURS = ("VLLM_", "NEMO_SPECROLLOUT_", "HF_", "TORCH")
# Packages that are missing in the environment without an engine.
HEAVY = (
    "vllm",
    "torch",
    "triton",
    "ray",
    "megatron",
    "speculators",
    "transformers",
    "__editable__",
    "nemo_specrollout",
)

# The self-test with a verifier that accepts every draft.
LENIENT = """
from nemo_specrollout.doctor.diagnosis import answer
from nemo_specrollout.doctor.self_test import compare_engines
from nemo_specrollout.generation.engine.arguments import set_process_environment

set_process_environment()
from nemo_specrollout.sampling import equality

accept = equality.accept_by_equality
equality.accept_by_equality = lambda sampled_R, inputs_R, *rest: accept(sampled_R, sampled_R.roll(1), *rest)
answer(compare_engines)
"""


def user_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def run(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Returns the exit code and the output, after checking that it has no stack trace."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], env={**user_environment(), **environment}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "Traceback" not in output and 'File "' not in output
    return done.returncode, output


def diagnoses(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(d["section"], d["name"]): d for d in json.loads(file.read_text())["diagnoses"]}


def test_a_sound_environment_passes(tmp_path: Path) -> None:
    file, config = tmp_path / "facts.json", tmp_path / "config.yaml"
    config.write_text(CLEAN)
    code, output = run(config, "grpo.max_num_steps=3", "--json", file)
    assert code == 0, output
    assert "768 of 768 tokens equal" in output and "0 fail" in output
    assert "\x1b" not in output, "no colours where there is no terminal"
    found = diagnoses(file)
    assert found[("engine", "model runner")]["found"].startswith("V2")
    assert found[("engine", "platform")]["found"] == "CpuPlatformForV2, on cpu"
    assert found[("self-test", "tokens at T=1")]["found"] == "768 of 768 tokens equal"
    assert "suffix" in found[("self-test", "drafts")]["found"]
    assert "3 steps in all" in found[("config", "step")]["found"]
    assert {d["state"] for d in found.values()} <= {"ok", "warn"}
    states = json.loads(file.read_text())["states"]
    assert states["fail"] == 0 and sum(states.values()) == len(found)


def test_a_killed_self_test_is_a_failed_line(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    process = subprocess.Popen(
        [*COMMAND, "--json", str(file)],
        env=user_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.kill(wait_for_child(process.pid, "doctor.self_test"), signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 1 and "Traceback" not in output
    assert "killed by SIGKILL" in output and "--json FILE" in output
    assert diagnoses(file)[("self-test", "engine")]["state"] == "fail"
    assert diagnoses(file)[("engine", "engine")]["found"] == "it did not start"


@pytest.mark.slow
def test_the_v1_model_runner_fails_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    code, _ = run("--json", file, VLLM_USE_V2_MODEL_RUNNER="0")
    assert code == 1
    found = diagnoses(file)[("self-test", "engine")]
    assert "V2 model runner" in found["found"] and "Unset VLLM_USE_V2_MODEL_RUNNER" in found["to_do"]
    assert any("Traceback" in line for line in found["log"]), "the file has what the terminal leaves out"


def test_a_verifier_that_accepts_wrong_drafts_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lenient_self_test.py").write_text(LENIENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    outcome = try_engines("lenient_self_test")
    assert not outcome.failure, outcome.log
    tokens = [d for d in diagnose_self_test(outcome) if d.name.startswith("tokens")]
    assert [d.state for d in tokens] == [State.FAIL, State.FAIL]
    assert all("first difference: response" in d.found for d in tokens)


def test_missing_vllm_torch_and_nemo_rl_are_diagnosed(tmp_path: Path) -> None:
    """Runs the interpreter without its site-packages, except links to the packages that the command line needs."""
    (site,) = {Path(p) for p in sys.path if p.endswith("site-packages") and (Path(p) / "rich").is_dir()}
    for entry in site.iterdir():
        if not entry.name.lower().startswith(HEAVY):
            (tmp_path / entry.name).symlink_to(entry)
    done = subprocess.run(
        [sys.executable, "-S", *COMMAND[1:]], env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert "Where engines run, install vLLM 0.25.1 or later, before 0.34.0." in done.stdout
    assert "not tried: vLLM is not installed" in done.stdout
    assert "0 fail" in done.stdout


def test_a_bad_config_does_not_stop_the_other_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "none.yaml", "--no-self-test"]) == 1
    output = "".join(capsys.readouterr())
    assert "Traceback" not in output
    assert "none.yaml" in output and "names of vLLM" in output and "1 fail" in output


def test_an_unwritable_json_file_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (tmp_path / "none" / "facts.json", tmp_path, "/dev/null"):
        assert main(["doctor", "--json", str(file)]) == 2
        output = "".join(capsys.readouterr())
        assert output.startswith(f"nemo-specrollout: --json: {file}") and output.count("\n") == 1
