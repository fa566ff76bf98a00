# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's other loops that roll out: three turns with an environment and with NeMo-Gym, on-policy distillation, the
TransferQueue trainer."""

from collections.abc import Mapping
from typing import Any

import pytest
from nemo_rl_host import ROUNDING, Run, num_drafts

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

STEPS = (1, 2, 3)
LOOPS = ("turn_runs", "gym_runs", "distillation_runs", "data_plane_runs", "ppo_runs")
ROWS = {"turn_runs": 8, "gym_runs": 16}  # of a training step, in the loops of three turns


@pytest.fixture
def pair(request: pytest.FixtureRequest, loop: str) -> tuple[Run, Run]:
    """A run without drafts and the same with them."""
    found: dict[str, Run] = request.getfixturevalue(loop)
    return found["plain"], found["drafted"]


@pytest.mark.parametrize("loop", LOOPS)
def test_runs_end_well_and_leave_no_actor(pair: tuple[Run, Run], loop: str) -> None:
    """NeMo-RL's scripts of the puzzle and of distillation leave their engines to the end of the process."""
    for run in pair:
        assert run.result["error"] is None
        assert loop != "data_plane_runs" or run.result["actors"] == []


@pytest.mark.parametrize("loop", LOOPS)
def test_losses_do_not_depend_on_the_drafter(pair: tuple[Run, Run], loop: str) -> None:
    plain, drafted = ([step["loss"] for step in run.metrics] for run in pair)
    assert len(plain) == 3 and plain == pytest.approx(drafted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_move_and_not_by_the_drafter(pair: tuple[Run, Run], loop: str) -> None:
    plain, drafted = (run.movement for run in pair)
    assert plain[-1] > ROUNDING and plain == pytest.approx(drafted, rel=1e-3)


@pytest.mark.parametrize("loop", LOOPS)
def test_each_step_is_drafted_and_has_seeds(pair: tuple[Run, Run], loop: str) -> None:
    steps = pair[1].metrics
    drafted = [num_drafts(step, kind) for step in steps for kind in ("suffix", "ngram")]
    assert sum(drafted) > 0
    assert all(step["seeds_derived"] == 0 for step in steps)
    assert all(step["weight_updates"] == 1 for step in steps)


def test_rows_of_ppo_do_not_depend_on_the_drafter(ppo_runs: dict[str, Run]) -> None:
    plain, drafted = (ppo_runs[name].record for name in ("plain", "drafted"))
    assert plain == drafted and [len(batch) for batch in plain] == [16, 16, 16]


def test_ppo_has_rewards_that_differ_and_losses(ppo_runs: dict[str, Run]) -> None:
    """A reward is 1 or -1 before it falls with the length of the answer."""
    for run in ppo_runs.values():
        assert all(step["loss"] != pytest.approx(0, abs=1e-6) for step in run.metrics)
        assert all(step["reward"] != pytest.approx(round(step["reward"])) for step in run.metrics)
        assert all(len({len(row) for row in batch}) > 1 for batch in run.record)


def test_samples_of_a_validation_are_not_kept(data_plane_runs: dict[str, Run]) -> None:
    """Three steps of 16 samples, and two validations of 8. The engine sample_stats a step's last ones in the step after."""
    kept = [sample for line in data_plane_runs["drafted"].lines("samples.jsonl") for sample in line["samples"]]
    assert 40 < len(kept) <= 48


def test_the_data_plane_has_texts_made_ahead(data_plane_runs: dict[str, Run]) -> None:
    """The rollout actor's engines find texts that the driver let them make. A refit is one new policy version."""
    plain, ahead = data_plane_runs["plain"], data_plane_runs["ahead"]
    assert ahead.result["error"] is None and ahead.result["actors"] == []
    assert [s["loss"] for s in plain.metrics] == pytest.approx([s["loss"] for s in ahead.metrics], rel=1e-4, abs=1e-6)
    assert plain.movement == pytest.approx(ahead.movement, rel=1e-3)
    assert [bool(s["ahead_tokens"]) for s in ahead.metrics] == [False, True, True]
    assert ahead.metrics[1]["ahead_kept"] > 0.5


@pytest.mark.parametrize("loop", ["ppo_runs", "distillation_runs", "data_plane_runs", "gym_runs"])
def test_texts_made_in_free_slots_change_no_loss(request: pytest.FixtureRequest, loop: str) -> None:
    """Each run has one engine on the trainer's GPU, so its texts are made in slots that rollouts leave empty."""
    found: dict[str, Run] = request.getfixturevalue(loop)
    plain, rolling = found["plain"], found["rolling"]
    assert rolling.result["error"] is None
    losses, same = ([step["loss"] for step in run.metrics] for run in (plain, rolling))
    assert len(losses) == 3 and losses == pytest.approx(same, rel=1e-4, abs=1e-6)
    assert plain.movement == pytest.approx(rolling.movement, rel=1e-3)
    assert sum(step["ahead_made"] for step in rolling.metrics) > 0
    assert any(step["ahead_tokens"] for step in rolling.metrics)


@pytest.mark.parametrize("step", STEPS)
def test_first_turns_of_nemo_gym_that_were_made_early_change_no_row(gym_runs: dict[str, Run], step: int) -> None:
    """The agent sends what its row says, so every text is for a request that comes, and only first turns have one."""
    plain, rolling = gym_runs["plain"], gym_runs["rolling"]
    assert plain.samples(step) == rolling.samples(step)
    metrics = rolling.metrics[step - 1]
    assert metrics["seeds_derived"] == 0 and not any("texts that were made ahead" in said for said in alarms(metrics))
    assert metrics.get("ahead_texts", 0) <= 16 and bool(metrics.get("ahead_texts")) == (step > 1)


def alarms(step: Mapping[str, Any]) -> list[str]:
    return list(step.get("alarms") or ())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("loop", ROWS)
def test_rows_of_three_turns_do_not_depend_on_the_drafter(pair: tuple[Run, Run], loop: str, step: int) -> None:
    plain, drafted = (run.samples(step) for run in pair)
    assert plain == drafted and len(plain) == ROWS[loop]


@pytest.mark.parametrize("loop", ROWS)
def test_the_rows_are_of_several_turns(pair: tuple[Run, Run], loop: str) -> None:
    """A turn is a stretch of tokens that the policy made."""
    masks = [mask for step in STEPS for _, (mask,) in pair[0].samples(step)]
    turns = [sum(here and not before for before, here in zip([0, *mask], mask, strict=False)) for mask in masks]
    assert max(turns) == 3
