# SPDX-License-Identifier: Apache-2.0
"""Drafters that read text: their proposals follow from the texts that they saw. Their index: `test_device_index.py`.

Shapes: S request slots, B requests of the batch, K draft positions, L longest sequence.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from nemo_specrollout.config.drafter_configs import DRAFTERS, LookupDrafterConfig, TextDrafterConfig
from nemo_specrollout.drafters.base import NUM_LEVELS, SMALLEST_SHARE, Proposals, Texts
from nemo_specrollout.drafters.device_index import MAX_LISTED
from nemo_specrollout.drafters.text import LookupDrafter, build_text_drafter
from nemo_specrollout.drafters.unread import UnreadTokens
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.engine.transfers import to_device

pytestmark = pytest.mark.unit
TEXT_DRAFTERS = [name for name, cls in DRAFTERS.items() if issubclass(cls, TextDrafterConfig)]

NUM_SLOTS, LONGEST, VOCABULARY = 8, 64, 20


def has_index(name: str) -> bool:
    """Returns whether a drafter proposes only what an index of texts holds."""
    return issubclass(DRAFTERS[name], LookupDrafterConfig)


class World:
    """A drafter, and request slots whose texts it follows."""

    def __init__(self, name: str, **config: int) -> None:
        self.drafter = build_text_drafter(DRAFTERS[name](**config), NUM_SLOTS, LONGEST, VOCABULARY, torch.device("cpu"))
        self.total_len_S = torch.zeros(NUM_SLOTS, dtype=torch.int32)
        self.token_ids_SL = torch.full((NUM_SLOTS, LONGEST), -7, dtype=torch.int32)
        self.num_opened = 0

    def open(self, slot: int, prompt: list[int], group: int, response: list[int] | None = None) -> None:
        """Gives a slot to a request of a group, which may have a part of its response already."""
        self.num_opened += 1
        text = prompt + (response or [])
        identity = RequestIdentity(1000 + self.num_opened, group)
        opened = NewRequest(slot, identity, len(prompt), text, LONGEST)
        self.drafter.open(tensor([slot]), [opened], partial(to_device, device=torch.device("cpu")))
        self.total_len_S[slot] = 0
        self.write(slot, text)

    def write(self, slot: int, tokens: list[int]) -> None:
        """Appends tokens to a request's text."""
        length = int(self.total_len_S[slot])
        self.token_ids_SL[slot, length : length + len(tokens)] = tensor(tokens, dtype=torch.int32)
        self.total_len_S[slot] += len(tokens)

    def propose(self, *slots: int, num_positions: int = 6, rate: float = 0.9) -> list[list[int]]:
        """Returns drafts for the requests of `slots` after reading new tokens. Every draft token has the rate `rate`."""
        shape, num = (NUM_SLOTS, num_positions), len(slots)
        tokens_BK, levels_BK = torch.full(shape, -9, dtype=torch.int32), torch.full(shape, -9, dtype=torch.int8)
        found_B = torch.full((NUM_SLOTS,), -9, dtype=torch.int32)
        texts = Texts(tensor(slots), self.total_len_S, self.token_ids_SL)
        out, lookup = Proposals(tokens_BK, levels_BK, found_B), self.drafter.lookup(0)
        if lookup is None:
            self.drafter.propose(texts, out)
        else:
            lookup.index.learn(texts, lookup.salts_S, lookup.learned_S, LONGEST)
            lookup.index.walk(texts, lookup.salts_S, torch.full((NUM_LEVELS,), rate), SMALLEST_SHARE, out)
        assert (found_B[num:] == -9).all() and (tokens_BK[num:] == -9).all(), "rows without a request"
        counts = found_B[:num].tolist()
        for levels_K, count in zip(levels_BK, counts, strict=False):
            assert ((levels_K[:count] >= 0) & (levels_K[:count] < NUM_LEVELS)).all()
        return [tokens_K[:count].tolist() for tokens_K, count in zip(tokens_BK, counts, strict=False)]


def test_ngram_continues_as_the_text_did_before() -> None:
    world = World("ngram")
    world.open(0, [1, 2, 3, 4, 5, 6, 1, 2, 3], group=0)
    assert world.propose(0, num_positions=3) == [[4, 5, 6]]
    world.write(0, [4, 5, 9])
    assert world.propose(0) == [[]], "the text never contained this before"
    world.write(0, [1, 2, 4, 5, 9])
    assert world.propose(0) == [[1, 2, 4, 5, 9, 1]]


def test_ngram_sees_its_own_request_only() -> None:
    world = World("ngram")
    world.open(0, [1, 2, 3, 4, 5], group=0)
    world.open(1, [9, 1, 2, 3], group=0)
    assert world.propose(0, 1) == world.propose(1, 0) == [[], []]


