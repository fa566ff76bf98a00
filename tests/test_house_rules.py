# SPDX-License-Identifier: Apache-2.0
"""The sizes of files and functions (CONTRIBUTING.md, "Rules"). They are habits that a machine can watch, not aims."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

MAX_LINES_OF_A_FILE = 450
MAX_LINES_OF_A_FUNCTION = 60
MAX_PARAMETERS = 6
PACKAGES = [path for name in ("nemo_specrollout", "lab") for path in sorted((ROOT / name).rglob("*.py"))]
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


def test_files_and_functions_are_short() -> None:
    assert [p for p in PACKAGES if len(p.read_text().splitlines()) > MAX_LINES_OF_A_FILE] == []
    found = [(p.name, f) for p in PACKAGES for f in functions(p)]
    assert [(n, f.name) for n, f in found if (f.end_lineno or 0) - f.lineno >= MAX_LINES_OF_A_FUNCTION] == []
    many = [(n, f.name) for n, f in found if num_parameters(f) > MAX_PARAMETERS]
    assert [(n, name) for n, name in many if name not in FOREIGN_SIGNATURES] == []
