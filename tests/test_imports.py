# SPDX-License-Identifier: Apache-2.0
"""The import rules of files and packages, read from the source: imports in functions and for type checks count too.

The table of docs/developing/packages.md is the rule: a package imports what its row names, and no row below it.
"""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT
from sources import PACKAGES, circles, imported_names, imports, strings

pytestmark = pytest.mark.unit

PRODUCT, LABORATORY = ROOT / "nemo_specrollout", ROOT / "lab"
PAGE = ROOT / "docs" / "developing" / "packages.md"
# The laboratory's folders, lowest first: each imports folders before it.
LABORATORY_FOLDERS = (
    "vllm_on_cpu", "placement", "simulation", "local", "policies", "heads", "gpu", "bench", "cli"
)  # fmt: skip
# The packages that alone may import a heavy one.
OWNERS = {
    "vllm": {
        "generation",
        "generation.engine",
        "generation.drafting",
        "generation.step",
        "generation.runners",
        "heads.serving",
        "remote.drafter",
    },
    "megatron": set(),
    "speculators": {"heads.training"},
    "nemo_rl": {"nemo_rl"},
    "ray": {"nemo_rl", "run_ahead"},
    "zmq": {"remote.protocol"},
}
HEAVY = {"torch", "vllm", "ray", "megatron", "transformers"}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def holds_code(folder: Path) -> bool:
    return any(path.name != "__init__.py" for path in folder.glob("*.py"))


def package_of(path: Path) -> str:
    """Returns a file's folder below the product, with dots; empty for the product's own files."""
    return ".".join(path.relative_to(PRODUCT).parts[:-1])


CODE = {package_of(path) for path in files_of(PRODUCT) if holds_code(path.parent)} - {""}


def within(name: str) -> set[str]:
    """Returns the packages that a name of the page stands for: `heads.*` stands for all rooms of `heads`."""
    if not name.endswith(".*"):
        return {name}
    return {package for package in CODE if package == name[:-2] or package.startswith(name[:-1])}


def rules() -> dict[str, set[str]]:
    """Returns the packages that each package may import, as the first table of the page says, in its order."""
    found: dict[str, set[str]] = {}
    table = PAGE.read_text().split("imports (of ours) |\n")[1].split("\n\n")[0]
    for line in table.splitlines()[1:]:
        names, _, allowed = (cell.strip() for cell in line.strip("|").split(" | "))
        above = set(found)
        listed = set().union(*(within(name) for name in re.findall(r"`([\w.*]+)`", allowed)))
        if allowed.startswith("all"):
            listed = above - listed
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), listed)
    return found


RULES = rules()


def test_every_package_has_a_row_and_imports_rows_above_it() -> None:
    assert set(RULES) == CODE
    order = list(RULES)
    for package, allowed in RULES.items():
        assert all(order.index(other) < order.index(package) for other in allowed - {package}), package


@pytest.mark.parametrize("package", RULES)
def test_packages_import_what_their_row_names(package: str) -> None:
    for file in files_of(PRODUCT / package.replace(".", "/")):
        if package_of(file) == package:
            found = {package_of(other) for other in imports(file) if other.is_relative_to(PRODUCT)} - {package, ""}
            assert found <= RULES[package], f"{file.name} imports {found - RULES[package]}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_files_import_each_other(folder: str) -> None:
    graph = {path: imports(path) for path in files_of(ROOT / folder)}
    assert [[str(path.relative_to(ROOT)) for path in group] for group in circles(graph)] == []


def test_circles_are_found() -> None:
    a, b, c, d = map(Path, "abcd")
    assert circles({a: [b], b: [c], c: [a], d: [a]}) == [[a, b, c]]
    assert circles({a: [b], b: [c], c: [], d: [a, b]}) == []


def test_the_product_neither_imports_nor_names_the_laboratory() -> None:
    for file in files_of(PRODUCT):
        assert "lab" not in {name.partition(".")[0] for name in imported_names(file)}, file
        assert not [text for text in strings(file) if re.search(r"\blab(\.|/)\w", text)], file


def test_folders_of_the_laboratory_import_those_before_them() -> None:
    folders = {path.relative_to(LABORATORY).parts[0] for path in files_of(LABORATORY) if path.parent != LABORATORY}
    assert folders == set(LABORATORY_FOLDERS)
    for file in files_of(LABORATORY):
        others = [other.relative_to(LABORATORY).parts[0] for other in imports(file) if LABORATORY in other.parents]
        own = file.relative_to(LABORATORY).parts[0]
        assert [f for f in others if LABORATORY_FOLDERS.index(f) > LABORATORY_FOLDERS.index(own)] == [], file


def test_the_page_names_every_folder_of_the_laboratory() -> None:
    section = PAGE.read_text().split("## The laboratory\n")[1].split("\n## ")[0]
    assert set(LABORATORY_FOLDERS) <= set(re.findall(r"`(\w+)`", section))


def test_bodies_of_vllm_s_kernels_import_nothing_of_ours() -> None:
    for file in files_of(LABORATORY / "vllm_on_cpu" / "kernels"):
        assert not [other for other in imports(file) if PRODUCT in other.parents], file.name


@pytest.mark.parametrize("heavy", OWNERS)
def test_heavy_packages_have_few_owners(heavy: str) -> None:
    for file in files_of(PRODUCT):
        heads = {name.partition(".")[0] for name in imported_names(file)}
        assert heavy not in heads or package_of(file) in OWNERS[heavy], f"{file} imports {heavy}"


def test_light_packages_load_without_torch() -> None:
    """Each module of a package that docs/developing/packages.md calls light is loaded after the modules before it.

    The first one that loads a heavy package is named.
    """
    text = PAGE.read_text()
    light = [row.replace(".", "/") for row in re.findall(r"^\| `([\w.]+)` \|.*Loads without torch", text, re.MULTILINE)]
    known = {"config", "speculation", "heads/decisions", "stragglers/decisions", "reports", "doctor", "cli"}
    assert known <= set(light), "the page no longer calls one of them light"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in light
        for path in files_of(PRODUCT / package)
        if path.stem != "__init__"
    ]
    code = f"import importlib, sys\nfor name in {modules}:\n  importlib.import_module(name)\n"
    code += f"  found = {HEAVY} & set(sys.modules)\n  if found: sys.exit(f'{{name}} loads {{found}}')"
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_import_in_a_function_counts(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from nemo_specrollout.config import block\n    import lab.local.engine\n")
    names = [PRODUCT / "config" / "block.py", LABORATORY / "local" / "engine.py"]
    assert imports(file) == set(names)
    assert [a < b for a, b in pairwise(list(imported_names(file)))] == [False]
