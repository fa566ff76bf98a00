# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own GRPO loop with what engines learn shared and kept: no row may depend on it, whatever the folder holds."""

import pytest
from nemo_rl_host import ROUNDING, Run, count_equal
from nemo_rl_scenarios import LEARNED_SCENARIOS

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

FINISHED = [name for name in LEARNED_SCENARIOS if name != "killed"]
SECOND_STARTS = [name for name, facts in LEARNED_SCENARIOS.items() if "earlier" in facts]
DAMAGED = [name for name, facts in LEARNED_SCENARIOS.items() if facts.get("damage")]


@pytest.mark.parametrize("name", FINISHED)
def test_a_run_ends_well_and_trains(learned_runs: dict[str, Run], name: str) -> None:
    run = learned_runs[name]
    assert (run.result["error"], run.result["actors"]) == (None, [])
    assert run.weights_moved_by > ROUNDING


@pytest.mark.parametrize("step", range(1, 7))
def test_no_row_depends_on_what_engines_learn(learned_runs: dict[str, Run], step: int) -> None:
    assert count_equal(learned_runs["forgetting"], learned_runs["learning"], step) == (16, 16)


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
