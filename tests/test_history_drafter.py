# SPDX-License-Identifier: Apache-2.0
"""The drafter `history` in engines: what they keep of their requests, what others draft from it, and equal tokens."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from test_equality import SAMPLINGS, assert_equal, requests

from lab.local.engine import Generation, RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, LearnedConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.drafting.history_drafter import HistoryDrafter
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.history.segments import Text
from nemo_specrollout.history.store import HistoryStore
from nemo_specrollout.sampling.seeds import content_hash

pytestmark = pytest.mark.integration

Start = Callable[..., RolloutEngine]
DRAFTERS = (SuffixDrafterConfig(), NgramDrafterConfig())
WAYS = ("T=1", "T=0", "T=0.7, penalties")
ASKED = requests(4, 3)


def block_at(folder: Path, **learned: Any) -> SpecrolloutConfig:
    return SpecrolloutConfig(
        drafters=DRAFTERS,
        budget=BudgetConfig("fixed", k=5),
        learned=LearnedConfig(folder=str(folder), warm_start=False, **learned),
    )


def history_of(engine: RolloutEngine) -> HistoryDrafter:
    found: list[HistoryDrafter] = engine._llm.collective_rpc(lambda worker: worker.specrollout_router.history)
    return found[0]


def end_step(engine: RolloutEngine) -> list[str]:
    """Ends a training step, and waits until all is written. Returns its alarms."""
    alarms = engine._ask(WorkerCalls.specrollout_end_step, None)["alarms"]
    if (history := history_of(engine)) is not None:
        assert history.service.settle(300.0)
    alarms += engine._ask(WorkerCalls.specrollout_take_alarms)
    return [alarm["sentence"] for alarm in alarms]


def accepted(engine: RolloutEngine) -> int:
    """Returns the accepted drafts of the history."""
    totals = engine._ask(WorkerCalls.specrollout_totals)
    return sum(dict(totals["accepted"])["history"])


def texts_in(folder: Path, asked: list[RolloutRequest], engine: RolloutEngine) -> dict[int, list[list[int]]]:
    """Returns the responses in a history by prompt, the oldest first."""
    store = HistoryStore(folder / "history", 1 << 30, history_of(engine).service._store._fingerprint)
    store.open()
    found = {}
    for index, prompt in {r.prompt_index: r.prompt_token_ids for r in asked}.items():
        texts = [store.read(place) for place, _ in store.find(content_hash(prompt))]
        assert None not in texts
        found[index] = [text.tokens[text.num_context :].tolist() for text in reversed(texts) if text is not None]
    return found


def until_known(engine: RolloutEngine, folder: Path) -> None:
    """Waits until an engine has looked at all that was written."""
    size = sum(path.stat().st_size for path in (folder / "history").iterdir())
    store = history_of(engine).service._store
    while sum(store._seen_bytes.values()) < size:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected(start_engine: Start) -> dict[str, list[Rollout]]:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    return {way: plain.generate(ASKED, **SAMPLINGS[way]) for way in WAYS}


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_an_engine_drafts_from_what_another_one_has_sampled(
    start_engine: Start, expected: dict[str, list[Rollout]], tmp_path: Path, asynchronous: bool
) -> None:
    first, second = (start_engine(STEP_ADDER, block_at(tmp_path), async_scheduling=asynchronous) for _ in range(2))
    for way in WAYS:
        assert_equal(first.generate(ASKED, **SAMPLINGS[way]), expected[way])
        assert end_step(first) == []
        until_known(second, tmp_path)
        before = accepted(second)
        assert_equal(second.generate(ASKED, **SAMPLINGS[way]), expected[way])
        assert accepted(second) > before, "the same texts were there, and no draft of theirs was right"
    facts = history_of(second).facts()
    assert facts.num_from_others > 0 and facts.num_read == 0


def test_the_next_start_knows_what_the_last_one_has_sampled(
    start_engine: Start, expected: dict[str, list[Rollout]], tmp_path: Path
) -> None:
    first = start_engine(STEP_ADDER, block_at(tmp_path))
    assert_equal(first.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    end_step(first)
    again = start_engine(STEP_ADDER, block_at(tmp_path))
    history = history_of(again)
    assert history.service.settle(60.0)
    assert history.facts().num_read == len(ASKED)
    assert_equal(again.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    assert accepted(again) > 0


def test_each_response_is_kept_once_and_as_it_is(start_engine: Start, tmp_path: Path) -> None:
    engine = start_engine(STEP_ADDER, block_at(tmp_path), max_num_seqs=4)
    rollouts = engine.generate(ASKED, temperature=1.0)
    end_step(engine)
    end_step(engine)
    later = [replace(request, policy_version=1) for request in ASKED[:3]]
    rollouts += engine.generate(later, temperature=1.0)
    end_step(engine)
    wanted: dict[int, list[list[int]]] = {}
    for request, rollout in zip([*ASKED, *later], rollouts, strict=True):
        if len(rollout.token_ids) >= 4:
            wanted.setdefault(request.prompt_index, []).append(rollout.token_ids)
    assert all(len(set(map(tuple, texts))) == len(texts) for texts in wanted.values()), "equal texts are kept once"
    found = texts_in(tmp_path, ASKED, engine)
    assert {index: sorted(texts) for index, texts in found.items()} == {
        index: sorted(texts) for index, texts in wanted.items()
    }


def test_samples_that_begin_later_draft_from_history_too(start_engine: Start, tmp_path: Path) -> None:
    one_prompt = requests(1, 6)
    first = start_engine(STEP_ADDER, block_at(tmp_path))
    first.generate(one_prompt, temperature=1.0)
    end_step(first)
    engine = start_engine(STEP_ADDER, block_at(tmp_path), max_num_seqs=2)
    history = history_of(engine)
    later = [replace(request, policy_version=1) for request in one_prompt]
    running = Generation(engine, later, sampling={"temperature": 1.0})
    running.advance(0.0)
    while not history.facts().num_fed:  # the first step may have taken the pieces already
        time.sleep(0.01)
    while running.num_done < 4:
        running.advance(0.0)
    salts = history._salts_S[list(history._open)].tolist()
    assert salts and set(salts) == {content_hash(one_prompt[0].prompt_token_ids)}
    running.advance()


def test_early_requests_and_checks_are_not_kept(start_engine: Start, tmp_path: Path) -> None:
    engine = start_engine(STEP_ADDER, block_at(tmp_path))
    engine.generate([replace(request, speculate=False) for request in ASKED], temperature=1.0)
    engine.generate([replace(request, is_early=True) for request in ASKED], temperature=1.0)
    end_step(engine)
    assert not any(texts_in(tmp_path, ASKED, engine).values())


def test_tokens_are_equal_whatever_the_history_holds(
    start_engine: Start, expected: dict[str, list[Rollout]], tmp_path: Path
) -> None:
    """Texts of another policy, tokens that the vocabulary does not have, and damaged texts among good ones."""
    engine = start_engine(STEP_ADDER, block_at(tmp_path))
    store = HistoryStore(tmp_path / "history", 1 << 30, history_of(engine).service._store._fingerprint)
    store.open()
    rng = np.random.default_rng(0)
    for request, rollout in zip(ASKED, expected["T=1"], strict=True):
        group = content_hash(request.prompt_token_ids)
        prompt = list(request.prompt_token_ids)[-6:]
        half_right = [*rollout.token_ids[:20], *rng.integers(0, 20, 20).tolist()]
        for response in (half_right, rng.integers(-5, 2**31 - 1, 40).tolist(), [2**31 - 1] * 3000):
            store.append([Text(group, len(prompt), np.array([*prompt, *response], np.int32))])
    (path,) = (tmp_path / "history").glob(f"{store._writer.name}.texts" if store._writer else "")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = b"\x00" * 4000
    path.write_bytes(content)
    until_known(engine, tmp_path)
    for way in WAYS:
        assert_equal(engine.generate(ASKED, **SAMPLINGS[way]), expected[way])
    assert history_of(engine).facts().num_from_others > 0
    assert end_step(engine) == [
        f"history: {tmp_path / 'history'} a response in {path.stem} is damaged and was left out"
    ]


def test_a_history_that_cannot_be_kept_costs_one_sentence(
    start_engine: Start, expected: dict[str, list[Rollout]], tmp_path: Path
) -> None:
    (tmp_path / "history").write_text("a file")
    engine = start_engine(STEP_ADDER, block_at(tmp_path))
    for _ in range(2):
        assert_equal(engine.generate(ASKED, **SAMPLINGS["T=1"]), expected["T=1"])
    (said,) = end_step(engine)
    assert said == f"history: {tmp_path / 'history'} cannot be made (File exists), so responses are not kept"
    assert end_step(engine) == []


def test_without_history_nothing_is_written_and_nothing_is_added(start_engine: Start, tmp_path: Path) -> None:
    engine = start_engine(STEP_ADDER, block_at(tmp_path, history=False))
    engine.generate(ASKED[:2], temperature=1.0)
    end_step(engine)
    assert list(tmp_path.iterdir()) == []
    names = engine._llm.collective_rpc(lambda worker: worker.specrollout_router.board.names)[0]
    assert names == ["suffix", "ngram"]
