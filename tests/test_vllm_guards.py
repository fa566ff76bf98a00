# SPDX-License-Identifier: Apache-2.0
"""Guards of vLLM about speculative decoding: the page of patch points names all of the installed version."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from nemo_specrollout.installed.python_source import installed_source
from nemo_specrollout.installed.versions import version_numbers, vllm_version

pytestmark = pytest.mark.unit

PAGE = ROOT / "docs" / "reference" / "vllm-patch-points.md"
OF_TRIMMING = {"enable_adaptive_verification", "use_adaptive_verification"}
OF_DRAFTS = {"speculative_config"}
WHERE = {
    "config": OF_TRIMMING, "v1/attention/selector.py": OF_TRIMMING, "v1/worker/gpu": OF_TRIMMING, "config/vllm.py": OF_DRAFTS,
    "sampling_params.py": OF_DRAFTS, "v1/engine/input_processor.py": OF_DRAFTS, "v1/worker/gpu/pcp_manager.py": OF_DRAFTS,
}  # fmt: skip
"""Places in vLLM, and the words that a function of a guard there has."""


def functions(node: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield above + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{above}{child.name}.")


def guards(vllm: Path) -> set[str]:
    """Returns the names of functions that may raise and read a word of their place."""
    found = set()
    for place, words in WHERE.items():
        files = [vllm / place] if place.endswith(".py") else sorted((vllm / place).rglob("*.py"))
        for file in files:
            for name, function in functions(ast.parse(file.read_text())):
                nodes = list(ast.walk(function))
                read = {getattr(n, "attr", None) or getattr(n, "id", None) or getattr(n, "arg", None) for n in nodes}
                if read & words and any(isinstance(n, ast.Raise | ast.Assert) for n in nodes):
                    found.add(name)
    return found


@pytest.fixture(scope="module")
def vllm() -> Path:
    source, version = installed_source("vllm"), vllm_version()
    if source is None or version is None or version_numbers(version) < (0, 32):
        pytest.skip("the table is of vLLM 0.32")
    return source / "vllm"


def test_the_page_names_every_guard(vllm: Path) -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert guards(vllm) - named == set(), "new guards: satisfy or repeat each, and add it to the page"
    if str(vllm_version()).startswith("0.32."):
        assert named - guards(vllm) == set()


def test_a_new_guard_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "new.py").write_text(
        "class A:\n    def check(self):\n        if self.enable_adaptive_verification:\n            raise ValueError\n"
    )
    monkeypatch.setattr("test_vllm_guards.WHERE", {"config": OF_TRIMMING})
    assert guards(tmp_path) == {"A.check"}
