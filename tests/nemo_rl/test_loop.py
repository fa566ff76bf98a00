# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own GRPO loop, real engines and trainers, with the block and without: what must be equal is."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from kept_weights import audit_of
from nemo_rl_host import ROUNDING, Host, Run, count_equal, num_drafts
from run_files import undefined

from nemo_specrollout.reports.metric_table import NEMO_RL

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(7200)]

AUDITED = [
    "sync_plain", "sync_drafted", "sync_routed_head", "sync_refreshed_head", "sync_remote", "sync_eagle3", "sync_dapo",
    "sync_moving", "sync_moving_streams", "dtensor_two_engines", "colocated_ahead_tail", "apart_ahead_streams",
    "colocated_rolling", "apart_ahead_moving", "apart_ahead_moving_streams",
    "apart_ahead_tail", "apart_ahead_resumed", "apart_ahead_draftless", "async_plain", "async_drafted", "async_eagle3",
    "async_moving", "async_moving_in_flight", "async_ahead", "async_shared_prompt",
]  # fmt: skip
STEPS = (1, 2, 3)
SOUND = 1e-4  # nats: float32, two implementations of one model
FINISHED = [
    "sync_plain", "sync_drafted", "sync_routed_head", "sync_refreshed_head", "sync_remote", "sync_eagle3",
    "sync_eagle3_native", "sync_dapo_plain", "sync_dapo",
    "sync_moving", "sync_moving_streams", "dtensor_two_engines", "async_plain", "async_drafted",
    "async_refreshed_head", "async_remote", "async_eagle3", "async_moving", "async_moving_in_flight",
    "apart_plain", "apart_ahead_streams", "apart_ahead_tail", "colocated_ahead_tail", "apart_ahead_resumed", "async_ahead",
    "async_shared_prompt", "colocated_rolling", "apart_ahead_moving", "apart_ahead_moving_streams",
]  # fmt: skip


@pytest.mark.parametrize("name", FINISHED)
def test_run_ends_well_and_leaves_no_actor(runs: dict[str, Run], name: str) -> None:
    assert runs[name].result["error"] is None
    assert runs[name].result["actors"] == []


@pytest.mark.parametrize("name", [*FINISHED, "sync_head_interrupted", "sync_head_resumed"])
def test_weights_move(runs: dict[str, Run], name: str) -> None:
    assert runs[name].weights_moved_by > ROUNDING


@pytest.mark.parametrize(
    "name", ["sync_drafted", "sync_routed_head", "sync_refreshed_head", "sync_remote", "sync_eagle3"]
)
@pytest.mark.parametrize("step", STEPS)
def test_synchronous_rollouts_do_not_depend_on_the_drafter(runs: dict[str, Run], name: str, step: int) -> None:
    equal, total = count_equal(runs["sync_plain"], runs[name], step)
    assert equal == total == 16


@pytest.mark.parametrize("name", AUDITED)
def test_a_run_records_what_is_documented(runs: dict[str, Run], name: str) -> None:
    assert [key for step in runs[name].metrics for key in undefined(step, NEMO_RL)] == []


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("apart_ahead_streams", range(1, 7)),
        ("apart_ahead_tail", range(1, 7)),
        ("apart_ahead_moving", range(1, 7)),
        ("apart_ahead_moving_streams", range(1, 7)),
        ("apart_ahead_interrupted", range(1, 5)),
        ("apart_ahead_resumed", (5, 6)),
    ],
)
def test_texts_made_ahead_change_no_row(runs: dict[str, Run], name: str, steps: Iterable[int]) -> None:
    """Neither does a run that was killed: no prompt is lost or repeated, although the loader has shown one early."""
    for step in steps:
        equal, total = count_equal(runs["apart_plain"], runs[name], step)
        assert equal == total == 16
    assert any(m["ahead_tokens"] for m in runs[name].metrics)


@pytest.mark.parametrize("name", ["apart_ahead_moving", "apart_ahead_moving_streams"])
def test_engines_make_texts_and_take_over_requests_in_one_run(runs: dict[str, Run], name: str) -> None:
    metrics = runs[name].metrics
    assert sum(m["tail"].get("moves", 0) for m in metrics) > 0 and sum(m["ahead_made"] for m in metrics) > 0
    assert any(m["tail"].get("early_worth") for m in metrics), "engines say what their texts are worth"


