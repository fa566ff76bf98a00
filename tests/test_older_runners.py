# SPDX-License-Identifier: Apache-2.0
"""The budget of older runners: drafts left out of a step, and the output that the scheduler reads later."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.model_drafter import AgreedCosts
from nemo_specrollout.generation.older_runners import HostBudget
from nemo_specrollout.scheduling.speculation.budget import DraftingPause, build_budget

pytestmark = pytest.mark.integration
SLOTS = {"a": 2, "b": 0, "c": 1}


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int] = field(default_factory=lambda: {"a": 4, "b": 4, "c": 9, "new": 5})
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=lambda: {n: [-1] * 3 for n in "ab"})
    total_num_scheduled_tokens: int = 22
    has_structured_output_requests: bool = False


def budget_with(rates_BK: list[list[float]], k: int = 3) -> HostBudget:
    """Returns a budget after a step in which the drafts of `SLOTS`, in their order, had these acceptance rates."""
    rates_SK = torch.zeros(4, 3)
    rates_SK[list(SLOTS.values())] = torch.tensor(rates_BK)
    runner: Any = SimpleNamespace(req_states=SimpleNamespace(req_id_to_index=SLOTS))
    drafting = Drafting.__new__(Drafting)
    drafting._policy, drafting._pause = build_budget(BudgetConfig("fixed", k=k)), DraftingPause()
    drafting.costs = AgreedCosts()
    drafting.board = SimpleNamespace(tables=SimpleNamespace(rates_SK=rates_SK))
    budget = HostBudget(runner, drafting)
    budget.record()
    return budget


def test_drafts_beyond_the_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_specrollout.generation.older_runners.agreed", lambda decision: decision)
    scheduled = Scheduled()
    trimmed = budget_with([[0.9, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).trimmed(scheduled)
    assert trimmed.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    assert trimmed.num_scheduled_tokens == {"a": 3, "b": 1, "c": 9, "new": 5}
    assert trimmed.total_num_scheduled_tokens == 18
    assert scheduled == Scheduled(), "the scheduler reads its own output later"
    assert budget_with([[0.9, 0.8, 0.7]] * 3, k=1).trimmed(Scheduled()).total_num_scheduled_tokens == 18


def test_steps_without_drafts_or_with_masks_stay_as_they_are() -> None:
    budget = budget_with([[0.0] * 3] * 3)
    for scheduled in (Scheduled(scheduled_spec_decode_tokens={}), Scheduled(has_structured_output_requests=True)):
        assert budget.trimmed(scheduled) is scheduled
