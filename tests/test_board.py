# SPDX-License-Identifier: Apache-2.0
"""The draft board on a CPU: what it learns, which drafter it chooses, what it counts. On a GPU: `test_kernels.py`.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence, C classes of context
length.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lab.vllm_on_cpu.own_kernels.step import level_rates
from nemo_specrollout.drafters.base import (
    LEVEL_PRIORS,
    MAX_RATE,
    NO_PRICE,
    NUM_BINS,
    NUM_LEVELS,
    PRIOR_STRENGTH,
    TRACED_STEPS,
    RowPrice,
    Texts,
)
from nemo_specrollout.drafters.board import BoardShape, DraftBoard

pytestmark = pytest.mark.unit

LONGEST, K = 400, 3
Proposals = dict[int, dict[int, list[int]]]
"""The proposed tokens by drafter and slot."""


class World:
    """A board, and requests whose whole texts are known from the start: the tokens that the policy will sample."""

    def __init__(self, num_drafters: int = 1, num_slots: int = 2, model: int | None = None) -> None:
        names = [f"drafter {d}" for d in range(num_drafters)]
        priors_DE = np.tile(LEVEL_PRIORS, (num_drafters, 1))
        self.board = DraftBoard(names, priors_DE, BoardShape(num_slots, K), torch.device("cpu"), model)
        self.tables = self.board.tables
        self.text_SL = torch.arange(LONGEST, dtype=torch.int32).repeat(num_slots, 1) % 50
        self.total_len_S = torch.full((num_slots,), 10, dtype=torch.int32)
        self.num_steps = 0
        self.open(*range(num_slots))

    def open(self, *slots: int, limit: int = LONGEST) -> None:
        self.board.open(tensor(slots), torch.full((len(slots),), limit, dtype=torch.int32))

    def texts(self, *slots: int) -> Texts:
        return Texts(tensor(slots), self.total_len_S, self.text_SL)

    def next_tokens(self, slot: int, num: int = K) -> list[int]:
        """Returns the next tokens that the policy will sample for a request."""
        length = int(self.total_len_S[slot])
        return self.text_SL[slot, length : length + num].tolist()

    def choose(
        self, *slots: int, proposals: Proposals | None = None, level: int = 0, price: RowPrice = NO_PRICE
    ) -> Tensor:
        """Lets the drafters propose and the board choose. Returns the rates of the submitted drafts, [B, K]."""
        t, self.slots = self.tables, slots
        t.found_DB.zero_()
        t.levels_DBK.fill_(level)
        for d, of_slot in (proposals or {}).items():
            for slot, tokens in of_slot.items():
                t.tokens_DBK[d, slots.index(slot), : len(tokens)] = tensor(tokens, dtype=torch.int32)
                t.found_DB[d, slots.index(slot)] = len(tokens)
        self.board.choose(self.texts(*slots), price)
        return t.rates_SK[list(slots)].clone()

    def drafts(self, row: int) -> list[int]:
        """Returns the drafts that were submitted for a row of the batch."""
        slot = self.slots[row]
        return self.tables.drafts_BK[row, self.tables.rates_SK[slot] > 0].tolist() if slot >= 0 else []

    def verify(self, *slots: int, most: int = K) -> tuple[Counter, Counter]:
        """Lets the policy sample, with at most `most` drafts of each request verified. Slot -1 is a row without a request.

        Returns the numbers of verified and of accepted drafts by slot.
        """
        num_sampled, num_rejected = [], []
        verified, accepted = Counter(), Counter()
        for row, slot in enumerate(slots):
            drafts = self.drafts(row)[:most] if slot >= 0 else []
            right = self.next_tokens(slot)
            num_right = next((k for k, draft in enumerate(drafts) if draft != right[k]), len(drafts))
            num_sampled.append(num_right + 1)
            num_rejected.append(len(drafts) - num_right)
            if slot >= 0:
                self.total_len_S[slot] += num_right + 1
                verified[slot], accepted[slot] = len(drafts), num_right
        counts = (tensor(numbers, dtype=torch.int32) for numbers in (num_sampled, num_rejected))
        self.board.observe(self.texts(*slots), *counts, self.num_steps)
        self.num_steps += 1
        return verified, accepted


# Learning


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_submitted", [True, False])
def test_rates_follow_outcomes_of_all_proposals_submitted_or_not(is_submitted: bool, is_right: bool) -> None:
    """Drafter 0 is always right for three tokens. Drafter 1 is alone, or proposes one token that is never submitted."""
    world = World(num_drafters=2)
    for _ in range(90):
        right = world.next_tokens(0)
        proposal = {0: right[:1] if is_right else [99]}
        world.choose(0, proposals={1: proposal} if is_submitted else {0: {0: right}, 1: proposal})
        world.verify(0)
    rate = level_rates(world.board)[1, 0].item()
    assert rate > 0.95 if is_right else rate < 0.05
    assert (world.tables.verified_DK2[1].sum() > 0) == is_submitted
    rates_BK = world.choose(0, proposals={1: {0: [1, 2]}})
    assert (rates_BK[0, :2] > 0.9).all() == is_right and rates_BK[0, 2] == 0.0
    assert rates_BK.max() <= np.float32(MAX_RATE)


def test_what_all_ranks_share_is_one_tensor() -> None:
    """A copy of its bytes is a copy of the submitted drafts, their rates and the spread."""
    first, second = World(num_slots=3), World(num_slots=3)
    for slot in range(3):
        first.choose(slot, proposals={0: {slot: first.next_tokens(slot)}}, level=5)
    assert first.tables.drafts_BK.any() and not second.tables.drafts_BK.any()
    second.board.shared.copy_(first.board.shared)
    for name in ("drafts_BK", "rates_SK", "spread_FQ"):
        assert torch.equal(getattr(second.tables, name), getattr(first.tables, name)), name


def test_each_level_has_its_own_rate() -> None:
    world = World()
    for n in range(100):
        is_even = n % 2 == 0
        world.choose(0, proposals={0: {0: world.next_tokens(0) if is_even else [99]}}, level=7 if is_even else 2)
        world.verify(0)
    rates_E = level_rates(world.board)[0]
    assert rates_E[7] > 0.95 and rates_E[2] < 0.1
    assert rates_E[3].item() == pytest.approx(LEVEL_PRIORS[3])


@pytest.mark.parametrize(("row_price", "chosen"), [(0.0, 0), (0.5, 1), (0.95, 0)])
def test_tokens_that_do_not_pay_for_their_row_hardly_count(row_price: float, chosen: int) -> None:
    """Three tokens of rate 0.65 are worth 1.35 tokens, one of rate 0.9 is worth 0.9. If a row costs half a token, only the
    first of the three pays. It wins 0.15, and the other proposal wins 0.4. If no token pays, the expected tokens decide."""
    world = World(num_drafters=2)
    world.tables.evidence_DE2[0, :, 0] = 0.65 * world.tables.evidence_DE2[0, :, 1]
    world.tables.evidence_DE2[1, :, 0] = 0.9 * world.tables.evidence_DE2[1, :, 1]
    world.choose(0, proposals={0: {0: [11, 12, 13]}, 1: {0: [14]}}, price=RowPrice(row_price))
    assert world.tables.chosen_S[0] == chosen


def test_a_row_of_a_long_text_is_dearer() -> None:
    """Two requests have the same proposals, as in the test above. Only the longer text makes half a token of the price."""
    world = World(num_drafters=2)
    world.tables.evidence_DE2[0, :, 0] = 0.65 * world.tables.evidence_DE2[0, :, 1]
    world.tables.evidence_DE2[1, :, 0] = 0.9 * world.tables.evidence_DE2[1, :, 1]
    world.total_len_S[1] = 300
    proposals = {0: {0: [11, 12, 13], 1: [11, 12, 13]}, 1: {0: [14], 1: [14]}}
    world.choose(0, 1, proposals=proposals, price=RowPrice(0.0, 0.5 / 300))
    assert world.tables.chosen_S[:2].tolist() == [0, 1]


def test_a_request_has_its_own_factor() -> None:
    world = World()
    for _ in range(30):
        world.choose(0, 1, proposals={0: {0: world.next_tokens(0), 1: [99, 99, 99]}})
        world.verify(0, 1)
    easy, hard = world.choose(0, 1, proposals={0: {0: [1], 1: [1]}})[:, 0].tolist()
    assert easy > 0.8 and hard < 0.3


def test_factors_count_as_far_as_they_have_predicted_hits() -> None:
    """Drafter 0 is always right for one request and never for the other. Drafter 1 is right at random for both, so its
    factors predict nothing."""
    world = World(num_drafters=2)
    rng = np.random.default_rng(0)
    for _ in range(110):
        right = {slot: world.next_tokens(slot, 1) for slot in (0, 1)}
        tossed = {slot: right[slot] if rng.random() < 0.5 else [99] for slot in (0, 1)}
        world.choose(0, 1, proposals={0: {0: right[0], 1: [99]}, 1: tossed})
        world.verify(0, 1, most=0)
    products, squares = (world.tables.factor_weight_D2 + 1).T
    assert products[0] / squares[0] > 0.9 and products[1] / squares[1] < 0.4


def test_a_token_that_contradicts_the_reference_has_a_lower_rate() -> None:
    """The text drafter is right in every other step, the reference drafter always. Only their agreement tells which."""
    world = World(num_drafters=2, model=1)
    for n in range(120):
        right = world.next_tokens(0, 1)
        world.choose(0, proposals={0: {0: right if n % 2 else [99]}, 1: {0: right}})
        world.verify(0, most=0)
    assert level_rates(world.board)[0, 0].item() == pytest.approx(0.5, abs=0.1)
    apart = [{0: {0: [1]}}, {0: {0: [1]}, 1: {0: [1]}}, {0: {0: [1, 2, 3]}, 1: {0: [1, 9]}}]
    alone, agreed, contradicted = (world.choose(0, proposals=proposals)[0] for proposals in apart)
    assert alone[0].item() == pytest.approx(LEVEL_PRIORS[0], rel=0.2), "no such evidence was observed"
    assert agreed[0] > 0.9 and contradicted[0] > 0.9
    rates_E = world.tables.evidence_DE2[..., 0] / world.tables.evidence_DE2[..., 1]
    assert rates_E[0, 2 * NUM_LEVELS] < 0.1 and world.tables.chosen_S[0] == 1


@pytest.mark.parametrize(
    ("text", "other", "reference", "expected"),
    [
        ([1, 2, 3], [], [], [[0, 0, 0], [], []]),
        ([1, 2, 3], [], [1], [[1, 3, 3], [], [1]]),
        ([1, 2, 3], [4], [1, 7, 3], [[1, 2, 3], [2], [1, 2, 3]]),
        ([1], [1, 2], [1, 2, 3], [[1], [1, 1], [1, 1, 3]]),
        ([], [], [1, 2], [[], [], [0, 0]]),
    ],
)
def test_evidence_holds_the_relation_to_the_other_side(
    text: list[int], other: list[int], reference: list[int], expected: list[list[int]]
) -> None:
    world = World(num_drafters=3, model=2)
    world.choose(0, proposals={0: {0: text}, 1: {0: other}, 2: {0: reference}}, level=3)
    for d, relations in enumerate(expected):
        levels = world.tables.evidence_SDK[0, d, : len(relations)].tolist()
        assert levels == [NUM_LEVELS * relation + 3 for relation in relations]


def test_a_proposal_stays_open_until_it_is_refuted_or_confirmed() -> None:
    world = World(num_drafters=2)
    tables, right = world.tables, world.next_tokens(0)
    open_proposals = []
    for proposal in ([right[0], 99, right[2]], [77], [78], [79], world.next_tokens(0, 6)[4:], [80], [81]):
        world.choose(0, proposals={0: {0: world.next_tokens(0)}, 1: {0: proposal}})
        assert tables.chosen_S[0] == 0 and tables.length_SD[0, 0] == 3, "the submitted drafter proposes again"
        open_proposals.append((tables.tokens_SDK[0, 1, 0].item(), tables.checked_SD[0, 1].item()))
        world.verify(0, most=0)  # one token is sampled
    fifth = world.text_SL[0, 14].item()
    assert open_proposals == [(right[0], 0), (right[0], 1), (78, 0), (79, 0), (fifth, 0), (fifth, 1), (81, 0)]
    judged = tables.evidence_DE2[1, :, 1].sum() - PRIOR_STRENGTH * tables.evidence_DE2.shape[1]
    assert judged == pytest.approx(7.0), "trials"


def test_a_submitted_proposal_replaces_the_open_one() -> None:
    world = World(num_drafters=2)
    world.choose(0, proposals={0: {0: world.next_tokens(0)}, 1: {0: world.next_tokens(0, 2)}})
    world.choose(0, proposals={1: {0: [99]}})
    assert world.drafts(0) == [99] and world.tables.tokens_SDK[0, 1, 0] == 99


def test_a_new_request_inherits_nothing_from_its_slot() -> None:
    world = World()
    for _ in range(20):
        world.choose(0, proposals={0: {0: [99]}})
        world.verify(0)
    world.choose(0, proposals={0: {0: [99, 99]}})
    world.open(0)
    learned, verified = world.tables.evidence_DE2[0, 0].tolist(), int(world.tables.verified_DK2.sum())
    world.verify(0)
    assert world.tables.evidence_DE2[0, 0, 1] <= learned[1] and world.tables.verified_DK2.sum() == verified
    assert world.tables.request_S2[0].tolist() == [0, 0]
    rates_BK = world.choose(0, 1, proposals={0: {0: [1], 1: [1]}})
    assert rates_BK[0, 0] == rates_BK[1, 0] < LEVEL_PRIORS[0]


def test_a_drafter_with_new_weights_starts_from_the_priors() -> None:
    world, never_used = World(num_drafters=2, model=1), World(num_drafters=2, model=1)
    for d in (0, 1) * 20:
        world.choose(0, proposals={d: {0: [99]}})
        world.verify(0)
    other = world.tables.evidence_DE2[0].clone()
    world.choose(0, proposals={1: {0: [99]}})
    world.board.forget_drafter(1)
    for name in ("evidence_DE2", "calibration_D2"):
        assert torch.equal(getattr(world.tables, name)[1], getattr(never_used.tables, name)[1])
    assert torch.equal(world.tables.evidence_DE2[0], other)
    assert not world.tables.factor_SD2[:, 1].any() and not world.tables.length_SD[:, 1].any()
    assert world.choose(0, proposals={1: {0: [1]}})[0, 0].item() == pytest.approx(LEVEL_PRIORS[0])


# Choice


def test_the_better_drafter_is_chosen_for_each_request() -> None:
    world = World(num_drafters=2)
    board, tables = world.board, world.tables
    world.choose(1, 0, proposals={0: {1: [1, 2, 3], 0: [4, 5, 6]}, 1: {1: [7, 8, 9], 0: [10, 11]}})
    tables.levels_DBK[0, 0], tables.levels_DBK[1, 1] = 3, 3  # each drafter has strong evidence for one request
    board.choose(world.texts(1, 0))
    assert tables.drafts_BK.tolist() == [[1, 2, 3], [10, 11, 0]]
    assert tables.chosen_S.tolist() == [1, 0] and tables.submitted_S.tolist() == [2, 3]
    assert tables.rates_SK.numpy() == pytest.approx(LEVEL_PRIORS[3] * np.array([[1, 1, 0], [1, 1, 1]]))


def test_the_proposal_of_most_expected_tokens_is_chosen() -> None:
    """Rates of 0.3, 0.45, 0.6 and 0.8: three tokens at 0.6 are worth 1.176, one at 0.8 is worth 0.8, three at 0.45 0.74."""
    world = World(num_drafters=2)
    board, tables = world.board, world.tables
    for level, drafts in ((2, [1, 2, 3]), (1, [7, 0, 0])):
        world.choose(0, proposals={0: {0: [1, 2, 3]}, 1: {0: [7]}}, level=level)
        tables.levels_DBK[1] = 3
        board.choose(world.texts(0))
        assert tables.drafts_BK[0].tolist() == drafts


def test_no_draft_exceeds_the_length_limit() -> None:
    """A request of 10 tokens with length limit `limit` can take its next token and `limit` - 11 drafts."""
    world = World(num_slots=5)
    for slot, limit in enumerate((0, 11, 12, 13, LONGEST)):
        world.open(slot, limit=limit)
    world.choose(*range(5), proposals={0: {slot: [7, 8, 9] for slot in range(5)}})
    assert [world.drafts(row) for row in range(5)] == [[], [], [7], [7, 8], [7, 8, 9]]
    assert world.tables.submitted_S.tolist() == [0, 0, 1, 2, 3]


def test_without_a_proposal_nothing_is_drafted() -> None:
    world = World(num_drafters=2)
    world.choose(0, 1, proposals={0: {0: [1, 2, 3]}})
    world.choose(1, 0)
    assert not world.tables.drafts_BK.any() and not world.tables.rates_SK.any()
    assert world.tables.submitted_S.tolist() == [0, 0]


# What the host knows of the choice


def spread(world: World, depth: int) -> tuple[int, np.ndarray]:
    """Returns the number of requests in a row of the spread, and the survival of its draft tokens, falling, to a bin."""
    row_Q = world.tables.spread_FQ[depth].numpy()
    return int(row_Q[-1]), np.repeat((np.arange(NUM_BINS) + 0.5) / NUM_BINS, row_Q[:-1])[::-1]


def expect(world: World, rates: dict[tuple[int, int], float]) -> None:
    """Sets the rate of each drafter and level, whatever the relation."""
    for (drafter, level), rate in rates.items():
        counts_E2 = world.tables.evidence_DE2[drafter, level::NUM_LEVELS]
        counts_E2[:, 0] = rate * counts_E2[:, 1]


def test_the_host_gets_the_survival_of_what_is_submitted() -> None:
    world = World(num_drafters=2, num_slots=3)
    expect(world, {(0, 0): 0.9, (1, 0): 0.5})
    world.choose(0, 1, -1, proposals={0: {0: [1, 2, 3]}, 1: {1: [1, 2], 0: [1, 2, 3]}})
    for depth in (0, -1):
        num_requests, survival = spread(world, depth)
        assert num_requests == 2
        assert survival == pytest.approx([0.9, 0.81, 0.729, 0.5, 0.25], abs=1 / NUM_BINS)
    assert not world.tables.spread_FQ[1:-1].any(), "there is no drafter with weights"


def test_the_host_gets_what_would_be_submitted_at_each_depth() -> None:
    """At depth 1 the text drafter's two tokens are worth more than one of the model, at depth 3 they are not."""
    world = World(num_drafters=2, model=1)
    expect(world, {(0, 0): 0.6, (1, 0): 0.9})
    world.choose(0, proposals={0: {0: [1, 2]}, 1: {0: [1, 2, 3]}})
    text, model = [0.6, 0.36], [0.9, 0.81, 0.729]
    for depth, expected in enumerate([text, text, model[:2], model, model]):
        assert spread(world, depth)[1] == pytest.approx(expected, abs=1 / NUM_BINS), depth
    world.choose(0, proposals={0: {0: [1, 2]}})
    for depth in (0, K + 1):
        assert spread(world, depth)[1] == pytest.approx(text, abs=1 / NUM_BINS)
    assert not world.tables.spread_FQ[1 : K + 1].any(), "the model drafted nothing"


