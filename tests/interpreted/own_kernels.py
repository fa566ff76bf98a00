# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernels, interpreted, equal their numba bodies, and sample the same tokens as vLLM's kernel.

Shapes: B requests, S request slots, R rows, D drafters, K draft positions, V vocabulary, L longest text, T steps.
"""

from types import SimpleNamespace

import interpreter
import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from lab.vllm_on_cpu import own_kernels
from lab.vllm_on_cpu.kernels.noise import row_state
from lab.vllm_on_cpu.own_kernels.draft_sampling import best_two
from nemo_specrollout.drafters import step_triton
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_LEVELS, SCORE_GAP_EDGES, RowPrice, Texts
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.drafters.device_index import ContextIndex, Lookup, context_orders
from nemo_specrollout.generation.drafting import draft_sampling_triton
from nemo_specrollout.generation.drafting.draft_sampling import sample_with_score_gap
from nemo_specrollout.generation.drafting.drafting_graphs import DraftingGraphs, StepInputs
from nemo_specrollout.sampling.equality import accept_by_equality
from nemo_specrollout.sampling.equality_triton import accept_rows

assert interpreter.torch is torch  # imported before vllm
own_kernels.register()
CPU = torch.device("cpu")
LONGEST = 60
PRICE = RowPrice(0.01, 0.007)
"""A row of a long text costs much more than one of a short text."""


@pytest.mark.parametrize("num_positions", [1, 3, 8])
def test_equality(num_positions: int) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(num_positions)
    counts_B = rng.integers(1, num_positions + 2, 40)
    starts_B1 = torch.from_numpy(np.concatenate([[0], np.cumsum(counts_B)])).int()
    sampled_R = torch.from_numpy(rng.integers(0, 2, counts_B.sum()))
    inputs_R = torch.where(torch.rand(len(sampled_R)) < 0.8, sampled_R.roll(1), -1).int()
    emitted_BK, counts = accept_by_equality(sampled_R, inputs_R, starts_B1, num_positions)
    got_BK, got_B = torch.empty_like(emitted_BK), torch.empty_like(counts)
    accept_rows(sampled_R, inputs_R, starts_B1, got_BK, got_B)
    assert torch.equal(got_BK, emitted_BK)
    assert torch.equal(got_B, counts)
    assert 1 in counts
    assert num_positions + 1 in counts


class BoardWorld:
    """A draft board, a text for each slot, and random drafters; the same for the same sizes.

    The first `num_lookups` drafters look texts up, in indexes so small that contexts of all requests meet in their buckets.
    """

    def __init__(self, num_drafters: int, num_positions: int, model: int | None, num_lookups: int) -> None:
        self.rng = np.random.default_rng(num_drafters + 10 * num_positions)
        self.num_slots, self.K = 9, num_positions
        priors_DE = np.tile(LEVEL_PRIORS, (num_drafters, 1))
        names = [str(d) for d in range(num_drafters)]
        self.board = DraftBoard(names, priors_DE, BoardShape(self.num_slots, num_positions), CPU, model)
        self.board.open(torch.arange(self.num_slots), self.ints(self.num_slots, low=30, high=LONGEST))
        self.tables = self.board.tables
        # Some have more trials than the evidence window.
        evidence_DE2 = self.tables.evidence_DE2
        evidence_DE2.mul_(torch.from_numpy(self.rng.uniform(0.8, 200.0, evidence_DE2.shape)).float())
        self.total_len_S = self.ints(self.num_slots, low=10, high=20)
        self.wide_SL = self.ints(self.num_slots, LONGEST + 20, high=2)
        self.token_ids_SL = self.wide_SL[:, :LONGEST]
        orders, salts_S = context_orders(1, 4), torch.arange(9)
        self.lookups = [
            Lookup(ContextIndex(32, orders[d:], CPU), salts_S % (2 + 7 * d), self.total_len_S - 2, d)
            for d in range(num_lookups)
        ]

    def use_triton(self) -> None:
        for part in (self.board, *(lookup.index for lookup in self.lookups)):
            part.use_kernels(step_triton)

    def ints(self, *shape: int, low: int = 0, high: int = 9, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape)).to(dtype)

    def step(self, number: int, graphs: DraftingGraphs | None = None) -> dict[str, Tensor]:
        """Runs a step of the batch, and returns the board's tensors before and after the choice.

        With `graphs` it runs what they would replay.
        """
        board, tables = self.board, self.tables
        slots_B = torch.from_numpy(self.rng.permutation(self.num_slots)[:7])
        slots_B[self.rng.integers(7)] = -1
        num_sampled_B = self.ints(7, high=self.K + 2)
        self.total_len_S[slots_B[slots_B >= 0]] += num_sampled_B[slots_B >= 0]
        self.total_len_S.clamp_(max=LONGEST)
        texts = Texts(slots_B, self.total_len_S, self.token_ids_SL)
        outcomes = (num_sampled_B, self.ints(7, high=self.K + 1))
        if graphs is None:
            board.observe(texts, *outcomes, number, self.lookups, 20 if number == 0 else 9)
        else:
            graphs.load(slots_B.numpy(), outcomes, number, self.K, PRICE)
            graphs.replay("observe")
        observed = self.state()
        tables.tokens_DBK.copy_(self.ints(*tables.tokens_DBK.shape, high=2))
        tables.levels_DBK.copy_(self.ints(*tables.levels_DBK.shape, high=NUM_LEVELS))
        tables.found_DB.copy_(self.ints(*tables.found_DB.shape, high=self.K + 1))
        if graphs is None:
            board.choose(texts, PRICE, self.lookups)
        else:
            graphs.replay("choose")
        return {f"observed.{name}": value for name, value in observed.items()} | self.state()

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.tables._asdict().items()}

    def indexed(self) -> list[Tensor]:
        return [table for u in self.lookups for table in (u.index.words, u.index.candidates, u.learned_S)]


SIZES = [(1, 1, None, 0), (2, 8, None, 0), (3, 5, 1, 2), (5, 3, 4, 0)]
"""Numbers of drafters and positions, the drafter with weights, and the number of lookups."""


@pytest.mark.parametrize(("sizes"), SIZES, ids=str)
def test_board(sizes: tuple[int, int, int | None, int]) -> None:
    """Each step starts from the same state, so that rounding errors cannot add up to another choice."""
    ours, theirs = BoardWorld(*sizes), BoardWorld(*sizes)
    ours.use_triton()
    for number in range(8 if sizes[3] else 12):
        got, expected = ours.step(number), theirs.step(number)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=2e-6, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
        for table, value in zip(ours.tables, theirs.tables, strict=True):
            table.copy_(value)
        assert all(map(torch.equal, ours.indexed(), theirs.indexed()))
    tables = theirs.tables
    assert tables.verified_DK2.flatten(0, 1).sum(dim=0).tolist() == tables.request_S2.sum(dim=0).tolist()
    assert tables.request_S2[:, 0].all(), "nothing was verified"
    assert tables.request_S2[:, 1].any()
    assert sizes[2] is None or tables.spread_FQ[1:-1].any()
    assert all(table.any() for table in theirs.indexed())
    assert not any(count.any() for count in ours.board.memory.sums[:3]), "counts of a step are left"


class Replaying(DraftingGraphs):
    """Runs the parts where a GPU would replay them, with the memory that the graphs would read."""

    def replay(self, part: str) -> None:
        self._parts[part](self._inputs(self._size))


def test_a_graph_of_more_rows_learns_and_chooses_the_same() -> None:
    """A batch of seven in a graph of eight rows has the same bits as by itself, in all tables and indexes."""
    ours, graphed = BoardWorld(*SIZES[2]), BoardWorld(*SIZES[2])
    ours.use_triton()
    graphed.use_triton()
    board = graphed.board

    def observe(inputs: StepInputs) -> None:
        outcomes = (inputs.num_sampled_B, inputs.num_rejected_B)
        board.observe(inputs.texts, *outcomes, inputs.step, graphed.lookups, 20)

    def choose(inputs: StepInputs) -> None:
        board.choose(inputs.texts, inputs.price, graphed.lookups, inputs.most_drafts)

    states = SimpleNamespace(
        total_len=SimpleNamespace(gpu=graphed.total_len_S), all_token_ids=SimpleNamespace(gpu=graphed.token_ids_SL)
    )
    graphs = Replaying({"observe": observe, "choose": choose}, states, graphed.num_slots, 20)
    for number in range(1 << 16, (1 << 16) + 4):
        expected, got = ours.step(number), graphed.step(number, graphs)
        assert graphs._size == 8
        for name, value in expected.items():
            batch = (slice(None), slice(7)) if "_DB" in name else slice(7) if "_BK" in name else slice(None)
            assert torch.equal(got[name][batch], value[batch]), name
        assert all(map(torch.equal, ours.indexed(), graphed.indexed()))
    assert graphed.tables.verified_DK2.any()


@pytest.mark.parametrize(("num_vocab", "dtype"), [(1, torch.float32), (97, torch.bfloat16), (4100, torch.float32)])
def test_drafts(num_vocab: int, dtype: torch.dtype) -> None:
    """The token equals vLLM's. The level equals the numba body's, unless the score gap lies on an edge."""
    rng = np.random.default_rng(num_vocab)
    num_rows, num_slots = 12, 9
    logits_RV = torch.from_numpy(rng.standard_normal((num_rows, num_vocab + 3)) * 3).to(dtype)[:, :num_vocab]
    logits_RV[3, num_vocab // 2 :] = logits_RV[3, 0]  # ties
    slots_R = torch.from_numpy(rng.integers(0, num_slots, num_rows))
    slots_R[2] = -1
    temperature_S = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0, 0.0, 0.5, 2.0, 1.0])
    seeds_S = torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, num_slots))
    positions_R = torch.from_numpy(rng.integers(0, 1 << 17, num_rows))
    column = torch.tensor(2)
    arguments = (logits_RV, slots_R, temperature_S, seeds_S, positions_R)
    levels_RK, expected_RK = (torch.full((num_rows, 4), 99, dtype=torch.int8) for _ in range(2))
    tokens_R = torch.empty(num_rows, dtype=torch.int64)
    draft_sampling_triton.sample_rows(*arguments, tokens_R, levels_RK, column, tokens_R[:0])
    assert torch.equal(tokens_R, gumbel_sample(*arguments, apply_temperature=True, is_drafting=False))
    assert torch.equal(tokens_R, sample_with_score_gap(*arguments, expected_RK, column))
    assert (levels_RK[:, [0, 1, 3]] == 99).all()
    ids_V = torch.arange(num_vocab) * 3 + 5  # tokens of a larger vocabulary
    draft_sampling_triton.sample_rows(*arguments, tokens_R, reduced_RK := levels_RK.clone(), column, ids_V)
    assert torch.equal(
        tokens_R, sample_with_score_gap(*arguments, expected_reduced_RK := expected_RK.clone(), column, ids_V)
    )
    assert ((tokens_R - 5) % 3 == 0).all()
    if num_vocab > 1:
        assert ((reduced_RK - expected_reduced_RK).abs() <= 1).all()
        near_R = is_near_an_edge(*arguments)
        assert torch.equal(levels_RK[~near_R], expected_RK[~near_R])
        assert near_R.sum() < 3
        assert len(set(levels_RK[:, 2].tolist())) > 2


def is_near_an_edge(
    logits_RV: Tensor, slots_R: Tensor, temperature_S: Tensor, seeds_S: Tensor, positions_R: Tensor
) -> Tensor:
    """Returns whether each row's score gap is so close to an edge that a last bit decides the level."""
    values_RV, edges = logits_RV.float().numpy(), np.array(SCORE_GAP_EDGES)
    all_tokens, ids_N = np.empty(0, np.int64), np.empty(1024, np.uint32)
    scores_N, bounds_N = np.empty(1024, np.float32), np.empty(1024, np.int32)
    near = []
    for r, slot in enumerate(slots_R.tolist()):
        temperature = np.float32(temperature_S[slot] if slot >= 0 else 0)
        state = row_state(np.int64(seeds_S[slot]), np.int64(positions_R[r]))
        divisor = temperature or np.float32(1)
        margin = best_two(values_RV[r], divisor, temperature != 0, state, True, all_tokens, scores_N, bounds_N, ids_N)[
            1
        ]
        near.append(bool((abs(edges - margin) < 1e-5).any()))
    return torch.tensor(near)