@pytest.mark.parametrize("step", range(1, 7))
def test_texts_made_in_free_slots_of_the_only_engine_change_no_row(runs: dict[str, Run], step: int) -> None:
    """The engine shares the trainer's GPU. Its texts are made during the two rollouts before their own."""
    rolling = runs["colocated_rolling"]
    equal, total = count_equal(runs["sync_plain"], rolling, step)
    assert equal == total == 16
    assert sum(m["ahead_made"] for m in rolling.metrics) > 0
    assert any(m["ahead_tokens"] for m in rolling.metrics)


def test_rows_of_a_task_without_drafts_are_not_begun_early(runs: dict[str, Run]) -> None:
    run = runs["apart_ahead_draftless"]
    assert run.result["error"] is None
    assert [m["ahead_tokens"] for m in run.metrics] == [0.0, 0.0, 0.0]


def test_no_sample_is_of_two_policies(runs: dict[str, Run]) -> None:
    """Requests that are under way in a refit begin again, with their text as drafts."""
    spans = [s["policy_spans"] for line in runs["async_ahead"].lines("samples.jsonl") for s in line["samples"]]
    assert spans and all(len(of_sample) == 1 for of_sample in spans)


@pytest.mark.parametrize("name", AUDITED)
def test_every_row_is_what_its_policies_sample(runs: dict[str, Run], host: Host, name: str, tmp_path: Path) -> None:
    """Computes every row again with the weights of each update, by the audit, which has no code of the engine's.

    In `async_shared_prompt` the prompts begin alike. If a row had read a prefix that older weights had cached, no policy's
    log-probs would be the engine's.
    """
    found, num_rows = audit_of(runs[name], host.tiny / "policy", tmp_path)
    assert not found.skipped
    assert not found.foreign, found.sentence
    assert not found.differences, found.sentence
    assert len(found.rows) == num_rows > 30
    assert found.logprob_quantiles["largest"] < SOUND


@pytest.mark.parametrize("step", [1, 2])
def test_dynamic_sampling_keeps_the_same_rows(runs: dict[str, Run], step: int) -> None:
    equal, total = count_equal(runs["sync_dapo_plain"], runs["sync_dapo"], step)
    assert equal == total == 16


@pytest.mark.parametrize("step", [4, 5])
def test_rollouts_after_a_head_was_published_do_not_depend_on_it(runs: dict[str, Run], step: int) -> None:
    equal, total = count_equal(runs["sync_plain"], runs["sync_refreshed_head"], step)
    assert equal == total == 16


@pytest.mark.parametrize("step", [4, 5, 6])
def test_rollouts_after_a_drafter_was_killed_do_not_depend_on_it(runs: dict[str, Run], step: int) -> None:
    equal, total = count_equal(runs["sync_plain"], runs["sync_remote"], step)
    assert equal == total == 16


@pytest.mark.parametrize("name", ["async_drafted", "async_refreshed_head", "async_remote", "async_moving"])
@pytest.mark.parametrize("step", STEPS)
def test_asynchronous_rollouts_do_not_depend_on_the_drafter(runs: dict[str, Run], name: str, step: int) -> None:
    equal, total = count_equal(runs["async_plain"], runs[name], step)
    assert equal == total == 16


@pytest.mark.parametrize(
    ("plain", "drafted"),
    [
        ("sync_plain", "sync_drafted"),
        ("sync_plain", "sync_routed_head"),
        ("sync_plain", "sync_refreshed_head"),
        ("sync_plain", "sync_remote"),
        ("sync_plain", "sync_eagle3"),
        ("sync_dapo_plain", "sync_dapo"),
        ("async_plain", "async_drafted"),
        ("async_plain", "async_refreshed_head"),
        ("async_plain", "async_remote"),
        ("async_plain", "async_moving"),
        ("dtensor_two_engines", "sync_moving"),
        ("dtensor_two_engines", "sync_moving_streams"),
        ("dtensor_two_engines", "colocated_ahead_tail"),
    ],
)
def test_training_is_the_same_step_by_step(runs: dict[str, Run], plain: str, drafted: str) -> None:
    pairs = list(zip(runs[plain].metrics, runs[drafted].metrics, strict=False))
    assert len(pairs) in {2, 3, 5, 6}
    for a, b in pairs:
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["reward"] == b["reward"]
    for moved, also_moved in zip(runs[plain].movement, runs[drafted].movement, strict=False):
        assert moved == pytest.approx(also_moved, rel=1e-3)