def test_depths_count_only_requests_that_the_model_follows() -> None:
    world = World(num_drafters=2, model=1, num_slots=3)
    world.open(2, limit=12)
    world.tables.found_DB[1, 1] = -1
    world.choose(0, 1, 2, proposals={1: {0: [1, 2], 2: [1, 2]}})
    world.tables.found_DB[1, 1] = -1
    world.board.choose(world.texts(0, 1, 2))
    assert [spread(world, depth)[0] for depth in range(5)] == [3, 2, 2, 0, 3]
    assert [len(spread(world, depth)[1]) for depth in range(5)] == [0, 2, 3, 4, 3], "slot 2 has room for one draft"


def test_deeper_drafts_are_foreseen() -> None:
    """A token that was not drafted has the rate of the last one that was."""
    world = World(num_drafters=2, model=1)
    expect(world, {(0, 0): 0.5, (1, 0): 0.8})
    world.choose(0, proposals={0: {0: [1, 2]}, 1: {0: [1]}})
    for depth, expected in ((1, [0.8]), (2, [0.8, 0.64]), (3, [0.8, 0.64, 0.512])):
        assert spread(world, depth)[1] == pytest.approx(expected, abs=1 / NUM_BINS)
    assert [spread(world, depth)[0] for depth in range(5)] == [1, 1, 0, 0, 1], "no request counts at these depths"


