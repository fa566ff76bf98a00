# SPDX-License-Identifier: Apache-2.0
"""The drafter `ahead`: where it drafts from, and that no text which a request brings along changes a token."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STEP_ADDER
from torch import tensor

from lab.local.engine import RolloutEngine
from lab.local.run_sections import GenerationConfig, VllmConfig
from nemo_specrollout.config.block import BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import AheadDrafterConfig, Eagle3DrafterConfig, SuffixDrafterConfig
from nemo_specrollout.drafters.ahead import ENOUGH, FARTHEST, AheadText
from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.generation.engine.ahead_branches import AheadBranch, after_prefix, pack, unpack
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity, Rollout, RolloutRequest, as_bytes
from nemo_specrollout.generation.engine.transfers import to_device
from nemo_specrollout.speculation.step_model import StepCosts, StepModel

NUM_SLOTS, LONGEST, POSITIONS = 4, 96, 8
PROMPT = [90, 91, 92]
TEXT = [*range(40)]


class World:
    """A drafter, and requests in its slots."""

    def __init__(self, most_paths: int = 1) -> None:
        self.drafter = AheadText(NUM_SLOTS, LONGEST, 300, torch.device("cpu"), most_paths)
        self.total_len_S = torch.zeros(NUM_SLOTS, dtype=torch.int32)
        self.token_ids_SL = torch.zeros(NUM_SLOTS, LONGEST, dtype=torch.int32)

    def open(
        self,
        slot: int,
        ahead: list[int],
        response: list[int],
        prompt: list[int] = PROMPT,
        branches: tuple[AheadBranch, ...] = (),
    ) -> None:
        """Gives a slot to a request that brings a text, and has a part of its response already."""
        text, identity = [*prompt, *response], RequestIdentity(0, 0, ahead=as_bytes(ahead), branches=branches)
        opened = NewRequest(slot, identity, len(prompt), text, LONGEST)
        self.drafter.open(tensor([slot]), [opened], partial(to_device, device=torch.device("cpu")))
        self.write(slot, text)

    def write(self, slot: int, text: list[int]) -> None:
        self.token_ids_SL[slot, : len(text)] = tensor(text, dtype=torch.int32)
        self.total_len_S[slot] = len(text)

    def propose(self, *slots: int) -> list[list[int]]:
        """Returns the drafts of each row. Keeps the levels of their evidence."""
        shape = (NUM_SLOTS, POSITIONS)
        out = Proposals(
            torch.full(shape, -9, dtype=torch.int32),
            torch.full(shape, -9, dtype=torch.int8),
            torch.full((NUM_SLOTS,), -9, dtype=torch.int32),
        )
        self.drafter.propose(Texts(tensor(slots), self.total_len_S, self.token_ids_SL), out)
        self.levels = out.levels_BK[: len(slots), 0].tolist()
        return [
            tokens[:n].tolist() for tokens, n in zip(out.tokens_BK, out.found_B[: len(slots)].tolist(), strict=False)
        ]


def test_drafts_begin_at_the_same_position() -> None:
    world = World()
    world.open(1, TEXT, TEXT[:20])
    world.open(2, TEXT, [])
    assert world.propose(2, -1, 1) == [TEXT[:8], [], TEXT[20:28]]
    assert world.levels[0] < world.levels[2] == NUM_LEVELS - 1


def test_after_a_token_that_differs_the_place_stays() -> None:
    world = World()
    world.open(0, TEXT, [*TEXT[:20], 77])
    assert world.propose(0) == [TEXT[21:29]] and world.levels == [NUM_LEVELS - 2]


@pytest.mark.parametrize("shift", [-FARTHEST, -3, 1, FARTHEST])
def test_a_shift_is_found(shift: int) -> None:
    """The response has tokens of its own, after which the text reads on at another place."""
    world, read = World(), 17 + ENOUGH
    own = [77] * 17 if shift <= 0 else []
    response = [*own, *TEXT[len(own) + shift : read + shift]]
    world.open(0, TEXT, response)
    assert world.propose(0) == [TEXT[read + shift :][:POSITIONS]]
    world.write(0, [*PROMPT, *response, *TEXT[read + shift :][:3]])
    assert world.propose(0) == [TEXT[read + shift + 3 :][:POSITIONS]], "the place is kept"


def test_nothing_is_drafted_beyond_the_text() -> None:
    world = World()
    world.open(0, TEXT[:10], TEXT[:8])
    assert world.propose(0) == [[8, 9]]
    world.write(0, [*PROMPT, *TEXT[:14]])
    assert world.propose(0) == [[]]


def test_a_slot_forgets_its_last_request() -> None:
    world = World()
    world.open(0, TEXT, TEXT[:5])
    world.drafter.close([0])
    assert world.propose(0) == [[]], "no request brings a text any more"
    world.open(1, TEXT, TEXT[:5])
    world.open(0, [], TEXT[:5])
    assert world.propose(0, 1) == [[], TEXT[5:13]]


def test_a_text_beyond_the_context_is_cut() -> None:
    world = World()
    world.open(0, [*range(300)], [*range(90)])
    assert world.propose(0) == [[90, 91, 92]]


def test_a_text_ends_before_a_token_that_the_policy_lacks() -> None:
    for bad in (300, -1):
        world = World()
        world.open(0, [*TEXT[:9], bad, 1], TEXT[:5])
        assert world.propose(0) == [TEXT[5:9]]


def branch_at(position: int, *own: int, parent: int = 0) -> AheadBranch:
    return AheadBranch(parent, position, as_bytes(own))


def test_the_path_that_agrees_is_followed() -> None:
    """The text has parted where a branch begins, and again where a branch of that branch begins."""
    branches = (branch_at(20, 70, 71, 72, 73, 74), branch_at(22, 80, 81, 82, parent=1), branch_at(3, 60, 61))
    world = World(most_paths=4)
    world.open(0, TEXT, TEXT[:20], branches=branches)
    assert world.propose(0) == [TEXT[20:28]], "all paths agree, and the text comes first"
    world.write(0, [*PROMPT, *TEXT[:20], 70])
    assert world.propose(0) == [[71, 72, 73, 74]]
    world.write(0, [*PROMPT, *TEXT[:20], 70, 71])
    assert world.propose(0) == [[72, 73, 74]]
    world.write(0, [*PROMPT, *TEXT[:20], 70, 71, 80])
    assert world.propose(0) == [[81, 82]]
    world.write(0, [*PROMPT, *TEXT[:20], 70, 71, 80, 5])
    assert world.propose(0) == [[82]], "after a token that no path has, the request stays at its position"


def test_a_slot_has_as_many_paths_as_its_request_brings() -> None:
    world = World(most_paths=2)
    world.open(0, TEXT, TEXT[:20], branches=(branch_at(20, 70, 71), branch_at(20, 75, 76)))
    world.write(0, [*PROMPT, *TEXT[:20], 75])
    assert world.propose(0) == [TEXT[21:29]], "the second branch finds no room"
    world.open(0, TEXT, TEXT[:20])
    world.write(0, [*PROMPT, *TEXT[:20], 70])
    assert world.propose(0) == [TEXT[21:29]], "branches of the last request of the slot are gone"


def test_branches_are_carried_whole() -> None:
    branches = (branch_at(5, 1, 2, 3), branch_at(6, 9, parent=1), branch_at(0))
    assert unpack(pack(branches)) == branches and unpack(b"") == ()
    assert after_prefix(branches, 6) == (branch_at(0, 2, 3), branch_at(0, 9, parent=1), branch_at(0))
    for bad in ([0], [1, 0, 0], [-1, 0, 0], [0, -1, 0], [0, 0, 3, 1], [0, 0, -1]):
        with pytest.raises(ValueError, match="branch"):
            unpack(as_bytes(bad))


# In engines

REQUESTS = [RolloutRequest([*range(40, 45 + i % 3)], i, s) for i in range(5) for s in range(2)]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0}]
BLOCKS = {
    "alone": SpecrolloutConfig(
        drafters=(AheadDrafterConfig(),), num_speculative_tokens=24, budget=BudgetConfig("fixed", 24)
    ),
    "auto": SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig(most_drafts=32)),
    "many drafts": SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig()),
    "beside a head": SpecrolloutConfig(
        drafters=(SuffixDrafterConfig(), Eagle3DrafterConfig(model=f"{STEP_ADDER}_eagle3")), run_ahead=RunAheadConfig()
    ),
}


def texts_like(rollouts: list[Rollout]) -> dict[str, list[list[int]]]:
    """Texts that older weights might have made: of all degrees of likeness."""
    rng, right = np.random.default_rng(3), [r.token_ids for r in rollouts]
    flipped = [[t if rng.random() < 0.9 else int(rng.integers(96)) for t in text] for text in right]
    shifted = [[*text[: len(text) // 2], 5, 6, *text[len(text) // 2 :]] for text in right]
    return {
        "right": right,
        "flipped": flipped,
        "shifted": shifted,
        "begun": [text[: len(text) // 3] for text in right],
        "of others": right[1:] + right[:1],
        "too long": [[*text, *range(90)] * 9 for text in right],
        "some": [text if i % 2 else [] for i, text in enumerate(flipped)],
    }


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_no_text_changes_a_token(start_engine: Callable[..., RolloutEngine], kind: str, asynchronous: bool) -> None:
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    engine = start_engine(STEP_ADDER, BLOCKS[kind], async_scheduling=asynchronous)
    for sampling in SAMPLINGS:
        expected = plain.generate(REQUESTS, **sampling)
        for name, texts in texts_like(expected).items():
            requests = [replace(r, ahead=as_bytes(text)) for r, text in zip(REQUESTS, texts, strict=True)]
            assert [r.token_ids for r in engine.generate(requests, **sampling)] == [r.token_ids for r in expected], name


def test_right_texts_save_steps(start_engine: Callable[..., RolloutEngine]) -> None:
    """Also those whose beginning another engine has made."""
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    engine = start_engine(STEP_ADDER, BLOCKS["alone"])
    expected = plain.generate(REQUESTS)
    num_tokens = max(len(r.token_ids) for r in expected)
    pairs = list(zip(REQUESTS, expected, strict=True))
    whole = [replace(q, ahead=as_bytes(r.token_ids)) for q, r in pairs]
    moved = [replace(q, prefix_token_ids=r.token_ids[:9]) for q, (_, r) in zip(whole, pairs, strict=True)]
    for requests, known in ((whole, 0), (moved, 9)):
        first = engine.num_steps
        rollouts = engine.generate(requests)
        assert [r.token_ids for r in rollouts] == [r.token_ids[known:] for r in expected]
        assert engine.num_steps - first <= num_tokens / 25 + 6


class FreeRows:
    """A step model by which a row costs next to nothing, as on a GPU that waits for its memory."""

    def __init__(self, most_rows: int) -> None:
        self._costs = StepCosts(1.0 + 1e-6 * np.arange(most_rows + 1.0), np.zeros(0))

    def observe(self, *step: Any) -> None:
        pass

    def costs(self) -> StepCosts:
        return self._costs


def _make_rows_free(worker: Any) -> None:
    runner = worker.model_runner
    worker.specrollout_accounts.step_model = FreeRows(runner.max_num_reqs + 1024)


def test_the_last_requests_take_a_handful_of_steps() -> None:
    """They share the rows of a step: 32 requests have 32 drafts each, and four have 256 each."""
    kwargs = {"max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 27}
    requests = [RolloutRequest([*range(40, 45 + i % 3)], i, 0, exact_length=768) for i in range(32)]
    engines = []
    for block in (SpecrolloutConfig(drafters=()), BLOCKS["many drafts"]):
        config = GenerationConfig(VllmConfig(max_model_len=1024), 768, vllm_kwargs=kwargs, specrollout=block)
        engines.append(RolloutEngine(STEP_ADDER, config, seed=7))
    plain, engine = engines
    try:
        expected = [r.token_ids for r in plain.generate(requests)]
        engine.run_in_worker(_make_rows_free)
        with_texts = [replace(q, ahead=as_bytes(t)) for q, t in zip(requests, expected, strict=True)]
        for num_requests, most_steps in ((1, 10), (4, 10), (32, 40)):
            first = engine.num_steps
            found = [r.token_ids for r in engine.generate(with_texts[:num_requests])]
            assert found == expected[:num_requests]
            assert engine.num_steps - first <= most_steps
        stats = engine.stats()
        assert stats is not None
        assert stats.trace.column("num_rows").max() == 32 + 1024
    finally:
        for each in engines:
            each.close()


# Steps beyond the largest CUDA graph

MANY = [RolloutRequest([*range(40, 45 + i % 3)], i, s) for i in range(5) for s in range(4)]
"""Twenty requests, which with 40 drafts each fill 820 rows. vLLM's largest graph has 512 by default."""


