# SPDX-License-Identifier: Apache-2.0
"""The README names every field of our block with its default, and the commands that it tells of exist."""

import dataclasses
import re

import pytest
import yaml
from conftest import ROOT

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build

pytestmark = pytest.mark.unit

README = (ROOT / "README.md").read_text()


def block_of_the_readme() -> dict:
    """The fenced YAML block of the README that shows `specrollout:`."""
    for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL):
        tree = yaml.safe_load(text)
        while isinstance(tree, dict) and "specrollout" not in tree and len(tree) == 1:
            tree = next(iter(tree.values()))
        if isinstance(tree, dict) and "specrollout" in tree:
            return tree["specrollout"]
    raise AssertionError("the README shows no specrollout block")


def field_names(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def test_the_readme_s_block_is_the_default_and_names_every_field() -> None:
    block = block_of_the_readme()
    assert build(SpecrolloutConfig, block, BLOCK_PATH) == SpecrolloutConfig()
    assert set(block) == field_names(SpecrolloutConfig)
    for name in ("budget", "verify"):
        assert set(block[name]) == field_names(type(getattr(SpecrolloutConfig(), name)))
    for name in ("type", "max_order", "num_slots"):
        assert any(name in drafter for drafter in block["drafters"])


def test_make_targets_and_links_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z0-9-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / link).exists(), link
