# SPDX-License-Identifier: Apache-2.0
"""Asynchronous GRPO: the age of samples, the policy of each token, and a run that is resumed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, STEP_ADDER
from rollout_world import EnginesInTurn, WildPolicy
from run_files import undefined
from safetensors.torch import load_file
from test_equality import requests
from test_racing import noisy, spans_of

from lab.cli.main import main
from lab.local.async_fleet import CollectorEvents, Trajectories, TrajectoryCollector
from lab.local.coordinator import DealingCoordinator
from lab.local.engine import RolloutEngine
from lab.local.run_sections import AsyncGrpoConfig
from lab.local.step_rollout import StepPrompts
from lab.local.turn_engine import ReloadingTurnEngine
from nemo_specrollout.config.block import BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import as_bytes
from nemo_specrollout.reports.metric_table import LAB
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile
from nemo_specrollout.stragglers.turns import TurnOrders

pytestmark = pytest.mark.integration

NUM_STEPS = 4
CONFIG = ROOT / "examples" / "configs" / "quickstart_async_cpu.yaml"
DRAFTING = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), budget=BudgetConfig("fixed", k=3))


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    """An engine that drafts, one that does not, and one to check with, each for half of a step's requests."""
    blocks = DRAFTING, SpecrolloutConfig(drafters=()), SpecrolloutConfig(drafters=())
    return [start_engine(STEP_ADDER, block, 96, max_num_seqs=6) for block in blocks]


def prompts(step: int) -> StepPrompts:
    """Returns four prompts of a step, with three samples of each."""
    return StepPrompts([], [replace(r, policy_version=step) for r in requests(4, 3, first=4 * step)])


def collect(
    engines: list[RolloutEngine],
    config: AsyncGrpoConfig,
    policies: list[dict[str, Any]],
    *,
    begins_again: bool = False,
) -> list[Trajectories]:
    """Returns the trajectories of a trainer that publishes policy s + 1 after step s."""
    workers = EnginesInTurn(engines[:2], 1, weights=policies[0])
    table = DecodeSpeedTable(["drafting", "plain"])
    coordinator = DealingCoordinator(workers, WildPolicy(2), table, LengthEstimator(96), begins_again=begins_again)
    collector = TrajectoryCollector(
        coordinator, config, prompts, CollectorEvents(lambda found: found), range(NUM_STEPS), "any"
    )
    taken = []
    try:
        for step in range(NUM_STEPS):
            taken.append(collector.take(step))
            collector.update_weights(policies[step + 1].items(), step + 1)
    finally:
        collector.close()
        workers.finish_turns()
    return taken


@pytest.mark.parametrize(
    ("in_flight", "max_age"),
    [(True, 1), pytest.param(True, 3, marks=pytest.mark.slow), pytest.param(False, 1, marks=pytest.mark.slow)],
)
def test_tokens_are_of_the_recorded_policy_and_none_is_too_old(
    engines: list[RolloutEngine], in_flight: bool, max_age: int
) -> None:
    policies = [load_file(STEP_ADDER / "model.safetensors")]
    policies += [noisy(policies[0], seed) for seed in range(NUM_STEPS)]
    config = AsyncGrpoConfig(True, max_age, in_flight, recompute_kv_cache_after_weight_updates=in_flight)
    taken = collect(engines, config, policies)
    assert [t.target for t in taken] == list(range(NUM_STEPS)) and taken[0].age == 0
    assert 1 <= max(t.age for t in taken) <= max_age
    responses = [r for t in taken for r in t.responses]
    num_updated_amid = sum(len(r.policy_spans) > 1 for r in responses)
    assert (num_updated_amid > 0) == in_flight
    oldest = [min(version for version, _ in r.policy_spans) for t in taken for r in t.responses]
    assert all(o >= t.target - max_age for t in taken for o in [min(v for r in t.responses for v, _ in r.policy_spans)])
    assert min(oldest) == 0
    checker = engines[2]
    for version, tensors in enumerate(policies):
        checker.load_weights(tensors.items())
        parts = [part for r in responses for part in spans_of(r, version)]
        again = checker.generate([replace(r.request, prefix_token_ids=r.tokens[:first]) for r, first, _ in parts])
        for made, (response, first, last) in zip(again, parts, strict=True):
            assert made.token_ids[: last - first] == response.tokens[first:last]