def test_text_drafts_are_calibrated_while_the_model_is_chosen() -> None:
    """The level predicts 0.9, but every other text draft is wrong, and the model's drafts are submitted."""
    world = World(num_drafters=2, model=1)
    for n in range(60):
        expect(world, {(0, 0): 0.9, (1, 0): 0.95})
        right = world.next_tokens(0)
        world.choose(0, proposals={0: {0: [right[0] if n % 2 else 99]}, 1: {0: right}})
        world.verify(0)
    assert not world.tables.calibration_D2[0].any(), "none was verified"
    hits, predicted = (world.tables.alone_2 + PRIOR_STRENGTH).tolist()
    assert 0.5 < hits / predicted < 0.9
    expect(world, {(0, 0): 0.9})
    world.tables.factor_SD2.zero_()
    world.choose(0, proposals={0: {0: [1]}, 1: {0: [1]}})
    assert spread(world, 0)[1] == pytest.approx([0.9 * hits / predicted], abs=1 / NUM_BINS)


def test_a_drafter_that_promises_too_much_is_calibrated() -> None:
    """The level predicts 2.4 of three tokens, but every other proposal is wrong from its first token."""
    world = World(num_drafters=2, model=1)
    for n in range(100):
        expect(world, {(0, 0): 0.9})
        right = world.next_tokens(0)
        world.choose(0, proposals={0: {0: right if n % 2 else [99, 98, 97]}})
        world.verify(0)
    hits, predicted = (world.tables.calibration_D2[0] + PRIOR_STRENGTH).tolist()
    assert 0.5 < hits / predicted < 0.85 and not world.tables.calibration_D2[1].any()
    expect(world, {(0, 0): 0.9})
    world.tables.factor_SD2.zero_()
    world.choose(0, proposals={0: {0: [1, 2, 3]}})
    assert spread(world, 0)[1] == pytest.approx(hits / predicted * 0.9 ** np.arange(1, 4), abs=1 / NUM_BINS)
    assert world.tables.rates_SK[0].numpy() == pytest.approx([0.9] * 3, rel=1e-5), (
        "the choice compares the drafters' own"
    )


