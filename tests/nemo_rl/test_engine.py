# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own generation worker, natively and with ours: sampling parameters one by one, and off is off."""

from typing import Any

import pytest
from nemo_rl_host import HERE, Host, answer_in
from nemo_rl_scenarios import RENAMED

NO_CHOICE = [
    "greedy",
    "top_k",
    "top_p",
    "stop_token_ids",
    "stop_strings",
    "bad_words",
    "ignore_eos",
    "max_new_tokens",
    "context_end",
]
SAMPLED = ["temperature", "sampled_top_k_top_p"]

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def answers(host: Host) -> dict[str, Any]:
    """Returns the findings of `engine_cases.py`."""
    found: dict[str, Any] = {}
    for which, more in {"native": RENAMED, "ours": {}}.items():
        output = host.run(HERE / "engine_cases.py", which, HERE / "base.yaml", more=more)
        found |= answer_in(output, "ANSWERS")
    return found


def test_nemo_rl_alone_does_not_start_with_this_vllm(host: Host) -> None:
    """If this fails, NeMo-RL has mended it: see docs/upstream/nemo-rl-synchronize-device.md and `known_traps`."""
    output = host.run(HERE / "engine_cases.py", "native", HERE / "base.yaml", may_fail=True)
    assert "already has an attribute synchronize_device" in output


def test_off_is_native(answers: dict[str, Any]) -> None:
    assert answers["same_engine_arguments"]
    assert answers["changed_keys"] == []


@pytest.mark.parametrize("case", NO_CHOICE)
def test_sampling_parameter_acts_as_natively(answers: dict[str, Any], case: str) -> None:
    assert answers["drafted"][case] == answers["native"][case]


@pytest.mark.parametrize("case", ["stop_token_ids", "stop_strings", "bad_words", "ignore_eos", "max_new_tokens"])
def test_cases_are_not_idle(answers: dict[str, Any], case: str) -> None:
    assert answers["native"][case] != answers["native"]["greedy"]


@pytest.mark.parametrize("case", NO_CHOICE + SAMPLED)
def test_sampling_parameter_is_the_same_with_and_without_drafts(answers: dict[str, Any], case: str) -> None:
    assert answers["drafted"][case] == answers["plain"][case]
    assert all(answers["plain"][case])
