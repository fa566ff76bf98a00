# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own: a death changes no token, and no engine waits for another."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, STEP_ADDER
from processes import wait_until_gone
from rollout_world import WildPolicy
from safetensors.torch import load_file
from test_equality import assert_equal
from test_racing import DRAFTING, MAX_TOKENS, coordinator, engine_pair, plain_rollouts, six_prompts

from lab.local import rollout_pool
from lab.local.coordinator import DealingCoordinator
from lab.local.engine import RolloutEngine
from lab.local.rollout_pool import DEAD, MAX_RESTARTS, RolloutPool, ray
from lab.local.run_sections import GenerationConfig, VllmConfig
from lab.local.timeline import Timeline
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.stragglers.attempts import AttemptOutcome
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return engine_pair(start_engine)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    return plain_rollouts(start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS))


@pytest.fixture(scope="module")
def pool() -> Iterator[RolloutPool]:
    tail = FastestOfNConfig(methods=(("suffix", "ngram"), ("ngram",)))
    generation = GenerationConfig(
        VllmConfig(max_model_len=512), MAX_TOKENS, vllm_kwargs={"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 28},
        specrollout=replace(DRAFTING, fastest_of_n=tail),
    )  # fmt: skip
    workers = RolloutPool(STEP_ADDER, generation, seed=7, num_engines=2)
    yield workers
    workers.close()


def test_two_processes_make_the_same_tokens(pool: RolloutPool, expected: dict[str, list[Rollout]]) -> None:
    assert pool.method_names == ["suffix+ngram", "ngram"] and pool.methods == [0, 1] and pool.capacity == 8
    assert len(set(pool.pids.values())) == 2
    ladder = DecodeSpeedTable(pool.method_names)
    rollout = DealingCoordinator(pool, FastestOfN(FastestOfNConfig(), ladder), ladder, LengthEstimator(MAX_TOKENS))
    made, timeline = rollout.roll_out(six_prompts())
    assert_equal(made, expected["T=1"])
    assert {s.engine for s in timeline.spans} == {0, 1}


WATCHES_RAY = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "ray":
            print(os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"]))
            print(os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"])
sys.meta_path.insert(0, Watch())
import lab.local.rollout_pool
"""


def test_ray_is_imported_with_the_settings_of_a_run() -> None:
    """Ray is imported by vLLM, and reads its settings then, so they must be there before."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", WATCHES_RAY], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["token", "64", "0"]


@pytest.mark.slow
def test_ray_refuses_a_process_without_the_run_s_token(pool: RolloutPool) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {n: v for n, v in os.environ.items() if not n.startswith("RAY_AUTH")}
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print('heard')"
    for known in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        stranger = subprocess.run(
            [sys.executable, "-c", code], env={**environment, **known}, capture_output=True, text=True, check=False
        )
        assert stranger.returncode != 0 and "heard" not in stranger.stdout


def test_a_killed_process_costs_no_token(pool: RolloutPool, expected: dict[str, list[Rollout]]) -> None:
    victim, rollout = pool.pids[0], coordinator(pool, WildPolicy(9))
    killed = threading.Event()

    def kill_amid(done: int) -> None:
        if done >= 2 and not killed.is_set():
            killed.set()
            os.kill(victim, signal.SIGKILL)

    made, timeline = rollout.roll_out(six_prompts(), kill_amid)
    assert_equal(made, expected["T=1"])
    assert killed.is_set() and pool.num_restarts == [1, 0]
    assert any(s.outcome == AttemptOutcome.DIED and s.engine == 0 for s in timeline.spans)
    (sentence,) = pool.take_deaths()
    assert sentence.startswith("rollout worker 0 died; the others take over its requests") and pool.take_deaths() == []
    timeline = roll_out_with_all(pool, rollout, expected["T=1"])
    assert pool.pids[0] != victim and {s.engine for s in timeline.spans} == {0, 1}


def test_turns_of_another_coordinator_are_left_alone(pool: RolloutPool, expected: dict[str, list[Rollout]]) -> None:
    """A local run has two coordinators of one pool. Turns of an abandoned rollout may end while the next one runs."""
    requests = six_prompts()
    order = [*range(8, 16), *range(8), *range(16, len(requests))]
    first = coordinator(pool, WildPolicy(1))
    first.deal(requests)
    first.send_turns()
    first.abandon()
    made, _ = coordinator(pool, WildPolicy(2)).roll_out([requests[i] for i in order])
    assert_equal(made, [expected["T=1"][i] for i in order])


def kill(pid: int) -> None:
    """Kills a process, and waits until it runs no longer."""
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)


def roll_out_with_all(pool: RolloutPool, rollout: DealingCoordinator, expected: list[Rollout]) -> Timeline:
    """Rolls out until no engine is missing, and once more; checks all tokens."""
    while True:
        all_alive = all(map(pool.is_alive, (0, 1)))
        made, timeline = rollout.roll_out(six_prompts())
        assert_equal(made, expected)
        if all_alive:
            return timeline


@pytest.mark.slow
def test_new_weights_do_not_wait_for_a_restarting_engine(
    pool: RolloutPool, engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    old = load_file(STEP_ADDER / "model.safetensors")
    new = {name: 0.8 * tensor if name == "lm_head.weight" else tensor for name, tensor in old.items()}
    engines[0].load_weights(new.items())
    wanted = engines[0].generate(six_prompts())
    engines[0].load_weights(old.items())
    assert [r.token_ids for r in wanted] != [r.token_ids for r in expected["T=1"]]
    rollout = coordinator(pool, WildPolicy(11))
    kill(pool.pids[0])  # the engine has no request now
    assert pool.ask(0, "capture_seconds") is DEAD
    (sentence,) = pool.take_deaths()
    assert sentence.startswith("rollout worker 0 died")
    pool.revive()
    rollout.load_weights(new.items(), 1)
    assert not pool.is_alive(0), "an engine takes seconds to start"
    timeline = roll_out_with_all(pool, rollout, wanted)
    assert {s.engine for s in timeline.spans} == {0, 1}
    rollout.load_weights(old.items(), 0)


@pytest.mark.slow
def test_an_engine_that_hangs_on_new_weights_is_killed(
    pool: RolloutPool, expected: dict[str, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_pool, "HANG_S", 10.0)
    rollout = coordinator(pool, WildPolicy(12))
    os.kill(pool.pids[1], signal.SIGSTOP)
    rollout.load_weights(load_file(STEP_ADDER / "model.safetensors").items(), 0)
    (sentence,) = pool.take_deaths()
    assert sentence.startswith("rollout worker 1 died")
    monkeypatch.undo()
    assert {s.engine for s in roll_out_with_all(pool, rollout, expected["T=1"]).spans} == {0, 1}


@pytest.mark.slow
def test_a_death_noticed_outside_turns_costs_no_token(pool: RolloutPool, expected: dict[str, list[Rollout]]) -> None:
    """One death is noticed by a question, one by new weights, both while requests are under way."""
    rollout, restarts, old = coordinator(pool, WildPolicy(10)), list(pool.num_restarts), dict(pool.pids)
    keys = rollout.deal(six_prompts())
    while not all(rollout.responses[key].tokens for key in keys[:4]):
        rollout.advance()
    for worker in (0, 1):
        kill(old[worker])
    assert pool.ask(0, "capture_seconds") is DEAD and pool.is_alive(1)
    rollout.load_weights(load_file(STEP_ADDER / "model.safetensors").items(), 0)
    assert not pool.is_alive(0) and not pool.is_alive(1)
    while rollout.is_busy:
        rollout.advance()
    responses, timeline = rollout.take_with_timeline(keys)
    assert_equal([r.rollout for r in responses], expected["T=1"])
    assert {s.engine for s in timeline.spans if s.outcome == AttemptOutcome.DIED} == {0, 1}
    assert [now - before for now, before in zip(pool.num_restarts, restarts, strict=True)] == [1, 1]
    pool.finish_turns()


def engines_that_died(rollout: DealingCoordinator, keys: list[int], expected: list[Rollout]) -> set[int]:
    """Ends a rollout and checks its tokens. Returns the engines that died with requests."""
    while rollout.is_busy:
        rollout.advance()
    responses, timeline = rollout.take_with_timeline(keys)
    assert_equal([r.rollout for r in responses], expected)
    return {s.engine for s in timeline.spans if s.outcome == AttemptOutcome.DIED}


@pytest.mark.slow
def test_a_silent_engine_is_killed_while_others_work(
    pool: RolloutPool, expected: dict[str, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_pool, "HANG_S", 10.0)
    rollout, restarts = coordinator(pool, None), pool.num_restarts[1]
    keys = rollout.deal(six_prompts())
    while not all(rollout.responses[key].tokens for key in keys[:4]):
        rollout.advance()
    os.kill(pool.pids[1], signal.SIGSTOP)
    died = engines_that_died(rollout, keys, expected["T=1"])
    if not died:  # the engine had ended its requests before the signal, so the next rollout finds it silent
        died = engines_that_died(rollout, rollout.deal(six_prompts()), expected["T=1"])
    assert pool.num_restarts[1] == restarts + 1 and died == {1}
    pool.finish_turns()
    assert [s for s in pool.take_deaths() if s.startswith("rollout worker 1 died")]
    roll_out_with_all(pool, coordinator(pool, None), expected["T=1"])


def test_an_engine_that_dies_too_often_is_given_up(pool: RolloutPool) -> None:
    pool.num_restarts = [MAX_RESTARTS] * 2
    for worker in (1, 0):
        kill(pool.pids[worker])
        assert worker not in pool.ask_each("capture_seconds")
        if worker:
            pool.revive()
    with pytest.raises(RuntimeError, match="all rollout workers have died 4 times"):
        pool.revive()


def test_what_vllm_refuses_is_a_sentence(tmp_path: Path) -> None:
    generation = GenerationConfig(
        VllmConfig(max_model_len=512), 64, vllm_kwargs={"max_num_sqes": 8}, specrollout=SpecrolloutConfig(drafters=())
    )
    with pytest.raises(ConfigError, match="max_num_sqes"):
        RolloutPool(STEP_ADDER, generation, seed=7, num_engines=1)