def test_no_more_tokens_are_submitted_than_asked_for() -> None:
    world = World()
    world.choose(0, proposals={0: {0: [1, 2, 3]}})
    world.board.choose(world.texts(0), most=2)
    assert world.tables.submitted_S[0] == 2 and world.drafts(0) == [1, 2]


# Counts


def test_outcomes_are_counted_by_drafter_position_and_request() -> None:
    world = World(num_drafters=2)
    right = world.next_tokens(0)
    world.choose(0, 1, proposals={0: {0: right}, 1: {1: [*world.next_tokens(1, 2), 99]}})
    world.verify(0, 1)  # 3 of 3 and 2 of 3 accepted
    world.choose(1, 0, proposals={1: {0: [99, 99]}})
    world.verify(1, 0)  # 0 of 2
    assert world.tables.verified_DK2.tolist() == [[[1, 1], [1, 1], [1, 1]], [[2, 1], [2, 1], [1, 0]]]
    assert world.tables.request_S2.tolist() == [[5, 3], [3, 2]]
    assert world.tables.steps_TD2[:3].tolist() == [[[3, 3], [3, 2]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]]


def test_early_requests_are_left_out_of_the_counts_by_position() -> None:
    """The head's canary judges by these. The slot's next request is counted again."""
    world = World(num_slots=2)
    limits = torch.full((2,), LONGEST, dtype=torch.int32)
    world.board.open(tensor([0, 1]), limits, tensor([True, False]))
    for _ in range(2):
        world.choose(0, 1, proposals={0: {0: world.next_tokens(0), 1: world.next_tokens(1)}})
        world.verify(0, 1)
        world.open(0)
    assert world.tables.verified_DK2[0].tolist() == [[3, 3]] * K
    assert world.tables.steps_TD2[:2].tolist() == [[[2 * K, 2 * K]]] * 2
    assert not world.tables.is_early_S.any()


