# SPDX-License-Identifier: Apache-2.0
"""Rollouts over several engines: moves, races and deaths change no token of what one engine makes without drafts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from rollout_world import EnginesInTurn, WildPolicy, drive_clock
from safetensors.torch import load_file
from test_equality import assert_equal, requests

from lab.local.coordinator import DealingCoordinator
from lab.local.engine import RolloutEngine
from lab.local.timeline import Timeline
from nemo_specrollout.config.block import BudgetConfig, FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.stragglers.attempts import AttemptOutcome, Response
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import table_file
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN
from nemo_specrollout.stragglers.turn_engine import TurnEngine
from nemo_specrollout.stragglers.turns import TurnOrders

pytestmark = pytest.mark.integration

DRAFTING = SpecrolloutConfig(drafters=(SuffixDrafterConfig(), NgramDrafterConfig()), budget=BudgetConfig("fixed", k=3))
MAX_TOKENS = 120
SAMPLINGS: dict[str, dict[str, Any]] = {"T=1": {"temperature": 1.0}, "T=0": {"temperature": 0.0}}


def six_prompts() -> list[RolloutRequest]:
    """Returns four samples of each of six problems."""
    return requests(6, 4)


def engine_pair(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    """Starts an engine that drafts and one that does not, each for six requests at a time."""
    blocks = DRAFTING, SpecrolloutConfig(drafters=())
    return [start_engine(STEP_ADDER, block, MAX_TOKENS, max_num_seqs=6) for block in blocks]


def plain_rollouts(plain: RolloutEngine) -> dict[str, list[Rollout]]:
    """Returns the rollouts of `six_prompts` by an engine without drafters, at each temperature."""
    return {name: plain.generate(six_prompts(), **sampling) for name, sampling in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return engine_pair(start_engine)


@pytest.fixture
def clock(engines: list[RolloutEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only engine steps move: a drafting engine's take longer."""
    drive_clock(monkeypatch, engines, (0.012, 0.01))


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(plain: RolloutEngine) -> dict[str, list[Rollout]]:
    return plain_rollouts(plain)


def coordinator(workers: Any, policy: Any) -> DealingCoordinator:
    return DealingCoordinator(workers, policy, DecodeSpeedTable(["drafting", "plain"]), LengthEstimator(MAX_TOKENS))


def rolled_out(workers: EnginesInTurn, policy: Any, work: list[RolloutRequest]) -> tuple[list[Rollout], Timeline]:
    """Rolls requests out; checks that nothing of them stays in an engine."""
    made, timeline = coordinator(workers, policy).roll_out(work)
    workers.finish_turns()
    assert not workers.has_requests()
    return made, timeline


# Any schedule


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("deaths", [(), (7, 0), (9, 5)], ids=["no death", "one dies", "both die"])
def test_no_decision_and_no_death_changes_a_token(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], name: str, deaths: tuple[int, ...]
) -> None:
    workers = EnginesInTurn(engines, 1, deaths, **SAMPLINGS[name])
    policy = WildPolicy(2)
    made, timeline = rolled_out(workers, policy, six_prompts())
    assert_equal(made, expected[name])
    assert policy.num_changes > 5 and (workers.num_deaths > 0) == bool(deaths)
    assert_sound(timeline, made)


def assert_sound(timeline: Timeline, made: list[Rollout]) -> None:
    """Checks that every request is won once, by its last token, and that spans end after they begin."""
    won = [s for s in timeline.spans if s.outcome == AttemptOutcome.WON]
    assert sorted(s.request for s in won) == list(range(len(made)))
    assert all(s.outcome and s.end_s >= s.start_s and s.last_token >= s.first_token for s in timeline.spans)
    assert all(s.last_token == len(made[s.request].token_ids) for s in won)


