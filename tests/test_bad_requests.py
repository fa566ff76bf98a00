# SPDX-License-Identifier: Apache-2.0
"""Bad requests among good ones: each is refused with field, value and fix, and the others get the tokens of plain decoding."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conftest import STEP_ADDER
from test_equality import requests

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest, as_bytes

pytestmark = pytest.mark.integration

BLOCK = SpecrolloutConfig(budget=BudgetConfig("fixed", k=4))
PROMPT = {"prompt_token_ids": [1, 40, 41, 42]}


def identity(**given: Any) -> dict[str, Any]:
    return {"extra_args": {"specrollout": given}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no seed": ({}, "seed: None; sampling at temperature 1.0 needs a seed"),
    "seed -1, which vLLM takes for none": ({"seed": -1}, "seed: None; "),
    "a seed that is no whole number": ({"seed": 1.5}, "seed: 1.5 is not a whole number"),
    "a huge seed": ({"seed": 2**63}, "seed: 9223372036854775808 is not a whole number of 64 bits"),
    "a text for an identity": ({"extra_args": {"specrollout": "seed=1"}}, "'seed=1' is no mapping"),
    "null for an identity": ({"extra_args": {"specrollout": None}}, "None is no mapping"),
    "a list for an identity": ({"extra_args": {"specrollout": [1]}}, "[1] is no mapping"),
    "an unknown key": (identity(sead=1), "has no key 'sead'; did you mean 'seed'"),
    "a key beside the identity": ({"extra_args": {"specrollout_speculate": 0}}, 'knows the key "specrollout" only'),
    "a seed of text": (identity(seed="x"), """["seed"]: 'x' is not a whole number"""),
    "a negative seed": (identity(seed=-1), '["seed"]: -1 is not a whole number from 0'),
    "a sample without a prompt": (identity(sample_index=2), '["sample_index"]: 2 without prompt_index'),
    "near-ties by text": (identity(seed=1, ties="a"), """["ties"]: 'a' is not a whole number from 0"""),
    "early by number": (identity(seed=1, early=1), """["early"]: 1 is not true or false"""),
    "drafts by text": (identity(seed=1, speculate="no"), """["speculate"]: 'no' is not true or false"""),
    "ids ahead": (identity(seed=1, ahead=[300, 5]), '["ahead"]: [300, 5] is not bytes'),
    "half a token ahead": (identity(seed=1, ahead=b"abc"), """["ahead"]: b'abc' is not bytes"""),
    "a length of text": (identity(seed=1, prompt_length="3"), """["prompt_length"]: '3' is not a number of tokens"""),
    "a negative length": (identity(seed=1, prompt_length=-1), '["prompt_length"]: -1 is not a number'),
    "several samples of one seed": ({**identity(seed=1), "n": 3}, "n: 3 with a seed or prompt_index"),
    "more allowed ids than there is room for": ({"seed": 1, "allowed_token_ids": [7] * 1025}, "allowed_token_ids: 1025"),
}  # fmt: skip
"""Sampling parameters, and words of the refusal."""
ODD: dict[str, dict[str, Any]] = {
    "a longer prompt than there is": identity(seed=1, prompt_length=2**20),
    "no prompt at all": identity(seed=1, prompt_length=0),
    "ids ahead that no token has": identity(seed=1, ahead=as_bytes([3, -1, 2**31 - 1])),
    "more ahead than fits": identity(seed=1, ahead=as_bytes([5] * 5000)),
    "several samples": {"seed": 1, "n": 3},
    "greedy without a seed": {"temperature": 0.0},
}
"""Parameters that are unusual, and allowed."""


def sampling(kind: type[Any], given: Mapping[str, Any]) -> Any:
    return kind(**{"temperature": 1.0, "max_tokens": 8, "logprobs": 0, "detokenize": False, **given})


def tokens(rollouts: Any) -> list[list[int]]:
    return [r.token_ids for r in rollouts]


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> list[list[int]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return tokens(plain.generate(requests(4, 2)))


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["asynchronous steps", "synchronous steps"])
def test_bad_requests_are_refused_and_the_others_finish(
    start_engine: Callable[..., RolloutEngine], expected: list[list[int]], async_scheduling: bool
) -> None:
    from vllm import SamplingParams

    from nemo_specrollout.generation.engine.vllm_requests import REFUSALS, RolloutSamplingParams

    engine = start_engine(STEP_ADDER, BLOCK, async_scheduling=async_scheduling)
    vllm = engine._llm.llm_engine
    asked = requests(4, 2)
    good = engine.submit(asked, {})
    done = engine.step()
    for kind in (SamplingParams, RolloutSamplingParams):
        for name, (given, words) in BAD.items():
            with pytest.raises(REFUSALS, match=re.escape(words)):
                vllm.add_request(f"bad {name}", PROMPT, sampling(kind, given))
            done |= engine.step()
        for name, given in ODD.items():
            vllm.add_request(f"odd {kind.__name__} {name}", PROMPT, sampling(kind, given))
    while vllm.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0] for o in vllm.step() if o.finished}
    assert [list(done[name].token_ids) for name in good] == expected
    for name in ODD:  # the samples of several came together
        assert list(done[f"odd SamplingParams {name}"].token_ids) == list(
            done[f"odd RolloutSamplingParams {name}"].token_ids
        )
    assert len(done) == len(good) + 2 * len(ODD)


def test_lists_that_the_model_runner_has_no_room_for_are_refused() -> None:
    from vllm import SamplingParams

    from nemo_specrollout.generation.engine.admission import check_bad_words, check_params

    stop = {"seed": 1, "stop_token_ids": list(range(121))}
    check_params(sampling(SamplingParams, stop))
    with pytest.raises(ValueError, match=r"stop_token_ids with min_tokens: 121 tokens; .* room for 120: send fewer"):
        check_params(sampling(SamplingParams, {**stop, "min_tokens": 1}))
    with pytest.raises(ValueError, match="logit_bias: 1025 tokens"):
        check_params(sampling(SamplingParams, {"seed": 1, "logit_bias": dict.fromkeys(range(1025), 1.0)}))
    check_bad_words(sampling(SamplingParams, {"_bad_words_token_ids": [[3] * 8] * 128}))
    with pytest.raises(ValueError, match="bad_words: 129 words"):
        check_bad_words(sampling(SamplingParams, {"_bad_words_token_ids": [[3]] * 129}))
    with pytest.raises(ValueError, match="bad_words: 1025 tokens in all"):
        check_bad_words(sampling(SamplingParams, {"_bad_words_token_ids": [[3] * 1025]}))


def test_a_refused_request_takes_none_of_its_call_into_the_engine(
    start_engine: Callable[..., RolloutEngine], expected: list[list[int]]
) -> None:
    from nemo_specrollout.generation.engine.vllm_requests import REFUSALS

    engine = start_engine(STEP_ADDER, BLOCK)
    good = requests(4, 2)
    bad = RolloutRequest(good[0].prompt_token_ids, 0, "x")  # type: ignore[arg-type]
    with pytest.raises(REFUSALS, match="sample_index"):
        engine.generate([*good, bad])
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert tokens(engine.generate(good)) == expected


def test_a_bad_request_that_came_another_way_harms_no_other(
    start_engine: Callable[..., RolloutEngine], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """No check of the engine's front end is asked, as if another program had put requests into the engine core."""
    from vllm import SamplingParams

    engine = start_engine(STEP_ADDER, BLOCK)
    vllm = engine._llm.llm_engine
    vllm.input_processor.validate_logits_processors_params = lambda params: None
    good = engine.submit(requests(4, 2), {})
    of_workers = {name: given for name, (given, _) in BAD.items() if "room" not in name and "n" not in given}
    for name, given in of_workers.items():
        vllm.add_request(name, PROMPT, sampling(SamplingParams, given))
    done: dict[str, Any] = {}
    while vllm.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0] for o in vllm.step() if o.finished}
    assert [list(done[name].token_ids) for name in good] == expected
    assert all(done[name].finish_reason in ("length", "stop") for name in of_workers)
    logged = [record.getMessage() for record in caplog.records if "is decoded without drafts" in record.getMessage()]
    assert len(logged) == len(of_workers)