@pytest.mark.parametrize("name", ["async_plain", "async_drafted", "async_eagle3"])
def test_synchronous_and_asynchronous_engines_sample_alike(runs: dict[str, Run], name: str) -> None:
    """Later steps have other weights."""
    equal, total = count_equal(runs["sync_plain"], runs[name], 1)
    assert equal == total == 16


def test_rollouts_do_not_depend_on_engines_or_trainer(runs: dict[str, Run]) -> None:
    """The first step's weights are the same everywhere; a validation before it draws from a stream of its own."""
    equal, total = count_equal(runs["sync_plain"], runs["dtensor_two_engines"], 1)
    assert equal == total == 16


@pytest.mark.parametrize("name", ["sync_moving", "sync_moving_streams"])
@pytest.mark.parametrize("step", STEPS)
def test_rollouts_do_not_depend_on_moves_races_and_deaths(runs: dict[str, Run], name: str, step: int) -> None:
    """In the third step of one of them the exchange is dead."""
    assert count_equal(runs["dtensor_two_engines"], runs[name], step) == (16, 16)


@pytest.mark.parametrize(
    ("name", "killed_after"),
    [("sync_moving", 2), ("sync_moving_streams", 3), ("async_moving", 3), ("async_moving_in_flight", 3)],
)
def test_requests_move_and_race_until_the_exchange_is_killed(
    runs: dict[str, Run], name: str, killed_after: int
) -> None:
    steps = runs[name].metrics
    before = [step for step in steps if step.get("tail")]
    assert sum(step["tail"]["moves"] for step in before) > 10
    assert sum(step["tail"]["races"] for step in before) > 5
    alarms = [sentence for step in steps for sentence in step.get("alarms", [])]
    assert len(alarms) == (len(steps) > killed_after) and all("no request moves" in sentence for sentence in alarms)
    if "in_flight" not in name:
        assert sum(step["tail"]["diverged"] for step in before) == 0


def test_weights_arrive_amid_requests_that_move(runs: dict[str, Run]) -> None:
    samples = [sample for line in runs["async_moving_in_flight"].lines("samples.jsonl") for sample in line["samples"]]
    assert any(len(sample["policy_spans"]) > 1 for sample in samples)


def test_engines_with_different_drafters_use_them(runs: dict[str, Run]) -> None:
    """A single step may have no draft of one of them, because its texts do not repeat."""
    for drafter in ("suffix", "ngram"):
        assert sum(num_drafts(step, drafter) for step in runs["sync_moving"].metrics) > 0


def test_siblings_and_steps_differ(runs: dict[str, Run]) -> None:
    """The policy must not learn to write a single token within three steps."""
    rows = [str(tokens) for step in STEPS for tokens, _ in runs["dtensor_two_engines"].samples(step)]
    assert len(set(rows)) == len(rows) == 48


@pytest.mark.parametrize(
    "name",
    [
        "sync_plain",
        "sync_drafted",
        "sync_routed_head",
        "sync_refreshed_head",
        "sync_remote",
        "sync_eagle3",
        "sync_moving",
        "dtensor_two_engines",
    ],
)
def test_the_engine_serves_the_policy_that_was_trained(runs: dict[str, Run], name: str) -> None:
    for step in runs[name].metrics:
        assert abs(step["gen_kl_error"]) < SOUND
        assert step["logprob_gap"] < SOUND
        assert step["logprob_gap_alarm"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "async_plain",
        "async_drafted",
        "async_refreshed_head",
        "async_remote",
        "async_eagle3",
        "async_moving",
        "async_moving_in_flight",
    ],
)
def test_in_asynchronous_runs_the_gap_is_no_more_than_the_lag(runs: dict[str, Run], name: str) -> None:
    for step in runs[name].metrics:
        assert abs(step["gen_kl_error"]) < SOUND
        assert step["logprob_gap"] < 0.01
        assert step["logprob_gap_alarm"] == 0


