# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout doctor` in NeMo-RL's environment: every patch point is present, and the engine makes equal tokens."""

import json
from pathlib import Path

import pytest
from nemo_rl_host import Host

from nemo_specrollout.doctor.patch_point_check import name_of
from nemo_specrollout.nemo_rl.patch_point_table import POINTS_OF_ALL_RUNS, WORKER_POINTS

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(600)]


def test_all_patch_points_are_present(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    output = host.run("-m", "nemo_specrollout.cli.main", "doctor", "--json", file)
    assert "768 of 768 tokens equal" in output
    found = {d["name"]: d["found"] for d in json.loads(file.read_text())["diagnoses"]}
    assert found["nemo-rl"].endswith("is newer than v0.7.0")
    assert {found[name_of(point)] for point in (*POINTS_OF_ALL_RUNS, *WORKER_POINTS)} == {"present"}
