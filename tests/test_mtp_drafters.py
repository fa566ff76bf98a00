# SPDX-License-Identifier: Apache-2.0
"""Heads that come with the policy's checkpoint (MTP): they draft, catch up, and follow the policy's weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from model_drafters import (
    LONG,
    assert_same_drafts,
    drafting_of,
    recorded,
)
from mtp_policy import save_mtp_policy
from test_equality import NGRAM, SAMPLINGS, assert_equal, requests

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    MtpDrafterConfig,
)
from nemo_specrollout.generation.engine.requests import Rollout

pytestmark = pytest.mark.integration

MTP = MtpDrafterConfig()


@pytest.fixture(scope="module")
def mtp_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp_policy")
    save_mtp_policy(folder)
    return folder


@pytest.fixture(scope="module")
def expected_of_mtp_policy(start_engine: Callable[..., RolloutEngine], mtp_policy: Path) -> dict[str, list[Rollout]]:
    plain = start_engine(mtp_policy, SpecrolloutConfig(drafters=()))
    asked = requests(8, 4, first=50)
    return {name: plain.generate(asked, **SAMPLINGS[name], **LONG) for name in ("T=1", "T=0")}


@pytest.fixture(scope="module")
def mtp_engine(start_engine: Callable[..., RolloutEngine], mtp_policy: Path) -> RolloutEngine:
    return start_engine(mtp_policy, SpecrolloutConfig(drafters=(MTP,), budget=BudgetConfig("fixed", k=3)))


def test_mtp_heads_draft_and_catch_up_with_skipped_steps(
    start_engine: Callable[..., RolloutEngine],
    mtp_policy: Path,
    mtp_engine: RolloutEngine,
    expected_of_mtp_policy: dict[str, list[Rollout]],
) -> None:
    mixed = SpecrolloutConfig(drafters=(NGRAM, MTP), budget=RANDOM)
    drafts = []
    for engine, mtp, least in ((mtp_engine, 0, 0.6), (start_engine(mtp_policy, mixed), 1, 0.3)):
        assert_equal(engine.generate(requests(8, 4, first=50), temperature=0.0, **LONG), expected_of_mtp_policy["T=0"])
        drafts.append(recorded(engine))
        assert_equal(engine.generate(requests(8, 4, first=50), **LONG), expected_of_mtp_policy["T=1"])
        stats = engine.stats()
        proposed, accepted = (sum(getattr(stats, key)[mtp]) for key in ("proposed", "accepted"))
        assert proposed > 1000 and accepted > least * proposed, f"{accepted} of {proposed} drafts were right"
    busy, lazy = drafts
    assert_same_drafts(lazy, busy)


def test_mtp_heads_change_no_token_under_the_automatic_budget(
    start_engine: Callable[..., RolloutEngine], mtp_policy: Path, expected_of_mtp_policy: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(mtp_policy, SpecrolloutConfig(drafters=(MTP, NGRAM)))
    for name, expected in expected_of_mtp_policy.items():
        assert_equal(engine.generate(requests(8, 4, first=50), **SAMPLINGS[name], **LONG), expected)
    assert sum(engine.stats().proposed[0]) > 0


def test_mtp_heads_follow_the_policys_weights(
    mtp_engine: RolloutEngine, mtp_policy: Path, expected_of_mtp_policy: dict[str, list[Rollout]]
) -> None:
    """The heads come with the policy's checkpoint. If their part is broken, the alarm does not blame shared modules."""
    from safetensors.torch import load_file

    tensors = load_file(mtp_policy / "model.safetensors")
    rates = []
    for sign in (1.0, -1.0):
        heads = {name: sign * t for name, t in tensors.items() if name.endswith("input_proj.weight")}
        before = mtp_engine.stats()
        mtp_engine.load_weights((tensors | heads).items())
        assert_equal(mtp_engine.generate(requests(8, 4, first=50), **LONG), expected_of_mtp_policy["T=1"])
        drafted, right = (
            sum(getattr(mtp_engine.stats(), key)[0]) - sum(getattr(before, key)[0]) for key in ("proposed", "accepted")
        )
        rates.append(right / drafted)
        samples = drafting_of(mtp_engine).samples
        assert samples.head_version == samples.policy_version
    assert rates[0] > 0.6 and rates[1] < 0.2
    (alarm,) = mtp_engine.take_alarms()
    assert alarm["event"] == "refit" and alarm["cause"] == "unknown" and not alarm["drafter_off"]
