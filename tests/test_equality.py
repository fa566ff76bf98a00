# SPDX-License-Identifier: Apache-2.0
"""Exactness: any drafter, budget and temperature gives the tokens of plain decoding, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import STEP_ADDER

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM, RandomPolicy
from lab.local.statistics import count_equal
from lab.local.step_addition import encode_prompt, make_problems
from lab.local.step_rollout import load_tokenizer
from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    NgramDrafterConfig,
    RandomDrafterConfig,
    SuffixDrafterConfig,
)
from nemo_specrollout.generation.engine.compat import scheduler_of
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

pytestmark = pytest.mark.integration

SUFFIX, NGRAM, WRONG = (cls() for cls in (SuffixDrafterConfig, NgramDrafterConfig, RandomDrafterConfig))
BLOCKS = {
    "suffix": SpecrolloutConfig(drafters=(SUFFIX,), budget=BudgetConfig("fixed", k=5)),
    "ngram": SpecrolloutConfig(drafters=(NGRAM,), budget=BudgetConfig("fixed", k=3)),
    "auto": SpecrolloutConfig(),
    "mixed drafters, random budgets": SpecrolloutConfig(drafters=(WRONG, SUFFIX, NGRAM), budget=RANDOM),
    "wrong drafts": SpecrolloutConfig(drafters=(WRONG,), budget=BudgetConfig("fixed", k=4)),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0": {"temperature": 0.0},
    "T=0.7": {"temperature": 0.7},
    "T=1, top-k, top-p": {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    "T=0.7, penalties": {
        "temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1
    },
    "T=0, penalties": {"temperature": 0.0, "presence_penalty": 0.6},
    "T=1, min-p, bias": {"temperature": 1.0, "min_p": 0.05, "logit_bias": {10: 1.5, 11: -1.0}},
    "T=1, bad words, min tokens": {
        "temperature": 1.0, "_bad_words_token_ids": [[12], [10, 11]], "min_tokens": 40
    },
}  # fmt: skip


def requests(num_prompts: int, num_samples: int, first: int = 0) -> list[RolloutRequest]:
    tokenizer = load_tokenizer(STEP_ADDER)
    prompts = [encode_prompt(p, tokenizer) for p in make_problems(3, num_prompts, first)]
    return [RolloutRequest(ids, first + i, s) for i, ids in enumerate(prompts) for s in range(num_samples)]


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))


@pytest.fixture(scope="module")
def expected(plain: RolloutEngine) -> dict[str, list[Rollout]]:
    """Returns the rollouts of plain decoding for the same requests, for every kind of sampling."""
    return {name: plain.generate(requests(8, 4), **sampling) for name, sampling in SAMPLINGS.items()}


def assert_equal(found: list[Rollout], expected: list[Rollout]) -> None:
    equal, total = count_equal(found, expected)
    assert equal == total, f"{total - equal} of {total} tokens differ"
    gaps = [
        abs(x - y) for a, b in zip(found, expected, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    assert max(gaps) < 1e-4


def assert_drafts(engine: RolloutEngine, block: SpecrolloutConfig, more_than: int) -> None:
    """Asserts that an engine with a fixed budget has drafted. Otherwise a busy machine decides how many drafts pay."""
    if block.budget.policy == "fixed":
        assert engine.stats().num_proposed > more_than, "too few drafts for this test to show anything"


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_tokens_do_not_depend_on_the_drafter(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], block: SpecrolloutConfig
) -> None:
    engine = start_engine(STEP_ADDER, block)
    policy = engine.run_in_worker(lambda worker: worker.specrollout_router.policy)
    assert isinstance(policy, RandomPolicy) == (block.budget == RANDOM)
    for name, sampling in SAMPLINGS.items():
        assert_equal(engine.generate(requests(8, 4), **sampling), expected[name])
    assert_drafts(engine, block, more_than=200)


def test_the_samples_are_worth_comparing(expected: dict[str, list[Rollout]]) -> None:
    assert sum(len(r.token_ids) for rollouts in expected.values() for r in rollouts) * len(BLOCKS) > 20_000
    siblings = [tuple(r.token_ids) for r in expected["T=1"]]
    assert len(set(siblings)) > 28, "siblings must differ"
    assert len({tuple(r.token_ids) for r in expected["T=0"]}) <= 8, "greedy siblings must not"


def test_preemption_changes_nothing(start_engine: Callable[..., RolloutEngine], plain: RolloutEngine) -> None:
    block = SpecrolloutConfig(drafters=(WRONG, SUFFIX), budget=RANDOM)
    engine = start_engine(STEP_ADDER, block, max_new_tokens=300, kv_cache_memory_bytes=20 << 20)
    asked = requests(6, 4, first=100)
    sampling = {"max_tokens": 300, "ignore_eos": True, "stop_token_ids": []}
    assert_equal(engine.generate(asked, **sampling), plain.generate(asked, **sampling))
    prefills = [row for row in engine.stats().trace.rows if not row[4]]
    assert len(prefills) > 3, "the cache was large enough: nothing was preempted"


def test_vllm_s_own_ngram_under_our_sampler(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), speculative_config=method)
    for name in ("T=1", "T=0", "T=0.7, penalties"):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[name]), expected[name])


def test_tokens_do_not_depend_on_order_or_other_requests(
    plain: RolloutEngine, expected: dict[str, list[Rollout]]
) -> None:
    asked = requests(8, 4)
    backwards = plain.generate(asked[::-1], **SAMPLINGS["T=1"])[::-1]
    assert_equal(backwards, expected["T=1"])
    alone = plain.generate(asked[5:6], **SAMPLINGS["T=1"])
    assert_equal(alone, expected["T=1"][5:6])


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_steps_of_a_drafting_pause_have_no_drafts(
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    monkeypatch: pytest.MonkeyPatch,
    is_asynchronous: bool,
) -> None:
    """No draft is ever accepted. Drafting is tried, and then most steps are scheduled without drafts."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(WRONG,)), async_scheduling=is_asynchronous)
    scheduler = scheduler_of(engine._llm.llm_engine)
    schedule, has_drafts = scheduler.schedule, []

    def record(*args: Any) -> Any:
        output = schedule(*args)
        has_drafts.append(bool(output.scheduled_spec_decode_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", record)
    engine.generate(requests(8, 4))
    found = engine.generate(requests(8, 4), **SAMPLINGS["T=1"])
    assert_equal(found, expected["T=1"])
    assert any(has_drafts) and sum(has_drafts) < 0.6 * len(has_drafts)


def test_a_request_may_opt_out_of_speculation(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(STEP_ADDER, BLOCKS["wrong drafts"])
    asked = [
        RolloutRequest(r.prompt_token_ids, r.prompt_index, r.sample_index, speculate=False) for r in requests(8, 4)
    ]
    assert_equal(engine.generate(asked, **SAMPLINGS["T=1"]), expected["T=1"])
    assert engine.stats().num_proposed == 0


def test_the_policy_version_changes_the_noise(plain: RolloutEngine, expected: dict[str, list[Rollout]]) -> None:
    later = [RolloutRequest(r.prompt_token_ids, r.prompt_index, r.sample_index, 1) for r in requests(8, 4)]
    equal, total = count_equal(plain.generate(later, **SAMPLINGS["T=1"]), expected["T=1"])
    assert equal < 0.6 * total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", [BLOCKS["auto"], BLOCKS["mixed drafters, random budgets"]], ids=["auto", "mixed"])
def test_a_million_tokens(
    start_engine: Callable[..., RolloutEngine], plain: RolloutEngine, block: SpecrolloutConfig
) -> None:
    """Compares about 500,000 tokens for each of two blocks, at T=1."""
    engine = start_engine(STEP_ADDER, block, max_new_tokens=320)
    equal = total = 0
    while total < 500_000:
        asked = requests(32, 8, first=1000 + total)
        more = count_equal(engine.generate(asked, max_tokens=320), plain.generate(asked, max_tokens=320))
        equal, total = equal + more[0], total + more[1]
    print(f"{equal} of {total} tokens equal")
    assert equal == total


def test_seedless_sampling_is_refused(plain: RolloutEngine) -> None:
    from nemo_specrollout.generation.engine.vllm_requests import REFUSAL

    with pytest.raises(REFUSAL, match="needs a seed that does not depend on arrival order"):
        plain.generate(requests(1, 1), extra_args=None)


def test_log_probs_are_those_of_a_hugging_face_forward_pass(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], tiny_model: Path
) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32)
    engine = start_engine(STEP_ADDER, BLOCKS["mixed drafters, random budgets"])
    asked = requests(8, 4)
    for request, rollout in list(zip(asked, engine.generate(asked), strict=True))[::4]:
        ids = torch.tensor([[*request.prompt_token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        start = len(request.prompt_token_ids)
        wanted = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert torch.allclose(torch.tensor(rollout.logprobs), wanted, atol=1e-4)