def test_requests_under_way_become_samples_of_the_newest_policy(start_engine: Callable[..., RolloutEngine]) -> None:
    """Each sample of a run with `run_ahead` equals plain decoding by one policy."""
    blocks = [replace(DRAFTING, run_ahead=RunAheadConfig()), SpecrolloutConfig(drafters=(), run_ahead=RunAheadConfig())]
    racers = [start_engine(STEP_ADDER, block, 96, max_num_seqs=6) for block in blocks]
    checker = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), 96, max_num_seqs=6)
    policies = [load_file(STEP_ADDER / "model.safetensors")]
    policies += [noisy(policies[0], seed) for seed in range(NUM_STEPS)]
    config = AsyncGrpoConfig(True, 2, True, recompute_kv_cache_after_weight_updates=True)
    taken = collect(racers, config, policies, begins_again=True)
    responses = [r for t in taken for r in t.responses]
    assert all(len(r.policy_spans) == 1 and r.policy_spans[0][1] == 0 for r in responses)
    versions = [r.policy_spans[0][0] for r in responses]
    assert sum(version > t.first_version for t in taken for version in [r.policy_spans[0][0] for r in t.responses])
    for version, tensors in enumerate(policies):
        checker.load_weights(tensors.items())
        own = [r for r, v in zip(responses, versions, strict=True) if v == version]
        again = checker.generate([replace(r.request, ahead=b"") for r in own])
        assert [r.rollout.token_ids for r in own] == [r.token_ids for r in again]


def test_the_longest_known_text_survives_two_changes_of_weights(start_engine: Callable[..., RolloutEngine]) -> None:
    """The second change comes before the attempt that began again has made a token."""
    block = SpecrolloutConfig(drafters=(), run_ahead=RunAheadConfig())
    turns = ReloadingTurnEngine(start_engine(STEP_ADDER, block, 96, max_num_seqs=6))
    (request,) = requests(1, 1)
    made, _ = turns.turn(TurnOrders(starts=((0, request),))).parts[0]
    assert made
    weights = load_file(STEP_ADDER / "model.safetensors")
    for version in (1, 2):
        turns.load_weights(weights.items(), version, recompute_kv_cache=True)
    (attempt,) = turns._attempts.values()
    assert attempt.request.prefix_token_ids == ()
    assert attempt.request.ahead == as_bytes(made)
    turns.stop_all()


def test_a_failed_collector_raises_in_every_call(engines: list[RolloutEngine]) -> None:
    def no_prompts(step: int) -> StepPrompts:
        raise RuntimeError("no more prompts")

    workers = EnginesInTurn(engines[:2], 1)
    coordinator = DealingCoordinator(workers, None, DecodeSpeedTable(["drafting", "plain"]), LengthEstimator(96))
    collector = TrajectoryCollector(
        coordinator, AsyncGrpoConfig(True), no_prompts, CollectorEvents(lambda t: t), range(2), "any"
    )
    with pytest.raises(RuntimeError, match="no more prompts"):
        collector.take(0)
    with pytest.raises(RuntimeError, match="no more prompts"):
        collector.call(lambda: None)
    collector.close()


