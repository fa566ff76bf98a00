# SPDX-License-Identifier: Apache-2.0
"""Known faults of vLLM and NeMo-RL that a config meets, and what `check` and `doctor` say of them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from test_nemo_rl_config import CLEAN, EAGLE3, NATIVE, tree

from nemo_specrollout.cli.doctor import diagnose_config
from nemo_specrollout.cli.main import main
from nemo_specrollout.config import engine_vllm, known_traps
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.known_traps import MOVED_MODULES, TRAPS, MetTrap
from nemo_specrollout.config.nemo_rl_tree import GENERATION, VLLM_CFG
from nemo_specrollout.doctor.diagnosis import State
from nemo_specrollout.installed.python_source import PythonSource, installed_source
from nemo_specrollout.installed.versions import VLLM_RANGE

pytestmark = pytest.mark.unit

TRAINED = (EAGLE3, "policy.draft.enabled=true")
MTP = NATIVE.format("method: mtp")
HEAD = f"{BLOCK_PATH}.drafters=[{{type: eagle3, model: a/head}}]"
HTTP = f"{VLLM_CFG}.expose_http_server=true"
OFF = f"{BLOCK_PATH}.enabled=false"
GREEDY = f"{GENERATION}.temperature=0"
NOISE = "from the same noise"
LAYERS = "names no layers"
CONTEXT = "context length of a head"
SERVER = "HTTP server imports"
STATES = "goes on from an older state"
DELTA = "policy.model_name=Qwen/Qwen3-Next-80B-A3B"
GYM = "env.should_use_nemo_gym=true"
LM_HEAD = "shares the policy's lm_head"
OLD_HEAD = "leaves the draft head as it was"
STALE = "prefixes that older weights have cached"
ASYNC = "grpo.async_grpo.enabled=true"
IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates=true"
RECOMPUTED = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
CONTROLLED = "async_rl.recompute_kv_cache_after_weight_updates=true"
NO_CACHE = f"{VLLM_CFG}.enable_prefix_caching=false"
NOWHERE = {"vllm": None, "nemo_rl": None}
Meet = Callable[..., list[MetTrap]]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Meet:
    def of(*overrides: str, vllm: str | None = "0.32.0", nemo_rl: str | None = "0.6.0") -> list[MetTrap]:
        """Returns the traps of the clean config with `overrides` if exactly these packages are installed."""
        monkeypatch.setattr(engine_vllm, "vllm_version", lambda: vllm)
        monkeypatch.setattr(engine_vllm, "nemo_rl_checkout", lambda: None)
        monkeypatch.setattr(known_traps, "nemo_rl_version", lambda: nemo_rl)
        return known_traps.known_traps(tree(*overrides))

    return of


def test_a_config_with_text_drafters_meets_none(met: Meet) -> None:
    for version in (None, "0.25.1", "0.32.0", "0.33.0"):
        assert met(vllm=version) == []


MEETS = [
    (NOISE, (EAGLE3,), "0.25.1"),
    (NOISE, (HEAD,), "0.28.0"),
    (LAYERS, (EAGLE3,), "0.25.1"),
    (LAYERS, (HEAD, GREEDY), "0.33.0"),
    (CONTEXT, (HEAD,), "0.33.0"),
    (STATES, (DELTA,), "0.25.1"),
    (STATES, (DELTA, OFF, MTP), "0.29.0"),
    (SERVER, (HTTP,), "0.29.0"),
    (SERVER, (GYM,), "0.33.0"),
    (LM_HEAD, TRAINED, "0.32.0"),
    (OLD_HEAD, TRAINED, "0.32.0"),
    (OLD_HEAD, (MTP,), "0.32.0"),
    (STALE, (ASYNC,), "0.25.1"),
    (STALE, (ASYNC, IN_FLIGHT, OFF), "0.32.0"),
    (STALE, (ASYNC, IN_FLIGHT, RECOMPUTED), "0.32.0"),
    (STALE, (CONTROLLED,), "0.32.0"),
]


@pytest.mark.parametrize(("symptom", "overrides", "vllm"), MEETS)
def test_a_config_meets_a_trap(met: Meet, symptom: str, overrides: tuple[str, ...], vllm: str) -> None:
    assert [symptom in str(trap) for trap in met(*overrides, vllm=vllm)].count(True) == 1


MEETS_NOT = [
    (NOISE, (EAGLE3,), "0.29.0"),
    (NOISE, (EAGLE3, GREEDY), "0.25.1"),
    (NOISE, (HEAD, OFF), "0.25.1"),
    (LAYERS, (MTP,), "0.32.0"),
    (CONTEXT, (HEAD,), "0.32.0"),
    (CONTEXT, (MTP,), "0.33.0"),
    (STATES, (DELTA,), "0.32.0"),
    (STATES, (DELTA, OFF), "0.25.1"),
    (STATES, (), "0.25.1"),
    (SERVER, (HTTP,), "0.28.0"),
    (SERVER, (HTTP, "runtime=local"), "0.32.0"),
    (LM_HEAD, (EAGLE3,), "0.32.0"),
    (OLD_HEAD, (EAGLE3,), "0.32.0"),
    (OLD_HEAD, (EAGLE3.replace("tokens: 3", "tokens: 0"), TRAINED[1]), "0.32.0"),
    (STALE, (IN_FLIGHT,), "0.32.0"),
    (STALE, (ASYNC, IN_FLIGHT, NO_CACHE), "0.32.0"),
    (STALE, (ASYNC, RECOMPUTED), "0.32.0"),
    (STALE, (CONTROLLED, NO_CACHE), "0.32.0"),
    (STALE, (ASYNC, "runtime=local"), "0.32.0"),
]


@pytest.mark.parametrize(("symptom", "overrides", "vllm"), MEETS_NOT)
def test_a_config_does_not_meet_a_trap(met: Meet, symptom: str, overrides: tuple[str, ...], vllm: str) -> None:
    assert not any(symptom in str(trap) for trap in met(*overrides, vllm=vllm))


def test_every_trap_is_met_and_not_met_by_a_case_above() -> None:
    for cases in (MEETS, MEETS_NOT):
        symptoms = {symptom for symptom, _, _ in cases}
        assert len(symptoms) == len(TRAPS)
        for trap in TRAPS:
            assert any(symptom in trap.symptom for symptom in symptoms), trap


def test_a_sentence_names_the_versions_with_the_fault(met: Meet) -> None:
    assert met(EAGLE3, vllm="0.25.1")[0].trap.versions == "vllm before 0.29.0"
    assert str(met(EAGLE3, vllm="0.25.1")[0]).startswith("vllm before 0.29.0, here 0.25.1: the V2 model runner")
    texts = [str(trap) for trap in met(*TRAINED, HTTP, ASYNC, DELTA, **NOWHERE)]
    assert len(texts) == len(TRAPS), "a run elsewhere may have any version"
    assert "vllm from 0.29.0, not installed here: " in " ".join(texts)
    assert "nemo-rl, not installed here: " in " ".join(texts)


def test_the_block_avoids_what_it_can(met: Meet) -> None:
    on = met(*TRAINED, HTTP, ASYNC, vllm="0.33.0")
    assert {trap.state for trap in on if trap.trap.is_ours} == {"avoided"}
    assert [trap.state for trap in on if not trap.trap.is_ours] == ["not avoided"]
    off = met(*TRAINED, HTTP, ASYNC, OFF, vllm="0.33.0")
    assert {trap.state for trap in off} == {"not avoided"}
    assert {"because the block is off" in str(trap) for trap in off if trap.trap.is_ours} == {True}
    assert [str(trap) for trap in on if not trap.trap.is_ours] == [str(trap) for trap in off if not trap.trap.is_ours]


def test_traps_are_those_of_supported_versions() -> None:
    first, first_too_new = VLLM_RANGE
    for trap in TRAPS:
        if trap.package == known_traps.VLLM:
            assert trap.before is None or first < trap.before
            assert trap.since is None or first < trap.since < first_too_new


@pytest.mark.parametrize(("pinned", "num_met"), [("0.25.1", 1), ("0.32.0", 0), (None, 1)])
def test_without_a_vllm_here_the_one_that_nemo_rl_pins_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: str | None, num_met: int
) -> None:
    monkeypatch.setattr(engine_vllm, "vllm_version", lambda: None)
    monkeypatch.setattr(engine_vllm, "nemo_rl_checkout", lambda: tmp_path)
    if pinned is not None:
        pin = f"[project.optional-dependencies]\nvllm = [\"vllm=={pinned} ; sys_platform != 'linux'\"]\n"
        (tmp_path / "pyproject.toml").write_text(pin)
    found = [str(trap) for trap in known_traps.known_traps(tree(HEAD)) if NOISE in str(trap)]
    assert len(found) == num_met
    place = "not installed here" if pinned is None else f"pinned by NeMo-RL's checkout {pinned}"
    assert all(f"vllm before 0.29.0, {place}: the V2" in text for text in found)


# Modules that NeMo-RL's HTTP server imports by names that vLLM has changed. Our engine actor lends it the old names.


HOST = ROOT / "tests" / "nemo_rl" / "cpu_host"
LEND_NAMES = """
import importlib, sys
from nemo_specrollout.config.known_traps import MOVED_MODULES
from nemo_specrollout.nemo_rl.moved_modules import lend_old_names
assert not set(MOVED_MODULES) & set(sys.modules)
lend_old_names()
lend_old_names()
for old, new in MOVED_MODULES.items():
    assert importlib.import_module(old) is importlib.import_module(new), old
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.engine.protocol import ErrorResponse
"""


@pytest.mark.integration
def test_the_moved_modules_are_importable_by_their_old_names() -> None:
    subprocess.run([sys.executable, "-c", LEND_NAMES], check=True, cwd=ROOT)


def test_a_vllm_keeps_the_modules_that_it_has(tmp_path: Path) -> None:
    """A package `vllm` that has one module by its old name and the other by none, as no real one has."""
    (tmp_path / "vllm" / "entrypoints").mkdir(parents=True)
    for folder in ("vllm", "vllm/entrypoints"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "vllm" / "entrypoints" / "chat_utils.py").write_text("its_own = True")
    code = (
        "import sys, vllm.entrypoints.chat_utils as own\n"
        "from nemo_specrollout.nemo_rl.moved_modules import lend_old_names\n"
        "lend_old_names()\n"
        "assert sys.modules['vllm.entrypoints.chat_utils'] is own and own.its_own\n"
        "assert 'vllm.entrypoints.openai.engine.protocol' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_moved_modules_are_the_ones_that_the_installed_vllm_lacks() -> None:
    folder = installed_source("vllm")
    assert folder is not None
    vllm = PythonSource(folder, "vllm")
    assert [vllm.file_of(old) for old in MOVED_MODULES] == [None, None]
    assert all(vllm.file_of(new) is not None for new in MOVED_MODULES.values())
    if not os.environ.get("NEMO_RL_SRC"):
        return
    server = Path(os.environ["NEMO_RL_SRC"]) / "nemo_rl" / "models" / "generation" / "vllm" / "vllm_worker_async.py"
    imported = set(re.findall(r"from (vllm[\w.]*) import", server.read_text(encoding="utf-8")))
    assert {name for name in imported if vllm.file_of(name) is None} == set(MOVED_MODULES)


def test_the_table_of_the_host_lists_all_that_it_does() -> None:
    hooks = set(
        re.findall(r"nemo_rl_cpu\.\w+:(\w+)", (HOST / "nemo_rl_cpu" / "__init__.py").read_text(encoding="utf-8"))
    )
    page = (ROOT / "docs" / "developing" / "tests.md").read_text(encoding="utf-8")
    table = page.partition("## What the CPU host stands in for")[2]
    listed = {
        name for row in table.splitlines() if row.startswith("| ") for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert len(hooks) > 20 and hooks == listed


def written(folder: Path, *overrides: str) -> Path:
    config = folder / "run.yaml"
    config.write_text(
        OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(CLEAN), OmegaConf.from_dotlist(list(overrides))))
    )
    return config


def test_check_tells_the_traps_of_a_config(met: Meet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    met(vllm="0.28.0")
    assert main(["check", str(written(tmp_path, HEAD))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13].strip() for line in lines if NOISE in line or LAYERS in line] == ["avoided", "avoided"]
    assert main(["check", str(written(tmp_path))]) == 0
    assert "avoided" not in capsys.readouterr().out


def test_check_of_a_config_that_cannot_run_tells_errors_only(
    met: Meet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    met(vllm="0.28.0")
    config = written(tmp_path, HEAD, f"{GENERATION}.vllm_kwargs.speculative_config.num_speculative_tokens=many")
    assert main(["check", str(config)]) == 2
    printed = capsys.readouterr()
    assert "avoided" not in printed.out and "num_speculative_tokens" in printed.err


def test_doctor_warns_of_what_is_not_avoided(met: Meet, tmp_path: Path) -> None:
    met(vllm="0.33.0")
    states = {d.name: d.state for d in diagnose_config(written(tmp_path, HEAD, HTTP), [])}
    assert states["avoided"] is State.OK and states["not avoided"] is State.WARN


def test_traps_need_neither_torch_nor_vllm() -> None:
    code = "import sys, nemo_specrollout.config.known_traps; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
