# SPDX-License-Identifier: Apache-2.0
"""The sections of `doctor`: everything out of range, missing, changed, too small or crashing becomes a diagnosis."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import wait_until_gone
from test_nemo_rl_config import CLEAN

from nemo_specrollout.cli.doctor import diagnose_config
from nemo_specrollout.doctor import environment
from nemo_specrollout.doctor.diagnosis import Diagnosis, Outcome, State, run_child
from nemo_specrollout.doctor.environment import NEEDED, devices, diagnose_versions, found_versions
from nemo_specrollout.doctor.model_cache import cache_folder, model_cache
from nemo_specrollout.doctor.patch_point_check import diagnose_vllm
from nemo_specrollout.doctor.self_test import (
    CAUSES,
    compared,
    diagnose_engine,
    diagnose_self_test,
)

pytestmark = pytest.mark.unit

VERSIONS = {"python": "3.11.7", "nemo_specrollout": "0.1.0", "vllm": "0.32.0", **dict.fromkeys(NEEDED, "1.0")}
NO_ENGINE = Outcome({}, "killed by SIGSEGV", (), 1.0)
Child = Callable[[str], str]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """Makes a module with the given lines of Python, which other processes can import; returns its name."""

    def make(text: str) -> str:
        (tmp_path / "some_child.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return "some_child"

    return make


def versions(**changes: str | None) -> dict[str, Diagnosis]:
    found = {name: v for name, v in {**VERSIONS, **changes}.items() if v is not None}
    return {d.name: d for d in diagnose_versions(found, is_release=False)}


def test_an_unsupported_vllm_fails_with_the_supported_range() -> None:
    for version in ("0.25.0", "0.34.0", "nightly"):
        diagnosis = versions(vllm=version)["vllm"]
        assert diagnosis.state is State.FAIL and version in diagnosis.found
        assert diagnosis.to_do == "Install vLLM 0.25.1 or later, before 0.34.0."
    assert versions()["vllm"] == Diagnosis("versions", "vllm", State.OK, "0.32.0")


def test_a_missing_vllm_is_no_failure() -> None:
    assert versions(vllm=None)["vllm"].state is State.WARN
    assert versions(vllm=None, torch=None)["torch"].state is State.OK, "only vLLM needs it"
    assert versions(vllm=None, **{"nemo-rl": "0.6.0"})["vllm"].state is State.OK


def test_only_packages_that_an_engine_needs_must_be_installed() -> None:
    assert versions(triton=None)["triton"].state is State.FAIL
    assert (
        versions(speculators=None)["speculators"].found
        == "not installed; only refresh-draft and draft_refresh needs it"
    )
    assert versions(speculators=None)["speculators"].state is State.OK


def test_a_release_of_nemo_rl_fails() -> None:
    found = {d.name: d for d in diagnose_versions({**VERSIONS, "nemo-rl": "0.7.0"}, is_release=True)}
    assert found["nemo-rl"].state is State.FAIL and "main of August 2026" in found["nemo-rl"].to_do


def test_installed_packages_are_found() -> None:
    found = found_versions()
    assert {"python", "nemo_specrollout", "vllm", "torch", "triton"} <= set(found)
    assert "commit" in found["nemo_specrollout"]


def test_a_missing_name_of_vllm_fails(changed_vllm: Callable[..., Path]) -> None:
    folder = changed_vllm(("vllm/v1/worker/gpu/sample/gumbel.py", "def gumbel_sample(", "def gumbel_samples("))
    failed = [d for d in diagnose_vllm(folder) if d.state is State.FAIL]
    assert {(d.name, d.found) for d in failed} == {("vllm.v1.worker.gpu.sample.gumbel.gumbel_sample", "absent")}
    present, total = next(d.found for d in diagnose_vllm(folder) if d.state is State.OK).split()[::2][:2]
    assert int(present) == int(total) - 1


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "not done after 2 s"),
        (
            "from nemo_specrollout.doctor.diagnosis import answer\n"
            "def work(order, tell):\n    tell('order', order)\n    raise ValueError('a\\nb')\n"
            "answer(work)",
            "ValueError: a b",
        ),
    ],
)
def test_every_end_of_a_child_is_an_outcome(child: Child, text: str, failure: str) -> None:
    outcome = run_child(child(text), [1, "two"], 2 if "sleep" in text else 120)
    assert outcome.failure == failure
    assert outcome.told == ({"order": [1, "two"]} if "answer" in text else {})


def test_a_time_out_ends_the_children_of_a_child(child: Child, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starts = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    timeout_s = 2.0
    while not (pid.exists() and pid.read_text()):  # a busy machine may need longer to start the child
        run_child(child(f"import subprocess, time\n{starts}\ntime.sleep(60)"), None, timeout_s)
        timeout_s *= 2
    wait_until_gone(int(pid.read_text()))  # killed, and about to end; else pytest's time-out


def test_limits_of_the_machine_are_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.shared_memory(tmp_path / "none").state is State.FAIL
    assert environment.open_files(256).state is State.WARN and environment.open_files(1024).state is State.OK
    monkeypatch.setattr(environment, "SMALLEST_SHM", 1 << 60)
    assert "--shm-size" in environment.shared_memory(tmp_path).to_do
    assert environment.temporary_folder().state is State.OK
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    gone = environment.temporary_folder()
    assert gone.state is State.FAIL and gone.found == os.strerror(errno.ENOENT)


def test_a_ray_address_without_a_listener_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for joined in (address, f"ray://{address}"):
            found = environment.ray_address({"RAY_ADDRESS": joined})
            assert found.state is State.WARN and "Unset RAY_ADDRESS" in found.to_do, "it may be somebody else's"
    for wrong in (address, "nonsense", "127.0.0.1:99999"):
        found = environment.ray_address({"RAY_ADDRESS": wrong})
        assert found.state is State.FAIL and wrong in found.found
    for harmless in ({}, {"RAY_ADDRESS": ""}, {"RAY_ADDRESS": "auto"}, {"RAY_ADDRESS": "local"}):
        assert environment.ray_address(harmless).state is State.OK


def test_the_machine_has_a_line_for_ray_and_the_model_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    variables = {"RAY_ADDRESS": "nonsense", "HF_HOME": str(tmp_path / "file")}
    found = {d.name: d.state for d in environment.diagnose_machine(variables)}
    assert found["RAY_ADDRESS"] is State.FAIL and found["Hugging Face cache"] is State.WARN


def test_a_model_cache_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "sealed").mkdir(mode=0o500)
    states = {}
    for name in ("new", "file", "sealed"):
        found = model_cache(environment.MACHINE, {"HF_HOME": str(tmp_path / name)})
        states[name] = found.state
        assert str(tmp_path / name / "hub") in found.found
    assert states["new"] is State.OK and states["file"] is State.WARN
    assert states["sealed"] is (State.OK if os.geteuid() == 0 else State.WARN), "root may write everywhere"
    offline = model_cache(environment.MACHINE, {"HF_HOME": str(tmp_path / "file"), "HF_HUB_OFFLINE": "1"})
    assert offline.state is State.OK and "HF_HUB_OFFLINE is set" in offline.found


def test_the_model_cache_is_where_its_library_looks(tmp_path: Path) -> None:
    for variables in ({"HF_HOME": "/a"}, {"HF_HUB_CACHE": "/b"}, {"XDG_CACHE_HOME": "/c"}):
        asked = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
        others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "HUGGING"))}
        done = subprocess.run(
            [sys.executable, "-c", asked], env={**others, **variables}, capture_output=True, text=True, check=True
        )
        assert str(cache_folder(variables)) == done.stdout.strip()


def test_a_model_that_is_not_downloaded_fails_if_downloads_are_off(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    head = "policy.generation.specrollout.drafters=[{type: eagle3, model: some/head}]"

    def failed(**variables: str) -> list[str]:
        given = {"HF_HUB_CACHE": str(tmp_path / "hub"), **variables}
        found = diagnose_config(tmp_path / "config.yaml", [head], given)
        return [d.found for d in found if d.state is State.FAIL]

    assert failed() == [], "the run downloads it"
    policy, drafter = failed(HF_HUB_OFFLINE="1")
    assert "policy.model_name: a/name is not in" in policy and "drafter eagle3: some/head is not in" in drafter
    (tmp_path / "hub" / "models--a--name" / "snapshots" / "0123").mkdir(parents=True)
    (only,) = failed(TRANSFORMERS_OFFLINE="true")
    assert "some/head" in only and "TRANSFORMERS_OFFLINE is set" in only


def test_an_unusable_gpu_fails_unless_vllm_is_for_a_cpu() -> None:
    line, without = "NVIDIA H100, 81559 MiB, 580.1", Outcome({"cuda": "12.9", "gpus": []}, "", (), 1.0)
    found = {d.name: d for d in devices(without, [line], cpu_build=False)}
    assert found["driver: GPU 0"].found == line
    assert found["torch"].state is State.FAIL and "driver" in found["torch"].to_do
    assert next(d for d in devices(without, [line], cpu_build=True) if d.name == "torch").state is State.OK
    nothing = next(d for d in devices(without, [], cpu_build=False) if d.name == "torch")
    assert nothing.state is State.FAIL and "no GPU here" in nothing.found
    usable = Outcome({"cuda": "12.9", "gpus": [["NVIDIA H100", 80 << 30, "9.0"]]}, "", (), 1.0)
    assert {d.state for d in devices(usable, [line], cpu_build=False)} == {State.OK}
    broken = Outcome({}, "ImportError: libcudart.so", ("last",), 1.0)
    assert [(d.state, d.log) for d in devices(broken, [], cpu_build=False)] == [(State.FAIL, ("last",))]


def test_gpus_that_a_run_uses_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Outcome(
        {"cuda": "12.9", "gpus": []}, "OutOfMemoryError: CUDA out of memory. Tried to allocate", ("last",), 1.0
    )
    (found,) = devices(full, [], cpu_build=False)
    assert found.state is State.WARN and "the memory of a GPU is full" in found.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = Outcome({"cuda": "12.9", "gpus": []}, "", (), 1.0)
    torch = next(d for d in devices(hidden, ["NVIDIA H100"], cpu_build=False) if d.name == "torch")
    assert torch.state is State.WARN and "CUDA_VISIBLE_DEVICES hides the GPUs" in torch.found


def test_the_first_differing_token_is_named() -> None:
    assert compared([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == {"equal": 4, "total": 4, "first": None}
    told = compared([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6, 7]])
    assert told == {"equal": 4, "total": 6, "first": [1, 1, 5, 6]}
    drafts = {"proposed": {"suffix": 0}, "accepted": {"suffix": 0}}
    tokens, none, seconds = diagnose_self_test(Outcome({"T=1": told, "drafts": drafts}, "", (), 1.0))
    assert tokens.state is State.FAIL and "--json" in tokens.to_do
    assert tokens.found == ("4 of 6 tokens equal; first difference: response 1, position 1, plain 5, drafted 6")
    assert none.found == "none was verified" and none.state is State.FAIL, "nothing was compared"
    assert seconds.state is State.OK


@pytest.mark.parametrize(("sign", "to_do"), CAUSES.items())
def test_a_known_cause_in_a_log_names_its_fix(sign: str, to_do: str) -> None:
    (diagnosis,) = diagnose_self_test(Outcome({}, "RuntimeError", ("a", f"b {sign} c"), 1.0))
    assert diagnosis.state is State.FAIL and diagnosis.to_do == to_do
    assert "--json" in next(diagnose_self_test(NO_ENGINE)).to_do
    assert next(diagnose_engine(NO_ENGINE)).state is State.FAIL


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.generation.specrollout.budjet=1", "did you mean 'budget'?"),
        ("policy.generation.quant_cfg=NVFP4", "policy.generation.quant_cfg: "),
        ("not an override", "not an override"),
        ("runtime=local", "use `specrollout-lab`"),
    ],
)
def test_a_config_that_cannot_run_fails_with_checks_message(tmp_path: Path, override: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(CLEAN)
    failed = [d for d in diagnose_config(tmp_path / "config.yaml", [override], {}) if d.state is State.FAIL]
    assert [words in d.found for d in failed] == [True]
    assert State.FAIL not in {d.state for d in diagnose_config(tmp_path / "config.yaml", [], {})}


def test_a_nemo_rl_config_and_a_missing_file_fail(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("runtime: nemo_rl\npolicy: {generation: {specrollout: {enabled: true}}}\n")
    assert State.FAIL in {d.state for d in diagnose_config(config, [])}
    assert {d.name for d in diagnose_config(tmp_path / "none.yaml", [])} == {"error"}