@pytest.mark.slow
def test_a_run_and_its_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16",
        "policy.generation.max_new_tokens=48", f"logger.log_dir={tmp_path}", f"policy.model_name={STEP_ADDER}",
    ]  # fmt: skip
    assert main(["run", str(CONFIG), *overrides, "grpo.max_num_steps=2"]) == 0
    known = SpeedTableFile.read(tmp_path / "ladder.json", "a run's ladder")
    rungs = tuple(replace(r, batches=(1024,), tokens_per_s=(3.0,), weights_s=(5.0,)) for r in known.rungs)
    (tmp_path / "ladder.json").write_text(replace(known, rungs=rungs).to_json())
    assert main(["run", str(CONFIG), *overrides, "grpo.max_num_steps=4"]) == 0
    assert "resuming" in capsys.readouterr().out
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line)["samples"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2, 3] and all(len(s) == 16 for s in samples)
    assert [m["policy_lag_max"] for m in metrics] == [0, 1, 0, 1], "a resumed run begins with the newest policy"
    assert not any(m["alarms"] for m in metrics)
    assert metrics[0]["logprob_gap_max"] < 1e-3 < metrics[1]["logprob_gap_max"]
    assert metrics[1]["sampling_importance_ratio"] != 1.0
    for step, of_step in enumerate(samples):
        versions = {version for s in of_step for version, _ in s["policy_spans"]}
        assert max(versions) <= step and min(versions) >= step - 1
        assert all(s["won_by"] == 0 and s["workers"] == [0] for s in of_step)
    rung = SpeedTableFile.read(tmp_path / "ladder.json", "a run's ladder").rungs[0]
    assert rung.task == "step_addition" and 0.0 < rung.acceptance <= 1.0 and len(rung.batches) > 1
    assert (rung.batches[-1], rung.tokens_per_s[-1], rung.weights_s[-1]) == (1024, 3.0, 5.0), (
        "the ladder kept what it knew before"
    )
    page = (tmp_path / "report.html").read_text()
    assert "Reward" in page


@pytest.mark.slow
def test_refresh_remote_drafters_and_racing_work_asynchronously(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"""
defaults: {CONFIG}
grpo: {{max_num_steps: 4, num_prompts_per_step: 16, num_generations_per_prompt: 2}}
policy:
  model_name: {STEP_ADDER}
  train_global_batch_size: 32
  generation:
    max_new_tokens: 128
    specrollout:
      drafters:
        - {{type: suffix}}
        - {{type: eagle3, model: {STEP_ADDER}_eagle3}}
        - {{type: remote, model: {STEP_ADDER}, workers: 1}}
      budget: {{policy: fixed, k: 3}}
      draft_refresh:
        {{trigger: interval, interval: 1, max_time_share: 1.0, held_out_share: 0.5, rollout_capture_share: 1.0}}
      fastest_of_n: {{enabled: true, methods: [[suffix, remote], [eagle3]], min_gain: 0.0}}
cluster: {{rollout_workers: 2}}
logger: {{log_dir: {tmp_path / "run"}}}
""")
    assert main(["run", str(config)]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 4 and not any(m["alarms"] for m in metrics)
    assert [undefined(m, LAB) for m in metrics] == [[]] * 4
    assert max(m["policy_lag_max"] for m in metrics) == 1
    on_policy = [m["logprob_gap_on_policy"] for m in metrics if m["logprob_gap_on_policy"] is not None]
    assert on_policy and max(on_policy) < 1e-3
    refreshes = [m["draft_refresh"] for m in metrics]
    assert any("gate" in refresh for refresh in refreshes), f"no head was judged: {refreshes}"
    assert sum(m["draft_supply"]["num_supplied"] for m in metrics) > 0
    assert sum(m["tail"]["moves"] + m["tail"]["races"] for m in metrics) > 0
    assert all(m["tail"]["diverged"] == m["tail"]["deaths"] == 0 and m["tail"]["saved_s"] is None for m in metrics)
    drafted = {n: sum(sum(m["acceptance"][n]["proposed"]) for m in metrics) for n in metrics[0]["acceptance"]}
    assert drafted.pop("history") == 0  # it stands beside suffix by itself, but no prompt comes again in four steps
    assert set(drafted) == {"suffix", "remote", "eagle3"} and min(drafted.values()) > 0
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    samples = [s for line in lines for s in json.loads(line)["samples"]]
    assert len(samples) == 4 * 32 and any(len(s["workers"]) > 1 for s in samples)
    assert all(s["won_by"] in s["workers"] and s["policy_spans"] for s in samples)
