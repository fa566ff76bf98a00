# SPDX-License-Identifier: Apache-2.0
"""Requests of coming steps in the free slots of an engine change no token of its own requests, whatever happens to them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from test_equality import assert_equal
from test_racing import SAMPLINGS, noisy, six_prompts

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.run_ahead.early_requests import EarlyMade, early_params
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.run_ahead.texts import TextAhead

pytestmark = pytest.mark.integration

MAX_TOKENS = 80
SLOTS = 6
BLOCK = SpecrolloutConfig(
    drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig(most_drafts=8), budget=BudgetConfig("fixed", k=4)
)
OLD = load_file(STEP_ADDER / "model.safetensors")
FREE = ([0.01] * (SLOTS + 1), 0.0)
"""Step times with which a further request costs nothing."""
DEAR = ([0.01 * n for n in range(SLOTS + 1)], 0.001)
"""Step times with which each request costs as much as the first."""


@dataclass(frozen=True)
class RequestRow:
    """A request of the tests as a row of a coming step."""

    seed: int
    request: RolloutRequest


def of_step(step: int) -> list[RolloutRequest]:
    """The requests of a step, which has a policy version of its own. There are more than the engine has slots."""
    return [replace(request, policy_version=step) for request in six_prompts()[: SLOTS + 3]]


class Rolling:
    """An engine with early requests, and the texts that it has made of each step."""

    def __init__(self, engine: RolloutEngine, most_branches: int = 2, **sampling: Any) -> None:
        self.engine = engine
        self.sampling = sampling
        self.rolling = RollingEngine(engine._llm, self._request_of, most_branches)
        self.texts: dict[int, TextAhead] = {}

    def _request_of(self, start: EarlyStart) -> tuple[Any, Any]:
        text, params = self.engine._text_and_params(start.row.row.request, self.sampling)  # type: ignore[attr-defined]
        return {"prompt_token_ids": [*text, *start.prefix]}, early_params(params, start)

    def row(self, request: RolloutRequest, ahead: int) -> EarlyRow:
        seed = request.noise_seed(self.engine._seed)
        return EarlyRow(list(request.prompt_token_ids), RequestRow(seed, request), ahead, self.texts.get(seed))

    def plan(self, step: int, num_steps: int) -> None:
        rows = [self.row(request, k) for k in range(1, num_steps + 1) for request in of_step(step + k)]
        self.rolling.plan(rows, scale=1e-3, kept=0.9)

    def generate(self, step: int) -> list[Rollout]:
        """Makes the responses of a step, whose requests bring what was made for them."""
        return self.engine.generate([self.with_text(request) for request in of_step(step)], **self.sampling)

    def with_text(self, request: RolloutRequest) -> RolloutRequest:
        text = self.texts.get(request.noise_seed(self.engine._seed))
        return request if text is None else replace(request, ahead=text.tokens, branches=text.branches)

    def end(self) -> EarlyMade:
        made = self.rolling.end(keeps_cache=False)
        self.texts.update(made.texts)
        assert not self.engine._llm.llm_engine.has_unfinished_requests()
        return made


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture(scope="module")
def shared(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, BLOCK, MAX_TOKENS, max_num_seqs=SLOTS)


@pytest.fixture
def engine(shared: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    """The engine with its first weights. A further request costs it nothing."""
    shared.load_weights(OLD.items())
    charge(shared, FREE, monkeypatch)
    return shared


def charge(engine: RolloutEngine, prices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives an engine's worker these step times."""
    name = WorkerCalls.specrollout_step_seconds.__name__
    native = engine._llm.collective_rpc

    def answer(method: Any, *arguments: Any, **options: Any) -> Any:
        return [prices] if method == name else native(method, *arguments, **options)

    monkeypatch.setattr(engine._llm, "collective_rpc", answer)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_several_phases_with_changed_weights(
    engine: RolloutEngine, plain: RolloutEngine, sampling: str, num_steps: int
) -> None:
    rolling = Rolling(engine, **SAMPLINGS[sampling])
    for step in range(4):
        weights = noisy(OLD, step) if step else OLD
        for each in (engine, plain):
            each.load_weights(weights.items())
        rolling.plan(step, num_steps)
        assert_equal(rolling.generate(step), plain.generate(of_step(step), **rolling.sampling))
        made = rolling.end()
        print(made.figures)
        assert made.figures.num_steps_beside and made.figures.num_tokens
