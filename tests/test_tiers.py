# SPDX-License-Identifier: Apache-2.0
"""The tiers of the suite (`tiers.py`), and which of them a change concerns (`changed_tiers.py`)."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from changed_tiers import PINS, SESSION_S, base_of_changes, changed_files, changed_tiers, git, pins_to_test
from conftest import LONGEST, ROOT
from tiers import EVERYWHERE, OTHER_TIERS, PRODUCT, TESTS, TIERS, Tier, modules_of, tier_of

pytestmark = pytest.mark.unit


def names(tiers: list[Tier]) -> list[str]:
    return [tier.name for tier in tiers]


@pytest.mark.parametrize("tier", OTHER_TIERS, ids=lambda tier: tier.name)
def test_a_tier_names_what_exists(tier: Tier) -> None:
    for name in tier.modules:
        assert (TESTS / name).exists(), name
    for path in (*tier.subject, *EVERYWHERE):
        assert (ROOT / path).exists(), path


def test_every_module_belongs_to_the_tier_that_its_target_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = [path for tier in TIERS for path in modules_of(tier)]
    assert sorted(found) == sorted(TESTS.rglob("test_*.py"))
    for tier in TIERS:
        target = "test-vllm" if tier.name == "pins" else tier.target  # `test-pins` asks for that with each version
        assert re.search(rf"^{target}: .*\n(.+\n)*.*--tier={tier.name}$", makefile, re.MULTILINE), tier.name


def test_the_longest_modules_exist() -> None:
    found = {path.name for path in TESTS.rglob("test_*.py")}
    assert [name for name in LONGEST if name not in found] == []


@pytest.mark.parametrize(
    ("changed", "tiers"),
    [
        (["docs/index.md", "tests/test_cli.py"], []),
        (["docs/index.md", "nemo_specrollout/cli/check.py", "tests/test_cli.py"], ["slurm"]),
        (["nemo_specrollout/nemo_rl/metrics.py"], ["processes", "pins", "slurm"]),
        (["nemo_specrollout/stragglers/exchange.py"], ["processes", "lab"]),
        (["lab/bench/bench.py"], ["lab"]),
        (["tests/lab/test_run.py", "README.md"], ["lab"]),
        (["tests/interpreted/rows.py"], ["kernels"]),
        (["tests/test_llama.py"], ["families"]),
        (["nemo_specrollout/drafters/board_triton.py"], ["kernels", "families", "processes", "lab", "pins"]),
        (["requirements/cpu.lock"], ["kernels", "families", "processes", "lab", "pins", "slurm"]),
        (["slurm/cluster.example.yaml"], ["slurm"]),
    ],
)
def test_a_change_asks_for_the_tiers_of_its_subject(changed: list[str], tiers: list[str]) -> None:
    assert names(changed_tiers(changed)) == tiers


def test_a_change_of_what_meets_vllm_or_nemo_rl_asks_for_the_pins_that_have_an_environment(tmp_path: Path) -> None:
    for version in (PINS[0], "0.32.0"):
        (tmp_path / f"vllm-{version}" / "bin").mkdir(parents=True)
        (tmp_path / f"vllm-{version}" / "bin" / "python").touch()
    assert pins_to_test(["README.md", "nemo_specrollout/generation/vllm_worker.py"], tmp_path) == [PINS[0]]
    assert pins_to_test(["nemo_specrollout/nemo_rl/metrics.py"], tmp_path) == [PINS[0]]
    assert pins_to_test(["nemo_specrollout/cli/check.py", "tests/test_cli.py"], tmp_path) == []


def test_a_module_without_a_tier_is_of_the_product() -> None:
    assert tier_of(Path(__file__)) is PRODUCT
    assert tier_of(TESTS / "lab" / "test_run.py").name == "lab"
    assert tier_of(TESTS / "faults" / "test_soak.py") is PRODUCT


def commit(folder: Path, name: str, at_s: int) -> str:
    """Commits a file of this name at a time in seconds. Returns the commit's hash."""
    (folder / name).write_text(name)
    who = {"NAME": "a", "EMAIL": "a@b", "DATE": f"{at_s} +0000"}
    names = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    for command in (["add", "-A"], ["commit", "--quiet", "--message", name]):
        subprocess.run(["git", *command], cwd=folder, check=True, env={**os.environ, **names})
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main"], cwd=tmp_path, check=True)
    return tmp_path


def test_on_main_changes_are_those_of_the_last_session(repository: Path) -> None:
    last_s = 10**9
    commit(repository, "oldest", last_s - 3 * SESSION_S)
    before = commit(repository, "old", last_s - SESSION_S)
    commit(repository, "new", last_s - SESSION_S + 60)
    commit(repository, "newest", last_s)
    (repository / "uncommitted").write_text("")
    assert base_of_changes(repository) == before
    assert changed_files(repository, before) == ["new", "newest", "uncommitted"]


def test_on_a_branch_changes_begin_where_it_left_main(repository: Path) -> None:
    fork = commit(repository, "old", 10**9)
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", fork], cwd=repository, check=True)
    commit(repository, "new", 10**9 + 10 * SESSION_S)
    assert base_of_changes(repository) == fork
    assert changed_files(repository, fork) == ["new"]


def test_without_an_older_commit_everything_counts_as_changed(repository: Path) -> None:
    commit(repository, "only", 10**9)
    assert base_of_changes(repository) == ""