def test_the_gap_is_what_it_is_without_speculation(runs: dict[str, Run]) -> None:
    for plain, drafted in (("sync_plain", "sync_drafted"), ("async_plain", "async_drafted")):
        for a, b in zip(runs[plain].metrics, runs[drafted].metrics, strict=False):
            assert a["logprob_gap"] == pytest.approx(b["logprob_gap"], abs=1e-5)


def test_native_draft_refit_has_the_fault_that_ours_prevents(runs: dict[str, Run]) -> None:
    """If this fails because the gap is gone, NeMo-RL or vLLM has mended it: see docs/upstream/nemo-rl-draft-refit.md."""
    lines = runs["sync_eagle3_native"].log.splitlines()
    errors = [float(line.rpartition(":")[2]) for line in lines if "Generation KL Error" in line]
    assert len(errors) == 3 and max(errors) > 0.01


@pytest.mark.parametrize("name", ["sync_drafted", "async_drafted", "dtensor_two_engines"])
def test_drafts_are_verified_and_logged(runs: dict[str, Run], name: str) -> None:
    """NeMo-RL's window of an asynchronous step begins when its batch is there, so the first is empty.

    Drafters soon find that next to nothing of what a random policy writes can be foretold, and then look up less.
    """
    steps = runs[name].metrics[1:]
    assert sum(num_drafts(step, drafter) for drafter in ("suffix", "ngram") for step in steps) > 0
    accepted = [s["num_accepted"] for line in runs[name].lines("samples.jsonl") for s in line["samples"]]
    assert sum(accepted) > 0
    if name == "async_drafted":  # most of its engine steps are in no window, so that no draft may be right in one
        steps = [step for step in steps if step["engine_steps"]]
    else:
        assert max(step["acceptance_length"] for step in steps) > 1
    assert max(num_drafts(step, "suffix") for step in steps) > 0
    assert all(step["speedup_estimate"] > 0 and step["seeds_derived"] == 0 for step in steps)


@pytest.mark.parametrize("name", ["sync_remote", "async_remote"])
def test_remote_drafts_are_accepted_and_drafter_stats_logged(runs: dict[str, Run], name: str) -> None:
    steps = runs[name].metrics
    assert sum(num_drafts(step, "remote", "accepted") for step in steps) > 0
    assert max(step["draft_supply"]["occupancy"] or 0 for step in steps) > 0
    for step in steps:
        supply = step["draft_supply"]
        assert supply["num_drafters"] == 2 and supply["num_ready"] <= 2
        assert 0 <= (supply["waste"] or 0) <= 1 and supply["bottleneck"]


@pytest.mark.parametrize("name", ["sync_remote", "async_remote"])
def test_a_drafter_that_was_killed_is_started_again_and_drafts(runs: dict[str, Run], name: str) -> None:
    steps = runs[name].metrics
    restarts = [step["drafter_restarts"] for step in steps]
    assert restarts[0] == 0 and restarts[-1] == 1
    alarms = [sentence for step in steps for sentence in step.get("alarms", [])]
    assert len(alarms) == 1 and "the rollout goes on" in alarms[0]
    killed = next(i for i, step in enumerate(steps) if "alarms" in step)
    ready = [step["draft_supply"]["num_ready"] for step in steps[killed:]]
    assert ready[-1] == 2 and min(ready) < 2


def test_the_secret_of_drafters_is_written_nowhere(runs: dict[str, Run]) -> None:
    """The secret has 64 characters. No file or output of a run has such a string, except for Ray's ids and checksums."""
    folder = runs["sync_remote"].folder
    files = [path for path in folder.rglob("*") if path.suffix in {".json", ".jsonl", ".yaml"}]
    for path in [*files, folder.parent / "log.txt"]:
        rest = re.sub(r'(ID: |"(sha256|config|weights)": ")[0-9a-f]{64}\b', "", path.read_text())
        assert not re.search(r"\b[0-9a-f]{64}\b", rest), path