def test_ngram_does_not_continue_a_single_token() -> None:
    world = World("ngram")
    world.open(0, [1, 2, 3, 9, 2], group=0)
    assert world.propose(0) == [[]]


def test_suffix_learns_from_siblings_as_their_tokens_arrive() -> None:
    world = World("suffix")
    world.open(0, [7, 8], group=5)
    world.open(1, [7, 8], group=5)
    assert world.propose(0, 1) == [[], []], "prompts are not learned"
    world.write(0, [1, 2, 3, 4, 5])
    world.write(1, [1])
    assert world.propose(0, 1, num_positions=4) == [[], [2, 3, 4, 5]]


def test_suffix_does_not_leak_between_groups() -> None:
    world = World("suffix")
    world.open(0, [7, 8], group=5)
    world.open(1, [7, 8], group=6)
    world.write(0, [1, 2, 3])
    world.write(1, [1])
    world.propose(0, 1)
    assert world.propose(1) == [[]]


def test_suffix_remembers_past_rollouts_of_the_same_prompt() -> None:
    world = World("suffix")
    world.open(0, [7, 8], group=5)
    world.write(0, [1, 2, 3, 4])
    world.propose(0)
    world.open(0, [9, 9], group=6)  # another request takes the slot
    world.open(3, [7, 8], group=5)
    assert world.propose(0, 3, num_positions=3) == [[], [1, 2, 3]]


def test_a_resumed_response_is_not_counted_twice() -> None:
    """A preempted request returns with its text. The other continuation, seen twice, stays the most frequent."""
    world = World("suffix")
    for slot, response in enumerate([[1, 5], [1, 5], [1, 4]]):
        world.open(slot, [7], group=5)
        world.write(slot, response)
    world.propose(0, 1, 2)
    for _ in range(3):
        world.open(2, [7], group=5, response=[1, 4])
        world.propose(2)
    world.open(3, [7], group=5, response=[1])
    assert world.propose(3, num_positions=1) == [[5]]


def test_the_most_frequent_continuation_wins() -> None:
    world = World("suffix")
    for slot, response in enumerate([[1, 4], [1, 5], [1, 5], [1]]):
        world.open(slot, [7], group=5)
        world.write(slot, response)
    assert world.propose(0, 1, 2, 3, num_positions=1)[3] == [5]


def test_a_walk_ends_when_survival_is_too_small() -> None:
    world = World("ngram")
    world.open(0, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], group=0)
    for rate in (0.9, 0.3, 0.1, 0.01):
        num = sum(rate**k >= SMALLEST_SHARE for k in range(1, 6))
        assert world.propose(0, num_positions=5, rate=rate) == [[4, 5, 6, 7, 8][:num]]


def test_random_tokens_cover_the_vocabulary_at_all_positions() -> None:
    torch.manual_seed(0)
    world = World("random")
    drafts = [draft for _ in range(50) for draft in world.propose(0, 3, num_positions=5)]
    assert all(len(draft) == 5 for draft in drafts)
    assert set(np.ravel(drafts)) == set(range(VOCABULARY))


texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=LONGEST), min_size=1, max_size=NUM_SLOTS)


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
@given(texts=texts, num_positions=st.integers(1, 9), data=st.data())
def test_proposals_are_tokens_and_fit_their_buffers(
    name: str, texts: list[list[int]], num_positions: int, data: st.DataObject
) -> None:
    world = World(name, num_slots=1024) if has_index(name) else World(name)
    for slot, text in enumerate(texts):
        prompt_length = data.draw(st.integers(1, len(text)))
        world.open(slot, text[:prompt_length], group=data.draw(st.integers(0, 2)))
        world.write(slot, text[prompt_length:])
    for draft in world.propose(*range(len(texts)), num_positions=num_positions):
        assert len(draft) <= num_positions
        assert all(0 <= token < VOCABULARY for token in draft)
        is_seen = set(draft) <= {token for text in texts for token in text}
        assert is_seen or not has_index(name)


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
def test_a_row_without_a_request_is_skipped(name: str) -> None:
    world = World(name)
    world.open(0, [1, 2, 3, 1, 2], group=0)
    world.propose(-1, 0)
    assert world.propose(-1, 0)[0] == [] or not has_index(name)


# What an index has yet to read


