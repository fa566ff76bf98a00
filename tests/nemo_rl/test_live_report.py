# SPDX-License-Identifier: Apache-2.0
"""The report of a run through NeMo-RL's real Logger: its picture in TensorBoard, its pages after the process has ended."""

from pathlib import Path

import pytest
from matplotlib.image import imread
from nemo_rl_host import HERE, Host, answer_in

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(600)]


def test_the_real_logger_gets_pictures_and_a_complete_report(host: Host, tmp_path: Path) -> None:
    output = host.run(HERE / "report_cases.py", tmp_path)
    found = answer_in(output, "FOUND")
    assert found["images"] == {"train/specrollout/picture": [[1, 1200, 840], [2, 1200, 840]]}
    assert {
        "train/specrollout/policy_lag_mean",
        "train/specrollout/speedup_estimate",
        "timing/train/generation",
    } <= set(found["scalars"])
    assert found["is_behind"]
    page = (tmp_path / "specrollout" / "report.html").read_text()
    assert "3 finished steps: steps 1 to 3" in page and "60%" in page
    assert imread(tmp_path / "specrollout" / "picture.png").shape[:2] == (840, 1200)
