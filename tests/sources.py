# SPDX-License-Identifier: Apache-2.0
"""The repository's Python files as a graph of imports. The files are read, and none is run."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nemo_specrollout", "lab")
TEST_FOLDERS = ("", "lab", "faults", "interpreted", "fake_gpu")
"""Folders of tests whose modules import each other by their bare names."""


@cache
def tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


@cache
def modules() -> dict[str, Path]:
    """Returns the file of each module of the packages and the tests, by the name with which it is imported."""
    found = {}
    for folder in TEST_FOLDERS:
        found |= {path.stem: path for path in sorted((ROOT / "tests" / folder).glob("*.py"))}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return found


def module_of(name: str) -> Path | None:
    """Returns the file of a name that is imported or written: a module, or something in one."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return modules().get(name)


def imported_names(path: Path) -> Iterator[str]:
    """Yields the absolute names that a file imports, in functions and for type checks too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                around = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join([*around, *filter(None, [module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports(path: Path) -> set[Path]:
    """Returns the files that a file imports. The `__init__.py` around a module does not count.

    The packages import no test, but a library of theirs may have a test's name.
    """
    found = {file for name in imported_names(path) if (file := module_of(name)) is not None} - {path}
    tests = ROOT / "tests"
    return found if tests in path.parents else {file for file in found if tests not in file.parents}


@cache
def strings(path: Path) -> frozenset[str]:
    """Returns a file's string constants, parts of f-strings too, but no docstring."""
    docs = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    constants = (node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in docs)
    return frozenset(node.value for node in constants if isinstance(node.value, str))


def circles(graph: Mapping[Path, Iterable[Path]]) -> list[list[Path]]:
    """Returns the groups of files that import each other, directly or through others (Tarjan's algorithm)."""
    order: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[Path]] = []

    def visit(file: Path) -> None:
        order[file] = lowest[file] = len(order)
        stack.append(file)
        for other in graph[file]:
            if other not in graph:
                continue
            if other not in order:
                visit(other)
            if other in stack:
                lowest[file] = min(lowest[file], lowest[other])
        if lowest[file] == order[file]:
            group = stack[stack.index(file) :]
            del stack[stack.index(file) :]
            if len(group) > 1:
                found.append(sorted(group))

    for file in graph:
        if file not in order:
            visit(file)
    return found
