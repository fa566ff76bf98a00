# SPDX-License-Identifier: Apache-2.0
"""What the supported versions of vLLM have: the table that needs no vLLM, and the names that it stands for."""

from typing import Any

import pytest

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DRAFTERS, MODEL_DRAFTERS
from nemo_specrollout.config.strict import build_tagged
from nemo_specrollout.config.vllm_features import ALWAYS, FEATURES, refusals

pytestmark = pytest.mark.unit
OLDEST, NEWEST = "0.25.1", "0.32.0"


def block_of(drafter: str) -> SpecrolloutConfig:
    values: dict[str, Any] = {"type": drafter}
    if drafter in MODEL_DRAFTERS and drafter != "mtp":
        values["model"] = "a/b"
    if drafter == "remote":
        values |= {"model": "a/b", "workers": 1}
    return SpecrolloutConfig(drafters=(build_tagged(DRAFTERS, values, "drafter"),))


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.drafters], ids=lambda feature: feature.name)
def test_a_drafter_that_a_version_lacks_is_refused_in_one_sentence(feature: Any) -> None:
    for drafter in feature.drafters:
        (sentence,) = refusals(block_of(drafter), OLDEST)
        assert sentence.startswith(f"{BLOCK_PATH}.drafters[0].type: {drafter}; with vLLM {OLDEST} ")
        assert "or vLLM 0.32.0 or later" in sentence and "\n" not in sentence
        assert not list(refusals(block_of(drafter), NEWEST))


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "eagle3", "mtp", "dflash", "dspark", "remote"])
def test_the_other_drafters_run_with_every_version(drafter: str) -> None:
    assert not list(refusals(block_of(drafter), OLDEST))


def test_a_block_that_is_off_needs_nothing() -> None:
    assert not list(refusals(SpecrolloutConfig(enabled=False, drafters=block_of("draft_model").drafters), OLDEST))


def test_no_feature_is_said_to_be_in_every_version() -> None:
    assert all(feature.since > ALWAYS for feature in FEATURES)
    assert not any(feature.is_in(OLDEST) for feature in FEATURES)
    assert all(feature.is_in(NEWEST) and feature.is_in("main") for feature in FEATURES)