@pytest.mark.usefixtures("clock")
def test_the_policy_moves_and_races_a_tail(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    ladder = DecodeSpeedTable(["drafting", "plain"])
    eager = FastestOfN(FastestOfNConfig(min_gain=0.0), ladder)
    workers = EnginesInTurn(engines, 5)
    rollout = DealingCoordinator(workers, eager, ladder, LengthEstimator(MAX_TOKENS))
    outcomes: Counter[str] = Counter()
    for _ in range(3):
        made, timeline = rollout.roll_out(six_prompts())
        workers.finish_turns()
        assert_equal(made, expected["T=1"])
        outcomes.update(s.outcome for s in timeline.spans)
    assert outcomes[AttemptOutcome.MOVED] + outcomes[AttemptOutcome.BEATEN] > 0
    written = table_file(ladder, "device", "policy", (0.5, 0.0))
    assert written is not None and {r.method for r in written.rungs} == {"drafting", "plain"}
    assert ladder.prefill_s(100) > 0


def test_without_a_policy_a_request_stays_where_it_is_dealt(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    made, timeline = rolled_out(EnginesInTurn(engines, 6), None, six_prompts())
    assert_equal(made, expected["T=1"])
    assert {s.outcome for s in timeline.spans} == {AttemptOutcome.WON}
    assert [s.engine for s in sorted(timeline.spans, key=lambda s: s.request)] == [0] * 12 + [1] * 12


@pytest.mark.usefixtures("clock")
def test_an_interrupted_rollout_leaves_nothing_behind(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    workers = EnginesInTurn(engines, 7)
    rollout = coordinator(workers, WildPolicy(8))

    def interrupt(done: int) -> None:
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout.roll_out(six_prompts(), interrupt)
    made, _ = rollout.roll_out(six_prompts()[:5])
    assert_equal(made, expected["T=1"][:5])
    workers.finish_turns()
    assert not workers.has_requests()


# New weights amid requests


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("deaths", [(), (11, 0)], ids=["no death", "one dies"])
def test_each_token_is_that_of_the_weights_recorded_for_it(
    engines: list[RolloutEngine], plain: RolloutEngine, deaths: tuple[int, ...]
) -> None:
    policies = [load_file(STEP_ADDER / "model.safetensors")]
    policies += [noisy(policies[0], seed) for seed in (1, 2)]
    workers = EnginesInTurn(engines, 10, deaths, policies[0])
    rollout = coordinator(workers, WildPolicy(11))
    keys = rollout.deal(six_prompts())
    num_done = 0
    for version, most in enumerate((6, 14, 24)):
        while num_done < most:
            num_done += len(rollout.advance())
        if version < 2:
            rollout.load_weights(policies[version + 1].items(), version + 1)
    responses, _ = rollout.take(keys)
    workers.finish_turns()
    assert {len(r.policy_spans) for r in responses} >= {1, 2}
    for version, tensors in enumerate(policies):
        plain.load_weights(tensors.items())
        parts = [part for r in responses for part in spans_of(r, version)]
        again = plain.generate([replace(r.request, prefix_token_ids=r.tokens[:first]) for r, first, _ in parts])
        assert all(
            a.token_ids[: last - first] == r.tokens[first:last]
            for a, (r, first, last) in zip(again, parts, strict=True)
        )
    for engine in (*engines, plain):
        engine.load_weights(policies[0].items())


def noisy(tensors: dict[str, Any], seed: int, size: float = 0.1) -> dict[str, Any]:
    """Returns a policy that gives other answers, and mostly the same ones if the `size` of the change is small."""
    import torch

    noise = torch.Generator().manual_seed(seed)
    return {
        n: t + size * t.std() * torch.randn(t.shape, generator=noise) if t.ndim == 2 else t for n, t in tensors.items()
    }


def spans_of(response: Response, version: int) -> list[tuple[Response, int, int]]:
    """Returns the parts of a response that the policy of `version` sampled: (response, first token, end)."""
    ends = [first for _, first in response.policy_spans[1:]] + [len(response.tokens)]
    return [(response, first, end) for (v, first), end in zip(response.policy_spans, ends, strict=True) if v == version]


# No bias


def draws(num_samples: int, prompt_index: int = 0) -> list[RolloutRequest]:
    """Returns samples of the shortest problem: nearly all responses end before the limit."""
    prompt = min((r.prompt_token_ids for r in requests(30, 1)), key=len)
    return [RolloutRequest(prompt, prompt_index, sample) for sample in range(num_samples)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_raced_samples_are_those_without_a_race(
    engines: list[RolloutEngine], plain: RolloutEngine
) -> None:
    raced: Counter[tuple[int, ...]] = Counter()
    num_raced = 0
    for first in range(0, 10_000, 500):
        made, timeline = rolled_out(
            EnginesInTurn(engines, first), WildPolicy(first), draws(10_000)[first : first + 500]
        )
        raced.update(tuple(r.token_ids) for r in made)
        num_raced += timeline.figures()["races"]
    assert raced == Counter(tuple(r.token_ids) for r in plain.generate(draws(10_000))) and num_raced > 1_000


def test_racers_with_own_seeds_would_favour_short_answers(plain: RolloutEngine) -> None:
    """Shows the danger: of two independent samples, the first to end is a short one."""
    lengths = np.array([[len(r.token_ids) for r in plain.generate(draws(300, racer))] for racer in (1, 2)])
    error = lengths.std() / np.sqrt(300)
    assert np.abs(lengths.mean(1) - lengths.mean()).max() < 3 * error, "each racer alone is unbiased"
    assert lengths.min(0).mean() < lengths.mean() - 4 * error, "the first of two is not"


# One engine


def test_an_engine_goes_on_from_any_prefix(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    rng = np.random.default_rng(0)
    whole = expected["T=1"]
    cuts = [int(rng.integers(0, len(r.token_ids))) for r in whole]
    rest = [replace(r, prefix_token_ids=w.token_ids[:c]) for r, w, c in zip(six_prompts(), whole, cuts, strict=True)]
    for engine in engines:
        made = engine.generate(rest)
        assert [r.token_ids for r in made] == [w.token_ids[c:] for w, c in zip(whole, cuts, strict=True)]
        assert [r.finish_reason for r in made] == [w.finish_reason for w in whole]


def test_an_engine_reports_every_token_once(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    worker, told, finished = TurnEngine(engines[0]), {}, {}
    orders = TurnOrders(tuple(enumerate(six_prompts())), seconds=0.002)
    while len(finished) < len(six_prompts()):
        result = worker.turn(orders)
        for key, (tokens, _) in result.parts.items():
            told[key] = told.get(key, []) + tokens
        finished.update(result.finished)
        orders = TurnOrders(seconds=0.002)
    assert [told[i] for i in range(len(told))] == [r.token_ids for r in expected["T=1"]]
    assert [finished[i] for i in range(len(told))] == [r.finish_reason for r in expected["T=1"]]