def test_a_head_is_refreshed_judged_and_taken_into_service(runs: dict[str, Run]) -> None:
    run = runs["sync_refreshed_head"]
    records = [step["draft_refresh"] for step in run.metrics if "draft_refresh" in step]
    assert all(record["decision"].startswith(("refreshed: ", "skipped: ")) for record in records)
    assert any("needed to judge" in record["decision"] for record in records), "four prompts cannot judge"
    judged = [record for record in records if "gate" in record]
    published = [record for record in judged if record["published"]]
    assert published and sum(step.get("heads_published", 0) for step in run.metrics) == len(published)
    named = json.loads(run.find("published.json").read_text())
    assert (named["head"], named["policy_version"]) == (published[-1]["head"], published[-1]["policy_version"])
    card = json.loads((run.find("published.json").parent / named["head"] / "head_card.json").read_text())
    assert card["gate"]["published"] and card["policy"]["version"] == named["policy_version"]
    ages = [step["head_age"] for step in run.metrics]
    assert ages[:3] == [0, 1, 2], "of the configured head"
    assert all(step["refresh_failures"] == 0 for step in run.metrics)


def test_a_resumed_run_has_its_policy_and_the_published_head(runs: dict[str, Run]) -> None:
    """The trainer was killed after step 5, before its checkpoint: steps 5 and 6 equal those steps of an uninterrupted run."""
    killed, resumed = runs["sync_head_interrupted"], runs["sync_head_resumed"]
    assert killed.result["error"] is not None and resumed.result["error"] is None
    records = [s["draft_refresh"] for s in killed.metrics if s.get("heads_published")]
    assert records and [line["step"] for line in resumed.lines("samples.jsonl")] == [5, 6]
    for step in (5, 6):
        assert count_equal(runs["sync_plain"], resumed, step) == (16, 16)
    (version,) = {sample["head_versions"][0] for sample in resumed.lines("samples.jsonl")[0]["samples"]}
    assert version >= records[-1]["policy_version"] > 0, "the configured head is of version 0"
    assert all(step["refresh_failures"] == 0 for step in resumed.metrics)


def test_samples_have_stats(runs: dict[str, Run]) -> None:
    lines = runs["sync_refreshed_head"].lines("samples.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert len(line["samples"]) == len({sample["seed"] for sample in line["samples"]}) == 16
        for sample in line["samples"]:
            (span,) = sample["policy_spans"]
            assert span[0] == line["step"] - 1 and 0 <= sample["num_accepted"] <= sample["num_drafted"]
    assert any(sample["num_accepted"] for line in lines for sample in line["samples"])


def test_a_killed_trainer_is_started_again_and_the_run_goes_on(runs: dict[str, Run]) -> None:
    steps = runs["async_refreshed_head"].metrics
    assert [step["refresh_failures"] for step in steps][-1] == 1
    alarms = [sentence for step in steps for sentence in step.get("alarms", [])]
    assert len(alarms) == 1 and "started again" in alarms[0]


def test_every_refit_arrives(runs: dict[str, Run]) -> None:
    """The first refit brings the weights that the run starts from; asynchronous GRPO makes one more in its first step."""
    for name, first in (("sync_drafted", 1), ("dtensor_two_engines", 1), ("async_drafted", 2)):
        assert [step["weight_updates"] for step in runs[name].metrics] == [first, 1, 1]


@pytest.mark.parametrize("name", ["sync_eagle3_native", "killed_native"])
def test_native_runs_load_nothing_of_ours(runs: dict[str, Run], name: str) -> None:
    log = runs[name].log
    assert "VllmGenerationWorker" in log and "Specrollout" not in log
    assert not list(runs[name].folder.rglob("specrollout"))


def test_a_killed_engine_ends_the_run_as_natively(runs: dict[str, Run]) -> None:
    ours, native = runs["killed"].result, runs["killed_native"].result
    assert ours["error"] == native["error"] is not None
    assert ours["actors"] == native["actors"] == []