class LongTexts:
    """A drafter with an index, and requests whose texts are long when they arrive. Each step samples a token of each."""

    MOST_SAMPLED = 9
    """Tokens that a request may sample in a step, as far as the host knows."""

    def __init__(self, name: str, num_requests: int, length: int, most_steps: int) -> None:
        device, longest = torch.device("cpu"), length + most_steps
        drafter = build_text_drafter(DRAFTERS[name](num_slots=1 << 16), num_requests, longest, VOCABULARY, device)
        assert isinstance(drafter, LookupDrafter)
        self.drafter = drafter
        self.slots_B = np.arange(num_requests)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (num_requests, longest), dtype=np.int32)
        self.texts = Texts(
            torch.from_numpy(self.slots_B),
            torch.full((num_requests,), length, dtype=torch.int32),
            torch.from_numpy(tokens),
        )
        opened = [NewRequest(s, RequestIdentity(s, 0), length, range(length), longest) for s in range(num_requests)]
        drafter.open(self.texts.slots_B, opened, partial(to_device, device=device))

    def step(self, *, is_read: bool = True) -> int:
        """Samples a token of each request. Returns the new tokens of a text that the index was allowed to read."""
        self.texts.total_len_S.add_(1)
        if not is_read:
            self.drafter.unread.skip(self.slots_B, self.MOST_SAMPLED)
            return 0
        lookup, max_new = self.drafter.lookup(0), self.drafter.unread.read(self.slots_B, self.MOST_SAMPLED)
        lookup.index.learn(self.texts, lookup.salts_S, lookup.learned_S, max_new)
        return max_new

    def num_behind(self) -> int:
        """Returns the tokens of all texts that the index has not read."""
        return int((self.texts.total_len_S - self.drafter.lookup(0).learned_S).sum())


def test_long_texts_that_arrive_together_are_read_as_fast_as_an_index_reads() -> None:
    """32 prompts of 1,000 tokens with 16 samples each. Their prefixes are cached, so all of them arrive in one step."""
    num_requests, length, most_steps = 512, 1000, 60
    texts = LongTexts("ngram", num_requests, length, most_steps)
    num_steps = 0
    while num_steps == 0 or texts.num_behind():
        before = texts.num_behind() + num_requests
        texts.step()
        assert texts.num_behind() == max(before - MAX_LISTED, 0), "an index reads what it can"
        num_steps += 1
    assert num_steps == -(-num_requests * length // (MAX_LISTED - num_requests))
    while texts.step() > texts.MOST_SAMPLED:  # the host cannot know at once that nothing is left
        assert not texts.num_behind()
        num_steps += 1
    assert num_steps < most_steps and texts.step() == texts.MOST_SAMPLED


def test_texts_that_need_no_reading_leave_nothing_behind() -> None:
    """The suffix drafter never reads prompts."""
    texts = LongTexts("suffix", num_requests=512, length=1000, most_steps=3)
    assert [texts.step() for _ in range(3)] == [texts.MOST_SAMPLED] * 3 and not texts.num_behind()


def test_what_was_sampled_while_drafters_rested_is_read_afterwards() -> None:
    texts = LongTexts("suffix", num_requests=300, length=10, most_steps=120)
    for _ in range(100):
        texts.step(is_read=False)
    assert texts.num_behind() == 100 * 300
    texts.step()
    assert texts.num_behind() == 101 * 300 - MAX_LISTED
    texts.step()
    assert not texts.num_behind()


@given(st.data())
def test_the_bound_of_unread_tokens_holds_and_ends(data: st.DataObject) -> None:
    """Compares with an index that reads exactly, for requests that come, go, and are absent from some steps."""
    num_slots, most_sampled = 6, 4
    unread, behind_S = UnreadTokens(num_slots), np.zeros(num_slots, np.int64)
    is_open_S = np.zeros(num_slots, bool)
    for _ in range(data.draw(st.integers(1, 12))):
        closed = [s for s in range(num_slots) if is_open_S[s] and data.draw(st.booleans())]
        unread.close(closed)
        is_open_S[closed] = False
        opened = [s for s in range(num_slots) if not is_open_S[s] and data.draw(st.booleans())]
        lengths = [data.draw(st.integers(0, MAX_LISTED)) for _ in opened]
        unread.open(opened, lengths)
        is_open_S[opened] = True
        behind_S[opened] = lengths
        slots_B = np.array(data.draw(st.permutations(np.flatnonzero(is_open_S).tolist())), np.int64)
        slots_B = slots_B[: data.draw(st.integers(0, num_slots))]
        behind_S[slots_B] += np.array([data.draw(st.integers(0, most_sampled)) for _ in slots_B], np.int64)
        if data.draw(st.booleans()):
            unread.skip(slots_B, most_sampled)
            continue
        max_new, room = unread.read(slots_B, most_sampled), MAX_LISTED
        assert max_new >= behind_S[slots_B].max(initial=0)
        for s in slots_B:
            num_read = min(behind_S[s], room)
            behind_S[s] -= num_read
            room -= num_read
    everyone_B = np.flatnonzero(is_open_S)
    for _ in range(num_slots + 1):
        unread.read(everyone_B, most_sampled)
    assert unread.read(everyone_B, most_sampled) == most_sampled
