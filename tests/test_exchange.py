# SPDX-License-Identifier: Apache-2.0
"""Shards of a rollout whose engines fetch their orders: moves, late engines and lost engines change no token."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from counting_processor import CountingProcessor
from plugin_package import install_plugin
from rollout_world import WildPolicy, drive_clock
from shard_world import OneAtATime, Shard, ThreadLink, given, rolled_out, sharded
from test_equality import assert_equal, requests
from test_racing import DRAFTING, MAX_TOKENS, SAMPLINGS, engine_pair, plain_rollouts, six_prompts
from test_stream_exchange import MOVING_KINDS
from tiny_policies import save_policy
from vllm.engine.arg_utils import EngineArgs

from lab.local.engine import RolloutEngine
from lab.local.own_ray import OwnRay, ray
from nemo_specrollout.config.block import FastestOfNConfig, LearnedConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.config.staying_requests import PLUGINS
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.generation.engine.vllm_requests import (
    as_vllm_returns,
    is_portable,
    reason_to_stay,
    shard_requests,
)
from nemo_specrollout.nemo_rl import supervisor
from nemo_specrollout.nemo_rl.engine_inputs import engine_arguments
from nemo_specrollout.nemo_rl.ray_calls import answer_of, ask_exchange
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of, put_run
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.nemo_rl.supervisor import SpecrolloutExchange, Supervisor
from nemo_specrollout.reports.records import BEGAN
from nemo_specrollout.stragglers import coordinator
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turn_engine import Ask
from nemo_specrollout.stragglers.turn_shard import TurnShard
from nemo_specrollout.stragglers.turns import ExchangeFailed, TurnResult, TurnWork

pytestmark = pytest.mark.integration

METHODS = ["drafting", "plain"]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes turns short, so that a short rollout has many. Only steps move the clock."""
    monkeypatch.setattr(coordinator, "SHORTEST_TURN_S", 0.005)
    drive_clock(monkeypatch, [OneAtATime], [0.01])


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return engine_pair(start_engine)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)
    return plain_rollouts(plain)


def wild(seed: int, methods: list[str] = METHODS) -> StragglerExchange:
    exchange = StragglerExchange(methods, FastestOfNConfig(), MAX_TOKENS)
    exchange._coordinator.policy = WildPolicy(seed)
    return exchange


def workers(engines: list[RolloutEngine], exchange: StragglerExchange, dies_after: int = 1 << 60) -> list[Shard]:
    return [Shard(OneAtATime(e._llm), ThreadLink(exchange, w, dies_after)) for w, e in enumerate(engines)]


def assert_idle(engines: list[RolloutEngine]) -> None:
    assert not any(engine._llm.llm_engine.has_unfinished_requests() for engine in engines)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param("T=1", 12, id="even"),
        pytest.param("T=0", 20, id="uneven", marks=pytest.mark.slow),
        pytest.param("T=1", 24, id="second empty", marks=pytest.mark.slow),
        pytest.param("T=1", 0, id="first empty", marks=pytest.mark.slow),
    ],
)
def test_moves_between_shards_change_no_token(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], name: str, cut: int
) -> None:
    exchange, num_changes = wild(1), 0.0
    while num_changes <= 3:
        exchange.begin()
        rollouts = workers(engines, exchange)
        made = rolled_out(rollouts, sharded(engines[0], six_prompts(), [cut], **SAMPLINGS[name]), [None, None])
        exchange.end()
        assert_equal(made, expected[name])
        assert [r.finish_reason for r in made] == [r.finish_reason for r in expected[name]]
        assert [r.failure for r in rollouts] == [None, None]
        assert_idle(engines)
        figures = exchange.take_figures()
        num_changes += figures["moves"] + figures["races"]


