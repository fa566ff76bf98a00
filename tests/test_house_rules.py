# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check (CONTRIBUTING.md): plain English, sizes, distinct names."""

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from prose import findings_of_source

pytestmark = pytest.mark.unit

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 50
MOST_PARAMETERS = 6
LONGEST_TEST_NAME = 60
PACKAGE = sorted((ROOT / "nemo_specrollout").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = [
    *PACKAGE,
    *sorted((ROOT / "lab.vllm_on_cpu").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *TESTS,
]
# Their parameters are vLLM's, or the arrays of a kernel.
FOREIGN_SIGNATURES = {
    "sample_and_compare",
    "sample_with_score_gap",
    "sample",
    "sample_draft",
    "draw",
    "align",
    "sample_rows",
    "_verify",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    """Yields the functions of a file that are not compiled kernels."""
    for node in ast.walk(ast.parse(path.read_text())):
        decorators = " ".join(ast.unparse(d) for d in getattr(node, "decorator_list", []))
        if isinstance(node, Function) and not any(word in decorators for word in ("jit", "kernel")):
            yield node


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_docstrings_and_comments_are_plain_english() -> None:
    assert [(str(p.relative_to(ROOT)), f.line, f.rule) for p in SOURCES for f in findings_of_source(p)] == []


def test_files_and_functions_are_short() -> None:
    assert [p for p in PACKAGE if len(p.read_text().splitlines()) > MOST_LINES_OF_A_FILE] == []
    found = [(p.name, f) for p in PACKAGE for f in functions(p)]
    assert [(n, f.name) for n, f in found if (f.end_lineno or 0) - f.lineno >= MOST_LINES_OF_A_FUNCTION] == []
    many = [(n, f.name) for n, f in found if num_parameters(f) > MOST_PARAMETERS]
    assert [(n, name) for n, name in many if name not in FOREIGN_SIGNATURES] == []


def test_no_two_files_of_the_package_share_a_name() -> None:
    counts = collections.Counter(p.name for p in PACKAGE if p.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_test_names_are_short() -> None:
    names = [f.name for path in TESTS for f in functions(path) if f.name.startswith("test_")]
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []
