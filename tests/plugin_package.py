# SPDX-License-Identifier: Apache-2.0
"""A package in a folder that adds a logits processor to every engine of vLLM's."""

from pathlib import Path

import pytest

from nemo_specrollout.config.staying_requests import PLUGINS


def install_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the package's metadata into `folder`, which Python searches until the test ends."""
    metadata = folder / "budgets-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: budgets\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{PLUGINS}]\nbudget = budgets:Budget\n")
    monkeypatch.syspath_prepend(folder)
