# SPDX-License-Identifier: Apache-2.0
"""Local runs whose engines make the texts of coming steps: samples stay those of plain decoding, whatever dies meanwhile."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import QUICKSTART, STEP_ADDER, TINY_ROLLOUTS
from processes import wait_until_gone
from safetensors.torch import load_file

from lab.local.ahead_fleet import AheadEngine, AheadFleet
from lab.local.async_fleet import AsyncFleet
from lab.local.early_work import EarlyWork
from lab.local.engine import RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import LocalEngine, StepPrompts, StepRollout, load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.local.texts_in_flight import TextsInFlight
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.ahead_branches import AheadBranch, begun_again, paths_of
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, as_bytes
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade
from nemo_specrollout.run_ahead.texts import TextAhead

NUM_STEPS = 5
SLOTS = 8
BLOCK = "policy.generation.specrollout"
FREE = ([0.01] * (SLOTS + 1), 0.0)
"""Step times with which a further request costs nothing."""
Weights = dict[str, torch.Tensor]


def config_of(ahead: str, **more: Any) -> RunConfig:
    """Returns a run of eight short requests a step."""
    changes = {
        **TINY_ROLLOUTS,
        "policy.generation.max_new_tokens": 96,
        "policy.generation.vllm_kwargs.max_num_seqs": SLOTS,
        "data.max_terms": 6,
        f"{BLOCK}.verify.requests_per_step": 0,
        f"{BLOCK}.run_ahead": ahead,
        **more,
    }
    return read_run_config(load_config(QUICKSTART, [f"{key}={value}" for key, value in changes.items()]))[0]


def prompts_of(config: RunConfig) -> Any:
    return partial(step_prompts, config, task=build_task(config.data, load_tokenizer(STEP_ADDER)))


@pytest.fixture(scope="module")
def versions() -> list[Weights]:
    """The weights of each step. Each update changes some tokens, and most texts part at one of them."""
    found = [load_file(STEP_ADDER / "model.safetensors")]
    for seed in range(NUM_STEPS):
        noise = torch.Generator().manual_seed(seed)
        found.append(
            {
                n: t + 3e-3 * t.std() * torch.randn(t.shape, generator=noise) if t.ndim == 2 else t
                for n, t in found[-1].items()
            }
        )
    return found


@pytest.fixture(scope="module")
def plain(versions: list[Weights]) -> Iterator[Callable[[float], list[list[list[int]]]]]:
    """The responses of each step by plain decoding, at a temperature."""
    made: dict[float, list[list[list[int]]]] = {}

    def responses(temperature: float) -> list[list[list[int]]]:
        if temperature not in made:
            more = {f"{BLOCK}.drafters": "[]", "policy.generation.temperature": temperature}
            config = config_of("null", **more)
            engine = LocalEngine(config, prompts_of(config))
            made[temperature] = [tokens_of(roll_out(engine, step, versions)) for step in range(NUM_STEPS)]
            engine.close()
        return made[temperature]

    yield responses


def roll_out(
    source: Any, step: int, versions: list[Weights], on_finished: Callable[[int], None] = lambda done: None
) -> StepRollout:
    source.load_weights(versions[step].items(), step)
    rollout: StepRollout = source.roll_out(step, on_finished)
    return rollout


def tokens_of(rollout: StepRollout) -> list[list[int]]:
    return [r.token_ids for r in rollout.rollouts]


def make_free(engine: RolloutEngine) -> None:
    """Lets early requests cost nothing, so that what is begun does not depend on the machine."""
    native = engine._llm.collective_rpc
    asked = WorkerCalls.specrollout_step_seconds.__name__

    def answer(method: Any, *arguments: Any, **options: Any) -> Any:
        return [FREE] if method == asked else native(method, *arguments, **options)

    engine._llm.collective_rpc = answer


@pytest.mark.integration
@pytest.mark.parametrize(("steps", "branches", "temperature"), [(1, 3, 1.0), (1, 3, 0.0), (2, 3, 1.0), (3, 0, 1.0)])
def test_a_colocated_engine_samples_what_plain_decoding_samples(
    versions: list[Weights],
    plain: Callable[[float], list[list[list[int]]]],
    steps: int,
    branches: int,
    temperature: float,
) -> None:
    more = {"policy.generation.temperature": temperature}
    config = config_of(f"{{steps: {steps}, branches: {branches}}}", **more)
    engine = AheadEngine(config, prompts_of(config))
    make_free(engine)
    engine.begin(range(NUM_STEPS))
    made = [roll_out(engine, step, versions) for step in range(NUM_STEPS)]
    engine.close()
    assert list(map(tokens_of, made)) == plain(temperature)
    figures = [rollout.figures for rollout in made]
    assert figures[0]["ahead_tokens"] == 0 and figures[1]["ahead_tokens"] > 0
    assert sum(f["ahead_kept"] for f in figures[1:] if "ahead_kept" in f) > 0
    num_branches = sum(f["ahead_branches"] for f in figures)
    assert branches > 0 or num_branches == 0  # how many slots are left for branches depends on how fast texts end
    assert figures[-1]["ahead_steps"] == 0, "no step of the run comes after the last one"


@pytest.mark.integration
def test_an_idle_engine_works_between_calls_until_all_is_made(
    start_engine: Callable[..., RolloutEngine], versions: list[Weights]
) -> None:
    config = config_of("{steps: 1, branches: 0}")
    engine = start_engine(STEP_ADDER, config.policy.generation.specrollout, 96, max_num_seqs=SLOTS)
    engine.load_weights(versions[0].items())
    texts = TextsInFlight(replace(config, grpo=replace(config.grpo, seed=7)), prompts_of(config))
    texts.begin(range(2))
    work = EarlyWork(engine.rolling(), has_own=lambda: False)
    work.plan(texts.plans(0, 1)[0])
    with work.set_aside():
        num_steps = engine.counters().num_steps  # type: ignore[union-attr]
        work.allow()
    with work._state:
        assert work._state.wait_for(lambda: not work._has_work, timeout=60)
    with work.set_aside():
        assert engine.counters().num_steps > num_steps  # type: ignore[union-attr]
    made = work.end(keeps_cache=False)
    requests = prompts_of(config)(1).requests
    texts.keep([made])
    expected = [as_bytes(r.token_ids) for r in engine.generate(requests)]
    assert [r.ahead for r in texts.with_texts(1).requests] == expected


@pytest.mark.integration
def test_a_slice_that_fails_is_raised_by_the_next_call(start_engine: Callable[..., RolloutEngine]) -> None:
    config = config_of("{steps: 1, branches: 0}")
    engine = start_engine(STEP_ADDER, config.policy.generation.specrollout, 96, max_num_seqs=SLOTS)
    rolling = engine.rolling()
    work = EarlyWork(rolling, has_own=lambda: False)

    def fail(seconds: float) -> bool:
        raise OSError("no memory")

    rolling.slice = fail  # type: ignore[method-assign]
    with work.set_aside():
        work.allow()
    with work._state:
        assert work._state.wait_for(lambda: work._error is not None, timeout=60)
    with pytest.raises(OSError, match="no memory"), work.set_aside():
        pass


@pytest.mark.integration
@pytest.mark.parametrize("colocated", [True, False])
def test_engines_that_die_cost_no_token(
    versions: list[Weights], plain: Callable[[float], list[list[list[int]]]], colocated: bool
) -> None:
    """One dies amid a rollout, and one while it works for the next step."""
    more = {"cluster.rollout_workers": 2, "policy.generation.colocated.enabled": str(colocated).lower()}
    config = config_of("{steps: auto, branches: 3}", **more)
    fleet = AheadFleet(config, prompts_of(config))
    killed = threading.Event()

    def kill_amid(done: int) -> None:
        if done >= 3 and not killed.is_set():
            killed.set()
            os.kill(fleet.pool.pids[0], signal.SIGKILL)

    try:
        fleet.begin(range(NUM_STEPS))
        made = []
        for step in range(NUM_STEPS):
            made.append(roll_out(fleet, step, versions, kill_amid if step == 1 else lambda done: None))
            if step == 3:
                victim = fleet.pool.pids[1]
                os.kill(victim, signal.SIGKILL)
                wait_until_gone(victim)
        deaths = fleet.take_deaths()
    finally:
        fleet.close()
    assert list(map(tokens_of, made)) == plain(1.0)
    assert killed.is_set() and len(deaths) == 2
    if not colocated:
        assert sum(rollout.figures["ahead_tokens"] for rollout in made) > 0


@pytest.mark.integration
@pytest.mark.slow
def test_each_sample_of_an_asynchronous_run_is_of_one_policy(versions: list[Weights]) -> None:
    """Texts of targets that may not begin yet are made early, and an engine dies meanwhile."""
    more = {
        "grpo.async_grpo": (
            "{enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true, "
            "recompute_kv_cache_after_weight_updates: true}"
        ),
        "loss_fn.use_importance_sampling_correction": "true",
        "cluster.rollout_workers": 2,
    }
    config = config_of("{steps: 2, branches: 3}", **more)
    fleet = AsyncFleet(config, prompts_of(config))
    made = []
    try:
        fleet.load_weights(versions[0].items(), 0)
        fleet.begin(range(NUM_STEPS))
        for step in range(NUM_STEPS):
            made.append(fleet.roll_out(step, lambda done: None))
            if step == 1:
                os.kill(fleet.pool.pids[0], signal.SIGKILL)
            fleet.load_weights(versions[step + 1].items(), step + 1)
    finally:
        fleet.close()
    by_version: dict[int, list[tuple[RolloutRequest, list[int]]]] = {}
    for rollout in made:
        for request, response, stats in zip(
            rollout.prompts.requests, rollout.rollouts, rollout.sample_stats, strict=True
        ):
            ((version, first),) = stats["policy_spans"]  # type: ignore[index]
            assert first == len(request.prompt_token_ids)
            by_version.setdefault(version, []).append((replace(request, ahead=b"", branches=()), response.token_ids))
    plain_config = config_of("null", **{f"{BLOCK}.drafters": "[]"})
    checker = LocalEngine(plain_config, prompts_of(plain_config))
    try:
        for version, samples in by_version.items():
            checker.load_weights(versions[version].items())
            again = checker.generate([request for request, _ in samples])
            assert [r.token_ids for r in again] == [tokens for _, tokens in samples]
    finally:
        checker.close()


@pytest.mark.unit
def test_texts_are_dealt_out_step_by_step_and_forgotten_after_their_step() -> None:
    config = config_of("{steps: 2}")

    def prompts(step: int) -> StepPrompts:
        """The last request of each step is decoded without drafts, so its text is not made early."""
        found = prompts_of(config)(step)
        last = replace(found.requests[-1], speculate=False)
        return replace(found, requests=[*found.requests[:-1], last])

    texts = TextsInFlight(config, prompts)
    texts.begin(range(3))
    first, second = texts.plans(0, 2)
    assert [row.steps_ahead for row in first.rows] == [1] * 4 + [2] * 4
    assert [row.steps_ahead for row in second.rows] == [1] * 3 + [2] * 3
    assert {row.row.request.prompt_index for row in first.rows} == {2, 4}, "samples of a prompt stay together"  # type: ignore[attr-defined]
    row = first.rows[0]
    branch = AheadBranch(0, 1, as_bytes([8]))
    made = TextAhead(as_bytes([5, 6, 7]), branches=(branch,))
    texts.keep([EarlyMade({row.row.seed: made}, EarlyFigures(num_tokens=3)), EarlyMade({}, EarlyFigures(num_tokens=4))])
    (again, _) = texts.plans(1, 2)
    assert [row.steps_ahead for row in again.rows] == [1] * 4, "step 3 is not of the run"
    requests = texts.with_texts(1).requests
    assert (requests[0].ahead, requests[0].branches) == (made.tokens, (branch,)) and requests[1].ahead == b""
    figures = texts.compare(requests, [Rollout([5, 8, 9], [0.0] * 3, "stop")] * len(requests))
    assert (figures["ahead_tokens"], figures["ahead_made"], figures["ahead_kept"]) == (3, 7, 1 / 3)
    assert texts.with_texts(1).requests[0].ahead == b""


@pytest.mark.unit
def test_a_request_begins_again_with_the_path_that_it_followed() -> None:
    """What it made comes first, then the rest of the branch that agrees with it. The old text is a branch of that."""
    text = as_bytes([1, 2, 3, 4])
    branches = (AheadBranch(0, 1, as_bytes([7, 8, 9])), AheadBranch(1, 2, as_bytes([5])))
    known, others = begun_again([1, 7], text, branches)
    assert known == as_bytes([1, 7, 8, 9])
    assert [path.tolist() for path in paths_of(known, others)[1:]] == [[1, 7, 5], [1, 2, 3, 4]]
    assert begun_again([], text, branches)[0] == text
    assert begun_again([1, 2, 3, 4, 5], text, ()) == (as_bytes([1, 2, 3, 4, 5]), ())
    assert begun_again([6], text, ()) == (as_bytes([6, 2, 3, 4]), ()), "its tail has the same noise"
    assert len(begun_again([6], text, branches)[1]) == len(branches)
