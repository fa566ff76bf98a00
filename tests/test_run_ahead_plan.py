# SPDX-License-Identifier: Apache-2.0
"""What the driver plans of coming steps: batches it looks at early, how many steps, and the texts it keeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_specrollout.config.block import RunAheadConfig
from nemo_specrollout.generation.engine.requests import as_bytes
from nemo_specrollout.nemo_rl.peeked_batches import PeekedBatches
from nemo_specrollout.nemo_rl.row_seeds import Row
from nemo_specrollout.nemo_rl.run_facts import changed_seed
from nemo_specrollout.reports.ahead_records import flight_figures, kept_figures, saved_figures
from nemo_specrollout.run_ahead.coming_texts import ComingTexts, shares
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.text_store import TextStore
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead

pytestmark = pytest.mark.unit

NUM_BATCHES = 5


class Source:
    """A data loader of numbered batches. A loader that starts from a state goes on where that one was."""

    def __init__(self, num_given: int = 0) -> None:
        self._num_given = num_given

    def __iter__(self) -> Iterator[int]:
        while self._num_given < NUM_BATCHES:
            self._num_given += 1
            yield self._num_given - 1
        self._num_given = 0  # the next epoch begins anew

    def state(self) -> dict[str, Any]:
        return {"num_given": self._num_given}


@pytest.mark.parametrize("looks", [(0,) * 6, (1,) * 6, (3,) * 6, (9,) * 6, (0, 4, 1, 0, 9, 2)])
def test_a_look_ahead_changes_neither_batches_nor_state(looks: tuple[int, ...]) -> None:
    """So a checkpoint of any step resumes with the batch that comes next, also at the end of an epoch."""
    plain, source = Source(), Source()
    expected = iter(plain)
    batches = PeekedBatches(iter(source), source.state)
    for taken, number in enumerate(looks):
        assert batches.peek(number) == list(range(taken, min(taken + number, NUM_BATCHES)))
        assert batches.state() == plain.state()
        left = [*PeekedBatches(iter(resumed := Source(**batches.state())), resumed.state)]
        assert left == list(range(taken, NUM_BATCHES))
        assert next(batches, None) == next(expected, None)
        assert batches.state() == plain.state()


def in_flight(*begun: int) -> list[Flight]:
    return [Flight(8, number) for number in begun]


def test_steps_ahead_grow_while_every_request_is_begun() -> None:
    depth = StepsAhead()
    found = [depth.steps]
    depth.observe_kept(1000, 1000)
    depth.observe_price(0.001, 1.0)
    for _ in range(4):
        depth.observe_flights(in_flight(*[8] * depth.steps))
        found.append(depth.steps)
    assert found == [1, 2, 3, 4, 4]
    depth.observe_flights(in_flight(8, 3, 0, 0))
    assert depth.steps == 2
    depth.observe_flights(in_flight(7, 0))
    assert depth.steps == 1


@pytest.mark.parametrize(
    ("share_right", "price", "steps"),
    [(0.999, 0.01, 4), (0.97, 0.02, 3), (0.85, 0.15, 1), (0.3, 0.01, 1), (0.0, 0.5, 1)],
)
def test_updates_that_change_much_keep_the_plan_short(share_right: float, price: float, steps: int) -> None:
    depth = StepsAhead()
    for _ in range(20):
        depth.observe_kept(1000, int(1000 * share_right))
        depth.observe_flights(in_flight(8, 8, 8, 8))
    depth.observe_price(price, 1.0)
    assert depth.steps == steps
    assert StepsAhead(most=1).steps == 1


def text(num_tokens: int) -> TextAhead:
    return TextAhead(b"\0\0\0\0" * num_tokens)


def test_texts_of_the_farthest_step_make_room_first() -> None:
    store = TextStore(100)
    for version in (3, 4, 5):
        store.put(version, {10 * version + i: text(5) for i in range(2)})
    assert store.num_bytes == 120
    assert store.trim() == {5: 1}
    assert list(store.of(5)) == [50] and store.num_bytes == 100
    store.put(3, {30: text(8)})  # newer weights have made more of it
    assert store.num_bytes == 112 and store.trim() == {5: 1}
    assert store.of(3)[30].num_tokens == 8 and store.num_tokens(3) == 13
    store.forget_before(4)
    assert not store.of(3) and store.num_bytes == 40
    store.put(4, {41: text(30)})
    assert store.trim() == {4: 1} and store.num_bytes == 20


def test_every_engine_gets_its_share_of_every_step() -> None:
    steps = [[EarlyRow([k], Row(10 * k + i, 1)) for i in range(4)] for k in (1, 2)]
    dealt = [[row.row.seed for row in rows] for rows in shares(steps, 2)]
    assert dealt == [[10, 11, 20, 21], [12, 13, 22, 23]]
    assert [len(rows) for rows in shares(steps, 8)] == [2, 0] * 4


def test_coming_texts_between_two_plans() -> None:
    """Texts go to their rows in the next plan. Of a step's own texts it is learned what was right."""
    coming = ComingTexts(RunAheadConfig(steps="auto"))
    steps = [[EarlyRow([k], Row(10 * k + i, 1)) for i in range(2)] for k in (1, 2)]
    assert coming.steps == 1
    _, second = coming.plans(0, steps, 2)
    assert [(row.row.seed, row.steps_ahead, row.known) for row in second.rows] == [(11, 1, None), (21, 2, None)]
    text = TextAhead(as_bytes([5, 6, 7, 8]))
    made = [EarlyMade({seed: text for seed in seeds}, EarlyFigures(alone_s=3.0)) for seeds in ([10], [11, 21])]
    coming.keep(made, is_interrupted=True)
    assert coming.steps == 1, "an interrupted plan does not say how far the engines come"
    (again,) = coming.plans(1, steps[1:], 1)
    assert [row.known for row in again.rows] == [None, text] and coming.of(1) == {10: text, 11: text}
    found = coming.learn(1, KeptCounts(num_made=8, num_kept=6, num_right=6, num_tokens=8, num_texts=2))
    assert (found["ahead_tokens"], found["ahead_tokens_2"], found["ahead_kept"]) == (8.0, 4.0, 0.75)
    assert (found["ahead_s"], found["ahead_steps"]) == (6.0, 1.0) and coming.plans(1, [], 1)[0].kept != again.kept
    assert not coming.take_alarms()
    assert coming.plans(1, steps, 0) == [], "all engines are dead"
    coming.learn(1, KeptCounts(num_made=8, num_tokens=8, num_texts=2))
    (alarm,) = coming.take_alarms()
    assert alarm.startswith("0% of 8 tokens") and not coming.take_alarms()
    coming.plans(1, steps[1:], 1)
    coming.keep([EarlyMade({20: text}, EarlyFigures())])
    coming.forget_before(2)
    assert not coming.of(1) and set(coming.of(2)) == {20, 21}


