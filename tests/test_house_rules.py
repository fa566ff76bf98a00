# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check (CONTRIBUTING.md): plain English and sizes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from prose import findings_of_source

pytestmark = pytest.mark.unit

MAX_LINES_OF_A_FILE = 400
MAX_LINES_OF_A_FUNCTION = 50
MAX_PARAMETERS = 6
MAX_LETTERS_OF_A_TEST = 60
MAX_LINES_OF_THE_PRODUCT = 23_000
PRODUCT, LABORATORY, TESTS = (sorted((ROOT / name).rglob("*.py")) for name in ("nemo_specrollout", "lab", "tests"))
PACKAGES = [*PRODUCT, *LABORATORY]
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
    "convolve",
    "scan_states",
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


@pytest.mark.parametrize("sources", [PRODUCT, LABORATORY, TESTS], ids=["product", "lab", "tests"])
def test_docstrings_and_comments_are_plain_english(sources: list[Path]) -> None:
    assert [(str(p.relative_to(ROOT)), f.line, f.rule) for p in sources for f in findings_of_source(p)] == []


def test_files_and_functions_are_short() -> None:
    assert [p for p in PACKAGES if len(p.read_text().splitlines()) > MAX_LINES_OF_A_FILE] == []
    found = [(p.name, f) for p in PACKAGES for f in functions(p)]
    assert [(n, f.name) for n, f in found if (f.end_lineno or 0) - f.lineno >= MAX_LINES_OF_A_FUNCTION] == []
    many = [(n, f.name) for n, f in found if num_parameters(f) > MAX_PARAMETERS]
    assert [(n, name) for n, name in many if name not in FOREIGN_SIGNATURES] == []


def test_the_product_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PRODUCT) <= MAX_LINES_OF_THE_PRODUCT


def test_test_names_are_short() -> None:
    names = [f.name for path in TESTS for f in functions(path) if f.name.startswith("test_")]
    assert [name for name in names if len(name) > MAX_LETTERS_OF_A_TEST] == []
