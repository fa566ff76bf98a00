# SPDX-License-Identifier: Apache-2.0
"""Drafters: what they propose follows from what they saw, of any length, in bounded memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.config.block import TEXT_DRAFTERS, DrafterConfig
from nemo_specrollout.drafters import build_drafter
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_LEVELS, Batch, Demand, Drafter, DraftRequest, Proposal
from nemo_specrollout.drafters.context_index import ContextIndex

pytestmark = pytest.mark.unit

LONGEST = 64
VOCABULARY = 20


def build(name: str, **config: int) -> Drafter:
    return build_drafter(DrafterConfig(name, **config), num_lanes=8, vocab_size=VOCABULARY)


def batch_of(texts: list[list[int]], seen: list[int] | None = None) -> Batch:
    token_ids = np.full((len(texts), LONGEST), -7, np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    lengths = np.array([len(t) for t in texts])
    return Batch(np.arange(len(texts)), token_ids, lengths, np.array(seen or [0] * len(texts)))


def observe(drafter: Drafter, batch: Batch, max_tokens: int = 1, floor: float = 0.0) -> list[list[int]]:
    """Shows the drafter what is new; returns its drafts."""
    num_rows = len(batch.lanes_B)
    shape = (num_rows, max_tokens)
    out = Proposal(np.zeros(shape, np.int32), np.zeros(shape, np.int8), np.full(num_rows, 99, np.int64))
    drafter.propose(batch, Demand(LEVEL_PRIORS, floor), out)
    assert ((out.levels_BK >= 0) & (out.levels_BK < NUM_LEVELS)).all()
    return [row[:n].tolist() for row, n in zip(out.tokens_BK, out.lengths_B, strict=True)]


def propose(drafter: Drafter, batch: Batch, max_tokens: int = 6, floor: float = 0.0) -> list[list[int]]:
    """Its drafts for a batch of which nothing is new."""
    return observe(drafter, replace(batch, seen_B=batch.lengths_B), max_tokens, floor)


def open_all(drafter: Drafter, batch: Batch, groups: list[int], prompt_length: int) -> None:
    for lane, group in enumerate(groups):
        drafter.open(lane, DraftRequest(1000 + lane, group, batch.token_ids_BL[lane, :prompt_length]))


def test_ngram_goes_on_as_the_text_went_before() -> None:
    drafter, batch = build("ngram"), batch_of([[1, 2, 3, 4, 5, 6, 1, 2, 3]])
    open_all(drafter, batch, [0], prompt_length=9)
    assert propose(drafter, batch, 3) == [[4, 5, 6]]


def test_ngram_sees_its_own_request_only() -> None:
    drafter, batch = build("ngram"), batch_of([[1, 2, 3, 4, 5], [9, 1, 2, 3]])
    open_all(drafter, batch, [0, 0], prompt_length=4)
    observe(drafter, batch_of([[1, 2, 3, 4, 5], [9, 1, 2, 3]], seen=[4, 4]))
    assert propose(drafter, batch)[1] == []


def test_suffix_learns_from_siblings_as_their_tokens_arrive() -> None:
    drafter = build("suffix")
    ahead, behind = [7, 8, 1, 2, 3, 4, 5], [7, 8, 1]
    batch = batch_of([ahead, behind])
    open_all(drafter, batch, [5, 5], prompt_length=2)
    assert propose(drafter, batch)[1] == []
    observe(drafter, batch_of([ahead, behind], seen=[2, 3]))
    assert propose(drafter, batch, 4)[1] == [2, 3, 4, 5]


def test_suffix_does_not_leak_between_groups() -> None:
    drafter, batch = build("suffix"), batch_of([[7, 8, 1, 2, 3], [7, 8, 1]])
    open_all(drafter, batch, [5, 6], prompt_length=2)
    observe(drafter, batch_of([[7, 8, 1, 2, 3], [7, 8, 1]], seen=[2, 3]))
    assert propose(drafter, batch)[1] == []


def test_suffix_remembers_past_rollouts_of_the_same_prompt() -> None:
    drafter, first = build("suffix"), batch_of([[7, 8, 1, 2, 3, 4]])
    open_all(drafter, first, [5], prompt_length=2)
    observe(drafter, batch_of([[7, 8, 1, 2, 3, 4]], seen=[2]))
    drafter.close(0)
    again = batch_of([[7, 8]])
    open_all(drafter, again, [5], prompt_length=2)
    assert propose(drafter, again, 3) == [[1, 2, 3]]


def test_the_commoner_continuation_wins() -> None:
    texts = [[7, 1, 4], [7, 1, 5], [7, 1, 5], [7, 1]]
    drafter, batch = build("suffix"), batch_of(texts)
    open_all(drafter, batch, [5] * 4, prompt_length=1)
    observe(drafter, batch_of(texts, seen=[1, 1, 1, 2]))
    assert propose(drafter, batch, 1)[3] == [5]


def test_a_walk_ends_where_hope_does() -> None:
    drafter, batch = build("ngram"), batch_of([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]])
    open_all(drafter, batch, [0], prompt_length=11)
    rate = LEVEL_PRIORS[1]  # of a continuation seen once
    assert propose(drafter, batch, 6, floor=0.99 * rate**3) == [[4, 5, 6]]
    assert propose(drafter, batch, 6, floor=1.01 * rate) == [[]]


def test_keys_of_a_bucket_share_a_cache_line() -> None:
    assert ContextIndex(1024, (1, 2)).words.ctypes.data % 64 == 0


texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST), min_size=1, max_size=8)


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
@given(texts=texts, max_tokens=st.integers(1, 9), data=st.data())
def test_proposals_are_tokens_and_no_longer_than_asked(
    name: str, texts: list[list[int]], max_tokens: int, data: st.DataObject
) -> None:
    drafter = build(name, num_slots=1024)
    batch = batch_of(texts, seen=[1] * len(texts))
    open_all(drafter, batch, [data.draw(st.integers(0, 2)) for _ in texts], prompt_length=1)
    observe(drafter, batch)
    for draft in propose(drafter, batch, max_tokens):
        assert len(draft) <= max_tokens
        assert all(0 <= token < VOCABULARY for token in draft)


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=LONGEST - 1), st.integers(1, 4))
def test_learning_in_pieces_is_learning_at_once(text: list[int], piece: int) -> None:
    at_once, in_pieces = build("suffix"), build("suffix")
    whole = batch_of([text], seen=[1])
    for drafter in (at_once, in_pieces):
        open_all(drafter, whole, [5], prompt_length=1)
    observe(at_once, whole)
    for start in range(1, len(text), piece):
        end = min(start + piece, len(text))
        observe(in_pieces, batch_of([text[:end]], seen=[start]))
    assert propose(at_once, whole) == propose(in_pieces, whole)


def test_memory_is_bounded_and_a_full_table_still_learns() -> None:
    index = ContextIndex(1024, (1, 2, 3, 4))
    before, rng = index.num_bytes, np.random.default_rng(0)
    for salt in range(200):
        text = rng.integers(0, 10_000, (1, 60), dtype=np.int32)
        index.learn(np.array([salt], np.uint64), text, np.array([1]), np.array([60]))
    assert index.num_bytes == before
    assert (index.words != 0).mean() > 0.95
    tokens, levels, found = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int8), np.zeros(1, np.int64)
    end = np.array([59])
    index.learn_and_walk(np.array([199], np.uint64), text, end, end, LEVEL_PRIORS, 0.0, tokens, levels, found)
    assert found[0] == 1 and tokens[0, 0] == text[0, 59]


def test_unknown_drafters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'eagl'"):
        build_drafter(DrafterConfig("eagl"), 8, VOCABULARY)
