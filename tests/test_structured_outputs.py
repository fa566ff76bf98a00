# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: their texts have the demanded form, and drafts change no token of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from conftest import STEP_ADDER
from test_equality import assert_drafts

from lab.local.engine import RolloutEngine
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RandomDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

pytestmark = pytest.mark.integration

BLOCKS = {
    "suffix": SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), budget=BudgetConfig("fixed", k=5)),
    "wrong drafts": SpecrolloutConfig(drafters=(RandomDrafterConfig(),), budget=BudgetConfig("fixed", k=4)),
    "auto": SpecrolloutConfig(),
}
# The policy's tokens are whole words and digits: a form must leave each prefix that a token can make a way to go on.
REGEX = r"(we|so)(add[0-9]{2,4}[+=]){3}answer:[0-9]{1,3}"
CHOICES = ["so12", "we12+5=17", "so12+5=17", "now17"]
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "a regex": ({"regex": REGEX}, REGEX),
    "a choice": ({"choice": CHOICES}, "|".join(map(re.escape, CHOICES))),
}


def requests(first: int = 0) -> list[RolloutRequest]:
    tokenizer = load_tokenizer(STEP_ADDER)
    prompts = [encode_prompt(p, tokenizer) for p in make_problems(3, 4, first)]
    return [RolloutRequest(ids, first + i, s) for i, ids in enumerate(prompts) for s in range(4)]


def structured(form: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters. vLLM changes the object, so each call makes a new one."""
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**form)}


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., RolloutEngine]) -> Callable[[SpecrolloutConfig], RolloutEngine]:
    """Starts an engine with a tokenizer, which structured outputs need."""
    return lambda block: start_engine(STEP_ADDER, block, skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def plain(start: Callable[[SpecrolloutConfig], RolloutEngine]) -> RolloutEngine:
    return start(SpecrolloutConfig(drafters=()))


def together(engine: RolloutEngine, form: dict[str, Any]) -> list[Rollout]:
    """Returns rollouts of structured requests and of free ones, which share the steps of the engine."""
    ids = [*engine.submit(requests(), structured(form)), *engine.submit(requests(first=50), {})]
    found: dict[str, Rollout] = {}
    while len(found) < len(ids):
        found.update(engine.step())
    return [found[name] for name in ids]


@pytest.mark.parametrize("name", FORMS)
def test_texts_have_the_form(plain: RolloutEngine, name: str) -> None:
    form, pattern = FORMS[name]
    tokenizer = load_tokenizer(STEP_ADDER)
    rollouts = plain.generate(requests(), **structured(form))
    texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True).replace(" ", "") for r in rollouts]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert {r.finish_reason for r in rollouts} == {"stop"} and len(set(texts)) > 1


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_drafts_change_no_token(
    start: Callable[[SpecrolloutConfig], RolloutEngine], plain: RolloutEngine, block: SpecrolloutConfig
) -> None:
    engine = start(block)
    for form, _ in FORMS.values():
        for sampling in ({"temperature": 1.0}, {"temperature": 0.0}):
            expected, found = (e.generate(requests(), **structured(form), **sampling) for e in (plain, engine))
            assert [r.token_ids for r in found] == [r.token_ids for r in expected]
            gaps = (abs(a - b) for x, y in zip(found, expected, strict=True)
                    for a, b in zip(x.logprobs, y.logprobs, strict=True))  # fmt: skip
            assert max(gaps) < 1e-4
        assert [r.token_ids for r in together(engine, form)] == [r.token_ids for r in together(plain, form)]
    assert_drafts(engine, block, more_than=100)
