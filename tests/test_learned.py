# SPDX-License-Identifier: Apache-2.0
"""What learns, as plain numbers and back, and the file of it: without torch and without an engine."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from nemo_specrollout.config.block import BudgetConfig, LearnedConfig, RunAheadConfig
from nemo_specrollout.learned import kept_file
from nemo_specrollout.learned.kept_file import MOST_BYTES, MOST_FILES, KeptFile
from nemo_specrollout.learned.state import Unfit, begin_with, state_of
from nemo_specrollout.learned.weights import weights_digest
from nemo_specrollout.run_ahead.coming_texts import ComingTexts
from nemo_specrollout.run_ahead.decisions.flips import counts_of_gaps
from nemo_specrollout.run_ahead.kept_updates import KeptUpdates
from nemo_specrollout.run_ahead.texts import KeptCounts
from nemo_specrollout.speculation.foresight import Foresight, Kind
from nemo_specrollout.speculation.policy import AutoPolicy, build_policy
from nemo_specrollout.speculation.request_lives import RequestLives
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepModel

pytestmark = pytest.mark.unit


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def measured(scale: float = 1.0) -> StepModel:
    """Returns a step model that has seen some steps: 10 ms, and 0.1 ms a row."""
    model = StepModel(64)
    for rows in [1, 2, 4, 8, 16, 32, 48, 64] * 4:
        model.observe(min(rows, 16), rows, scale * (0.01 + 1e-4 * rows))
        model.observe_drafting(rows, min(rows, 16), 2, scale * (0.002 + 1e-5 * rows))
    return model


def policy_with(model: StepModel) -> AutoPolicy:
    """Returns a policy that has seen some steps of 16 requests with drafts that are right."""
    policy = build_policy(BudgetConfig("auto"), 4)
    assert isinstance(policy, AutoPolicy)
    policy.costs = model.costs()
    tokens_FQ = np.zeros((5, 128), np.int32)
    tokens_FQ[:, 120] = 16 * np.arange(5)
    for _ in range(8):
        policy.plan(16, 16)
        policy.num_drafts(16, 64)
        policy.observe(Spread(tokens_FQ, np.full(5, 16), tokens_FQ[-1], 16))
        policy.ends_step(16, 16)
    return policy


# The state.


def test_a_step_model_begins_with_the_seconds_of_another() -> None:
    before = measured()
    model = StepModel(64)
    begin_with([(model, through_json(state_of(before)))])
    assert np.allclose(model.costs().seconds_R, before.costs().seconds_R)
    assert model.costs().drafting == before.costs().drafting
    model.observe(4, 4, 0.01)
    assert np.isfinite(model.costs().seconds_R).all()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_has_changed_is_noticed_within_some_steps(factor: float) -> None:
    model = StepModel(64)
    begin_with([(model, through_json(state_of(measured())))])
    for _ in range(8):
        for rows in (8, 16, 32):
            model.observe(min(rows, 16), rows, factor * (0.01 + 1e-4 * rows))
    seconds_R = model.costs().seconds_R
    assert seconds_R[16] == pytest.approx(factor * 0.0116, rel=0.15)


def test_a_policy_begins_with_the_forecast_of_another() -> None:
    before = policy_with(measured())
    policy = build_policy(BudgetConfig("auto"), 4)
    begin_with([(policy, through_json(state_of(before)))])
    policy.costs = before.costs
    assert policy.plan(16, 16) == before.plan(16, 16) > 1
    cold = build_policy(BudgetConfig("auto"), 4)
    cold.costs = before.costs
    assert cold.plan(16, 16) == 1, "it does not know yet that deeper drafts pay"


def test_what_is_read_counts_for_less_than_what_is_seen() -> None:
    before = policy_with(measured())
    policy = build_policy(BudgetConfig("auto"), 4)
    begin_with([(policy, through_json(state_of(before)))])
    assert 0 < policy._forecast.num_seen <= 32 < before._forecast.num_seen
    none_FQ = np.zeros((5, 128), np.int32)
    for one in (before, policy):  # drafts that were good are bad now
        for _ in range(8):
            one.observe(Spread(none_FQ, np.full(5, 16), none_FQ[-1], 16))
    assert policy._forecast.counts(16, 16).sum() < 0.7 * before._forecast.counts(16, 16).sum()


def test_a_fixed_policy_and_foresight_have_states_too() -> None:
    fixed = build_policy(BudgetConfig("fixed", k=3), 4)
    begin_with([(fixed, through_json(state_of(fixed)))])
    foresight = Foresight(4, 3, 0.9)
    foresight._first[Kind.NEW][:] = 0.25
    foresight._together = 0.5
    other = Foresight(4, 3, 0.9)
    begin_with([(other, through_json(state_of(foresight)))])
    assert other.persistence == 0.5
    assert other._first[Kind.NEW].dtype == np.float32
    assert other._first[Kind.NEW].tolist() == [0.25] * 3


def test_the_lives_of_requests_are_known_and_fade() -> None:
    before = RequestLives()
    for _ in range(40):
        before.arrived(8, 160)
        for _ in range(24):
            before.stepped(8)
        before.stepped(0)
    lives = RequestLives()
    begin_with([(lives, through_json(state_of(before)))])
    assert lives.life_steps == pytest.approx(before.life_steps) and lives.tokens_read == pytest.approx(20.0)
    for one in (before, lives):
        for _ in range(8):
            one.arrived(8, 160)
            for _ in range(96):
                one.stepped(8)
            one.stepped(0)
    assert before.life_steps < lives.life_steps - 10.0, "longer requests are noticed sooner"
    new = RequestLives()
    begin_with([(new, through_json(state_of(RequestLives())))])
    assert new.life_steps == np.inf


class Thing:
    LEARNED: ClassVar = ("number", "count", "flag", "rates_AB", "weight_A", "unknown_AB")

    def __init__(self) -> None:
        self.number = 1.0
        self.count = 1
        self.flag = True
        self.rates_AB = np.ones((2, 3))
        self.weight_A = np.ones(2)
        self.unknown_AB: np.ndarray | None = None


GOOD = {"number": 2, "count": 3, "flag": False, "rates_AB": [[1.0] * 3] * 2, "weight_A": [0, 1], "unknown_AB": None}


@pytest.mark.parametrize(
    "change",
    [
        {"number": True}, {"number": "2"}, {"number": float("nan")}, {"number": float("inf")}, {"number": 1e300},
        {"number": [1.0]}, {"count": 1.5}, {"count": True}, {"flag": 1}, {"rates_AB": [[1.0, 2.0], [3.0]]},
        {"rates_AB": [[1.0] * 3] * 3}, {"rates_AB": [[None] * 3] * 2}, {"rates_AB": {"a": 1}}, {"weight_A": "ab"},
        {"weight_A": [float("inf"), 0.0]}, {"unknown_AB": [1.0]}, {"unknown_AB": [[1.0]]}, {"more": 1},
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any]) -> None:
    first, second = Thing(), Thing()
    with pytest.raises(Unfit):
        begin_with([(first, GOOD), (second, GOOD | change)])
    assert first.number == second.number == 1.0 and first.count == 1 and first.weight_A.tolist() == [1.0, 1.0]


def test_unknown_numbers_stay_as_they_are() -> None:
    thing = Thing()
    thing.number = float("inf")
    state = through_json(state_of(thing))
    assert state["number"] is None
    other = Thing()
    begin_with([(other, state | {"unknown_AB": [[1.0] * 3] * 2})])
    assert other.number == 1.0
    assert other.unknown_AB is not None and other.unknown_AB.shape == (2, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["_steps"].update(covariance_XX=(-np.eye(len(s["_steps"]["coefficients_X"]))).tolist()),
        lambda s: s["_steps"].update(covariance_XX=(100 * np.eye(len(s["_steps"]["coefficients_X"]))).tolist()),
        lambda s: s["_steps"].update(_scale_s=-1.0),
        lambda s: s.update(_unit=0.0),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(change: Callable[[Any], None]) -> None:
    state = through_json(state_of(measured()))
    change(state)
    model = StepModel(64)
    with pytest.raises(Unfit, match="contradict"):
        begin_with([(model, state)])
    assert model.costs() is None


# The file.

KEY = {"model": "a", "slots": 3}


def written(folder: Path, state: Any = None, key: dict[str, Any] | None = None) -> KeptFile:
    file = KeptFile(folder, "engine", KEY if key is None else key)
    file.keep({"x": 1.5} if state is None else state, 7)
    file.settle()
    return file


def test_what_is_kept_is_found_by_one_like_it(tmp_path: Path) -> None:
    written(tmp_path / "new" / "folder")
    found = KeptFile(tmp_path / "new" / "folder", "engine", KEY).read()
    assert found.state == {"x": 1.5} and found.num_steps == 7 and found.saved
    other = KeptFile(tmp_path / "new" / "folder", "engine", KEY | {"slots": 4}).read()
    assert other.state is None and other.is_told
    assert not KeptFile(tmp_path, "engine", KEY).read().is_told


def test_a_file_is_not_written_all_the_time(tmp_path: Path) -> None:
    file = written(tmp_path, {"x": 1})
    assert not file.is_due
    file.keep({"x": 2}, 8)
    file.settle()
    assert file.read().state == {"x": 1}
    file._next_s = 0.0
    file.keep({"x": 2}, 8)
    file.settle()
    assert file.read().state == {"x": 2}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def of_another(path: Path) -> None:
    head, body = path.read_text().split("\n")
    path.write_text(json.dumps(json.loads(head) | {"key": {"model": "b"}}) + "\n" + body)


def without_time(path: Path) -> None:
    head, body = path.read_text().split("\n")
    path.write_text(json.dumps({k: v for k, v in json.loads(head).items() if k != "saved"}) + "\n" + body)


def too_large(path: Path) -> None:
    os.truncate(path, MOST_BYTES + 1)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "is damaged"),
    "empty": (lambda path: path.write_text(""), "is damaged"),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), "is damaged"),
    "a list": (lambda path: path.write_text("[1]\n{}"), "is damaged"),
    "deep": (lambda path: path.write_text("[" * 100_000), "is damaged"),
    "no time": (without_time, "is damaged"),
    "of another": (of_another, "another kind"),
    "too large": (too_large, "is larger than"),
    "a folder": (a_folder, "cannot be read"),
    "a pipe": (a_pipe, "cannot be read"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_cannot_be_used_costs_one_sentence(
    tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    file = written(tmp_path)
    damage(file.path)
    found = file.read()
    assert found.state is None and words in found.reason and found.is_told
    problem = file.take_problem()
    assert problem is not None and words in problem and str(file.path) in problem
    assert file.take_problem() is None


def test_a_disk_that_takes_nothing_costs_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = written(tmp_path / "file" / "folder")
    problem = file.take_problem()
    assert problem is not None and "cannot be written" in problem
    file._next_s = 0.0
    file.keep({"x": 1}, 1)
    file.settle()
    assert file.take_problem() is None


def test_a_state_with_nan_is_not_written(tmp_path: Path) -> None:
    file = written(tmp_path, {"x": float("nan")})
    assert not file.path.exists() and "cannot be written" in str(file.take_problem())


def test_old_files_make_room(tmp_path: Path) -> None:
    files = [written(tmp_path, key={"slots": i}) for i in range(MOST_FILES)]
    for age, file in enumerate(files):
        os.utime(file.path, (age + 1, age + 1))
    left_behind = tmp_path / ".engine-0123456789abcdef.json.99"
    left_behind.write_text("")
    os.utime(left_behind, (1, 1))
    stranger = tmp_path / "notes.json"
    stranger.write_text("")
    newest = written(tmp_path, key={"slots": -1})
    assert newest.path.exists() and stranger.exists() and not left_behind.exists()
    assert not files[0].path.exists() and all(file.path.exists() for file in files[1:])


def test_two_writers_and_a_reader_meet_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "WRITING_SHARE", 1e9)
    states = [{"x": [float(i)] * 2_000} for i in range(2)]
    files = [written(tmp_path, states[0]), KeptFile(tmp_path, "engine", KEY)]

    def write(which: int) -> None:
        for _ in range(40):
            files[which].keep(states[which], 1)
            files[which].settle()

    # Two threads of a process would share a temporary file, as two processes never do.
    writer = threading.Thread(target=write, args=(1,))
    writer.start()
    while writer.is_alive():
        found = files[0].read()
        assert found.state in states
    writer.join()
    assert files[0].take_problem() is None


def test_a_digest_tells_weights_apart(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    weights = bytearray(os.urandom(1 << 20))
    (head / "model.safetensors").write_bytes(weights)
    first = weights_digest(head)
    assert weights_digest(str(head)) == first
    (head / "model.safetensors").write_bytes(bytes(byte ^ 1 for byte in weights))
    assert weights_digest(head) != first
    assert weights_digest("a/name") == weights_digest("a/name") != weights_digest("another/name")
    (head / "config.json").unlink()
    assert weights_digest(head) == weights_digest(head)


# What updates teach.


def test_a_run_that_goes_on_knows_how_far_updates_move_scores(tmp_path: Path) -> None:
    config = LearnedConfig(folder=str(tmp_path))
    gaps = counts_of_gaps(np.geomspace(1e-4, 1.0, 500))
    coming = ComingTexts(RunAheadConfig())
    kept = KeptUpdates(coming, config, "model")
    kept.begin(resumes=False)
    coming.learn(1, KeptCounts(num_texts=4, num_made=400, num_right=300, num_flips=20, gaps_G=gaps))
    kept.keep()
    kept.settle()
    for model, resumes, knows in (("model", True, True), ("model", False, False), ("other", True, False)):
        later = ComingTexts(RunAheadConfig())
        begun = KeptUpdates(later, config, model)
        begun.begin(resumes=resumes)
        assert (later._flips.scale == coming._flips.scale) == knows
        assert (later._depth.kept == coming._depth.kept) == knows
        assert begun.take_alarms() == []
    (path,) = tmp_path.glob("run_ahead-*.json")
    cut(path)
    begun = KeptUpdates(ComingTexts(RunAheadConfig()), config, "model")
    begun.begin(resumes=True)
    (alarm,) = begun.take_alarms()
    assert "is damaged" in alarm
    nowhere = KeptUpdates(coming, LearnedConfig(), "model")
    nowhere.begin(resumes=True)
    nowhere.keep()
    assert nowhere.take_alarms() == []
