# SPDX-License-Identifier: Apache-2.0
"""What would pay in a run, by its records: bounds for what is off, and what was saved for what is on."""

from pathlib import Path
from typing import Any

import pytest
from nemo_rl_records import write_run
from test_nemo_rl_report import page_of

from nemo_specrollout.reports.advice import Advice, advice_of, lines_of
from nemo_specrollout.reports.run_folders import latest_run

pytestmark = pytest.mark.unit


def step(number: int = 1, **figures: Any) -> dict[str, Any]:
    return {"step": number, "rollout_s": 10.0, "num_engines": 4, **figures}


def verdicts(steps: list[dict[str, Any]], block: dict[str, Any]) -> dict[str, str]:
    return {advice.mechanism: advice.verdict for advice in advice_of(steps, block)}


def test_idle_engines_bound_what_moves_and_texts_of_coming_steps_can_save() -> None:
    idle, busy = ([step(i, engine_idle_share=share) for i in (1, 2)] for share in (0.3, 0.01))
    assert verdicts(idle, {}) == {"moving requests": "may pay", "texts of coming steps": "may pay"}
    assert verdicts(busy, {}) == {"moving requests": "would not pay", "texts of coming steps": "would not pay"}
    (moving, _) = advice_of([step(engine_idle_share=0.1), step(rollout_s=30.0, engine_idle_share=0.3)], {})
    assert moving == Advice(
        "moving requests",
        "off",
        "may pay",
        "engines that end before the last one are idle for 25% of a rollout, and fastest_of_n can save no more than that",
    )


def test_one_engine_has_nobody_to_move_requests_to() -> None:
    assert advice_of([{"step": 1, "rollout_s": 10.0}], {}) == []


@pytest.mark.parametrize(
    ("saved_s", "verdict"), [(2.5, "pays"), (0.1, "hardly pays"), (-1.0, "does not pay"), (None, "not known yet")]
)
def test_what_moves_have_saved_counts_where_they_are_on(saved_s: float | None, verdict: str) -> None:
    tail = {"moves": 4, "races": 0} if saved_s is None else {"moves": 4, "races": 0, "saved_s": saved_s}
    assert verdicts([step(tail=tail)], {"fastest_of_n": {}})["moving requests"] == verdict
    assert "moving requests" not in verdicts([step(tail=tail)], {"fastest_of_n": {"enabled": False}})


def test_races_are_judged_by_those_that_were_won() -> None:
    block = {"fastest_of_n": {"methods": [["suffix"], ["ngram"]]}}
    for races, won, verdict in (0, 0, "does nothing"), (5, 0, "does not pay"), (5, 2, "helps some"):
        tail = {"moves": 0, "races": races, "won_by_racer": won}
        advice = {a.mechanism: a for a in advice_of([step(tail=tail)], block)}
        assert advice["racing requests"].verdict == verdict and "experimental" in advice["racing requests"].sentence


def test_texts_of_coming_steps_are_judged_by_what_they_saved_and_delayed() -> None:
    block = {"run_ahead": {}}
    assert verdicts([step()], block)["texts of coming steps"] == "not known yet"
    assert verdicts([step(ahead_saved_s=5.0, ahead_delay_s=1.0)], block)["texts of coming steps"] == "pays"
    assert verdicts([step(ahead_saved_s=1.0, ahead_delay_s=2.0)], block)["texts of coming steps"] == "does not pay"
    both = [step(ahead_saved_s=5.0, ahead_delay_s=1.0, tail={"early_worth": 0.4, "declined": 3})]
    assert "a second of an idle engine spared it 0.40 s later" in "\n".join(lines_of(advice_of(both, block)))


def test_a_remote_drafter_can_save_no_more_than_drafting_takes() -> None:
    block = {"drafters": [{"type": "draft_model", "model": "m"}]}
    assert verdicts([step(draft_s=4.0)], block)["remote drafters"] == "may pay"
    assert verdicts([step(draft_s=1.0)], block)["remote drafters"] == "would not pay", (
        "a fifth of the devices for a tenth"
    )
    head = {"drafters": [{"type": "eagle3", "model": "m"}]}
    assert "remote drafters" not in verdicts([step(draft_s=4.0)], head), "a head stays in the policy's engine"
    remote = {"drafters": [{"type": "remote", "model": "m"}]}
    fast = step(plain_estimate_s=15.0, draft_supply={"occupancy": 0.9})
    assert verdicts([fast], remote)["remote drafters"] == "pays"
    assert verdicts([step()], remote)["remote drafters"] == "not known yet"


def test_the_report_and_check_find_it(tmp_path: Path) -> None:
    assert latest_run(tmp_path / "nothing") is None
    log_dir = tmp_path / "logs"
    for start, share in ("exp_001", 0.4), ("exp_002", 0.2):
        write_run(log_dir / start, [step(engine_idle_share=share)])
    (log_dir / "exp_003").mkdir()
    run = latest_run(log_dir)
    assert run is not None and run.folder.parent.name == "exp_002"
    assert "What would pay in this run" in page_of(run.folder).text
