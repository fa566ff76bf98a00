# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's SingleController, unedited, with the block and without: its prompt groups, its figures, all samplers."""

import pytest
from nemo_rl_host import ROUNDING, Run, num_drafts

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

OURS = ("plain", "drafted", "ahead", "weight_fifo", "windowed", "two_engines", "moving", "refreshed_head", "remote")
SAME_BATCHES = [name for name in OURS[1:] if name != "windowed"]  # which trains on other groups
NUM_STEPS = {"refreshed_head": 24, "remote": 24}
Group = list[list[list[int]]]


def groups(run: Run) -> dict[tuple[int, int], Group]:
    """Tokens of each group's samples, by prompt and policy version; of groups that saw one version only."""
    spans = ((group["prompt"], *group["versions"], group["samples"]) for group in run.record)
    return {(prompt, first): samples for prompt, first, last, samples in spans if first == last}


@pytest.mark.parametrize("name", ["native", *OURS, "long", "whole", "half", "resumed"])
def test_a_run_ends_well_and_leaves_no_actor(controller_runs: dict[str, Run], name: str) -> None:
    assert controller_runs[name].result["error"] is None
    assert controller_runs[name].result["actors"] == []


@pytest.mark.parametrize("name", ["native", *OURS, "long"])
def test_weights_move(controller_runs: dict[str, Run], name: str) -> None:
    assert controller_runs[name].weights_moved_by > ROUNDING


@pytest.mark.parametrize("name", ["whole", "half", "resumed"])
def test_a_learning_rate_of_0_moves_nothing(controller_runs: dict[str, Run], name: str) -> None:
    assert controller_runs[name].weights_moved_by == 0


@pytest.mark.parametrize("name", SAME_BATCHES)
def test_weights_move_as_without_drafts(controller_runs: dict[str, Run], name: str) -> None:
    plain, other = controller_runs["long" if name in NUM_STEPS else "plain"], controller_runs[name]
    for moved, also_moved in zip(plain.movement, other.movement, strict=True):
        assert moved == pytest.approx(also_moved, rel=1e-3)


@pytest.mark.parametrize("name", OURS[1:])
def test_groups_do_not_depend_on_drafts_sampler_or_engines(controller_runs: dict[str, Run], name: str) -> None:
    plain = groups(controller_runs["long" if name in NUM_STEPS else "plain"])
    other = groups(controller_runs[name])
    common = plain.keys() & other.keys()
    assert len(common) >= 4 * (NUM_STEPS.get(name, 3) - 2)
    assert [plain[key] for key in sorted(common)] == [other[key] for key in sorted(common)]


def test_the_samples_of_a_group_differ(controller_runs: dict[str, Run]) -> None:
    """Two samples of a tiny policy may be equal by chance, when they are short."""
    for group in groups(controller_runs["plain"]).values():
        assert len({str(sample) for sample in group}) > 1


@pytest.mark.parametrize("name", OURS)
def test_each_step_has_figures_and_a_sound_policy(controller_runs: dict[str, Run], name: str) -> None:
    steps = controller_runs[name].metrics
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS.get(name, 3) + 1))
    assert sum(step["engine_steps"] for step in steps) > 50
    for step in steps:
        assert step["seeds_derived"] == 0
        assert step["weight_updates"] == 1
        assert step["logprob_gap"] < 0.01 and step["logprob_gap_alarm"] == 0


@pytest.mark.parametrize("name", OURS[1:])
def test_drafts_are_verified_and_samples_have_stats(controller_runs: dict[str, Run], name: str) -> None:
    run = controller_runs[name]
    assert sum(step["draft_tokens_per_request_step"] for step in run.metrics) > 0
    stamped = [sample for line in run.lines("samples.jsonl") for sample in line["samples"]]
    assert stamped and all(sample["policy_spans"] for sample in stamped)


