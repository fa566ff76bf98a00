# SPDX-License-Identifier: Apache-2.0
"""The driver's part of the online refresh in NeMo-RL, its metrics, and the folder of heads, without Ray and engines."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_records import watching_logger

from nemo_specrollout.config.block import BLOCK_PATH, DraftRefreshConfig, FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.heads.decisions.refresh_schedule import (
    FIRST_REFRESH_S,
    SHORTEST_S,
    DecodeCosts,
    RefreshSchedule,
    StepFacts,
)
from nemo_specrollout.heads.files.head_folder import NUM_KEPT, HeadFolder, PublishedHead, RefreshRecord
from nemo_specrollout.nemo_rl.head_refresh import HeadRefresh
from nemo_specrollout.nemo_rl.metrics import head_metrics, sample_lines, step_facts
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, EngineClient
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.telemetry.engine_stats import EngineTotals
from nemo_specrollout.telemetry.sample_stats import SampleStats, StepEnd

pytestmark = pytest.mark.unit

BLOCK = build(
    SpecrolloutConfig,
    {"drafters": [{"type": "eagle3", "model": "head"}], "draft_refresh": {"store_bytes": 4 << 20}},
    BLOCK_PATH,
)
SOURCE = {"policy_name": "p", "layer_ids": [1, 2, 3]}
FACTS = StepFacts(2.0, 100, 10.0, 5, DecodeCosts(0.01, 0.02))
KEPT = RefreshRecord("skipped: too little", 0.5)
REFUSED = RefreshRecord("refreshed: because", 9.0, "refused: worse", published=False, refresh_s=3.0)


class ScriptedTrainer(ActorLink):
    """A trainer without an actor: it gives the answers that a test sets, and keeps what it was asked."""

    is_idle = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[StepFacts]]] = []
        self.next: Any = SOURCE
        self.is_closed = False

    def call(self, method: str, *arguments: Any) -> None:
        assert self.is_idle and method == "after_steps"
        version, facts = arguments
        self.asked.append((version, list(facts)))
        self.is_idle = False

    def answer(self) -> Any:
        answer, self.next = self.next, None
        if isinstance(answer, Exception):
            raise answer
        self.is_idle = self.is_idle or answer is not None
        return answer

    def close(self) -> None:
        self.is_closed = True


class Engines(EngineClient):
    """Two engines without actors: they keep their calls, and give the replies that a test sets."""

    num_engines = 2

    def __init__(self) -> None:
        self.told: list[tuple[Callable[..., object], list[Any]]] = []
        self.replies: list[Any] = [None, None]

    def call_each(self, method: Callable[..., object], arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        self.told.append((method, [None if a is None else list(a) for a in arguments]))
        return self.replies[: len(arguments)]


class Driver:
    """A `HeadRefresh` of two engines in `folder`, its trainers, and the calls of its engines."""

    def __init__(self, folder: Path, block: SpecrolloutConfig = BLOCK) -> None:
        self.folder, self.log = HeadFolder(folder), StepLog()
        self.trainers: list[ScriptedTrainer] = []
        self.engines = Engines()
        self.refresh = HeadRefresh(block, self.folder, self._start, self.engines, self.log)

    def _start(self) -> ScriptedTrainer:
        self.trainers.append(ScriptedTrainer())
        return self.trainers[-1]

    def methods(self) -> list[Callable[..., object]]:
        """Returns the methods that were called in the engines since the previous call."""
        told, self.engines.told = [method for method, _ in self.engines.told], []
        return told

    def publish(self, step: int) -> RefreshRecord:
        """Publishes a head as the trainer does before it answers."""
        head = self.folder.candidate(step, True)
        head.mkdir(parents=True)
        self.folder.publish(PublishedHead(head, step, 2.5))
        return RefreshRecord("refreshed: it pays", 9.0, "published: better", True, 3.0, head.name, step, 2.5)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "heads")


def test_steps_reach_an_idle_trainer_and_never_wait_for_it(driver: Driver) -> None:
    (trainer,) = driver.trainers
    trainer.next = None  # it still loads the head
    driver.refresh.policy_updated(0)
    assert driver.refresh.after_step(0, FACTS) == {"refresh_failures": 0.0}
    assert driver.methods() == [WorkerCalls.specrollout_save_teacher] and not trainer.asked
    trainer.next = SOURCE
    driver.refresh.policy_updated(1)
    driver.refresh.after_step(1, FACTS)
    assert trainer.asked == [(1, [FACTS, FACTS])]
    driver.refresh.after_step(2, FACTS)  # it trains
    driver.refresh.after_step(3, FACTS)
    assert len(trainer.asked) == 1
    trainer.next = REFUSED
    figures = driver.refresh.after_step(4, FACTS)
    assert trainer.asked[1:] == [(4, [FACTS] * 3)]
    assert (figures["heads_published"], figures["heads_refused"], figures["refresh_s"]) == (0.0, 1.0, 3.0)
    assert driver.log.entries["draft_refresh"]["gate"] == "refused: worse"
    trainer.next = KEPT
    figures = driver.refresh.after_step(5, None)
    assert (figures["heads_published"], figures["heads_refused"]) == (0.0, 0.0)


def test_each_engine_stores_features_and_the_first_the_teacher(driver: Driver) -> None:
    driver.refresh.policy_updated(7)
    driver.refresh.after_step(7, FACTS)
    told = dict(driver.engines.told)
    assert told[WorkerCalls.specrollout_save_teacher] == [
        [str(driver.folder.path / "teachers" / "policy_7.safetensors")]
    ]
    (first,), (second,) = told[WorkerCalls.specrollout_store_features]
    assert (first["folder"], second["folder"]) == tuple(str(driver.folder.features(i)) for i in (0, 1))
    assert first["max_bytes"] == 2 << 20 and first["source"] == SOURCE


def test_a_published_head_is_loaded_once_after_the_next_refit(
    driver: Driver,
) -> None:
    (trainer,) = driver.trainers
    driver.refresh.policy_updated(0)
    driver.refresh.after_step(0, FACTS)
    driver.refresh.after_step(1, FACTS)
    trainer.next = driver.publish(0)
    figures = driver.refresh.after_step(2, FACTS)
    assert figures["heads_published"] == 1.0 and WorkerCalls.specrollout_load_head not in driver.methods()
    driver.refresh.policy_updated(3)
    head = [str(driver.folder.path / "step_0"), 0, 2.5, BLOCK.num_speculative_tokens]
    assert (WorkerCalls.specrollout_load_head, [head, head]) in driver.engines.told
    driver.methods()
    driver.refresh.after_step(3, FACTS)
    driver.refresh.policy_updated(4)
    assert WorkerCalls.specrollout_load_head not in driver.methods()
    ((_, before), (version, after)) = trainer.asked
    assert before == [FACTS] and version == 3
    assert [facts.seconds for facts in after] == [30.0]


def test_an_engine_that_drafts_otherwise_gets_no_head(tmp_path: Path) -> None:
    Driver(tmp_path / "heads").publish(5)
    methods = FastestOfNConfig(methods=((), ("eagle3",)))
    driver = Driver(tmp_path / "heads", replace(BLOCK, fastest_of_n=methods))
    driver.refresh.policy_updated(6)
    assert (
        WorkerCalls.specrollout_load_head,
        [None, [str(tmp_path / "heads" / "step_5"), 5, 2.5, 8]],
    ) in driver.engines.told


def test_a_resumed_run_goes_on_with_the_published_head(tmp_path: Path) -> None:
    Driver(tmp_path / "heads").publish(5)
    driver = Driver(tmp_path / "heads")
    driver.refresh.policy_updated(6)
    assert (
        WorkerCalls.specrollout_load_head,
        [[str(tmp_path / "heads" / "step_5"), 5, 2.5, 8]] * 2,
    ) in driver.engines.told
    HeadFolder(tmp_path / "heads").withdraw()
    driver = Driver(tmp_path / "heads")
    driver.refresh.policy_updated(0)
    assert driver.methods() == [WorkerCalls.specrollout_save_teacher]


def test_a_trainer_that_fails_is_started_again_once(driver: Driver) -> None:
    driver.refresh.policy_updated(0)
    driver.refresh.after_step(0, FACTS)
    driver.trainers[0].next = ActorFailed("killed")
    driver.publish(0)  # which it had done before it was killed
    driver.refresh.after_step(1, FACTS)
    assert driver.trainers[0].is_closed and len(driver.trainers) == 2
    driver.refresh.policy_updated(2)
    assert WorkerCalls.specrollout_load_head in driver.methods()
    assert driver.refresh.after_step(2, FACTS)["refresh_failures"] == 1.0
    driver.trainers[1].next = ActorFailed("killed")
    assert driver.refresh.after_step(3, FACTS)["refresh_failures"] == 2.0
    assert len(driver.trainers) == 2 and len(driver.log.alarms) == 2
    driver.methods()
    driver.refresh.policy_updated(4)
    driver.refresh.after_step(4, FACTS)
    assert driver.methods() == [] and len(driver.log.alarms) == 2


def test_a_trainer_with_a_gpu_starts_after_all_workers(tmp_path: Path) -> None:
    assert BLOCK.draft_refresh is not None
    driver = Driver(tmp_path, replace(BLOCK, draft_refresh=replace(BLOCK.draft_refresh, trainer_gpus=1)))
    assert driver.trainers == []
    for version in range(3):
        driver.refresh.policy_updated(version)
    assert len(driver.trainers) == 1


def test_a_full_disk_ends_the_refreshes_and_not_the_run(driver: Driver) -> None:
    driver.engines.replies = ["OSError: no space left", None]
    driver.refresh.policy_updated(0)
    driver.refresh.after_step(0, FACTS)
    (sentence,) = driver.log.alarms
    assert "refreshed no more" in sentence and "no space left" in sentence and driver.trainers[0].is_closed


def test_a_refresh_in_the_background_costs_the_run_nothing() -> None:
    config = DraftRefreshConfig(max_time_share=0.5, min_gap=1)
    waiting, beside = RefreshSchedule(config), RefreshSchedule(config, in_background=True)
    slow = replace(FACTS, seconds=60.0, steps_to_come=1)  # what is left to gain is less than eight seconds
    decisions = [schedule.after_step(slow) for schedule in (waiting, beside)]
    assert [decision.refresh for decision in decisions] == [False, True]
    assert "wait for no training" in decisions[1].reason and "s of training" in decisions[0].reason
    assert (waiting.budget_s(), beside.budget_s()) == (FIRST_REFRESH_S, 30.0)
    beside.refreshed(30.0, None)
    assert beside.budget_s() == SHORTEST_S, "its share of the time is used up"


def test_old_heads_and_teachers_make_room(tmp_path: Path) -> None:
    folder = HeadFolder(tmp_path)
    for step in range(6):
        folder.candidate(step, True).mkdir()
        os.utime(folder.candidate(step, True), (step, step))
    folder.publish(PublishedHead(folder.candidate(1, True)))
    for version in (1, 2, 3, 9):
        folder.teacher(version).touch()
    folder.forget_old(version=4)
    assert {p.name for p in tmp_path.glob("step_*")} == {"step_1", *(f"step_{i}" for i in range(6 - NUM_KEPT, 6))}
    assert {p.stem for p in (tmp_path / "teachers").iterdir()} == {"policy_2", "policy_3"}


def test_the_trigger_gets_totals_of_engines_and_their_mean_time() -> None:
    done = EngineTotals(
        num_steps=4, num_request_steps=50, other_s=1.0, decode_s=3.0, estimated_s=3.0, plain_s=5.0,
        proposed=(("suffix", (20, 9)), ("eagle3", (20, 10))), accepted=(("suffix", (10, 0)), ("eagle3", (10, 5))),
    )  # fmt: skip
    facts = step_facts(done + done, 2, 12.0, 4)
    assert facts == StepFacts(1.75, 150, 12.0, 4, DecodeCosts(6.0 / 150, 4.0 / 100), head_share=0.4)
    assert step_facts(done - done, 1, 12.0, 4) is None


def test_samples_keep_their_order_and_the_oldest_head_counts() -> None:
    sample = {"policy_spans": [[3, 7]], "head_versions": [1, 1], "num_drafted": 4, "num_accepted": 2}
    replies: list[dict[str, Any]] = [
        {
            "alarms": [{"event": "refit", "sentence": "low"}, {"sentence": "a file cannot be written"}],
            "sample_stats": [[11, sample]],
            "policy_version": 3,
            "head_version": 1,
            "head_is_dormant": True,
        },
        {
            "alarms": [],
            "sample_stats": [[12, sample], [13, sample]],
            "policy_version": 3,
            "head_version": 2,
            "head_is_dormant": False,
        },
    ]
    ends = [StepEnd.from_wire(reply) for reply in replies]
    assert head_metrics(ends) == {
        "specrollout/canary_alarms": 1.0, "specrollout/head_age": 2.0, "specrollout/head_dormant": 0.5
    }  # fmt: skip
    assert [line["seed"] for line in sample_lines(ends, [13, 99, 11])] == [13, 11]
    assert [line["seed"] for line in sample_lines(ends, None)] == [11, 12, 13]
    plain = [StepEnd([], [], 3, None, None)]
    assert "specrollout/head_age" not in head_metrics(plain) and sample_lines(plain, [1]) == []


def test_a_sample_of_several_engines_has_merged_stats() -> None:
    first = {"policy_spans": [[3, 7], [4, 20]], "head_versions": [1, 2], "num_drafted": 4, "num_accepted": 2}
    second = {"policy_spans": [[4, 25], [5, 40]], "head_versions": [2, 3], "num_drafted": 10, "num_accepted": 5}
    # The second engine read the whole text anew, of which the first one had computed a part by an older policy.
    expected = SampleStats(((3, 7), (4, 20), (4, 25), (5, 40)), (1, 3), 14, 7, read_again=(25,))
    for one, other in ((first, second), (second, first)):
        ends = [StepEnd([], [(11, SampleStats.from_wire(stats))], 5, 3, False) for stats in (one, other)]
        assert sample_lines(ends, [11]) == [{"seed": 11, **asdict(expected)}]


def test_the_step_log_reaches_the_record_and_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = StepLog()
    logger = watching_logger(tmp_path, log=log)
    log.entries["draft_refresh"] = REFUSED.known()
    log.alarms.append("acceptance collapsed")
    log.samples.append({"seed": 11, "num_drafted": 4})
    for step in (1, 2):
        logger.log_metrics(
            {"token_mult_prob_error": 1.0, "loss": 0.1, "specrollout/canary_alarms": 1.0}, step, prefix="train"
        )
    logger.finish()
    read = [json.loads(line) for line in (tmp_path / "specrollout" / "metrics.jsonl").read_text().splitlines()]
    assert read[0]["draft_refresh"]["decision"] == "refreshed: because" and read[0]["canary_alarms"] == 1.0
    assert read[0]["alarms"] == ["acceptance collapsed"] and "alarms" not in read[1]
    samples = [json.loads(line) for line in (tmp_path / "specrollout" / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"step": 1, "samples": [{"seed": 11, "num_drafted": 4}]}]
    said = capsys.readouterr()
    assert "refused: worse" in said.out and "ALARM, step 1: acceptance collapsed" in said.err
    summary = json.loads((tmp_path / "specrollout" / "summary.json").read_text())
    assert summary["alarms"] == 1
