# SPDX-License-Identifier: Apache-2.0
"""Heads in an engine that runs: what is loaded and refused, what the canary says, and the features that are captured."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from model_drafters import (
    ITSELF,
    LONG,
    Drafts,
    drafts_in_every_step,
    head_of_few_tokens,
    plain_rollouts,
    policy_tensors,
    recorded,
    untrained_head,
    worker_of,
)
from test_equality import NGRAM, assert_equal, requests

from lab.local.engine import Generation, RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import BudgetConfig, DraftRefreshConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    Eagle3DrafterConfig,
)
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.heads.features.features import SequenceFeatures

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    return untrained_head(tmp_path_factory.mktemp("heads") / "untrained")


@pytest.fixture(scope="module")
def small_vocabulary_head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    return head_of_few_tokens(tmp_path_factory.mktemp("heads") / "small")


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    return plain_rollouts(start_engine)


@pytest.fixture(scope="module")
def drafts_of_a_busy_head(start_engine: Callable[..., RolloutEngine], head: DrafterConfig) -> Drafts:
    return drafts_in_every_step(start_engine, head)


@pytest.mark.parametrize(
    "has_own_embedding",
    [pytest.param(False, id="shared embedding", marks=pytest.mark.slow), pytest.param(True, id="own embedding")],
)
def test_a_published_head_drafts_like_one_loaded_at_start(
    has_own_embedding: bool,
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    head: DrafterConfig,
    drafts_of_a_busy_head: Drafts,
    tmp_path: Path,
) -> None:
    """The policy does not change, although vLLM lets a head share its LM head and embedding at first."""
    from nemo_specrollout.heads.training.head import create_head, save_head

    other = create_head(STEP_ADDER, seed=5)
    other.model.lm_head.weight.data.mul_(0.5)
    if has_own_embedding:  # of an older policy, say; the published one's is the policy's and not in its folder
        other.has_own_embedding = True
        other.model.embed_tokens.weight.data = other.model.embed_tokens.weight.roll(1, 0)
    save_head(other, tmp_path / "other")
    drafter = Eagle3DrafterConfig(model=str(tmp_path / "other"))
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=3)), 128)
    assert_equal(engine.generate(requests(8, 4), max_tokens=64), expected["T=1"])
    engine.load_head(Path(str(head.model)))
    drafts = recorded(engine)
    engine.generate(requests(6, 4, first=50), **LONG)
    different = sum(drafts[key] != tokens for key, tokens in drafts_of_a_busy_head.items() if key in drafts)
    assert different <= len(drafts) // 200
    assert_equal(engine.generate(requests(8, 4), max_tokens=64), expected["T=1"])


def test_a_head_that_does_not_fit_is_refused(
    start_engine: Callable[..., RolloutEngine],
    head: DrafterConfig,
    small_vocabulary_head: DrafterConfig,
    tmp_path: Path,
) -> None:
    import torch

    from nemo_specrollout.heads.training.head import create_head, save_head

    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)), 128)
    broken = create_head(STEP_ADDER)
    broken.model.norm.weight.data[0] = torch.nan
    save_head(broken, tmp_path / "broken")
    for folder, sentence in (
        (tmp_path / "broken", "NaN or infinite"),
        (Path(str(small_vocabulary_head.model)), "the same draft vocabulary"),
        (tmp_path / "absent", "no head folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            engine.load_head(folder)
    engine.generate(requests(2, 2), **LONG)
    assert sum(engine.stats().proposed[0]) > 100


def test_features_of_a_rollout_equal_those_of_a_forward_pass(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refit cuts the captured sequences, so that each has one policy version. A slow machine captures as many of them."""
    from nemo_specrollout.heads.features.features import hf_features, load_policy
    from nemo_specrollout.heads.serving import feature_capture

    monkeypatch.setattr(feature_capture, "CAPTURE_TIME_SHARE", 1.0)

    refresh = DraftRefreshConfig(rollout_capture_share=0.5)
    block = SpecrolloutConfig(drafters=(head, NGRAM), budget=RANDOM, draft_refresh=refresh)
    engine = start_engine(STEP_ADDER, block, 128)
    asked = requests(6, 4, first=50)
    rollouts = engine.generate(asked, **LONG)
    engine.generate(requests(1, 1), max_tokens=1)  # the batch must change for the last ones to be closed
    captured = engine.take_features()
    assert 4 <= len(captured) <= 20
    wanted = {(*r.prompt_token_ids, *o.token_ids[:-1]): r for r, o in zip(asked, rollouts, strict=True)}
    texts = [(f.token_ids_T.tolist(), f.prompt_length) for f in captured]
    assert all(tuple(ids) in wanted and length == len(wanted[tuple(ids)].prompt_token_ids) for ids, length in texts)
    assert_same_features(captured, list(hf_features(load_policy(STEP_ADDER), texts, (1, 2, 3))))
    assert {f.policy_version for f in captured} == {0}
    engine.load_weights(policy_tensors())
    assert {f.policy_version for f in engine.take_features()} <= {0}
    engine.generate(asked, **LONG)
    assert {f.policy_version for f in engine.take_features()} == {1}


