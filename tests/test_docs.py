# SPDX-License-Identifier: Apache-2.0
"""README and documentation: fields, commands and links exist, and every page is in the site's menu."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from lab.cli.main import PROGRAM as LAB
from nemo_specrollout.cli.main import PROGRAM as PRODUCT
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build

pytestmark = pytest.mark.unit

README = ROOT / "README.md"
BLOCK_PAGE = ROOT / "docs" / "reference" / "block.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READ_ON_GITHUB = [
    README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "slurm/README.md", "lab/README.md")), *PAGES,
]  # fmt: skip


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def block_of(page: Path) -> dict:
    """Returns the fenced YAML block of a page that shows `specrollout:`."""
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        tree = yaml.safe_load(text)
        while isinstance(tree, dict) and "specrollout" not in tree and len(tree) == 1:
            tree = next(iter(tree.values()))
        if isinstance(tree, dict) and "specrollout" in tree:
            return tree["specrollout"]
    raise AssertionError(f"{page} shows no specrollout block")


def field_names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def test_the_block_page_shows_the_defaults_and_every_field() -> None:
    block = block_of(BLOCK_PAGE)
    assert build(SpecrolloutConfig, block, BLOCK_PATH) == SpecrolloutConfig()
    assert set(block) == field_names(SpecrolloutConfig)
    for name in ("budget", "verify", "learned"):
        assert set(block[name]) == field_names(type(getattr(SpecrolloutConfig(), name)))


def test_the_block_of_the_readme_builds() -> None:
    build(SpecrolloutConfig, block_of(README), BLOCK_PATH)


@pytest.mark.parametrize("page", READ_ON_GITHUB, ids=names)
def test_make_targets_and_links_exist(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z0-9-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_that_a_page_names_exist(page: Path) -> None:
    if "upstream" in page.parts:
        return  # these pages name files of other projects
    packages = [p.name for p in (ROOT / "nemo_specrollout").iterdir() if p.is_dir()]
    for name in re.findall(rf"`((?:{'|'.join(packages)})/[a-z0-9_/]+\.py)`", page.read_text()):
        is_theirs = page.name == "nemo-rl-patch-points.md" and name.startswith("nemo_rl/models")
        assert is_theirs or (ROOT / "nemo_specrollout" / name).exists(), name


@pytest.mark.parametrize("page", READ_ON_GITHUB, ids=names)
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    if "upstream" in page.parts:
        return  # these pages name files of other projects
    for name in re.findall(r"`((?:lab|tests|examples/configs)/[a-z0-9_/.-]+\.(?:py|yaml))[`:]", page.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"python -m (lab[a-z0-9_.]+[a-z0-9_])", page.read_text()):
        assert (ROOT / (name.replace(".", "/") + ".py")).exists(), name


@pytest.mark.parametrize("page", READ_ON_GITHUB, ids=names)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    for program in (PRODUCT, LAB):
        known = {command.name for command in program.commands}
        found = set(re.findall(rf"{program.name} +([a-z][a-z-]+)", page.read_text()))
        assert found <= known, found - known


CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PATH = r"\.?[\w*{][\w.,*{}-]*(/[\w.,*{}-]+)*/?"
"""A path, in which `{a,b}` and `*` stand for several files."""
FILE_ENDINGS = (".py", ".md", ".yaml", ".yml", ".toml", ".lock", ".sh", ".json")
ELSEWHERE = ("DIR/", ".venv/", "__pycache__/", "/")
"""Beginnings of paths that are no files of the repository."""


def paths_in(text: str) -> list[str]:
    """Returns each word of the inline code of a page that looks like a file or a folder, with braces written out."""
    found = []
    for word in " ".join(re.findall(r"`([^`\n]+)`", text)).split():
        is_path = re.fullmatch(PATH, word) and ("/" in word or word.endswith(FILE_ENDINGS))
        if is_path and not word.startswith(ELSEWHERE):
            before, _, rest = word.partition("{")
            choices, _, after = rest.partition("}")
            found += [before + choice + after for choice in choices.split(",")]
    return found


def is_in_the_repository(path: str) -> bool:
    """Returns whether a path names something, counted from the root or from the product's folder."""
    return any(any(folder.glob(path.rstrip("/"))) for folder in (ROOT, ROOT / "nemo_specrollout"))


def test_files_and_folders_that_contributing_names_exist() -> None:
    paths = paths_in(CONTRIBUTING.read_text())
    assert {"config/known_traps.py", "tests/upstream", "lab/vllm_on_cpu/kernels/", "config/nemo_rl_*.py"} <= set(paths)
    assert [path for path in paths if not is_in_the_repository(path)] == []


def test_missing_files_are_found_in_code_of_every_kind() -> None:
    text = (
        "`config/none.py`, `run lab/none/ -s`, `generation/{engine/compat,none}.py`, `none_*.py`, `DIR/none`, `a word`"
    )
    missing = ["config/none.py", "lab/none/", "generation/none.py", "none_*.py"]
    assert [path for path in paths_in(text) if not is_in_the_repository(path)] == missing


def test_names_of_the_code_that_contributing_names_exist() -> None:
    code = "\n".join(p.read_text() for folder in ("nemo_specrollout", "tests") for p in (ROOT / folder).rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    for name in re.findall(r"`(_?[A-Z][A-Za-z_.]+[a-z_A-Z]|[a-z]+(?:_[a-z]+)+)`", CONTRIBUTING.read_text()):
        is_variable = re.fullmatch(r"\w+_(SRC|PYTHON|ENVIRONMENTS)|DIR|CONFIG", name)
        assert is_variable or set(name.split(".")) <= known, name


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [p for p in PAGES if str(p.relative_to(ROOT / "docs")) not in menu] == []
