# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights: vLLM's own networks, with the noise of the requests, asked only where their drafts pay."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from mtp_policy import save_mtp_policy
from test_equality import NGRAM, SAMPLINGS, assert_equal, requests

from lab.local.engine import Generation, RolloutEngine
from lab.local.random_budgets import RANDOM
from lab.vllm_on_cpu.bfloat16_head import multiplies_bfloat16
from nemo_specrollout.config.block import BudgetConfig, DraftRefreshConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import (
    DrafterConfig,
    DraftModelDrafterConfig,
    Eagle3DrafterConfig,
    MtpDrafterConfig,
)
from nemo_specrollout.drafters.base import Texts
from nemo_specrollout.generation.engine.compat import scheduler_of
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.speculation.policy import FixedPolicy

pytestmark = pytest.mark.integration

# (seed of the request, position of the first draft, depth): the draft tokens.
Drafts = dict[tuple[int, int, int], list[int]]
ITSELF = DraftModelDrafterConfig(model=str(STEP_ADDER))
GREEDY = DraftModelDrafterConfig(model=str(STEP_ADDER), sampling="greedy")
MTP = MtpDrafterConfig()
LONG = {"max_tokens": 128, "ignore_eos": True, "stop_token_ids": []}

STEP_ADDER_HEAD = STEP_ADDER.parent / "step_adder_eagle3"
# Accepted share of its drafts by position, by sampling of drafts and temperature; measured with vLLM 0.32.
GOLDEN = {
    "shared_noise": {1.0: [0.8381, 0.7493, 0.6722, 0.6257], 0.0: [0.8287, 0.7895, 0.7438, 0.7089]},
    "greedy": {1.0: [0.829, 0.6806, 0.6, 0.5375]},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    """An EAGLE-3 head of random weights. Its drafts are useless but reproducible.

    Its LM head is not the policy's, which vLLM would let it share, in the policy's precision.
    """
    from nemo_specrollout.heads.head.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "untrained"
    untrained = create_head(STEP_ADDER)
    untrained.model.lm_head.weight.data.mul_(1.25)
    save_head(untrained, folder)
    return Eagle3DrafterConfig(model=str(folder))


@pytest.fixture(scope="module")
def small_vocabulary_head(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    from nemo_specrollout.heads.head.head import create_head, save_head

    folder = tmp_path_factory.mktemp("heads") / "small"
    save_head(create_head(STEP_ADDER, draft_token_ids=range(5, 60)), folder)
    return Eagle3DrafterConfig(model=str(folder))


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {name: plain.generate(requests(8, 4), **sampling) for name, sampling in SAMPLINGS.items()}


def worker_of(engine: RolloutEngine) -> Any:
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def drafting_of(engine: RolloutEngine) -> Any:
    return worker_of(engine).specrollout_router


def recorded(engine: RolloutEngine) -> Drafts:
    """Returns a record to which every later draft of the engine's drafter with weights is added."""
    drafting, found, seed_of = drafting_of(engine), Drafts(), {}
    board, open_requests = drafting.board, drafting.open
    choose = board.choose

    def note_seeds(new_requests: Any) -> None:
        seed_of.update({r.slot: r.identity.seed for r in new_requests})
        open_requests(new_requests)

    def record(texts: Texts, *others: Any) -> None:
        for row, slot in enumerate(texts.slots_B.tolist()):
            depth = int(board.tables.found_DB[board.model, row])
            if depth > 0:
                tokens = board.tables.tokens_DBK[board.model, row, :depth].tolist()
                found[seed_of[slot], int(texts.total_len_S[slot]), depth] = tokens
        choose(texts, *others)

    drafting.open, board.choose = note_seeds, record
    return found


def test_only_decode_steps_teach_the_seconds_of_drafting(start_engine: Callable[..., RolloutEngine]) -> None:
    """After a prefill the model reads whole prompts, beside which no draft token has a price."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(Eagle3DrafterConfig(model=str(STEP_ADDER_HEAD)),)))
    worker = worker_of(engine)
    step_model, most_rows = worker.specrollout_accounts.step_model, 1 + worker.model_runner.num_speculative_steps
    observe, seen = step_model.observe_drafting, list[tuple[int, int, int]]()

    def note(num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        seen.append((num_rows, num_requests, depth))
        observe(num_rows, num_requests, depth, seconds)

    step_model.observe_drafting = note
    engine.generate(requests(8, 4))
    assert len(seen) > 5 and all(rows <= most_rows * num_requests for rows, num_requests, _ in seen)


@pytest.mark.parametrize("name", ["eagle3 and n-gram", "reduced vocabulary"])
def test_tokens_do_not_depend_on_a_drafter_with_weights(
    start_engine: Callable[..., RolloutEngine],
    expected: dict[str, list[Rollout]],
    head: DrafterConfig,
    small_vocabulary_head: DrafterConfig,
    name: str,
) -> None:
    drafters, budget, samplings = {
        "eagle3 and n-gram": ((head, NGRAM), RANDOM, tuple(SAMPLINGS)),
        "reduced vocabulary": ((NGRAM, small_vocabulary_head), RANDOM, ("T=1", "T=0")),
    }[name]
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters, budget=budget))
    for sampling in samplings:
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    index = [d.type in ("eagle3", "draft_model") for d in drafters].index(True)
    assert sum(engine.stats().proposed[index]) > 100, "nothing was drafted with weights, so nothing was shown"


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ["always", "greedy drafts"])
def test_tokens_do_not_depend_on_how_a_drafter_samples(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]], head: DrafterConfig, drafters: str
) -> None:
    drafter = head if drafters == "always" else GREEDY
    block = SpecrolloutConfig(drafters=(drafter,), budget=BudgetConfig("fixed", k=3))
    engine = start_engine(STEP_ADDER, block)
    for sampling in ("T=1", "T=0.7, penalties"):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])


def test_a_drafter_equal_to_the_policy_is_always_right(
    start_engine: Callable[..., RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    """This needs the exact noise of request and position, and a KV cache without gaps."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(ITSELF, NGRAM), budget=RANDOM))
    for sampling in ("T=1", "T=0", "T=0.7"):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS[sampling]), expected[sampling])
    stats = engine.stats()
    assert sum(stats.proposed[0]) > 1000
    assert stats.accepted[0] == stats.proposed[0]


