# SPDX-License-Identifier: Apache-2.0
"""The ledger of tests: what a module sees, and that only a run that passed is written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from ledger import candidates, content_hash, seen_by

pytestmark = pytest.mark.unit

HERE = ROOT / "tests"
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-m 'not slow' -q -p no:cacheprovider"
markers = ["slow: long"]
"""
CONFTEST = 'pytest_plugins = ["ledger"]\n'
TESTS = {
    "good": "from lab.number import NUMBER\ndef test_number():\n    assert NUMBER > 0\n",
    "bad": "def test_fails():\n    assert False\n",
    "skipping": "import pytest\ndef test_skips():\n    pytest.skip('not here')\ndef test_passes():\n    pass\n",
    "slow": "import pytest\n@pytest.mark.slow\ndef test_slow():\n    pass\ndef test_quick():\n    pass\n",
}


def seen(module: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in seen_by(HERE / module)}


def test_a_module_sees_what_it_imports_names_and_starts() -> None:
    kernels = seen("test_kernels.py")
    assert "nemo_specrollout/drafters/step_triton.py" in kernels, "a name that a platform registers"
    assert "tests/interpreted/own_kernels.py" in kernels, "a test file that a process runs"
    assert not [path for path in kernels if path.startswith("nemo_specrollout/nemo_rl/")]
    engine = seen("lab/test_bench.py")
    assert "lab/vllm_on_cpu/platform.py" in engine, "vLLM loads its platform by an entry point"
    assert "nemo_specrollout/generation/vllm_worker.py" in engine, "vLLM loads the worker by its name"
    everything = {str(path.relative_to(ROOT)) for path in (ROOT / "nemo_specrollout").rglob("*.py")}
    assert everything <= seen("lab/test_run.py"), "its processes may import anything"
    assert not [path for path in seen("lab/test_placement.py") if path.startswith("nemo_specrollout/generation/v")]


def test_a_change_of_any_file_that_is_seen_changes_the_hash() -> None:
    module = HERE / "lab" / "test_placement.py"
    before = content_hash(module, {})
    for path in (module, HERE / "conftest.py", ROOT / "lab" / "placement" / "planner.py"):
        assert content_hash(module, {path: b"changed"}) != before
    model = ROOT / "examples" / "models" / "step_adder" / "model.safetensors"
    assert content_hash(module, {model: b"changed"}) != before
    assert content_hash(module, {ROOT / "nemo_specrollout" / "nemo_rl" / "supervisor.py": b"changed"}) == before


def test_product_tests_are_never_left_out() -> None:
    names = {path.name for path in candidates()}
    assert "test_kernels.py" in names and "test_bench.py" in names and "test_equality.py" not in names


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository with a laboratory and its tests."""
    folder = tmp_path / "repository"
    for name in ("tests/lab", "lab", "nemo_specrollout", "examples", "requirements"):
        (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(SETTINGS)
    for name in ("ledger.py", "sources.py"):
        shutil.copy(HERE / name, folder / "tests")
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "lab" / "__init__.py").touch()
    (folder / "lab" / "number.py").write_text("NUMBER = 1\n")
    for name, text in TESTS.items():
        (folder / "tests" / "lab" / f"test_{name}.py").write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> tuple[str, set[str]]:
    """Runs pytest in a repository; returns its output and the modules in its ledger."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    ledger = folder / "tests" / "ledger.json"
    known = json.loads(ledger.read_text()) if ledger.exists() else {}
    return done.stdout + done.stderr, {Path(name).stem.removeprefix("test_") for name in known}


def test_only_modules_that_passed_are_written_and_left_out(tree: Path) -> None:
    for chosen in (("-k", "number"), ("tests/lab/test_good.py::test_number",)):
        assert run(tree, "--ledger=use", *chosen)[1] == set()
    said, known = run(tree, "--ledger=use")
    assert "1 failed, 3 passed, 1 skipped" in said and known == {"good", "slow"}
    (tree / "lab" / "number.py").write_text("NUMBER = 0\n")
    said, known = run(tree, "--ledger=use")
    assert "2 failed, 1 passed, 1 skipped" in said and known == {"slow"}
    assert "left out, as this content passed before: slow" in said
    said, known = run(tree, "--ledger=write")
    assert "2 failed, 2 passed, 1 skipped" in said and known == {"slow"}


def test_workers_leave_out_what_their_controller_says(tree: Path) -> None:
    said, known = run(tree, "--ledger=use", "-n", "2", "--dist", "loadfile")
    assert "1 failed, 3 passed, 1 skipped" in said and known == {"good", "slow"}
    said, known = run(tree, "--ledger=use", "-n", "2", "--dist", "loadfile")
    assert "1 failed, 1 passed, 1 skipped" in said and known == {"good", "slow"}
