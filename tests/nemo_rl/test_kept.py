# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own GRPO loop with what engines learn shared and kept: no row may depend on it, whatever the folder holds."""

from collections import Counter
from pathlib import Path

import pytest
from earlier_start import DAMAGES, LEARNED
from kept_weights import audit_of
from nemo_rl_host import ROUNDING, Host, Run, count_equal, num_drafts
from nemo_rl_scenarios import LEARNED_SCENARIOS

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

FINISHED = [name for name in LEARNED_SCENARIOS if name != "killed"]
SECOND_STARTS = [name for name, facts in LEARNED_SCENARIOS.items() if "earlier" in facts]
AUDITED = ["forgetting", "learning", "resumed_at_random", "after_stranger", "cut_short", "turned", "spread_learning"]
SOUND = 1e-4  # nats: float32, two implementations of one model
TOLD = ["cut_short", "overwritten", "turned", "other_format"]
"""Damage of which the user hears. Files without content are like those of an engine that has only just begun."""


@pytest.mark.parametrize("name", FINISHED)
def test_a_run_ends_well_and_trains(learned_runs: dict[str, Run], name: str) -> None:
    run = learned_runs[name]
    assert (run.result["error"], run.result["actors"]) == (None, [])
    assert run.weights_moved_by > ROUNDING


@pytest.mark.parametrize("name", ["learning", "after_stranger"])
@pytest.mark.parametrize("step", range(1, 7))
def test_no_row_depends_on_what_engines_learn(learned_runs: dict[str, Run], name: str, step: int) -> None:
    """One of the runs begins with the texts of another policy."""
    assert count_equal(learned_runs["forgetting"], learned_runs[name], step) == (16, 16)


@pytest.mark.parametrize("step", range(1, 5))
def test_no_row_depends_on_which_engine_has_which_samples(learned_runs: dict[str, Run], step: int) -> None:
    """The samples of each prompt are spread over two engines, and the prompts of steps 1 and 2 come again."""
    assert count_equal(learned_runs["spread_forgetting"], learned_runs["spread_learning"], step) == (16, 16)


@pytest.mark.parametrize("name", SECOND_STARTS)
@pytest.mark.parametrize("step", [5, 6])
def test_a_second_start_goes_on_with_the_rows_of_a_run_that_never_stopped(
    learned_runs: dict[str, Run], name: str, step: int
) -> None:
    """The trainer was killed after step 5, before its checkpoint, so that a start begins after step 4."""
    resumed = learned_runs[name]
    assert [line["step"] for line in resumed.lines("metrics.jsonl")] == [5, 6]
    assert count_equal(learned_runs["forgetting"], resumed, step) == (16, 16)


@pytest.mark.parametrize("step", range(1, 6))
def test_rows_before_the_end_of_a_killed_run_are_the_same(learned_runs: dict[str, Run], step: int) -> None:
    killed = learned_runs["killed"]
    assert killed.result["error"] is not None
    assert count_equal(learned_runs["forgetting"], killed, step) == (16, 16)


def test_each_kind_of_damage_befalls_a_second_start() -> None:
    assert {facts["damage"] for facts in LEARNED_SCENARIOS.values() if facts.get("damage")} == set(DAMAGES)


@pytest.mark.parametrize("name", AUDITED)
def test_every_row_is_what_its_policies_sample(
    learned_runs: dict[str, Run], host: Host, name: str, tmp_path: Path
) -> None:
    found, num_rows = audit_of(learned_runs[name], host.tiny / "repetitive", tmp_path)
    assert not found.skipped
    assert not found.foreign, found.sentence
    assert not found.differences, found.sentence
    assert len(found.rows) == num_rows > 30
    assert found.logprob_quantiles["largest"] < SOUND


@pytest.mark.parametrize("name", ["learning", "spread_learning", "resumed_at_random", "after_stranger"])
def test_texts_of_the_history_are_drafts_and_some_are_right(learned_runs: dict[str, Run], name: str) -> None:
    """Otherwise equal rows would show nothing."""
    steps = learned_runs[name].metrics
    proposed, accepted = (sum(num_drafts(step, "history", kind) for step in steps) for kind in ("proposed", "accepted"))
    assert 0 < accepted < proposed


@pytest.mark.parametrize("name", ["learning", "spread_learning"])
def test_an_engine_drafts_from_texts_of_the_other_one(learned_runs: dict[str, Run], name: str) -> None:
    """Nothing was kept when these runs began."""
    facts = learned_runs[name].metrics[-1]["history"]
    assert facts["num_read"] == 0
    assert 0 < facts["num_from_others"] <= facts["num_fed"]


def test_a_second_start_reads_what_the_first_one_has_kept(learned_runs: dict[str, Run]) -> None:
    written = learned_runs["killed"].metrics[-1]["history"]["num_written"]
    for name in ("resumed", "resumed_at_random"):
        assert learned_runs[name].metrics[0]["history"]["num_read"] >= written > 0
    (told,) = [step["began"] for step in learned_runs["resumed"].metrics if "began" in step]
    assert any("earlier responses" in sentence for sentence in told)
    assert any("began with" in sentence for sentence in told), "rates and step times"


def test_a_step_that_is_made_again_is_drafted_from_its_own_texts(learned_runs: dict[str, Run]) -> None:
    """The engines had written the responses of step 5 before the trainer was killed, and the second start makes it again."""
    made_again = learned_runs["resumed_at_random"].metrics[0]
    assert num_drafts(made_again, "history", "accepted") > 0.5 * num_drafts(made_again, "history") > 0


@pytest.mark.parametrize("name", ["forgetting", "spread_forgetting"])
def test_nothing_is_learned_or_kept_where_the_user_wants_none(learned_runs: dict[str, Run], name: str) -> None:
    run = learned_runs[name]
    assert sum(num_drafts(step, "history") for step in run.metrics) == 0
    assert not [path for folder in run.folder.rglob(LEARNED) for path in folder.rglob("*")]


@pytest.mark.parametrize("name", ["learning", "spread_learning", "killed", "resumed"])
def test_no_alarm_is_raised_where_nothing_is_wrong(learned_runs: dict[str, Run], name: str) -> None:
    assert _alarms(learned_runs[name]) == []


@pytest.mark.parametrize("name", TOLD)
def test_damage_is_told_in_a_sentence_and_once(learned_runs: dict[str, Run], name: str) -> None:
    """Two engines read the folder, and what they say alike is said once."""
    alarms = _alarms(learned_runs[name])
    assert any(LEARNED in sentence and "history" in sentence for sentence in alarms)
    assert max(Counter(alarms).values()) == 1


def _alarms(run: Run) -> list[str]:
    return [sentence for step in run.metrics for sentence in step.get("alarms", [])]