@pytest.mark.parametrize("sampling", GOLDEN)
def test_acceptance_of_the_shipped_pair_is_what_it_was(
    start_engine: Callable[..., RolloutEngine], sampling: str
) -> None:
    """With seeded requests, a wrong weight layout, position or noise changes the acceptance of the shipped head."""
    trained = Eagle3DrafterConfig(model=str(STEP_ADDER_HEAD), sampling=sampling)
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(trained,), budget=BudgetConfig("fixed", k=4)))
    for temperature, golden_K in GOLDEN[sampling].items():
        before = engine.stats()
        engine.generate(requests(16, 4), **{**LONG, "temperature": temperature, "max_tokens": 64})
        after = engine.stats()
        proposed_K, accepted_K = (
            np.subtract(getattr(after, k)[0], getattr(before, k)[0])[:4] for k in ("proposed", "accepted")
        )
        assert accepted_K / proposed_K == pytest.approx(golden_K, abs=0.01)


@pytest.fixture(scope="module")
def drafts_of_a_busy_head(start_engine: Callable[..., RolloutEngine], head: DrafterConfig) -> Drafts:
    """Drafts of a head that is asked in every step."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)), 128)
    drafts = recorded(engine)
    engine.generate(requests(6, 4, first=50), **LONG)
    return drafts


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"kv_cache_memory_bytes": 20 << 20}, id="preempted"),
        pytest.param({"max_num_batched_tokens": 240, "max_num_seqs": 24}, id="read in bits"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix caching", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_skipped_steps_drafts_as_well_afterwards(
    start_engine: Callable[..., RolloutEngine],
    drafts_of_a_busy_head: Drafts,
    head: DrafterConfig,
    kwargs: dict[str, Any],
) -> None:
    """The head drafts as if it were asked in every step, whatever it has to catch up with."""
    block = SpecrolloutConfig(drafters=(head,), budget=RANDOM)
    engine = start_engine(STEP_ADDER, block, 128, **kwargs)
    drafts = recorded(engine)
    engine.generate(requests(6, 4, first=50), **LONG)
    assert_same_drafts(drafts, drafts_of_a_busy_head)


def test_samples_of_a_prompt_share_all_of_its_cache_blocks(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The step that reads the prompt has as many rows as in an engine without a head."""

    def rows_read(drafters: tuple[DrafterConfig, ...]) -> int:
        engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=drafters), block_size=32)
        scheduler, rows = scheduler_of(engine._llm.llm_engine), []
        schedule = scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            rows.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = noted
        text = list(requests(1, 1)[0].prompt_token_ids) * 40
        engine.generate([RolloutRequest(text[:100], 0, s) for s in range(4)], max_tokens=1)
        return max(rows)

    assert rows_read((head,)) == rows_read(()) == 100 + 3 * 4