def test_the_policy_evens_out_an_uneven_dealing(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    exchange = StragglerExchange(METHODS, FastestOfNConfig(min_gain=0.0), MAX_TOKENS)
    num_changes = 0.0
    while num_changes == 0:
        exchange.begin()
        rollouts = workers(engines, exchange)
        assert_equal(rolled_out(rollouts, sharded(engines[0], six_prompts(), [22]), [None, None]), expected["T=1"])
        exchange.end()
        figures = exchange.take_figures()
        of_this = figures["moves"] + figures["races"]
        assert ("saved_s" in figures) == (of_this > 0)
        num_changes += of_this


def test_a_late_engine_is_waited_for_and_helps(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    exchange, late = wild(3), threading.Event()
    exchange.begin()
    rollouts = workers(engines, exchange)
    rollouts[0].ask.when_exchanged(3, late.set)
    made = rolled_out(rollouts, sharded(engines[0], six_prompts(), [4]), [None, late])
    assert_equal(made, expected["T=1"])
    assert exchange.take_figures()["moves"] > 0


def test_an_engine_that_leaves_keeps_no_other_waiting(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    exchange = wild(4)
    exchange.begin()
    rollouts = workers(engines, exchange)
    exchange.leave(1)
    shard = sharded(engines[0], six_prompts(), [24])[0]
    assert_equal(rollouts[0].run(shard), expected["T=1"])
    assert_idle(engines)


def test_an_added_request_begins_at_once_a_moved_one_next_turn(engines: list[RolloutEngine]) -> None:
    exchange, (first, second) = wild(7), sharded(engines[0], six_prompts(), [4])
    for worker, shard in enumerate((first, second)):
        exchange.join(worker, 6)
        exchange.add(worker, shard[:1])
    assert exchange._fleet.num_turns(1) == coordinator.MAX_AHEAD
    (moved, *_) = exchange._coordinator._active
    exchange._coordinator._start(moved, 1)
    ((_, begun),) = exchange.add(1, second[1:2])
    assert begun.prompt_token_ids == second[1].prompt_token_ids
    assigned = exchange._coordinator._assigned[1]
    assert moved in [assigned.attempts[name] for name in assigned.starts], "the move waits for a turn"


@pytest.mark.parametrize("dies_after", [0, 1, 2, 5, 9, 14])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_without_the_exchange_each_finishes_alone(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], name: str, dies_after: int
) -> None:
    exchange = wild(5)
    exchange.begin()
    rollouts = workers(engines, exchange, dies_after)
    made = rolled_out(rollouts, sharded(engines[0], six_prompts(), [12], **SAMPLINGS[name]), [None, None])
    assert_equal(made, expected[name])
    assert all(r.failure == "it died" for r in rollouts)
    assert_idle(engines)


def test_an_error_of_the_exchange_reaches_every_engine(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    class Broken(WildPolicy):
        def decide(self, seen: Any) -> Any:
            if self.num_changes > 5:
                raise ZeroDivisionError("a policy's fault")
            return super().decide(seen)

    exchange = wild(6)
    exchange._coordinator.policy = Broken(6)
    exchange.begin()
    rollouts = workers(engines, exchange)
    made = rolled_out(rollouts, sharded(engines[0], six_prompts(), [12]), [None, None])
    assert_equal(made, expected["T=1"])
    assert [r.failure for r in rollouts] == ["ZeroDivisionError: a policy's fault"] * 2
    assert_idle(engines)


def test_an_engine_that_fails_leaves_its_requests_to_others(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    """NeMo-RL then ends the run; until it does, no engine hangs."""
    exchange = wild(7)
    exchange.begin()
    rollouts = workers(engines, exchange)
    shards = sharded(engines[0], six_prompts(), [12])
    steps = 0

    def fail_at_last() -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise MemoryError("the engine")
        return OneAtATime.step(rollouts[1].engine)

    rollouts[1].engine.step = fail_at_last
    made: list[Rollout] = []
    other = threading.Thread(target=lambda: made.extend(rollouts[0].run(shards[0])))
    other.start()
    with pytest.raises(MemoryError):
        rollouts[1].run(shards[1])
    other.join()
    assert_equal(made, expected["T=1"][:12])
    assert_idle(engines)


# Through Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    own = OwnRay()
    yield
    own.stop()


def kills_at(number: int, ask: Ask, kill: Callable[[], None]) -> Ask:
    """Returns `ask` with a kill before the exchange of that number."""
    numbers = itertools.count(1)

    def asks(method: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
        if method is StragglerExchange.exchange and next(numbers) == number:
            kill()
        return ask(method, *arguments)

    return asks


@pytest.mark.parametrize(
    "dies", [pytest.param(False, id="lives", marks=pytest.mark.slow), pytest.param(True, id="is killed")]
)
def test_an_exchange_in_an_actor(
    cluster: None, engines: list[RolloutEngine], expected: dict[str, list[Rollout]], dies: bool
) -> None:
    kind: Any = SpecrolloutExchange
    actor = kind.options(max_concurrency=12).remote(METHODS, FastestOfNConfig(min_gain=0.0), MAX_TOKENS)
    answer_of(actor.begin.remote())
    rollouts = [Shard(OneAtATime(engines[w]._llm), partial(ask_exchange, actor, w)) for w in range(2)]
    shards = sharded(engines[0], six_prompts(), [20])
    if dies:
        answer_of(actor.take_figures.remote())
        rollouts[0].ask = kills_at(3, rollouts[0].ask, lambda: ray.kill(actor))
    made = rolled_out(rollouts, shards, [None, None])
    assert_equal(made, expected["T=1"])
    assert_idle(engines)
    if dies:
        assert all(r.failure is not None and "ActorDiedError" in r.failure for r in rollouts)
        with pytest.raises(ExchangeFailed, match="ActorDiedError"):
            answer_of(actor.end.remote())
    else:
        assert [r.failure for r in rollouts] == [None, None]
        answer_of(actor.end.remote())
        with pytest.raises(ExchangeFailed, match="engine 0 is not part of the rollout"):
            ask_exchange(actor, 0, StragglerExchange.exchange, None)()
        ray.kill(actor)


@pytest.fixture
def environment(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets actors run by this Python, because there is no NeMo-RL here that could name another."""
    monkeypatch.setattr(supervisor, "engine_environment", dict)


class Starts:
    """Engine actors that join an exchange without a word."""

    num_engines = 2

    def start(self, engine: int, method: Callable[..., object], /, **arguments: Any) -> Any:
        return ray.put(None)


def start_of(folder: Path, *, is_async: bool, ladder: str | None = None) -> Supervisor:
    """Returns the supervisor of a start whose engines keep what they learn in `folder`; its exchange is open."""
    racing = FastestOfNConfig(methods=(("suffix",), ()), ladder=ladder)
    learned = LearnedConfig(folder=str(folder))
    block = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), fastest_of_n=racing, learned=learned)
    config: dict[str, Any] = {
        "model_name": str(STEP_ADDER),
        "max_new_tokens": MAX_TOKENS,
        "vllm_cfg": {"async_engine": is_async, "precision": "float32", "tensor_parallel_size": 1},
        "vllm_kwargs": {"max_num_seqs": 4},
    }
    put_run(config, block, RunFacts(1, 0, 3, "heads"))
    started = Supervisor(block, config, StepLog())
    started._engines = Starts()  # type: ignore[assignment]
    started.open_exchange()
    return started


def end_step(started: Supervisor, num_tokens: int) -> StepLog:
    """Ends a step in which engine 0 has made so many tokens in a second, and returns its log."""
    exchange = started._exchange
    assert exchange is not None
    ask = partial(ask_exchange, exchange.actor, 0)
    ask(StragglerExchange.join, 4)()
    ((name, _),) = ask(StragglerExchange.add, [ShardRequest(tuple(range(10)), 0, (0, 0), b"")])()
    work = TurnWork(1.0, 1.0, num_tokens, 0.01, 10)
    ask(StragglerExchange.exchange, TurnResult({name: ([7] * num_tokens, [-1.0] * num_tokens)}, work=work))()
    started._exchanged(exchange)
    ask(StragglerExchange.leave)()
    return started._log.take()


def table_of(log: StepLog) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(log.files["ladder.json"])
    return table


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.usefixtures("environment")
def test_a_start_begins_with_the_decode_speeds_of_the_one_before(tmp_path: Path, is_async: bool) -> None:
    first = start_of(tmp_path, is_async=is_async)
    assert BEGAN not in end_step(first, 200).entries, "nothing was kept, so there is nothing to tell"
    first.close_exchange()
    second = start_of(tmp_path, is_async=is_async)
    log = end_step(second, 100)
    (sentence,) = log.entries[BEGAN]
    assert sentence.startswith("the exchange of requests began with the decode speeds of 2") and log.alarms == []
    assert table_of(log)["rungs"][0]["tokens_per_s"] == pytest.approx([150]), (
        "a second that was read, and one that was seen"
    )
    assert BEGAN not in end_step(second, 100).entries, "it is told once"
    second.close_exchange()
    other = start_of(tmp_path, is_async=not is_async)
    assert "because what was kept is of others" in end_step(other, 50).entries[BEGAN][0]
    other.close_exchange()


@pytest.mark.usefixtures("environment")
def test_a_named_file_of_decode_speeds_wins_and_a_damaged_kept_one_is_told(tmp_path: Path) -> None:
    first = start_of(tmp_path, is_async=False)
    named = tmp_path / "ladder.json"
    named.write_text(json.dumps({**table_of(end_step(first, 200)), "prefill_s_per_token": 0.5}))
    first.close_exchange()
    second = start_of(tmp_path, is_async=False, ladder=str(named))
    log = end_step(second, 200)
    assert BEGAN not in log.entries and table_of(log)["prefill_s_per_token"] > 0.1
    second.close_exchange()
    (file,) = tmp_path.glob("speeds-*.json")
    file.write_bytes(file.read_bytes()[:-9])
    third = start_of(tmp_path, is_async=False)
    log = end_step(third, 50)
    (alarm,) = log.alarms
    assert alarm.startswith(f"{file} is damaged, so it is not used") and "began without" in log.entries[BEGAN][0]
    assert table_of(log)["rungs"][0]["tokens_per_s"] == pytest.approx([50])
    third.close_exchange()


@pytest.mark.parametrize(("rank", "drafters"), [(0, ["suffix"]), (3, ["suffix"]), (4, []), (8, ["suffix"])])
def test_each_engine_of_nemo_rl_gets_its_own_drafters(
    monkeypatch: pytest.MonkeyPatch, rank: int, drafters: list[str]
) -> None:
    """Each engine has four vLLM workers, which NeMo-RL numbers one after another."""
    monkeypatch.setenv("RANK", str(rank))
    block = {"drafters": [{"type": "suffix"}], "fastest_of_n": {"methods": [["suffix"], []]}}
    config = {"specrollout": block, "vllm_cfg": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
    arguments = engine_arguments({"worker_extension_cls": "a.VllmInternalWorkerExtension"}, config, block_of(config))
    own = arguments["additional_config"]["specrollout"]
    assert [d["type"] for d in own["drafters"]] == drafters and own["fastest_of_n"] is None
    assert ("speculative_config" in arguments) == bool(drafters)


# Requests that may move


def test_the_record_is_vllm_s_own(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    work = six_prompts()[:6]
    params = [given(engines[1], r, {}) for r in work]
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in work]
    native = engines[1]._llm.generate(prompts, params, use_tqdm=False)
    asked = shard_requests(0, prompts, params, None)
    assert asked is not None
    for request, theirs, made in zip(asked, native, expected["T=1"], strict=False):
        ours = as_vllm_returns(request, theirs.request_id, made)
        assert type(ours) is type(theirs) and ours.prompt_token_ids == theirs.prompt_token_ids and ours.finished
        (a,), (b,) = ours.outputs, theirs.outputs
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        for x, y, token in zip(a.logprobs, b.logprobs, b.token_ids, strict=True):
            assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"stop": ["x"], "detokenize": True}, {"repetition_penalty": 1.1}, {"min_tokens": 3}, {"n": 2}, {"logprobs": 2},
        {"prompt_logprobs": 1}, {"bad_words": ["a"]}, {"max_tokens": None}, {"logprobs": None}, {"frequency_penalty": 0.5},
        {"prompt_logprobs": 0}, {"thinking_token_budget": 0}, {"thinking_token_budget": 9}, {"watermarking": False},
        {"_bad_words_token_ids": [[3]]}, {"trace_decode_token_ids": [3]}, {"structured_outputs": {"regex": "a"}},
        {"prompt_logprob_token_ids": [[3]]}, {"extra_args": {EXTRA_ARGS_KEY: {"seed": 1}, "budget": 9}},
        {"extra_args": {EXTRA_ARGS_KEY: {"prompt_index": 1}}}, {"extra_args": None},
    ],
    ids=str,
)  # fmt: skip
def test_requests_that_look_back_at_the_response_do_not_move(
    engines: list[RolloutEngine], change: dict[str, Any]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    request: RolloutRequest = requests(1, 1)[0]
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    params = given(engines[0], request, {"top_k": -1, "min_p": 0.1, "stop": [], "bad_words": None})
    assert is_portable(prompt, params, None)
    assert not is_portable(prompt, params, "a reason of the engine's")
    assert not is_portable({**prompt, "multi_modal_data": {}}, params, None)
    (name, value) = next(iter(change.items()))
    if name == "structured_outputs":
        value = StructuredOutputsParams(**value)
    if name == "prompt_logprob_token_ids":
        value = np.asarray(value)
    setattr(params, name, value)
    assert not is_portable(prompt, params, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"reasoning_config": {"reasoning_start_str": "so", "reasoning_end_str": "answer"}}, None),
        ({"logits_processors": [CountingProcessor]}, "logits_processors: a logits processor may count"),
        ({"watermark_config": {"algorithm": "gumbel", "key": 5}}, "watermark_config: a watermark depends"),
        ({"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}, "return_sampling_mask: an engine"),
        ({"hf_overrides": {"rswa_window": 128}}, "rswa_window: the policy's attention sees all of the prompt"),
        ({"hf_overrides": {"canvas_length": 128}}, "canvas_length: the policy is a diffusion model"),
    ],
    ids=str,
)
def test_an_engine_may_keep_all_its_requests(arguments: dict[str, Any], reason: str | None) -> None:
    config = EngineArgs(model=str(STEP_ADDER), max_model_len=256, **arguments).create_engine_config()
    assert (reason_to_stay(config) or "").startswith(reason or "") and (reason is None) == (
        reason_to_stay(config) is None
    )


def test_an_engine_that_returns_experts_keeps_all_its_requests(tmp_path: Path) -> None:
    policy = save_policy("Qwen3-MoE", tmp_path)
    config = EngineArgs(model=str(policy), max_model_len=256, enable_return_routed_experts=True).create_engine_config()
    assert "returns the experts of its own tokens only" in (reason_to_stay(config) or "")


def test_an_installed_plugin_keeps_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(STEP_ADDER), max_model_len=256).create_engine_config()
    install_plugin(tmp_path, monkeypatch)
    assert (reason_to_stay(config) or "").startswith(f"{PLUGINS}: a logits processor may count")


def engines_own(llm: Any, params: list[Any]) -> list[Any]:
    """Returns what vLLM returns for the first of `six_prompts`, one for each of `params`."""
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in six_prompts()[: len(params)]]
    made: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    return made


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_synchronous_engine_with_a_logits_processor_works_alone(
    start_engine: Callable[..., RolloutEngine], name: str
) -> None:
    """It does not work for others either, whose requests it would continue with another count."""
    pair = [start_engine(STEP_ADDER, DRAFTING, MAX_TOKENS, logits_processors=[CountingProcessor]) for _ in range(2)]
    exchange = wild(8)
    exchange.begin()
    shards = [TurnShard(engine._llm, w, ThreadLink(exchange, w)) for w, engine in enumerate(pair)]
    work = six_prompts()[:8]
    params = [given(pair[0], r, SAMPLINGS[name]) for r in work]
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in work]
    made = shards[0].generate(prompts, params, lambda: engines_own(pair[0]._llm, params), use_tqdm=False)
    assert shards[1].generate([], [], list) == []
    exchange.end()
    assert_equal([Rollout.from_vllm(m) for m in made], pair[1].generate(work, **SAMPLINGS[name]))
    assert exchange.take_figures()["moves"] == 0


def test_requests_with_further_arguments_stay(engines: list[RolloutEngine]) -> None:
    """Other engines would not get them. `use_tqdm` concerns no token, so such requests go to the exchange, which is lost."""
    params = [given(engines[1], r, {}) for r in six_prompts()[:2]]
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in six_prompts()[:2]]
    asked: list[str] = []

    def lost(method: Callable[..., object], *_: Any) -> Callable[[], Any]:
        asked.append(method.__name__)
        raise ExchangeFailed("it died")

    shard = TurnShard(engines[1]._llm, 0, lost)
    shard.generate(prompts, params, lambda: engines_own(engines[1]._llm, params), use_tqdm=False, lora_request=None)
    shard.generate(prompts, params, lambda: engines_own(engines[1]._llm, params), lora_request=object())
    assert asked == ["join", "leave"]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_portable_kind_of_request_goes_on_from_any_token(engines: list[RolloutEngine], name: str) -> None:
    work = six_prompts()
    kinds = [MOVING_KINDS[i % len(MOVING_KINDS)] for i in range(len(work))]
    params = [given(engines[1], r, {**SAMPLINGS[name], **kind}) for r, kind in zip(work, kinds, strict=True)]
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in work]
    whole = [Rollout.from_vllm(m) for m in engines_own(engines[1]._llm, params)]
    asked = shard_requests(0, prompts, params, None)
    assert asked is not None
    for seed in range(3):
        cuts = [(seed * 41 + 7 * i) % len(w.token_ids) for i, w in enumerate(whole)]
        rest = [replace(r, prefix_token_ids=w.token_ids[:c]) for r, w, c in zip(asked, whole, cuts, strict=True)]
        hosted, made = OneAtATime(engines[0]._llm), {}
        ids = hosted.submit(rest, {})
        while len(made) < len(ids):
            made |= hosted.step()
        assert [made[i].token_ids for i in ids] == [w.token_ids[c:] for w, c in zip(whole, cuts, strict=True)]
        assert [made[i].finish_reason for i in ids] == [w.finish_reason for w in whole]


def test_a_prefix_of_any_length_goes_on(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    (shard,) = sharded(engines[0], six_prompts(), [])
    hosted = OneAtATime(engines[0]._llm)
    cuts = [len(r.token_ids) // 2 for r in expected["T=1"]]
    rest = [replace(r, prefix_token_ids=w.token_ids[:c]) for r, w, c in zip(shard, expected["T=1"], cuts, strict=True)]
    ids, made = hosted.submit(rest, {}), {}
    while len(made) < len(ids):
        made |= hosted.step()
    assert [made[i].token_ids for i in ids] == [w.token_ids[c:] for w, c in zip(expected["T=1"], cuts, strict=True)]