def test_samples_that_share_their_prompts_kv_give_features(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample gives features of the tokens that it computed. They equal the policy's features of the whole text."""
    from nemo_specrollout.heads.features.features import hf_features, load_policy
    from nemo_specrollout.heads.serving import feature_capture

    monkeypatch.setattr(feature_capture, "CAPTURE_TIME_SHARE", 1.0)
    refresh = DraftRefreshConfig(rollout_capture_share=1.0)
    block = SpecrolloutConfig(drafters=(head,), draft_refresh=refresh)
    engine = start_engine(STEP_ADDER, block, 64, block_size=32)
    asked = [replace(r, prompt_token_ids=list(r.prompt_token_ids) * 6) for r in requests(2, 4, first=80)]
    assert all(64 < len(r.prompt_token_ids) < 300 for r in asked)
    rollouts = engine.generate(asked, **{**LONG, "max_tokens": 32})
    engine.generate(requests(1, 1), max_tokens=1)  # the batch must change for the last ones to be closed
    texts = {(*r.prompt_token_ids, *o.token_ids): len(r.prompt_token_ids) for r, o in zip(asked, rollouts, strict=True)}
    wholes = hf_features(load_policy(STEP_ADDER), [(list(ids), length) for ids, length in texts.items()], (1, 2, 3))
    whole_of = {tuple(w.token_ids_T.tolist()): w for w in wholes}
    captured = [f for f in engine.take_features() if f.num_tokens > 8 and f.prompt_length > 64]
    assert {f.first_position > 0 for f in captured} == {True, False} and len(captured) == len(asked)
    for f in captured:
        text = next(
            t
            for t in whole_of
            if t[f.first_position : f.first_position + f.num_tokens] == tuple(f.token_ids_T.tolist())
        )
        assert f.first_position < f.prompt_length and f.whole_prompt_P.tolist() == list(text[: f.prompt_length])
        part = slice(f.first_position, f.first_position + f.num_tokens)
        torch.testing.assert_close(f.aux_TF, whole_of[text].aux_TF[part], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(f.final_TH, whole_of[text].final_TH[part], rtol=1e-4, atol=1e-3)


def assert_same_features(left: Sequence[SequenceFeatures], right: Sequence[SequenceFeatures]) -> None:
    """Asserts equality up to rounding: hidden states are as large as some tens."""
    import torch

    for a, b in zip(left, right, strict=True):
        assert a.prompt_length == b.prompt_length and a.token_ids_T.tolist() == b.token_ids_T.tolist()
        torch.testing.assert_close(a.aux_TF, b.aux_TF, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(a.final_TH, b.final_TH, rtol=1e-4, atol=1e-3)


def test_a_stale_drafter_raises_an_alarm_and_goes_on(
    start_engine: Callable[..., RolloutEngine],
) -> None:
    """The tasks may have changed as well. A refit that changes little raises no alarm, and tokens are exact throughout."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("fixed", k=3)), 128)
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), 128)
    asked = requests(6, 4, first=50)
    for scale in (1.0, 1.001, -1.0):
        for each in (engine, plain):
            each.load_weights(policy_tensors(scale))
        assert_equal(engine.generate(asked, **LONG), plain.generate(asked, **LONG))
        alarms = engine.take_alarms()
        assert len(alarms) == (scale < 0)
    assert alarms[0]["event"] == "refit" and alarms[0]["cause"] == "stale" and not alarms[0]["drafter_off"]
    proposed = np.sum(engine.stats().proposed)
    engine.generate(asked, **LONG)
    assert np.sum(engine.stats().proposed) > 1.1 * proposed


def test_a_drafter_is_turned_off_only_if_it_is_broken(
    start_engine: Callable[..., RolloutEngine],
) -> None:
    """The tasks may have changed, so the canary learns a new baseline and does not repeat the alarm."""

    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("fixed", k=3)), 128)
    asked, found = requests(6, 4, first=50), []
    for scale in (1.0, -1.0):
        engine.load_weights(policy_tensors(scale))
        engine.generate(asked, **LONG)
        found += engine.take_alarms()
    (alarm,) = found
    assert alarm["cause"] == "stale" and not alarm["drafter_off"]
    proposed = np.sum(engine.stats().proposed)
    engine.generate(asked, **LONG)
    assert engine.take_alarms() == [] and np.sum(engine.stats().proposed) > 1.3 * proposed
    engine.load_weights(policy_tensors())
    engine.generate(asked, **LONG)
    worker_of(engine).model_runner.speculator.model.model.norm.weight.data.zero_()
    engine.generate(asked, **LONG)
    (alarm,) = engine.take_alarms()
    assert alarm["cause"] == "all_zero" and alarm["drafter_off"]


def test_a_head_that_loses_its_weights_raises_an_alarm(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """A wake-up that does not restore the weights looks like this."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("fixed", k=3)), 128)
    engine.generate(requests(6, 4, first=50), **LONG)
    draft = worker_of(engine).model_runner.speculator.model
    draft.model.norm.weight.data.zero_()
    engine.generate(requests(6, 4, first=60), **LONG)
    (alarm,) = engine.take_alarms()
    assert alarm["cause"] == "all_zero" and alarm["seen"] < 0.2 and alarm["expected"] > 0.8


def test_samples_know_their_versions_and_each_span_is_exact(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """Weights change while requests run, and tokens are the same with and without drafts."""
    asked = requests(3, 2, first=50)
    engines = [
        start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=RANDOM), 96)
        for drafters in ((head, NGRAM), (NGRAM,))
    ]
    outputs = []
    for engine in engines:
        generation = Generation(engine, asked, sampling={**LONG, "max_tokens": 96})
        while not generation.is_done and engine.num_steps < 14:
            generation.advance(0.0)
        engine.load_weights(policy_tensors(1.5))
        generation.advance()
        sample_stats = engine.take_sample_stats(asked)
        outputs.append((generation.rollouts, sample_stats))
        for request, rollout, sample in zip(asked, generation.rollouts, sample_stats, strict=True):
            assert sample is not None and 0 < sample["num_accepted"] + 1 <= sample["num_drafted"] + 1
            (first, start), (second, change) = sample["policy_spans"]
            prompt = len(request.prompt_token_ids)
            assert (first, second) == (0, 1) and prompt == start < change < prompt + len(rollout.token_ids)
    changes = [[s["policy_spans"][1][1] for s in sample_stats if s] for _, sample_stats in outputs]
    for row, (change_a, change_b) in enumerate(zip(*changes, strict=True)):
        until = min(change_a, change_b) - len(asked[row].prompt_token_ids)
        a, b = (rollouts[row].token_ids[:until] for rollouts, _ in outputs)
        assert a == b and until > 5
    assert all((s and s["head_versions"] == (0, 0)) or s["head_versions"] == [0, 0] for s in outputs[0][1])


def test_a_head_with_another_rope_is_recognized_and_not_loaded(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, tmp_path: Path
) -> None:
    from nemo_specrollout.heads.training.head import create_head, save_head

    folder = tmp_path / "other"
    save_head(create_head(STEP_ADDER), folder)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))
    block = SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model=str(folder)),), budget=BudgetConfig("fixed", k=3))
    engine = start_engine(STEP_ADDER, block)
    with pytest.raises(ValueError, match=r"its rope_theta is 10000\.0, the engine's 500\.0"):
        engine.load_head(Path(str(head.model)))
    engine.load_head(folder, expected_length=3.0)
    engine.generate(requests(6, 4, first=50), **LONG)
    (alarm,) = engine.take_alarms()
    assert alarm["cause"] == "rope" and "its rope_theta is 500.0, the policy's 10000.0" in alarm["sentence"]
