# SPDX-License-Identifier: Apache-2.0
"""The replay of recorded proposals: all drafters together are no slower than any part of them, while the tasks change."""

from pathlib import Path

import numpy as np
import pytest

from lab.simulation import replay
from lab.simulation.regret import Hindsight, shares
from lab.simulation.replay import MACHINES, STORED, Choice, Machine, Phase, Replay, phases, union_over_best, ways_of
from lab.simulation.replay_record import Record
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.speculation.policy import build_policy

pytestmark = pytest.mark.unit
MIXED, FREE, REPETITIVE, UNKNOWN = 0, 1, 3, 4
"""Batches of the record, each of 32 responses. 2 and 5 are mixed, too."""


@pytest.fixture(scope="module")
def record() -> Record:
    return Record.load(STORED)


def test_a_record_is_read_as_it_was_written(record: Record, tmp_path: Path) -> None:
    record.save(tmp_path / "again.npz")
    again = Record.load(tmp_path / "again.npz")
    assert (again.names, again.model) == (record.names, record.model) == (["suffix", "ngram", "eagle3"], 2)
    for name, value in vars(record).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(again, name), value)
    assert (tmp_path / "again.npz").stat().st_size < 1 << 20


def test_plain_decoding_takes_the_machine_s_seconds(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NOISE", 0.0)
    machine, lengths = MACHINES["two_cores"], np.diff(record.start_R)[record.batch_R == MIXED] - 1
    phase = Replay(record, [], machine).play(MIXED)
    running = [int((lengths > step).sum()) for step in range(lengths.max())]
    assert phase.tokens == lengths.sum() and phase.steps == lengths.max()
    assert phase.seconds == pytest.approx(sum(machine.step_s(n, n, has_drafters=False) for n in running))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_token_is_made_once(record: Record, machine: str) -> None:
    phase = Replay(record, ways_of(record)["all"], MACHINES[machine]).play(MIXED, at_a_time=4)
    assert phase.tokens == (np.diff(record.start_R)[record.batch_R == MIXED] - 1).sum()


def test_a_fixed_policy_drafts_in_every_step(record: Record) -> None:
    policy = build_policy(BudgetConfig("fixed", k=3), 8)
    phase = Replay(record, ways_of(record)["all"], MACHINES["deep"], policy).play(MIXED)
    assert phase.depths == 3 * phase.steps and phase.tokens > 1.5 * phase.steps


@pytest.mark.parametrize(("machine", "at_a_time"), [("two_cores", None), ("deep", 8), ("gpu", None)])
def test_all_drafters_are_no_slower_than_their_best_part(record: Record, machine: str, at_a_time: int | None) -> None:
    """Unknown tasks are left out: their batches end before what was learned of the others is forgotten."""
    found = phases(record, MACHINES[machine], [MIXED, FREE, 2, REPETITIVE, FREE, 5], at_a_time)
    over = union_over_best(found)
    assert min(over) > 0.95 and np.exp(np.mean(np.log(over))) > 0.99, over
    assert _gain(found, -1) > 1.5 and _gain(found, 0) > 1.45


def test_a_head_asleep_after_free_text_helps_in_the_next_batch(record: Record) -> None:
    engine = Replay(record, ways_of(record)["all"], MACHINES["deep"])
    asleep, awake = engine.play(FREE), engine.play(2)
    assert asleep.dormant > asleep.steps / 2
    assert awake.dormant == 0 and awake.depths > awake.steps


def test_the_policy_is_close_to_perfect_decisions(record: Record) -> None:
    machine, order = MACHINES["two_cores"], [MIXED, FREE, 2, REPETITIVE, UNKNOWN, 5]
    of_rates, of_hindsight = np.exp(np.log(shares(record, machine, order)).mean(axis=0))
    assert of_rates > 0.97 and 0.8 < of_hindsight < of_rates


def test_hindsight_verifies_only_right_drafts(record: Record) -> None:
    phase = Hindsight(record, MACHINES["two_cores"], has_model=True).play(MIXED, at_a_time=4)
    assert phase.tokens == (np.diff(record.start_R)[record.batch_R == MIXED] - 1).sum()
    running = phase.tokens - phase.drafts
    assert phase.steps < running <= 4 * phase.steps, "each request makes one token besides its drafts"


def _gain(found: dict[str, list[Phase]], phase: int) -> float:
    return found["all"][phase].rate / found["plain"][phase].rate


def test_the_host_s_late_choice_costs_little(record: Record) -> None:
    """Compared with the device's, which knows the latest proposals. Without foresight it would cost more."""
    machine, drafters = MACHINES["gpu"], ways_of(record)["all"]
    found = {choice: _rates(record, drafters, machine, choice) for choice in Choice}
    loss = {choice: 1.0 - float(np.exp(np.log(found[choice] / found[Choice.DEVICE]).mean())) for choice in Choice}
    assert loss[Choice.HOST] < min(0.04, loss[Choice.UNFORESEEN]), loss


def _rates(record: Record, drafters: list[int], machine: Machine, choice: Choice) -> np.ndarray:
    replay = Replay(record, drafters, machine)
    replay.choice = choice
    return np.array([replay.play(batch).rate for batch in (MIXED, FREE, 2, REPETITIVE, UNKNOWN, 5)])
