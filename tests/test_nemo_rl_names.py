# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's names, as the check of patch points sees them in a source, and as our overrides pass on what is new.

`NEMO_RL_SOURCE` names the folder of a NeMo-RL to read instead of a stand-in that the patch points themselves describe.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from nemo_rl_standin import POINTS, make_nemo_rl, write_torchdata

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.doctor.diagnosis import State
from nemo_specrollout.doctor.patch_point_check import imports_of_nemo_rl, patch_points_of_nemo_rl
from nemo_specrollout.installed.python_source import PythonSource
from nemo_specrollout.nemo_rl.patch_point_table import DRIVER_POINTS, WORKER_POINTS
from nemo_specrollout.nemo_rl.patch_points import (
    NEMO_RL,
    Use,
    changes_of,
    check_patch_points,
    unknown_shared_names,
)

pytestmark = pytest.mark.unit
GENERATION = "nemo_rl/models/generation/vllm/vllm_generation.py"
BACKEND = "nemo_rl/models/generation/vllm/vllm_backend.py"
Change = Callable[[str, str, str], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_nemo_rl(tmp_path / "standin")


@pytest.fixture
def change(folder: Path) -> Change:
    """Replaces a text in one of the stand-in's files."""

    def replace(file: str, old: str, new: str) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return replace


def changes(folder: Path) -> dict[str, list[str]]:
    """Returns the changes of the patch points that have changed, by name; a harmless one in brackets."""
    source = PythonSource(folder, NEMO_RL)
    found = {p.name: [f"({c.text})" if c.is_harmless else c.text for c in changes_of(p, source)] for p in POINTS}
    return {name: texts for name, texts in found.items() if texts}


def test_a_nemo_rl_as_described_has_no_changes(folder: Path) -> None:
    """Every name of a real NeMo-RL must fit, too; new parameters and results are listed, and passed on."""
    real = os.environ.get("NEMO_RL_SOURCE")
    found = changes(Path(real) if real else folder)
    print("\n".join(f"{name}: {'; '.join(texts)}" for name, texts in found.items()))
    assert not [name for name, texts in found.items() if not all(text.startswith("(") for text in texts)]
    assert real or not found


def test_added_parameters_and_results_are_listed_and_harmless(tmp_path: Path) -> None:
    found = changes(make_nemo_rl(tmp_path, added=True))
    passed_on = {p.name for p in POINTS if p.use is Use.PASSED_ON} - {"StatefulDataLoader"}
    assert set(found) == passed_on
    assert found["VllmInternalWorkerExtension._load_draft_weights"] == [
        "(it also takes added: passed on)", "(its result is a value now: passed on)"
    ]  # fmt: skip
    check_patch_points(POINTS, PythonSource(tmp_path, NEMO_RL))


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "text"),
    [
        (BACKEND, "def _load_draft_weights(self, draft_weights)", "def _load_draft_weights(self)",
         "_load_draft_weights", "changed: it no longer takes draft_weights"),
        (BACKEND, "_mtp_drafter_from_disk = False", "_loads_mtp_from_disk = False", "_mtp_drafter_from_disk", "absent"),
        (BACKEND, "@contextmanager\n    def _weight_update_lifecycle", "def _weight_lifecycle", "_weight_update_lifecycle",
         "absent"),
        ("nemo_rl/utils/logger.py", "def log_plot(self, figure, step, name)", "def log_plot(self, figure, step, name, run)",
         "log_plot", "changed: it needs run now"),
        ("nemo_rl/utils/checkpoint.py", "return 'get_latest_checkpoint_path'", "pass", "get_latest_checkpoint_path",
         "changed: its result is nothing, not value"),
        (GENERATION, "async def generate_async", "def generate_async", "generate_async",
         "changed: its result is stream, not async stream"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    folder: Path, change: Change, file: str, old: str, new: str, name: str, text: str
) -> None:
    change(file, old, new)
    (found,) = (texts for key, texts in changes(folder).items() if key.rpartition(".")[2] == name)
    assert found == [text]
    with pytest.raises(ConfigError, match=f"{name} is {text.partition(':')[0]}"):
        check_patch_points(POINTS, PythonSource(folder, NEMO_RL))


@pytest.mark.parametrize(("name", "unknown"), [("synchronize_device", []), ("sleep", ["sleep"])])
def test_a_name_that_vllm_s_worker_has_too_is_found(
    folder: Path, change: Change, tmp_path: Path, name: str, unknown: list[str]
) -> None:
    worker = tmp_path / "vllm" / "v1" / "worker" / "gpu_worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("class Worker:\n    def synchronize_device(self): ...\n    def sleep(self): ...\n")
    head = "class VllmInternalWorkerExtension:"
    change(BACKEND, head, f"{head}\n    def {name}(self): ...")
    assert unknown_shared_names(PythonSource(folder, NEMO_RL), PythonSource(tmp_path, "vllm")) == unknown


def test_doctor_distinguishes_absent_and_changed_and_new(folder: Path, change: Change) -> None:
    change("nemo_rl/utils/logger.py", "def finish(self)", "def finish(self, reason=None)")
    change("nemo_rl/utils/logger.py", "def log_plot(", "def plot(")
    found = {d.name: d for d in patch_points_of_nemo_rl(POINTS, folder)}
    assert found["logger.Logger.log_metrics"].found == "present"
    assert found["logger.Logger.finish"].found == "present; it also takes reason: passed on"
    assert found["logger.Logger.finish"].state is State.OK
    absent = found["logger.Logger.log_plot"]
    assert absent.state is State.FAIL and absent.found == "absent" and "main of August 2026" in absent.to_do


def test_an_import_that_fails_or_crashes_is_a_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "fails.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    (tmp_path / "dies.py").write_text(
        "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    (good,) = imports_of_nemo_rl(["json", "shutil"])
    assert good.state is State.OK and good.found == "all 2 succeed"
    absent, failed = imports_of_nemo_rl(["no_such_package", "json", "fails"])
    assert absent.name == "import no_such_package" and "No module named" in absent.found
    assert failed.found == "OSError: libcuda.so.1: cannot open shared object file"
    assert failed.to_do.startswith("Repair this import")
    (crashed,) = imports_of_nemo_rl(["json", "dies", "shutil"])
    assert crashed.name == "import dies, and those after it" and crashed.found == "killed by SIGSEGV"
    assert "last words" in crashed.last_words and not any("File" in line for line in crashed.last_words)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns what each override returned, after `overrides_case.py` called it with one more argument."""
    folder = make_nemo_rl(tmp_path_factory.mktemp("standin"), added=True)
    write_torchdata(folder)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path}
    script = ROOT / "tests" / "overrides_case.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.integration
def test_overrides_pass_on_new_arguments_and_results(results: dict[str, str]) -> None:
    """Each native function returns its own name if it got the new argument."""
    assert results == {name: "passed on" for name in results}
    overridden = {p.name.rpartition(".")[2] for p in (*DRIVER_POINTS, *WORKER_POINTS) if p.use is Use.PASSED_ON}
    not_called = {
        "_get_drafter_model", "reset_prefix_cache_async",  # ours answers alone
        "_create_workers_from_bundle_indices",  # relied upon only
        "StatefulDataLoader", "AsyncTrajectoryCollector", "SyncRolloutActor",  # constructed with all arguments
    }  # fmt: skip
    assert set(results) == overridden - not_called | {"with_worker_names"}