def test_a_resumed_run_samples_as_an_uninterrupted_one(controller_runs: dict[str, Run]) -> None:
    """NeMo-RL keeps the groups that wait for a step and drops those under way, so prompts come in other steps. The weights are
    always the same here."""
    whole, resumed = (
        {group["prompt"]: group["samples"] for group in controller_runs[name].record} for name in ("whole", "resumed")
    )
    common = whole.keys() & resumed.keys()
    assert len(common) >= 8 and all(whole[prompt] == resumed[prompt] for prompt in common)
    steps = {name: controller_runs[name].metrics for name in ("whole", "resumed")}
    assert [step["step"] for step in steps["resumed"]] == [3, 4]
    assert steps["resumed"][0]["loss"] == pytest.approx(steps["whole"][2]["loss"], rel=1e-4)


def test_rows_of_coming_batches_are_decoded_early(controller_runs: dict[str, Run]) -> None:
    steps = controller_runs["ahead"].metrics
    assert sum(step["ahead_made"] for step in steps) > 0
    assert any(step["ahead_tokens"] for step in steps)


def test_requests_move_and_race_across_engines(controller_runs: dict[str, Run]) -> None:
    steps = controller_runs["moving"].metrics
    assert sum(step["tail"]["moves"] + step["tail"]["races"] for step in steps) > 0


def test_a_head_is_refreshed(controller_runs: dict[str, Run]) -> None:
    steps = controller_runs["refreshed_head"].metrics
    assert sum(step.get("heads_published", 0) for step in steps) > 0


def test_remote_drafters_draft_and_end(controller_runs: dict[str, Run]) -> None:
    steps = controller_runs["remote"].metrics
    assert sum(num_drafts(step, "remote") for step in steps) > 0


def test_a_group_that_lost_its_engine_gets_the_same_tokens_again(controller_runs: dict[str, Run]) -> None:
    """The run ends in the next refit: NeMo-RL cannot go on without the engine yet."""
    plain, lost = groups(controller_runs["plain"]), groups(controller_runs["engine_lost"])
    common = plain.keys() & lost.keys()
    assert len(common) >= 4 and [plain[key] for key in sorted(common)] == [lost[key] for key in sorted(common)]
    log = controller_runs["engine_lost"].log
    assert "suspect -> dead" in log and "=== kills EngineActor " in log


def test_off_leaves_nothing_of_ours(controller_runs: dict[str, Run]) -> None:
    assert not list(controller_runs["native"].folder.rglob("specrollout"))


def test_groups_of_nemo_gym_do_not_depend_on_drafts(gym_controller_runs: dict[str, Run]) -> None:
    plain, drafted = (groups(gym_controller_runs[name]) for name in ("plain", "drafted"))
    common = plain.keys() & drafted.keys()
    assert len(common) >= 4  # the first step's, at least
    assert [plain[key] for key in sorted(common)] == [drafted[key] for key in sorted(common)]


def test_groups_of_nemo_gym_do_not_depend_on_texts_made_ahead(gym_controller_runs: dict[str, Run]) -> None:
    plain, ahead = (groups(gym_controller_runs[name]) for name in ("plain", "ahead"))
    common = plain.keys() & ahead.keys()
    assert len(common) >= 4 and [plain[key] for key in sorted(common)] == [ahead[key] for key in sorted(common)]
    assert sum(step["ahead_made"] for step in gym_controller_runs["ahead"].metrics) > 0


@pytest.mark.parametrize("name", ["plain", "drafted", "ahead"])
def test_rows_of_nemo_gym_bring_seeds(gym_controller_runs: dict[str, Run], name: str) -> None:
    run = gym_controller_runs[name]
    assert run.result["error"] is None and run.result["actors"] == []
    assert [step["step"] for step in run.metrics] == [1, 2, 3]
    assert run.weights_moved_by > ROUNDING
    for step in run.metrics:
        assert step["seeds_derived"] == 0
        assert step["logprob_gap"] < 0.01 and step["logprob_gap_alarm"] == 0
