# SPDX-License-Identifier: Apache-2.0
"""Near-ties of early requests: what the vLLM worker keeps is what the scores say, whatever drafts a request has.

The reference is Hugging Face's forward pass with numpy's noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER

from lab.local.engine import Generation, RolloutEngine
from nemo_specrollout.audit.noise import scheme_of
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity, Rollout, RolloutRequest, as_bytes
from nemo_specrollout.generation.step import row_sampling
from nemo_specrollout.generation.step.near_ties import NearTies, Ties

BLOCK = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig())
TOLERANCE = 2e-3
"""Of gaps of a few nats, which travel as float16 numbers."""
WAYS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0": {"temperature": 0.0},
    "T=0.7, top-k": {"temperature": 0.7, "top_k": 5},
}
REQUESTS = [RolloutRequest([*range(40, 45 + i % 3)], i, 0) for i in range(5)]


# The object alone


def opened(slot: int, ties: int | None, num_tokens: int, limit: int = 20) -> NewRequest:
    return NewRequest(slot, RequestIdentity(1, 1, ties=ties), num_tokens, range(num_tokens), limit)


class Slots:
    """Near-ties of two slots, whose tables have at each place what this object says was sampled there."""

    def __init__(self) -> None:
        self.ties = NearTies(2, 20, torch.device("cpu"))
        self.lengths_S = torch.zeros(2, dtype=torch.int32)

    def open(self, *requests: NewRequest) -> None:
        self.ties.open(requests)
        for request in requests:
            self.lengths_S[request.slot] = request.num_tokens

    def sample(self, slot: int, num_tokens: int, gap: float) -> None:
        """Samples tokens of one gap, and writes beyond them what a rejected draft leaves."""
        first = int(self.lengths_S[slot])
        self.ties.tables.gap_SL[slot, first : first + num_tokens] = gap
        self.ties.tables.gap_SL[slot, first + num_tokens] = -1.0
        self.ties.tables.runner_up_SL[slot, first : first + num_tokens] = first
        self.lengths_S[slot] += num_tokens

    def take(self, *names: int) -> dict[int, tuple[int, list[float]]]:
        found = self.ties.take(names, self.lengths_S)
        return {name: (ties.first, ties.gaps_N.tolist()) for name, ties in found.items()}


@pytest.mark.unit
def test_what_a_request_leaves_survives_the_next_one_in_its_slot() -> None:
    slots = Slots()
    slots.open(opened(0, 7, 3), opened(1, None, 2))
    assert slots.ties.tables.wanted_S.tolist() == [True, False]
    slots.sample(0, 2, 0.5)
    assert slots.take(7, 99) == {7: (3, [0.5, 0.5])}
    slots.sample(0, 1, 0.25)
    slots.ties.close([0], slots.lengths_S)
    slots.open(opened(0, 8, 5))
    slots.sample(0, 3, 4.0)
    assert slots.take(7, 8) == {7: (5, [0.25]), 8: (5, [4.0, 4.0, 4.0])}
    assert slots.take(7, 8) == {8: (8, [])}, "a request that has ended is forgotten"


@pytest.mark.unit
def test_a_request_that_was_preempted_goes_on_where_it_samples_again() -> None:
    slots = Slots()
    slots.open(opened(0, 7, 3))
    slots.sample(0, 4, 0.5)
    slots.ties.close([0], slots.lengths_S)
    slots.open(opened(1, 7, 6))  # the last token had not been returned
    slots.sample(1, 2, 0.125)
    assert slots.take(7) == {7: (3, [0.5, 0.5, 0.5, 0.125, 0.125])}


@pytest.mark.unit
def test_what_was_so_far_can_be_forgotten() -> None:
    slots = Slots()
    slots.open(opened(0, 7, 3), opened(1, 8, 3))
    slots.sample(0, 2, 0.5)
    slots.sample(1, 2, 0.5)
    slots.ties.close([1], slots.lengths_S)
    slots.ties.forget(slots.lengths_S)
    slots.sample(0, 1, 0.25)
    assert slots.take(7, 8) == {7: (5, [0.25])}


@pytest.mark.unit
def test_tables_are_given_to_steps_with_a_request_that_asks() -> None:
    slots = Slots()
    slots.open(opened(0, 7, 3), opened(1, None, 2))
    assert slots.ties.tables_for(np.array([0, 1])) is slots.ties.tables
    assert slots.ties.tables_for(np.array([1])) is None
    slots.ties.close([0], slots.lengths_S)
    slots.open(opened(0, None, 3))
    assert slots.ties.tables_for(np.array([0, 1])) is None
    assert not slots.ties.tables.wanted_S.any()


@pytest.mark.unit
def test_two_live_requests_of_one_name_end_no_engine() -> None:
    slots = Slots()
    slots.open(opened(0, 7, 3), opened(1, 7, 3))
    slots.sample(0, 1, 0.5)
    slots.sample(1, 2, 0.25)
    assert slots.take(7) == {7: (3, [0.5])}


# In engines


def take(engine: RolloutEngine, names: Sequence[int]) -> dict[int, Ties]:
    found = engine._ask(WorkerCalls.specrollout_take_ties, list(names))
    arrays = {n: (np.frombuffer(gaps, np.float16), np.frombuffer(ids, np.int32)) for n, (_, gaps, ids) in found.items()}
    return {name: Ties(found[name][0], *arrays[name]) for name in found}


@cache
def policy() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32)


def best_three(request: RolloutRequest, response: list[int], seed: int, way: dict[str, Any]) -> tuple[Any, Any]:
    """Returns scores and tokens of the three best tokens at each position of a response, [T, 3] each."""
    text = [*request.prompt_token_ids, *response]
    first = len(request.prompt_token_ids)
    with torch.no_grad():
        scores_TV = policy()(torch.tensor([text])).logits[0, first - 1 : -1].double().numpy()
    if way["temperature"]:
        scores_TV = scores_TV / way["temperature"]
        if "top_k" in way:
            least_T1 = np.sort(scores_TV, axis=1)[:, [-way["top_k"]]]
            scores_TV = np.where(scores_TV < least_T1, -np.inf, scores_TV)
        places_T1 = np.arange(first - 1, len(text) - 1)[:, None]
        scores_TV = scores_TV + scheme_of(compat.VLLM_VERSION).noise(seed, places_T1, np.arange(scores_TV.shape[1]))
    tokens_T3 = np.argsort(-scores_TV, axis=1)[:, :3]
    return np.take_along_axis(scores_TV, tokens_T3, axis=1), tokens_T3


def assert_right(ties: Ties, request: RolloutRequest, response: list[int], seed: int, way: dict[str, Any]) -> None:
    """Asserts that near-ties of a request's tokens are those of the reference. `response` includes the request's prefix."""
    known = len(request.prefix_token_ids)
    assert ties.first == len(request.prompt_token_ids) + known
    num_sampled = len(response) - known
    assert num_sampled <= len(ties.gaps_N) <= num_sampled + 2 * 33, "drafts of two steps may go beyond the end"
    scores_T3, tokens_T3 = (values[known:] for values in best_three(request, response, seed, way))
    assert tokens_T3[:, 0].tolist() == response[known:]
    np.testing.assert_allclose(
        ties.gaps_N[:num_sampled].astype(np.float64), scores_T3[:, 0] - scores_T3[:, 1], TOLERANCE, TOLERANCE
    )
    is_clear_T = scores_T3[:, 1] - scores_T3[:, 2] > TOLERANCE
    assert is_clear_T.mean() > 0.9
    assert ties.runners_up_N[:num_sampled][is_clear_T].tolist() == tokens_T3[is_clear_T, 1].tolist()


def assert_kept(
    plain: RolloutEngine, engine: RolloutEngine, asked: Sequence[RolloutRequest], way: dict[str, Any]
) -> None:
    """Asserts near-ties and tokens of requests: without drafts, with right and wrong ones, and with a prefix."""
    expected = [r.token_ids for r in plain.generate(asked, **way)]
    wrong = [[t if i % 7 else 5 for i, t in enumerate(text)] for text in expected]
    kinds = {
        "no drafts": asked,
        "right drafts": [replace(q, ahead=as_bytes(t)) for q, t in zip(asked, expected, strict=True)],
        "some right drafts": [replace(q, ahead=as_bytes(t)) for q, t in zip(asked, wrong, strict=True)],
        "a prefix": [replace(q, prefix_token_ids=t[:9]) for q, t in zip(asked, expected, strict=True)],
    }
    for kind, requests in kinds.items():
        early = [replace(q, ties=100 + i) for i, q in enumerate(requests)]
        beside = replace(asked[0], prompt_index=50)  # a request of the present step
        responses = [
            [*q.prefix_token_ids, *r.token_ids]
            for q, r in zip(early, engine.generate([*early, beside], **way), strict=False)
        ]
        assert responses == expected, kind
        found = take(engine, [q.ties for q in early])
        for i, request in enumerate(early):
            assert_right(found[100 + i], request, responses[i], engine._seed_of(request), way)


@pytest.mark.integration
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_gaps_and_runners_up_are_those_of_the_scores(
    start_engine: Callable[..., RolloutEngine], asynchronous: bool
) -> None:
    """There are fewer slots than requests, so what is taken was left in slots of others."""
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    engine = start_engine(STEP_ADDER, BLOCK, async_scheduling=asynchronous, max_num_seqs=3)
    for way in WAYS.values():
        assert_kept(plain, engine, REQUESTS, way)


@pytest.mark.integration
def test_ties_are_taken_while_texts_grow(start_engine: Callable[..., RolloutEngine]) -> None:
    engine = start_engine(STEP_ADDER, BLOCK)
    assert engine._ask(WorkerCalls.specrollout_step_seconds) is None, "nothing was measured"
    asked = [replace(q, ties=i) for i, q in enumerate(REQUESTS)]
    generation = Generation(engine, asked)
    found: dict[int, Ties] = {}
    while not generation.is_done:
        generation.advance(0.0)
        for name, ties in take(engine, range(len(asked))).items():
            assert name not in found or ties.first == found[name].first + len(found[name].gaps_N)
            found[name] = found[name].then(ties) if name in found else ties
    for i, (request, rollout) in enumerate(zip(asked, generation.rollouts, strict=True)):
        assert_right(found[i], request, rollout.token_ids, engine._seed_of(request), {"temperature": 1.0})
    seconds_R, row_s = engine._ask(WorkerCalls.specrollout_step_seconds)
    assert len(seconds_R) == 64 + 1
    assert np.all(np.diff(seconds_R) >= 0) and seconds_R[0] > 0 and np.isfinite(row_s)


@pytest.mark.integration
def test_log_probs_of_other_tokens_change_no_ties(start_engine: Callable[..., RolloutEngine]) -> None:
    """Steps with a request for such log-probs are vLLM's."""
    assert_kept_beside_log_probs(start_engine(STEP_ADDER, BLOCK))


