# SPDX-License-Identifier: Apache-2.0
"""The GPU check on a machine without a GPU: its message, the stages that it skips, and the record of failed stages."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu_check

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]


def test_without_a_gpu_the_check_exits_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "gpu.json")]) == gpu_check.EXIT_NO_GPU
    assert capsys.readouterr().err == "There is no CUDA GPU here. Use --rehearse to run what can run on this CPU.\n"
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_gives_the_reason_of_skipped_stages(tmp_path: Path) -> None:
    out = tmp_path / "new" / "gpu.json"
    assert gpu_check.main(["--out", str(out), "--rehearse", "--stages", *gpu_check.NEEDS_GPU]) == 0
    report = json.loads(out.read_text())
    assert {name: stage["outcome"] for name, stage in report["stages"].items()} == dict.fromkeys(
        gpu_check.NEEDS_GPU, "skipped"
    )
    assert all(stage["reason"] for stage in report["stages"].values())
    assert "torch" in report["versions"]


def test_a_failed_stage_does_not_affect_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages run out of time, and both are recorded."""
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_check, "_device", lambda: "none")
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.05)
    assert gpu_check.main(["--out", str(out), "--quick", "--stages", "kernels", "sleep"]) == 1
    report = json.loads(out.read_text())
    assert [stage["outcome"] for stage in report["stages"].values()] == ["failed", "failed"]
    assert "not done after" in report["stages"]["sleep"]["error"]
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.json"]
