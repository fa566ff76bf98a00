# SPDX-License-Identifier: Apache-2.0
"""The context index on the engine's device: what it finds and forgets, and that its numba and Triton bodies agree.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions. Seeds are fixed.
"""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, tensor

from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.device_index import (
    BUCKET_SLOTS,
    COUNT_MASK,
    FEWEST_SLOTS,
    MAX_COUNT,
    MAX_LEAD,
    MAX_LISTED,
    MAX_SLOTS,
    NO_SALT,
    NUM_CANDIDATES,
    RANK_MASK,
    ContextIndex,
    context_orders,
    slots_for,
)

pytestmark = pytest.mark.unit


ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
ORDERS = (1, 2, 4, 6)
LONGEST = 64
MIN_P_VALUE = 1e-6
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Requests:
    """Texts in request slots, as the engine stores them, and an index that follows them."""

    def __init__(
        self,
        index: ContextIndex,
        texts: list[list[int]],
        salts: list[int],
        learned: list[int] | None = None,
        longest: int = LONGEST,
    ) -> None:
        self.index = index
        self.slots_B = torch.arange(len(texts))
        self.salts_S = tensor(salts, dtype=torch.int64, device=index.words.device)
        self.learned_S = tensor(learned or [0] * len(texts), dtype=torch.int32)
        self.total_len_S = tensor([len(text) for text in texts], dtype=torch.int32)
        self.token_ids_SL = torch.full((len(texts), longest), -7, dtype=torch.int32)
        for s, text in enumerate(texts):
            self.token_ids_SL[s, : len(text)] = tensor(text, dtype=torch.int32)
        self.move(index.words.device)

    def move(self, device: torch.device) -> None:
        for name in ("slots_B", "learned_S", "total_len_S", "token_ids_SL"):
            setattr(self, name, getattr(self, name).to(device))

    def texts(self, rows: Tensor | None = None) -> Texts:
        return Texts(self.slots_B if rows is None else rows, self.total_len_S, self.token_ids_SL)

    def learn(self, max_new: int = LONGEST, rows: Tensor | None = None) -> None:
        self.index.learn(self.texts(rows), self.salts_S, self.learned_S, max_new)

    def learn_all(self) -> None:
        while not torch.equal(self.learned_S, self.total_len_S):
            self.learn(self.token_ids_SL.shape[1])

    def walk_raw(
        self, num_positions: int, floor: float = 0.0, rates: Tensor | None = None, rows: Tensor | None = None
    ) -> Proposals:
        rows = self.slots_B if rows is None else rows
        rates = torch.full((NUM_LEVELS,), 0.5) if rates is None else rates
        shape, device = (len(rows), num_positions), self.index.words.device
        tokens_BK = torch.full(shape, -9, dtype=torch.int32, device=device)
        levels_BK = torch.full(shape, -9, dtype=torch.int8, device=device)
        found_B = torch.full(shape[:1], 99, dtype=torch.int32, device=device)
        out = Proposals(tokens_BK, levels_BK, found_B)
        self.index.walk(self.texts(rows), self.salts_S, rates.to(device), floor, out)
        return out

    def walk(self, num_positions: int = 6, floor: float = 0.0, rates: Tensor | None = None) -> list[list[int]]:
        """Returns the drafts of each row."""
        tokens_BK, _, found_B = self.walk_raw(num_positions, floor, rates)
        return [row[:n] for row, n in zip(tokens_BK.tolist(), found_B.tolist(), strict=True)]


def new_index(num_slots: int = 1 << 14, orders: tuple[int, ...] = ORDERS) -> ContextIndex:
    return ContextIndex(num_slots, orders, CPU)


def learned(texts: list[list[int]], salts: list[int] | None = None, **kwargs: int) -> Requests:
    requests = Requests(new_index(**kwargs), texts, salts or [5] * len(texts))
    requests.learn()
    return requests


def drafts_of(index: ContextIndex, text: list[int], salt: int = 5, num_positions: int = 6) -> list[int]:
    return Requests(index, [text], [salt]).walk(num_positions)[0]


# Lookup