def assert_kept_beside_log_probs(engine: RolloutEngine) -> None:
    early = replace(REQUESTS[0], ties=3)
    for text in (b"", as_bytes(engine.generate([REQUESTS[0]])[0].token_ids)):
        ids = engine.submit([REQUESTS[1]], {"logprobs": 5}) + engine.submit([replace(early, ahead=text)], {})
        done: dict[str, Rollout] = {}
        while len(done) < len(ids):
            done.update(engine.step())
        assert_right(take(engine, [3])[3], early, done[ids[1]].token_ids, engine._seed_of(early), {"temperature": 1.0})


@pytest.mark.integration
def test_other_steps_get_no_tables(start_engine: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(STEP_ADDER, BLOCK)
    has_tables = list[bool]()
    draw_rows = row_sampling.draw_rows

    def noted(*arguments: Any) -> Any:
        has_tables.append(arguments[4] is not None)
        return draw_rows(*arguments)

    monkeypatch.setattr(row_sampling, "draw_rows", noted)
    engine.generate([replace(REQUESTS[0], ties=1)])
    assert all(has_tables)
    has_tables.clear()
    engine.generate(REQUESTS)
    assert has_tables and not any(has_tables)


@pytest.mark.integration
def test_an_early_request_is_no_sample_and_may_share_its_seed(start_engine: Callable[..., RolloutEngine]) -> None:
    """A text and its branch are live at once. A head neither learns from them nor is judged by them."""
    from nemo_specrollout.config.block import DraftRefreshConfig

    block = SpecrolloutConfig(
        drafters=(SuffixDrafterConfig(), Eagle3DrafterConfig(model=f"{STEP_ADDER}_eagle3")),
        run_ahead=RunAheadConfig(),
        draft_refresh=DraftRefreshConfig(rollout_capture_share=1.0),
    )
    engine = start_engine(STEP_ADDER, block)
    engine.run_in_worker(capture_regardless_of_time)
    text = engine.generate([REQUESTS[0]])[0].token_ids
    assert engine.take_sample_stats([REQUESTS[0]])[0] is not None
    counts, num_captured = engine.run_in_worker(of_head)
    assert np.array(counts).sum() > 0 and num_captured == 1
    early = replace(REQUESTS[0], ties=0, is_early=True)
    branch = replace(early, prefix_token_ids=[*text[:6], 7], ties=1)
    responses = engine.generate([early, branch, replace(early, ahead=as_bytes(text), ties=2)])
    assert responses[0].token_ids == responses[2].token_ids == text
    assert engine.take_sample_stats([REQUESTS[0]]) == [None]
    assert engine.run_in_worker(of_head) == (counts, 1)
    assert sorted(take(engine, range(3))) == [0, 1, 2]
    own = replace(REQUESTS[0], ties=3)
    assert engine.generate([own])[0].token_ids == text
    assert engine.take_sample_stats([own])[0] is not None, "it asks for its near-ties, and is a sample all the same"
    assert engine.run_in_worker(of_head)[1] == 2, "a head learns from it"
    assert sorted(take(engine, [3])) == [3]


def capture_regardless_of_time(worker: Any) -> None:
    worker.specrollout_router.capture.seconds = -1e9


def of_head(worker: Any) -> Any:
    """Returns the counts that the head's canary judges, and the number of requests whose features were captured."""
    router = worker.specrollout_router
    return router.board.tables.verified_DK2[router.board.model].tolist(), router.capture._num_opened