def test_figures_of_texts_made_ahead() -> None:
    assert flight_figures([100, 40, 7]) == {"ahead_tokens_2": 40.0, "ahead_tokens_3": 7.0}
    assert not flight_figures([]) and not kept_figures(KeptCounts()._asdict())
    counts = KeptCounts(
        num_made=90, num_kept=60, num_right=80, num_tokens=100, num_texts=4, num_flips=2, num_runners_up=1
    )
    found = kept_figures(counts._asdict())
    assert (found["ahead_right"], found["ahead_parted"], found["ahead_runners_up"]) == (0.8, 2.0, 0.5)
    times = {"plain_estimate_s": 10.0, "rollout_s": 6.0}
    accepted = {"ahead": {"accepted": [20, 10]}, "suffix": {"accepted": [10]}}
    assert saved_figures(times, accepted) == {"ahead_saved_s": 3.0}
    assert not saved_figures(times, {"suffix": {"accepted": [10]}}) and not saved_figures({}, accepted)


def test_a_resumed_run_with_another_seed_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    assert changed_seed(config, "grpo", 7) is None
    config.write_text("grpo: {seed: 42}\n")
    assert changed_seed(config, "grpo", 42) is None
    said = changed_seed(config, "grpo", 7)
    assert said is not None and said.startswith("grpo.seed is 7, but the run that wrote the checkpoint had 42")
