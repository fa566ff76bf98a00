# SPDX-License-Identifier: Apache-2.0
"""The tiers of the suite (`tiers.py`), and which of them a change concerns (`changed_tiers.py`)."""

import re
from pathlib import Path

import pytest
from changed_tiers import changed_tiers
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
        assert re.search(rf"^{tier.target}: .*\n.*--tier {tier.name}$", makefile, re.MULTILINE), tier.name


def test_the_longest_modules_exist() -> None:
    found = {path.name for path in TESTS.rglob("test_*.py")}
    assert [name for name in LONGEST if name not in found] == []


@pytest.mark.parametrize(
    ("changed", "tiers"),
    [
        (["docs/index.md", "nemo_specrollout/cli/check.py", "tests/test_cli.py"], []),
        (["nemo_specrollout/nemo_rl/metrics.py"], ["processes"]),
        (["nemo_specrollout/stragglers/exchange.py"], ["processes", "lab"]),
        (["lab/bench/bench.py"], ["lab"]),
        (["tests/lab/test_run.py", "README.md"], ["lab"]),
        (["tests/interpreted/rows.py"], ["kernels"]),
        (["tests/test_llama.py"], ["families"]),
        (["nemo_specrollout/drafters/board_triton.py"], ["kernels", "families", "processes", "lab"]),
        (["requirements/cpu.lock"], ["kernels", "families", "processes", "lab"]),
    ],
)
def test_a_change_asks_for_the_tiers_of_its_subject(changed: list[str], tiers: list[str]) -> None:
    assert names(changed_tiers(changed)) == tiers


def test_a_module_without_a_tier_is_of_the_product() -> None:
    assert tier_of(Path(__file__)) is PRODUCT
    assert tier_of(TESTS / "lab" / "test_run.py").name == "lab"
    assert tier_of(TESTS / "faults" / "test_soak.py") is PRODUCT
