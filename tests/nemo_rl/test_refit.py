# SPDX-License-Identifier: Apache-2.0
"""A trainer's draft head reaches the drafter of vLLM's V2 model runner, and nothing else."""

import pytest
from nemo_rl_host import HERE, Host, answer_in
from nemo_rl_scenarios import RENAMED

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(600)]


def refitted(host: Host, which: str, **more: str) -> tuple[dict[str, bool], str]:
    """Returns the findings of `refit_cases.py`, and all that it printed."""
    output = host.run(HERE / "refit_cases.py", which, HERE / "base.yaml", more=more)
    return answer_in(output, "FOUND"), output


def test_a_refit_changes_the_head_and_not_the_policy(host: Host) -> None:
    found, _ = refitted(host, "ours")
    assert all(found.values()), found


def test_natively_the_head_stays_as_it_was(host: Host) -> None:
    """If this fails, NeMo-RL looks for the drafter of V2 by itself: see docs/upstream/nemo-rl-draft-refit.md."""
    found, output = refitted(host, "native", **RENAMED)
    assert not any(is_sent for name, is_sent in found.items() if name != "policy_kept")
    assert "vLLM drafter is unavailable" in output