def test_a_head_that_was_dormant_drafts_well_for_new_requests(
    start_engine: Callable[..., RolloutEngine],
    drafts_of_a_busy_head: Drafts,
    head: DrafterConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While dormant, it drafts for no new request, and tokens are the same."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)), 128)
    policy, drafts, asked = drafting_of(engine).policy, recorded(engine), requests(6, 4, first=50)
    generation = Generation(engine, asked, sampling=LONG)
    while engine.num_steps < 20:
        generation.advance(0.0)
    assert len(drafts) > 200
    monkeypatch.setattr(policy, "is_dormant", True)
    generation.advance()
    drafts.clear()
    assert_equal(engine.generate(asked, **LONG), generation.rollouts)
    assert engine.stats().head_is_dormant and not drafts
    monkeypatch.undo()
    engine.generate(requests(1, 1), max_tokens=2)
    assert_equal(engine.generate(asked, **LONG), generation.rollouts)
    assert not engine.stats().head_is_dormant
    assert_same_drafts(drafts, drafts_of_a_busy_head)


def test_acceptance_from_before_a_dormant_period_is_forgotten(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The tasks may have changed meanwhile."""

    class Rests(FixedPolicy):
        is_dormant = True

        def requests_arrived(self, num_new: int) -> None:
            self.is_dormant = False

    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,), budget=BudgetConfig("fixed", k=3)))
    board, model, asked = drafting_of(engine).board, drafting_of(engine).model, requests(4, 2)
    rollouts = engine.generate(asked, **LONG)
    num_known = float(board.tables.evidence_DE2[0, :, 1].sum())
    assert num_known > 300
    drafting_of(engine).policy, num_steps = Rests(3, 8), engine.num_steps
    model.plan(3)
    generation = Generation(engine, asked, sampling=LONG)
    while engine.num_steps == num_steps:
        generation.advance(0.0)
    assert not model.is_dormant and board.tables.evidence_DE2[0, :, 1].sum() < num_known / 2
    generation.advance()
    assert_equal(generation.rollouts, rollouts)


def test_a_head_multiplies_in_bfloat16_if_the_cpu_can(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """The policy's type does not matter, and a published head is treated alike."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    for _ in range(2):
        draft = drafting_of(engine).model._speculator.model
        assert draft.lm_head.weight.dtype == (torch.bfloat16 if multiplies_bfloat16() else torch.float32)
        assert draft.model.norm.weight.dtype == torch.float32
        engine.load_head(Path(head.model))


def test_a_head_reads_no_request_that_is_decoded_plainly(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig
) -> None:
    """An equality check therefore costs as much as plain decoding, and does not make the head look expensive."""
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    model, num_read = drafting_of(engine).model, []
    propose = model._propose
    model._propose = lambda *args, **kwargs: num_read.append(1) or propose(*args, **kwargs)
    asked = requests(2, 2)
    plain = engine.generate([replace(request, speculate=False) for request in asked])
    assert not num_read and model.depth == 0
    assert_equal(engine.generate(asked), plain)
    assert num_read


def assert_same_drafts(drafts: Drafts, of_a_busy_drafter: Drafts) -> None:
    """Asserts equal drafts at the same positions of the same requests, except for rare near-ties."""
    wanted = {(request, position): tokens for (request, position, _), tokens in of_a_busy_drafter.items()}
    pairs = [
        (wanted[request, position], tokens[:3])
        for (request, position, _), tokens in drafts.items()
        if (request, position) in wanted
    ]
    assert len(pairs) > 500
    different = sum(a[: len(b)] != b for a, b in pairs)
    assert different <= len(pairs) // 200, f"{different} of {len(pairs)} drafts differ"


def test_drafts_stop_at_the_end_of_the_context(start_engine: Callable[..., RolloutEngine]) -> None:
    asked = requests(1, 2, first=80)
    sampling = {"max_tokens": 500, "ignore_eos": True, "stop_token_ids": []}
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), max_new_tokens=500)
    block = SpecrolloutConfig(drafters=(ITSELF,), budget=BudgetConfig("fixed", k=8))
    engine = start_engine(STEP_ADDER, block, max_new_tokens=500)
    found = engine.generate(asked, **sampling)
    assert_equal(found, plain.generate(asked, **sampling))
    assert {len(r.prompt_token_ids) + len(f.token_ids) for r, f in zip(asked, found, strict=True)} == {512}
    stats = engine.stats()
    assert stats.accepted == stats.proposed


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
    from nemo_specrollout.heads.head.head import create_head, save_head

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

    from nemo_specrollout.heads.head.head import create_head, save_head

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


def policy_tensors(scale: float = 1.0) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    tensors = load_file(STEP_ADDER / "model.safetensors")
    return [(name, t.float() * (scale if "layers.1.mlp" in name else 1.0)) for name, t in tensors.items()]


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


