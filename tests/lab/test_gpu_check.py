# SPDX-License-Identifier: Apache-2.0
"""The GPU check on a machine without a GPU: its sentences, its processes, its figures and page, and a whole rehearsal."""

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT

from lab.gpu import gpu_check, gpu_report, machine, training
from lab.gpu.geometries import hf_config
from lab.gpu.gpu_kernels import _note
from lab.gpu.gpu_stage import Findings, divergence
from lab.gpu.items import ITEMS, Item, reason_to_skip
from lab.gpu.kernel_check import CPU, Compared, compare_drafting
from lab.gpu.machine import Machine
from lab.gpu.training import PHASES, Arm, compared_rows, ratios
from lab.simulation.data_sheets import MODELS
from lab.vllm_on_cpu.own_kernels import step as step_bodies
from nemo_specrollout.doctor.diagnosis import Outcome
from nemo_specrollout.doctor.self_test import diagnose_self_test
from nemo_specrollout.generation.engine.requests import Rollout

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]
H100 = {"GPU": "NVIDIA H100 80GB HBM3", "compute capability": "9.0"}


def rehearsal(out: Path) -> argparse.Namespace:
    (out / "gpu_check").mkdir(parents=True)
    return argparse.Namespace(out=out, rehearse=True)


def test_without_a_gpu_the_check_exits_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_machine", lambda options: machine.look())
    assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.EXIT_CANNOT
    said = capsys.readouterr().err
    assert said.startswith("There is no CUDA GPU that torch can use; torch is built for a CPU. --rehearse")
    assert said.count("\n") == 1


def test_an_unknown_item_gets_the_nearest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "new"), "tokns"]) == gpu_check.EXIT_CANNOT
    said = capsys.readouterr().err
    assert "no item 'tokns'" in said and "tokens" in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_every_item_names_a_function() -> None:
    for item in ITEMS.values():
        module, function = item.function.split(".")
        assert callable(getattr(importlib.import_module(f"lab.gpu.{module}"), function))


def test_the_parent_loads_no_torch() -> None:
    """A CUDA context of the parent would count as memory that stays in use while an engine sleeps."""
    code = "import sys, lab.gpu.gpu_check; sys.exit(bool({'torch', 'vllm', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_items_are_skipped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ITEMS["tokens"]
    whole = Machine(H100, 79.0)
    assert reason_to_skip(tokens, 660.0, whole) == ""
    assert reason_to_skip(tokens, 20.0, whole) == "takes about 75 s, 20 s are left"
    experts = ITEMS["speed_experts"]
    assert reason_to_skip(experts, 660.0, whole._replace(free_gib=39.0)) == "needs 74 GiB of GPU memory, 39 are free"
    assert "mixtures of experts" in reason_to_skip(experts, 660.0, whole._replace(serves_experts=False))
    without = whole._replace(vllm_problem="vLLM is not installed.")
    assert reason_to_skip(tokens, 660.0, without) == "vLLM is not installed."
    assert reason_to_skip(ITEMS["kernels"], 660.0, without) == ""
    monkeypatch.setenv("SMOLLM2_START", str(tmp_path))
    assert reason_to_skip(ITEMS["real"], 660.0, whole) == f"{tmp_path} is missing: run `make smollm2`"


def test_a_vllm_that_does_not_load_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert machine._vllm_problem("an H100").startswith("vLLM does not load: ")