def test_steps_of_many_rows_change_no_token(start_engine: Callable[..., RolloutEngine]) -> None:
    """Also where the step model is told that graphs end at 32 rows, so that decisions leave them."""
    plain = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    block = SpecrolloutConfig(drafters=(AheadDrafterConfig(),), num_speculative_tokens=40)
    all_drafts = start_engine(STEP_ADDER, replace(block, budget=BudgetConfig("fixed", 40)))
    by_price = start_engine(STEP_ADDER, block)
    by_price.run_in_worker(_end_graphs_at_32_rows)
    for sampling in SAMPLINGS:
        expected = plain.generate(MANY, **sampling)
        for kind in ("right", "flipped"):
            texts = texts_like(expected)[kind]
            requests = [replace(r, ahead=as_bytes(text)) for r, text in zip(MANY, texts, strict=True)]
            for engine in (all_drafts, by_price):
                assert [r.token_ids for r in engine.generate(requests, **sampling)] == [r.token_ids for r in expected]
    for engine, most_rows in ((all_drafts, 512), (by_price, 32)):
        stats = engine.stats()
        assert stats is not None
        decode_rows = stats.trace.column("num_rows")[stats.trace.column("is_decode") > 0]
        assert decode_rows.max() > most_rows and decode_rows.min() <= 32


def _end_graphs_at_32_rows(worker: Any) -> None:
    worker.specrollout_accounts.step_model = StepModel(820, (1, 2, 4, 8, 16, 24, 32))