@pytest.mark.slow
def test_a_head_that_is_never_right_is_no_longer_asked(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, expected: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=(head,)))
    for _ in range(3):
        assert_equal(engine.generate(requests(8, 4), **SAMPLINGS["T=1"]), expected["T=1"])
    proposed = [sum(engine.stats().proposed[0])]
    for _ in range(2):
        engine.generate(requests(8, 4), **SAMPLINGS["T=1"])
        proposed.append(sum(engine.stats().proposed[0]))
    assert proposed[-1] - proposed[0] < 100


@pytest.fixture(scope="module")
def mtp_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp_policy")
    save_mtp_policy(folder)
    return folder


@pytest.fixture(scope="module")
def expected_of_mtp_policy(start_engine: Callable[..., RolloutEngine], mtp_policy: Path) -> dict[str, list[Rollout]]:
    plain = start_engine(mtp_policy, SpecrolloutConfig(drafters=()))
    asked = requests(8, 4, first=50)
    return {name: plain.generate(asked, **SAMPLINGS[name], **LONG) for name in ("T=1", "T=0")}


@pytest.fixture(scope="module")
def mtp_engine(start_engine: Callable[..., RolloutEngine], mtp_policy: Path) -> RolloutEngine:
    return start_engine(mtp_policy, SpecrolloutConfig(drafters=(MTP,), budget=BudgetConfig("fixed", k=3)))


def test_mtp_heads_draft_and_catch_up_with_skipped_steps(
    start_engine: Callable[..., RolloutEngine],
    mtp_policy: Path,
    mtp_engine: RolloutEngine,
    expected_of_mtp_policy: dict[str, list[Rollout]],
) -> None:
    mixed = SpecrolloutConfig(drafters=(NGRAM, MTP), budget=RANDOM)
    drafts = []
    for engine, mtp, least in ((mtp_engine, 0, 0.6), (start_engine(mtp_policy, mixed), 1, 0.3)):
        assert_equal(engine.generate(requests(8, 4, first=50), temperature=0.0, **LONG), expected_of_mtp_policy["T=0"])
        drafts.append(recorded(engine))
        assert_equal(engine.generate(requests(8, 4, first=50), **LONG), expected_of_mtp_policy["T=1"])
        stats = engine.stats()
        proposed, accepted = (sum(getattr(stats, key)[mtp]) for key in ("proposed", "accepted"))
        assert proposed > 1000 and accepted > least * proposed, f"{accepted} of {proposed} drafts were right"
    busy, lazy = drafts
    assert_same_drafts(lazy, busy)


def test_mtp_heads_change_no_token_under_the_automatic_budget(
    start_engine: Callable[..., RolloutEngine], mtp_policy: Path, expected_of_mtp_policy: dict[str, list[Rollout]]
) -> None:
    engine = start_engine(mtp_policy, SpecrolloutConfig(drafters=(MTP, NGRAM)))
    for name, expected in expected_of_mtp_policy.items():
        assert_equal(engine.generate(requests(8, 4, first=50), **SAMPLINGS[name], **LONG), expected)
    assert sum(engine.stats().proposed[0]) > 0


def test_mtp_heads_follow_the_policys_weights(
    mtp_engine: RolloutEngine, mtp_policy: Path, expected_of_mtp_policy: dict[str, list[Rollout]]
) -> None:
    """The heads come with the policy's checkpoint. If their part is broken, the alarm does not blame shared modules."""
    from safetensors.torch import load_file

    tensors = load_file(mtp_policy / "model.safetensors")
    rates = []
    for sign in (1.0, -1.0):
        heads = {name: sign * t for name, t in tensors.items() if name.endswith("input_proj.weight")}
        before = mtp_engine.stats()
        mtp_engine.load_weights((tensors | heads).items())
        assert_equal(mtp_engine.generate(requests(8, 4, first=50), **LONG), expected_of_mtp_policy["T=1"])
        drafted, right = (
            sum(getattr(mtp_engine.stats(), key)[0]) - sum(getattr(before, key)[0]) for key in ("proposed", "accepted")
        )
        rates.append(right / drafted)
        samples = drafting_of(mtp_engine).samples
        assert samples.head_version == samples.policy_version
    assert rates[0] > 0.6 and rates[1] < 0.2
    (alarm,) = mtp_engine.take_alarms()
    assert alarm["event"] == "refit" and alarm["cause"] == "unknown" and not alarm["drafter_off"]


def test_a_head_with_another_rope_is_recognized_and_not_loaded(
    start_engine: Callable[..., RolloutEngine], head: DrafterConfig, tmp_path: Path
) -> None:
    from nemo_specrollout.heads.head.head import create_head, save_head

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