def test_a_vllm_without_kernels_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms_norm(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    vllm = ModuleType("vllm")
    vllm.__path__ = []
    monkeypatch.setattr(vllm, "_custom_ops", SimpleNamespace(rms_norm=rms_norm), raising=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch, "ones", lambda *size, **_: torch.zeros(size))
    problem = machine._vllm_problem("NVIDIA A100, compute capability 8.0")
    assert problem == "This vLLM has no kernels for NVIDIA A100, compute capability 8.0."


def test_without_vllm_the_other_items_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(
        gpu_check, "_machine", lambda options: Machine(H100, 79.0, vllm_problem="vLLM is not installed.")
    )
    monkeypatch.setattr(
        gpu_check, "_run_apart", lambda name, *_: ran.append(name) or {"outcome": "done", "seconds": 1.0}
    )
    assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.EXIT_CANNOT
    assert ran == ["kernels"]
    items = json.loads((tmp_path / "gpu_check.json").read_text())["items"]
    assert list(items) == list(ITEMS)
    assert items["tokens"] == {"outcome": "skipped", "reason": "vLLM is not installed."}


def test_a_failed_item_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('undefined symbol: _Z')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = gpu_check._run_apart("sampling", ITEMS["sampling"], rehearsal(tmp_path / "out"), 60.0)
    assert (result["outcome"], result["reason"]) == ("failed", "ImportError: undefined symbol: _Z")
    assert "  | ImportError: undefined symbol: _Z" in capsys.readouterr().out


def test_an_item_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    result = gpu_check._run_apart("tokens", Item("gpu_engines.tokens", 1.0, ""), rehearsal(tmp_path / "out"), 0.3)
    assert (result["outcome"], result["reason"]) == ("stopped", "not done after 0 s")


def test_an_item_with_a_problem_fails_at_its_end(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "x.json", True, 60.0)
    broken = Compared({"drafts_BK": 3.0}, {"choose": lambda: None})
    _note(findings, "board", lambda: broken)
    _note(findings, "index", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    _note(findings, "acceptance", lambda: Compared({}, {"accept": lambda: None}))
    known = json.loads((tmp_path / "x.json").read_text())
    assert known["problems"] == ["board: drafts_BK by 3", "index: ZeroDivisionError: division by zero"]
    assert known["tables"][""]["acceptance: accept"] == {"differs": "nothing"}


def test_responses_part_at_their_first_difference() -> None:
    texts = [[1, 2, 3], [1, 2], [4, 5], [7]]
    others = [[1, 9, 3], [1, 2], [4, 5, 6], [7]]
    pair = ([Rollout(ids, [], "stop") for ids in each] for each in (texts, others))
    assert divergence(*pair) == (2, 2 + 2 + 3 + 1)


@pytest.mark.parametrize("broken", ["", "observe", "choose"])
def test_a_broken_kernel_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {**vars(step_bodies)}
    if broken:
        bodies[broken] = lambda *_: None
    monkeypatch.setattr("nemo_specrollout.drafters.step_triton", SimpleNamespace(**bodies), raising=False)
    compared = compare_drafting(12, CPU, num_steps=3)
    expected = {"observe": {"suffix words", "evidence_DE2"}, "choose": {"drafts_BK", "chosen_S"}}.get(broken, set())
    assert expected <= set(compared.different) and bool(compared.different) == bool(broken)


def test_a_report_goes_on_for_the_same_machine(tmp_path: Path) -> None:
    file = tmp_path / "gpu_check.json"
    gpu_report.Report(file, H100, False).add("kernels", {"outcome": "done", "seconds": 40.0})
    gpu_report.Report(file, H100, False).add("tokens", {"outcome": "done", "seconds": 70.0})
    assert list(json.loads(file.read_text())["items"]) == ["kernels", "tokens"]
    gpu_report.Report(file, {**H100, "GPU": "NVIDIA H200"}, False).add("tokens", {"outcome": "done", "seconds": 70.0})
    assert list(json.loads(file.read_text())["items"]) == ["tokens"]


def test_reports_of_several_calls_are_joined(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.json" for name in ("kernels", "tokens")]
    for file in files:
        gpu_report.Report(file, H100, False).add(file.stem, {"outcome": "done", "seconds": 40.0})
    joined = gpu_report.merged(files)
    assert joined is not None and list(joined["items"]) == ["kernels", "tokens"]
    gpu_report.Report(files[1], {"GPU": "NVIDIA H200"}, False).add("tokens", {"outcome": "done", "seconds": 40.0})
    with pytest.raises(ValueError, match="differ in machine"):
        gpu_report.merged(files)


def test_the_page_shows_figures_and_what_did_not_run(tmp_path: Path) -> None:
    page, file = tmp_path / "gpu.md", tmp_path / "gpu_check.json"
    page.write_text(f"before\n{gpu_report.BEGIN}\nold\n{gpu_report.END}\nafter\n")
    tables = {"": {"plain, T=0": {"parted": 0, "ms a step": 5.43211}, "text, T=0": {"parted": 1}}}
    failed = {"outcome": "failed", "seconds": 61.2, "problems": ["text, T=0: 1 part"], "tables": tables}
    gpu_report.Report(file, H100, False).add("tokens", failed)
    gpu_report.write_page(gpu_report.read(file), page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| plain, T=0 | 0 | 5.432 |" in text and "| text, T=0 | 1 |  |" in text
    assert "| tokens | tokens against plain decoding, float32, eager | 75 | failed | 61 | text, T=0: 1 part |" in text
    assert text.count("| not run | - |") == len(ITEMS) - 1
    page.write_text("no markers")
    with pytest.raises(ValueError, match="needs the lines"):
        gpu_report.write_page(None, page)


def test_the_page_is_what_the_check_writes() -> None:
    """Until something has run on a GPU, every figure of the page is "not run"."""
    figures = gpu_report.PAGE.read_text().split(gpu_report.BEGIN)[1].split(gpu_report.END)[0]
    if figures.startswith("\nNot run"):
        assert figures == f"\n{gpu_report.figures_of(None)}\n"
    assert all(f"| {name} |" in figures for name in ITEMS)


def test_doctor_names_the_precision_on_a_gpu_only() -> None:
    for device, count in (("cuda", 1), ("cpu", 0)):
        found = diagnose_self_test(Outcome({"facts": {"device": device}}, "", (), 1.0))
        assert sum("products in ieee" in d.found for d in found) == count


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_shapes_of_the_check_are_those_of_the_simulator(name: str) -> None:
    config = hf_config(name)
    assert {field: config.get(field, 0) for field in vars(MODELS[name])} == vars(MODELS[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_rehearsal_runs_the_code_of_every_item(tmp_path: Path) -> None:
    assert gpu_check.main(["--out", str(tmp_path), "--rehearse"]) == 0
    items = json.loads((tmp_path / "gpu_check.json").read_text())["items"]
    assert {name: r["outcome"] for name, r in items.items() if r["outcome"] != "done"} == {"batch_invariant": "skipped"}
    assert all(r["tables"] for r in items.values() if r["outcome"] == "done")


NAMES_OF_KITS = {
    "lab.gpu.geometries": ("model_folder",),
    "lab.gpu.gpu_check": ("main",),
    "lab.gpu.gpu_speed": ("WAYS",),
    "lab.gpu.gpu_stage": ("POLICY", "block"),
    "lab.policies.low_rank": ("merge_low_rank",),
    "lab.policies.smollm2": (
        "CHANGE", "GGUF_NAME", "PACKAGE", "START", "WEIGHTS", "WHEEL_SHA256", "hf_config", "hf_tensors"
    ),
    "nemo_specrollout.cli.main": ("main",),
    "nemo_specrollout.config.block": ("BudgetConfig",),
    "nemo_specrollout.config.nemo_rl_config": ("prepare_nemo_rl",),
    "nemo_specrollout.config.nemo_rl_tree": ("block_is_on",),
    "nemo_specrollout.generation.engine.arguments": ("QUIET_START", "set_process_environment", "with_specrollout"),
    "nemo_specrollout.generation.engine.compat": ("device_type", "vllm_abilities"),
    "nemo_specrollout.generation.vllm_worker": (),
    "nemo_specrollout.installed.versions": ("installed_versions",),
    "nemo_specrollout.nemo_rl.engine_actors": (),
    "nemo_specrollout.nemo_rl.engine_inputs": ("engine_arguments",),
    "nemo_specrollout.nemo_rl.installation": (),
    "nemo_specrollout.nemo_rl.vllm_workers": (),
}  # fmt: skip
"""Modules and names that scripts outside this repository use on a lent GPU machine. A move that changes one must be told
to whoever keeps those scripts."""


@pytest.mark.parametrize("module", NAMES_OF_KITS)
def test_what_kits_for_gpu_machines_use_is_there(module: str) -> None:
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    given = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [t for node in tree.body for t in getattr(node, "targets", [getattr(node, "target", None)])]
    given |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert set(NAMES_OF_KITS[module]) <= given


def test_without_megatron_core_no_arm_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    findings = Findings(tmp_path / "training.json", True, 60.0)
    training.training(findings)
    assert findings.problems == ["megatron-core is not installed: no arm can train"] and not findings.tables


def test_rows_and_losses_of_training_arms_are_counted() -> None:
    def arm(kind: str, rows: list[list[int]], loss: float, seconds: float) -> Arm:
        step = {"loss": loss, "logprob_gap_max": 0.5, **dict.fromkeys(PHASES.values(), seconds)}
        metrics = [step | {"mean_gen_tokens_per_sample": 2.0, "num_samples": 2}] * 3
        return Arm(kind, metrics, dict.fromkeys(range(3), rows), {})

    plain, ours = arm("plain", [[1, 2], [3, 4]], 0.25, 2.0), arm("ours", [[1, 2], [3, 5]], 0.5, 1.0)
    counts = compared_rows(plain, ours)
    assert (counts["rows"], counts["rows equal"], counts["losses equal"]) == (6, 3, 0)
    assert counts["largest difference of losses"] == 0.25 and compared_rows(plain, plain)["rows equal"] == 6
    assert ratios(plain, ours)["rollout"] == ratios(plain, ours)["tokens a second, over plain"] == 2.0