def test_drafts_beyond_the_budget_are_not_counted() -> None:
    world = World()
    world.choose(0, proposals={0: {0: world.next_tokens(0)}})
    world.verify(0, most=1)
    assert world.tables.request_S2[0].tolist() == [1, 1]
    assert world.tables.verified_DK2[0].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_a_step_of_a_prompt_changes_nothing() -> None:
    """A step that samples no token of a request leaves its drafts open."""
    world = World()
    world.choose(0, proposals={0: {0: [99]}})
    none = tensor([0], dtype=torch.int32)
    world.board.observe(world.texts(0), none, none, 0)
    assert world.tables.submitted_S[0] == 1 and not world.tables.request_S2.any()


def test_step_counts_are_a_ring_buffer() -> None:
    world = World()
    for world.num_steps in (0, TRACED_STEPS):
        world.choose(0, proposals={0: {0: world.next_tokens(0, world.num_steps % 2 + 1)}})
        world.verify(0)
        assert world.tables.steps_TD2[0, 0].tolist() == [1, 1]
    assert not world.tables.steps_TD2[1:].any()


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_counts_add_up_whatever_happens(seed: int, num_drafters: int) -> None:
    """Random drafters, requests that come and go, rows in any order, some of them without a request."""
    rng, world = np.random.default_rng(seed), World(num_drafters, num_slots=4)
    verified, accepted = Counter(), Counter()
    for _ in range(12):
        slots = [int(slot) for slot in rng.permutation([*range(4), -1])[: rng.integers(1, 5)]]
        proposals: Proposals = {
            d: {slot: [t + int(rng.random() < 0.3) for t in world.next_tokens(slot, int(rng.integers(0, K + 1)))]
                for slot in slots if slot >= 0}
            for d in range(num_drafters)
        }  # fmt: skip
        rates_BK = world.choose(*slots, proposals=proposals, level=int(rng.integers(NUM_LEVELS)))
        assert (rates_BK <= np.float32(MAX_RATE)).all()
        for row, slot in enumerate(slots):
            assert world.drafts(row) in [[], *(of_slot.get(slot) for of_slot in proposals.values())]
        for total, more in zip(
            (verified, accepted), world.verify(*slots, most=int(rng.integers(0, K + 1))), strict=True
        ):
            total.update(more)
        if rng.random() < 0.2:
            gone = int(rng.integers(4))
            world.open(gone)
            verified[gone] = accepted[gone] = 0
    tables = world.tables
    assert tables.request_S2.tolist() == [[verified[slot], accepted[slot]] for slot in range(4)]
    assert torch.equal(tables.verified_DK2.sum(dim=1), tables.steps_TD2.sum(dim=0))
    assert (tables.verified_DK2[..., 0] >= tables.verified_DK2[..., 1]).all()


def test_a_row_without_a_request_changes_nothing() -> None:
    world = World()
    world.choose(-1, 0, proposals={0: {0: [1]}})
    world.tables.found_DB[0] = 1
    before = {name: value.clone() for name, value in world.tables._asdict().items()}
    world.choose(-1)
    world.verify(-1)
    changed = {name for name, value in before.items() if not torch.equal(value, getattr(world.tables, name))}
    assert not world.tables.drafts_BK[0].any()
    assert changed <= {"found_DB", "levels_DBK", "tokens_DBK", "drafts_BK", "spread_FQ"}, changed
    assert not world.tables.spread_FQ.any()