def test_learned_continuations_are_found():
    requests = learned([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert drafts_of(requests.index, [1, 2, 3]) == [4, 5, 6, 7, 8, 9]
    assert drafts_of(requests.index, [1, 2, 3], num_positions=2) == [4, 5]
    assert drafts_of(requests.index, [30, 7]) == [8, 9]
    assert drafts_of(requests.index, [9]) == []


def test_the_longest_drafts_are_not_looked_up_to_their_end():
    """A text that was made ahead may have 256 drafts, but each position of a lookup takes time and registers."""
    requests = Requests(new_index(), [[*range(1, 150)]], [5], longest=160)
    requests.learn_all()
    walk = Requests(requests.index, [[1, 2, 3]], [5], longest=160).walk
    assert walk(num_positions=64) == [[*range(4, 68)]]
    assert walk(num_positions=256) == [[*range(4, 36)]]


def test_an_empty_index_finds_nothing():
    assert Requests(new_index(), [[1, 2, 3], [], [0]], [0, 0, 0]).walk() == [[], [], []]


def test_salts_separate_and_join():
    index = learned([[1, 2, 3, 4], [1, 2, 7, 8]], salts=[5, -6]).index
    assert drafts_of(index, [1, 2], 5) == [3, 4]
    assert drafts_of(index, [1, 2], -6) == [7, 8]
    assert drafts_of(index, [1, 2], 0) == []


def test_nothing_is_looked_up_without_a_salt():
    index = learned([[1, 2, 3, 4]], salts=[NO_SALT]).index
    assert drafts_of(index, [1, 2], NO_SALT) == []


def test_the_longest_known_context_wins():
    index = learned([[9, 1, 2, 3, 40], [8, 1, 2, 3, 50], [7, 1, 2, 3, 50]], orders=(1, 2, 4)).index
    assert drafts_of(index, [9, 1, 2, 3], num_positions=1) == [40]
    assert drafts_of(index, [6, 1, 2, 3], num_positions=1) == [50]


def test_the_most_frequent_continuation_wins_then_the_first():
    index = learned([[1, 4], [1, 5], [1, 5], [2, 6], [2, 7]]).index
    assert drafts_of(index, [1], num_positions=1) == [5]
    assert drafts_of(index, [2], num_positions=1) == [6]


def test_contexts_longer_than_the_text_are_left_out():
    requests = learned([[], [3], [3, 4]], orders=(2, 4))
    assert not requests.index.words.any()
    assert requests.walk() == [[], [], []]


def test_learning_counts_from_where_it_stopped():
    index = new_index()
    requests = Requests(index, [[1, 2, 3, 4, 5, 6]], [5], learned=[3])
    requests.learn()
    assert requests.learned_S.tolist() == [6]
    assert drafts_of(index, [1]) == drafts_of(index, [2]) == []
    assert drafts_of(index, [3]) == [4, 5, 6]
    before = index.words.clone()
    requests.learn()
    assert torch.equal(index.words, before)


def test_tokens_beyond_the_bound_wait_for_the_next_call():
    requests = Requests(new_index(), [list(range(10)), [50, 51]], [5, 5])
    lengths = []
    for _ in range(4):
        requests.learn(max_new=4)
        lengths.append(requests.learned_S.tolist())
    assert lengths == [[4, 2], [8, 2], [10, 2], [10, 2]]
    assert drafts_of(requests.index, [2]) == [3, 4, 5, 6, 7, 8]


def test_what_all_texts_have_beyond_the_bound_waits():
    half = MAX_LISTED // 2 + 8
    requests = Requests(new_index(), [[], [], []], [5, 6, 7], longest=half)
    requests.total_len_S.fill_(half)
    lengths = []
    for _ in range(3):
        requests.learn(max_new=half)
        lengths.append(requests.learned_S.tolist())
    assert lengths == [[half, half - 16, 0], [half, half, half], [half] * 3]


def test_a_slot_whose_text_became_shorter_starts_there():
    requests = Requests(new_index(), [[1, 2, 3]], [5], learned=[40])
    requests.learn()
    assert requests.learned_S.tolist() == [3] and not requests.index.words.any()


def test_rows_without_a_slot_are_skipped():
    requests = Requests(new_index(), [[1, 2, 3], [1, 2, 4], [1, 2]], [5, 6, 5])
    rows = tensor([-1, 0, 3, 1 << 40])
    requests.learn(rows=rows)
    assert requests.learned_S.tolist() == [3, 0, 0]
    tokens_BK, levels_BK, found_B = requests.walk_raw(3, rows=tensor([-1, 2, 3]))
    assert found_B.tolist() == [0, 1, 0]
    assert tokens_BK.tolist() == [[-9] * 3, [3, -9, -9], [-9] * 3]
    assert (levels_BK[:, 1:] == -9).all()


def test_a_walk_ends_when_its_survival_falls_below_the_floor():
    requests = Requests(learned([[1, 2, 3, 4, 5, 6, 7, 8]]).index, [[9, 1]], [5])
    assert requests.walk(floor=0.25) == [[2, 3]]
    assert requests.walk(floor=0.26) == [[2]]
    assert requests.walk(floor=0.51) == [[]]


def test_levels_grade_evidence():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    requests = Requests(learned([text] * 4, orders=(1, 2, 4, 6, 8)).index, [text[:8], [1], [1, 2], text[:6]], [5] * 4)
    assert requests.walk_raw(1)[1][:, 0].tolist() == [15, 3, 3, 11]
    once = Requests(learned([text]).index, [[1]], [5])
    assert once.walk_raw(1)[1].tolist() == [[1]]


def test_siblings_learn_from_each_other_within_a_step():
    requests = Requests(new_index(), [[7, 8, 1, 2, 3, 4, 5], [7, 8, 1]], [5, 5])
    requests.learn()
    assert requests.walk(4)[1] == [2, 3, 4, 5]


def test_out_buffers_may_be_larger_or_smaller_than_the_batch():
    requests = learned([[1, 2, 3, 4], [1, 2]])
    tokens_BK = torch.zeros(5, 9, dtype=torch.int32)[:, 2:5]
    levels_BK, found_B = torch.zeros(5, 3, dtype=torch.int8), torch.full((5,), 7, dtype=torch.int32)
    arguments = (requests.salts_S, torch.ones(NUM_LEVELS), 0.0, Proposals(tokens_BK, levels_BK, found_B))
    requests.index.walk(requests.texts(tensor([1, 0], dtype=torch.int32)), *arguments)
    assert found_B.tolist() == [2, 0, 7, 7, 7]
    assert tokens_BK[0].tolist() == [3, 4, 0]
    requests.index.walk(requests.texts(torch.arange(2).repeat(9)), *arguments)
    assert found_B.tolist() == [0, 2, 0, 2, 0]


def test_placeholders_are_never_drafted():
    requests = learned([[1, 2, -1, 3, 4]])
    assert drafts_of(requests.index, [1, 2]) == []
    assert drafts_of(requests.index, [3]) == [4]


# Comparison with a reference in plain Python


class Reference:
    """Reference: an index of unlimited size."""

    def __init__(self, orders: tuple[int, ...]) -> None:
        self.orders = orders
        self.counts: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}

    def learn(self, salt: int, text: list[int], start: int) -> None:
        for i in range(start, len(text)):
            for m in self.orders:
                if m <= i:
                    self._count((salt, tuple(text[i - m : i])), text[i])

    def _count(self, context: tuple[int, tuple[int, ...]], token: int) -> None:
        candidates = self.counts.setdefault(context, [[0, 0] for _ in range(NUM_CANDIDATES)])
        own = [c for c in candidates if c[0] == token]
        chosen = own[0] if own else min(candidates, key=lambda c: c[1])
        chosen[:] = [token, chosen[1] + 1]
        if chosen[1] >= MAX_COUNT:
            for c in candidates:
                c[1] //= 2

    def walk(self, salt: int, text: list[int], num_positions: int) -> list[int]:
        text, length = list(text), len(text)
        while len(text) < length + num_positions:
            suffixes = [(salt, tuple(text[-m:])) for m in self.orders if m <= len(text)]
            known = [s for s in suffixes if s in self.counts]
            if not known:
                break
            text.append(max(self.counts[known[-1]], key=lambda c: c[1])[0])
        return text[length:]


small_texts = st.lists(st.lists(st.integers(0, 3), max_size=LONGEST), min_size=1, max_size=6)


@settings(max_examples=150)
@given(small_texts, st.sampled_from([ORDERS, (2, 3), (1,), (2, 4, 8, 16)]), st.integers(1, 40), st.data())
def test_an_index_with_room_equals_the_reference(texts, orders, max_new, data):
    salts = [data.draw(st.integers(-1, 1)) for _ in texts]
    index, reference = new_index(1 << 13, orders), Reference(orders)
    requests = Requests(index, texts, salts)
    while not torch.equal(requests.learned_S, requests.total_len_S):
        starts = requests.learned_S.tolist()
        requests.learn(max_new)
        for text, salt, start, end in zip(texts, salts, starts, requests.learned_S.tolist(), strict=True):
            reference.learn(salt, text[:end], start)
    assert requests.walk(9) == [reference.walk(salt, text, 9) for salt, text in zip(salts, texts, strict=True)]
    starts = Requests(index, [text[: len(text) // 2] for text in texts], salts)
    expected = [reference.walk(salt, text[: len(text) // 2], 9) for salt, text in zip(salts, texts, strict=True)]
    assert starts.walk(9) == expected


@given(small_texts, st.integers(0, 2**32))
def test_tables_of_any_content_are_accessed_in_bounds(texts, seed):
    """Tables hold random numbers, which is worse than what races leave. Every drafted token is one of the candidates."""
    rng = np.random.default_rng(seed)
    index = new_index(16, (1, 2))
    index.words.copy_(torch.from_numpy(rng.integers(-(2**63), 2**63, (2, 8))))
    index.candidates.copy_(torch.from_numpy(rng.integers(0, 4, (16, 4)) << 32 | rng.integers(0, 20, (16, 4))))
    requests = Requests(index, texts, [0] * len(texts))
    for _ in range(3):
        for draft in requests.walk(5):
            assert set(draft) <= {0, 1, 2, 3}
        requests.learned_S.zero_()
        requests.learn()


# The tables


@pytest.mark.parametrize("log2_slots", [20, 22, 24])
def test_contexts_spread_over_all_buckets(log2_slots):
    """Texts of few distinct tokens and small salts would collide under a weak hash."""
    texts = np.random.default_rng(0).integers(0, 50, (64, 1024), dtype=np.int32)
    index = ContextIndex(1 << log2_slots, ORDERS, CPU)
    requests = Requests(index, [[]] * 64, list(range(64)), longest=1024)
    requests.token_ids_SL.copy_(torch.from_numpy(texts))
    requests.total_len_S.fill_(1024)
    requests.learn_all()
    contexts = {(s, texts[s, i - m : i].tobytes()) for s in range(64) for m in ORDERS for i in range(m, 1024)}
    used_per_bucket = (index.words != 0).sum(1).numpy()
    num_buckets = len(used_per_bucket)
    assert used_per_bucket.sum() == pytest.approx(len(contexts), rel=1e-3)
    expected = num_buckets * -np.expm1(len(contexts) * np.log1p(-1 / num_buckets))
    assert (used_per_bucket > 0).sum() == pytest.approx(expected, abs=6 * np.sqrt(num_buckets))
    for parts in (used_per_bucket.reshape(256, -1).sum(1), used_per_bucket.reshape(-1, 256).sum(0)):
        assert stats.chisquare(parts).pvalue > MIN_P_VALUE


def test_the_index_has_the_size_that_requests_need_within_memory():
    assert slots_for(512, 16384, ORDERS) == 1 << 24
    assert slots_for(10_000, 10_000, ORDERS) == MAX_SLOTS
    assert slots_for(64, 512, ORDERS) == 1 << 16
    assert slots_for(65, 512, ORDERS) == 1 << 17
    assert slots_for(1, 1, (1,)) == FEWEST_SLOTS


def test_orders():
    assert context_orders(1, 6) == ORDERS
    assert context_orders(2, 8) == (2, 4, 6, 8)


def test_an_impossible_index_is_refused():
    with pytest.raises(ConfigError, match=r"1500 is not a power of two; the next is 2048"):
        build(SuffixDrafterConfig, {"num_slots": 1500}, "drafters")


def test_a_bucket_is_a_cache_line():
    index = new_index(1 << 10)
    assert index.words.data_ptr() % 64 == 0
    assert index.words.nbytes + index.candidates.nbytes == (1 << 10) * 40


# Replacement


def share_found(index: ContextIndex, texts: np.ndarray, first_salt: int, order: int = 2) -> float:
    """Returns the share of the texts' tokens that the index drafts after the `order` tokens before them."""
    salts = np.repeat(np.arange(first_salt, first_salt + len(texts)), texts.shape[1] - order)
    windows = np.lib.stride_tricks.sliding_window_view(texts, order + 1, axis=1).reshape(-1, order + 1)
    requests = Requests(index, [[]] * len(windows), salts.tolist(), longest=order)
    requests.token_ids_SL.copy_(torch.from_numpy(windows[:, :order].copy()))
    requests.total_len_S.fill_(order)
    tokens_BK, _, found_B = requests.walk_raw(1)
    return ((found_B.numpy() == 1) & (tokens_BK[:, 0].numpy() == windows[:, order])).mean()


def learn_texts(index: ContextIndex, texts: np.ndarray, first_salt: int) -> None:
    requests = Requests(
        index, [[]] * len(texts), list(range(first_salt, first_salt + len(texts))), longest=texts.shape[1]
    )
    requests.token_ids_SL.copy_(torch.from_numpy(texts))
    requests.total_len_S.fill_(texts.shape[1])
    requests.learn_all()


def random_texts(num: int, seed: int, length: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100_000, (num, length), dtype=np.int32)


def test_a_small_index_always_knows_the_latest_texts():
    """Thirty times more contexts than fit, each seen once. The index always knows most of the latest eighth."""
    index, shares = new_index(1 << 13, (1, 2)), []
    for round_ in range(240):
        texts = random_texts(8, seed=round_)
        learn_texts(index, texts, first_salt=8 * round_)
        shares.append(share_found(index, texts, 8 * round_))
    assert (index.words != 0).all()
    assert min(shares[10:]) > 0.7
    assert np.mean(shares[-30:]) > np.mean(shares[10:40]) - 0.02


def test_old_contexts_make_room_however_often_they_were_counted():
    """Contexts fill the index and are counted a thousand times each. New contexts soon replace them."""
    index = new_index(1 << 10, (1, 2))
    old = random_texts(12, seed=0)
    for _ in range(1000):
        learn_texts(index, old, first_salt=0)
    assert (index.words != 0).float().mean() > 0.95
    assert share_found(index, old, 0) > 0.6
    shares = []
    for round_ in range(80):
        texts = random_texts(1, seed=1 + round_)
        for _ in range(3):  # siblings
            learn_texts(index, texts, first_salt=100 + round_)
        shares.append(share_found(index, texts, 100 + round_))
    assert min(shares) > 0.6 and np.mean(shares) > 0.9
    assert share_found(index, old, 0) < 0.05


def test_repeated_contexts_outlive_those_seen_once():
    index, popular = new_index(1 << 11, (1, 2)), random_texts(4, seed=0)
    for round_ in range(100):
        learn_texts(index, popular, first_salt=0)
        learn_texts(index, random_texts(8, seed=1 + round_), first_salt=100 + 8 * round_)
    assert share_found(index, popular, 0) > 0.95


def test_ranks_of_a_bucket_stay_together_however_often_they_wrap():
    index, rng = new_index(BUCKET_SLOTS, (1,)), np.random.default_rng(0)
    for _ in range(40):
        learn_texts(index, (rng.integers(0, 40, (1, 20_000)) % rng.integers(1, 40)).astype(np.int32), 0)
        ranks = (index.words[0] & RANK_MASK).numpy().astype(np.int16)
        spread = (ranks - ranks[0]).astype(np.int16)
        assert spread.max() - spread.min() <= MAX_LEAD + 1


@pytest.mark.parametrize("times", [1, 10, 1000])
def test_a_new_continuation_replaces_the_old_one_soon(times):
    requests = Requests(new_index(1 << 10), [[1, 2] * (LONGEST // 2)], [5], learned=[1])
    for _ in range(times):
        requests.learned_S.fill_(1)
        requests.learn()
    assert drafts_of(requests.index, [1], num_positions=1) == [2]
    needed = 0
    while drafts_of(requests.index, [1], num_positions=1) != [3]:
        learn_texts(requests.index, np.array([[1, 3]], np.int32), 5)
        needed += 1
    assert needed <= 16
    assert (requests.index.candidates & COUNT_MASK).max() < MAX_COUNT


def test_counts_that_fade_still_rank_continuations():
    """Counts that fade still distinguish a continuation of 70 % from one of 30 %."""
    rng, index, won = np.random.default_rng(0), new_index(1 << 10, (1,)), Counter()
    for _ in range(400):
        learn_texts(index, np.array([[1, 2 if rng.random() < 0.7 else 3]], np.int32), 5)
        won[drafts_of(index, [1], num_positions=1)[0]] += 1
    assert won[2] > 350


# Triton


def run_script(script: str, **environment: str) -> str:
    command, env = [sys.executable, "-c", script], {**os.environ, **environment}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pair_of_bodies(num_slots: int, orders: tuple[int, ...]) -> tuple[ContextIndex, ContextIndex]:
    from lab.vllm_on_cpu import own_kernels
    from nemo_specrollout.drafters import step_triton

    own_kernels.register()
    ours, theirs = new_index(num_slots, orders), new_index(num_slots, orders)
    theirs.use_kernels(step_triton)
    return ours, theirs


def check_tables(ours: ContextIndex, theirs: ContextIndex) -> None:
    assert torch.equal(ours.words, theirs.words)
    assert torch.equal(ours.candidates, theirs.candidates)


def check_walks(
    both: list[Requests], num_positions: int, floor: float = 0.0, rate: float | None = None, rows: Tensor | None = None
) -> int:
    """Compares the walks of both bodies. Returns the number of tokens found."""
    rates = torch.from_numpy(LEVEL_PRIORS).float() + 0.15 if rate is None else torch.full((NUM_LEVELS,), rate)
    ours, theirs = (requests.walk_raw(num_positions, floor, rates, rows) for requests in both)
    assert all(map(torch.equal, ours, theirs))
    return int(ours[2].sum())


def check_blocks(orders: tuple[int, ...], rows: list[int]) -> None:
    """Compares the bodies on blocks of distinct contexts, several programs for a row, rows without a slot and short texts."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1 << 17, n).tolist() for n in (50, 3, 40, 17, 0, 1)]
    salts = [*rng.integers(-(2**63), 2**63, 5).tolist(), NO_SALT]
    both = [Requests(index, texts, salts) for index in pair_of_bodies(1 << 20, orders)]
    for requests in both:
        requests.learn(max_new=30, rows=tensor(rows, dtype=torch.int32))
    ours, theirs = both
    assert torch.equal(ours.learned_S, theirs.learned_S) and ours.learned_S.max() == 30
    check_tables(ours.index, theirs.index)
    for length, at_least in ((17, 16), (orders[0], 8)):
        for requests in both:
            requests.total_len_S.clamp_(max=length)
        assert check_walks(both, 8, rows=tensor(rows)) >= at_least


def check_single_tokens(num_slots: int, orders: tuple[int, ...], vocabulary: int, lift: int) -> None:
    """Compares the bodies on one token for each row and equal tables, which covers every rule of ranks and candidates.

    `lift` is added to all ranks, so that some wrap around.
    """
    rng, indexes = np.random.default_rng(1), pair_of_bodies(num_slots, orders)
    learn_texts(indexes[0], rng.integers(0, vocabulary, (3, 400), dtype=np.int32), 0)
    words = indexes[0].words
    words[words != 0] = (words & ~RANK_MASK | (words + lift) & RANK_MASK)[words != 0]
    indexes[1].words.copy_(words)
    indexes[1].candidates.copy_(indexes[0].candidates)
    texts = rng.integers(0, vocabulary, (6, 20)).tolist()
    both = [Requests(index, texts, [0, 0, 1, 1, 2, 7], learned=[9] * 6) for index in indexes]
    for length in (10, 11, 12):
        for requests in both:
            requests.total_len_S.fill_(length)
            requests.learn(max_new=1)
        check_tables(*indexes)
    assert check_walks(both, 7, floor=0.02) > 0
    assert check_walks(both, 4, floor=0.25, rate=0.5) > 0
    # Shares on either side of each edge between levels, ties, and no candidate.
    counts = tensor([[3, 0, 0, 0], [1, 3, 0, 0], [6, 9, 4, 0], [2, 0, 0, 0], [6, 9, 5, 0], [7, 7, 7, 7], [0, 0, 0, 0]])
    tokens = torch.from_numpy(rng.integers(0, vocabulary, (num_slots, 4)))
    for index in indexes:
        index.candidates.copy_(tokens << 32 | counts.repeat(num_slots // 7 + 1, 1)[:num_slots])
    texts = rng.integers(0, vocabulary, (40, 12)).tolist()
    assert check_walks([Requests(index, texts, [0] * 40) for index in indexes], 1) > 0


def check_conflicts(num_slots: int) -> None:
    """Compares the bodies on texts whose contexts are counted, and replace each other, many times in one call."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 3, n).tolist() for n in (30, 12, 0, 30, 25)]
    both = [Requests(index, texts, [0, 0, 0, 1, 1]) for index in pair_of_bodies(num_slots, (1, 2, 4))]
    for requests in both:
        requests.learn(max_new=25)
    check_tables(*(requests.index for requests in both))
    assert (both[0].index.words != 0).all()


def check_a_full_list() -> None:
    """The texts have more new tokens than are learned in a step. The first rows come first."""
    from triton import language

    from nemo_specrollout.drafters import index_triton

    index_triton._MAX_LISTED = language.constexpr(32)
    _, index = pair_of_bodies(1 << 10, (1,))
    requests = Requests(index, [[1] * 20, [2] * 20, [3] * 20], [5, 6, 7])
    lengths = []
    for _ in range(3):
        requests.learn()
        lengths.append(requests.learned_S.tolist())
    assert lengths == [[20, 12, 0], [20, 20, 20], [20] * 3]
    assert requests.walk(2) == [[1, 1], [2, 2], [3, 3]]


def check_bodies_agree() -> None:
    """Runs in Triton's interpreter (`test_interpreted_drafters.py`)."""
    check_blocks(ORDERS, rows=[3, -1, 0, 5, 2, 1, 9])
    check_blocks((2, 4, 6, 8, 10, 12, 14, 16), rows=[0, 2])
    check_single_tokens(64, (1, 2, 4), vocabulary=12, lift=0)
    check_single_tokens(16, (1, 2), vocabulary=3, lift=0x7FF0)
    check_single_tokens(256, (1, 2, 3), vocabulary=4, lift=0xE000)
    check_conflicts(16)
    check_a_full_list()


def test_a_cpu_needs_no_triton():
    run_script(
        "import sys, torch; from nemo_specrollout.drafters.device_index import ContextIndex as Index;"
        " from lab.vllm_on_cpu import own_kernels; own_kernels.register();"
        " Index(64, (1, 2), torch.device('cpu')); sys.exit('triton' in sys.modules)"
    )


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_body_on_a_gpu():
    """Both bodies make the same tables from the same texts, and read them alike."""
    rng, device = np.random.default_rng(0), torch.device("cuda")
    texts = rng.integers(0, 1000, (300, 2000)).tolist()
    both = [Requests(ContextIndex(1 << 18, ORDERS, d), texts, list(range(300)), longest=2000) for d in (CPU, device)]
    for requests in both:
        requests.learn_all()
    cpu, gpu = both
    assert torch.equal(gpu.index.words.cpu(), cpu.index.words)
    assert torch.equal(gpu.index.candidates.cpu(), cpu.index.candidates)
    lengths = torch.from_numpy(rng.integers(0, 1990, 300)).int()
    for requests in both:
        requests.total_len_S.copy_(lengths)
    for on_gpu, on_cpu in zip(gpu.walk_raw(8), cpu.walk_raw(8), strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)
