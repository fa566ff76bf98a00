# SPDX-License-Identifier: Apache-2.0
"""The draft board on a CPU: what is learned of drafters, who drafts, what is counted. For a GPU: `test_kernels.py`.

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

from nemo_specrollout.drafters.base import (
    EVIDENCE_WINDOW,
    LEVEL_PRIORS,
    MAX_RATE,
    NUM_LEVELS,
    PRIOR_RATE,
    PRIOR_STRENGTH,
    TRACED_STEPS,
)
from nemo_specrollout.drafters.board import DraftBoard

pytestmark = pytest.mark.unit

LONGEST, K = 400, 3
Proposals = dict[int, dict[int, list[int]]]
"""Of each drafter, by slot, the tokens that it proposes."""


class World:
    """A board, and requests whose whole texts are known from the start: what the policy will sample."""

    def __init__(
        self, num_drafters: int = 1, num_slots: int = 2, edges: tuple[int, ...] = (), model: int | None = None
    ) -> None:
        names = [f"drafter {d}" for d in range(num_drafters)]
        priors_DE = np.tile(LEVEL_PRIORS, (num_drafters, 1))
        self.board = DraftBoard(names, priors_DE, num_slots, K, edges, torch.device("cpu"), model)
        self.text_SL = torch.arange(LONGEST, dtype=torch.int32).repeat(num_slots, 1) % 50
        self.total_len_S = torch.full((num_slots,), 10, dtype=torch.int32)
        self.num_steps = 0
        self.open(*range(num_slots))

    def open(self, *slots: int, limit: int = LONGEST) -> None:
        self.board.open(tensor(slots), torch.full((len(slots),), limit, dtype=torch.int32))

    def next_tokens(self, slot: int, num: int = K) -> list[int]:
        """What the policy will sample of a request."""
        length = int(self.total_len_S[slot])
        return self.text_SL[slot, length : length + num].tolist()

    def choose(self, *slots: int, proposals: Proposals | None = None, level: int = 0, row_price: float = 0.0) -> Tensor:
        """The drafters propose; the rates of what is submitted, [B, K]."""
        board = self.board
        board.found_DB.zero_()
        board.levels_DBK.fill_(level)
        for d, of_slot in (proposals or {}).items():
            for slot, tokens in of_slot.items():
                board.tokens_DBK[d, slots.index(slot), : len(tokens)] = tensor(tokens, dtype=torch.int32)
                board.found_DB[d, slots.index(slot)] = len(tokens)
        board.choose(tensor(slots), self.total_len_S, row_price)
        return board.rates_BK[: len(slots)].clone()

    def drafts(self, row: int) -> list[int]:
        """What was submitted for a row of the batch."""
        return self.board.drafts_BK[row, self.board.rates_BK[row] > 0].tolist()

    def verify(self, *slots: int, most: int = K) -> tuple[Counter, Counter]:
        """The policy samples, with at most so many of each request's drafts verified; drafts verified, and accepted, by slot.
        Slot -1 stands for a row of nobody."""
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
        self.board.observe(tensor(slots), *counts, self.total_len_S, self.text_SL, self.num_steps)
        self.num_steps += 1
        return verified, accepted


# What is learned


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_submitted", [True, False])
def test_estimates_follow_what_came_true_whether_submitted_or_not(is_submitted: bool, is_right: bool) -> None:
    """Drafter 0 is always right three tokens deep. Drafter 1 is alone, or proposes one token, which is never submitted."""
    world = World(num_drafters=2)
    for _ in range(90):
        right = world.next_tokens(0)
        proposal = {0: right[:1] if is_right else [99]}
        world.choose(0, proposals={1: proposal} if is_submitted else {0: {0: right}, 1: proposal})
        world.verify(0)
    rate = world.board.level_rates_DE[1, 0].item()
    assert rate > 0.95 if is_right else rate < 0.05
    assert (world.board.verified_DCK2[1].sum() > 0) == is_submitted
    rates_BK = world.choose(0, proposals={1: {0: [1, 2]}})
    assert (rates_BK[0, :2] > 0.9).all() == is_right and rates_BK[0, 2] == 0.0
    assert rates_BK.max() <= np.float32(MAX_RATE)


def test_levels_are_learned_apart() -> None:
    world = World()
    for n in range(100):
        is_even = n % 2 == 0
        world.choose(0, proposals={0: {0: world.next_tokens(0) if is_even else [99]}}, level=7 if is_even else 2)
        world.verify(0)
    rates_E = world.board.level_rates_DE[0]
    assert rates_E[7] > 0.95 and rates_E[2] < 0.1
    assert rates_E[3].item() == pytest.approx(LEVEL_PRIORS[3])


@pytest.mark.parametrize(("row_price", "chosen"), [(0.0, 0), (0.5, 1), (0.95, 0)])
def test_of_a_long_proposal_only_the_tokens_worth_their_rows_count(row_price: float, chosen: int) -> None:
    """Three tokens of rate 0.65 promise 1.35 tokens, one of rate 0.9 promises 0.9. At half a token a row, only the first of
    the three pays, and wins 0.15 where the other wins 0.4. Where no token is worth its row, the promise decides."""
    world = World(num_drafters=2)
    world.board.evidence_DE2[0, :, 0] = 0.65 * world.board.evidence_DE2[0, :, 1]
    world.board.evidence_DE2[1, :, 0] = 0.9 * world.board.evidence_DE2[1, :, 1]
    world.choose(0, proposals={0: {0: [11, 12, 13]}, 1: {0: [14]}}, row_price=row_price)
    assert world.board.chosen_S[0] == chosen


def test_a_request_that_is_harder_than_others_is_believed_to_be() -> None:
    world = World()
    for _ in range(30):
        world.choose(0, 1, proposals={0: {0: world.next_tokens(0), 1: [99, 99, 99]}})
        world.verify(0, 1)
    easy, hard = world.choose(0, 1, proposals={0: {0: [1], 1: [1]}})[:, 0].tolist()
    assert easy > 0.8 and hard < 0.3


def test_factors_count_as_far_as_they_foretold_hits() -> None:
    """The first drafter is always right for one request and never for the other. The second is right at random in both, so
    its factors predict nothing."""
    world = World(num_drafters=2)
    rng = np.random.default_rng(0)
    for _ in range(110):
        right = {slot: world.next_tokens(slot, 1) for slot in (0, 1)}
        tossed = {slot: right[slot] if rng.random() < 0.5 else [99] for slot in (0, 1)}
        world.choose(0, 1, proposals={0: {0: right[0], 1: [99]}, 1: tossed})
        world.verify(0, 1, most=0)
    told, square = (world.board.factor_weight_D2 + 1).T
    assert told[0] / square[0] > 0.9 and told[1] / square[1] < 0.4


def test_what_contradicts_the_witness_is_believed_less() -> None:
    """The text drafter is right in every other step, the witness always: no level tells, but whether they agree does."""
    world = World(num_drafters=2, model=1)
    for n in range(120):
        right = world.next_tokens(0, 1)
        world.choose(0, proposals={0: {0: right if n % 2 else [99]}, 1: {0: right}})
        world.verify(0, most=0)
    assert world.board.level_rates_DE[0, 0].item() == pytest.approx(0.5, abs=0.1)
    apart = [{0: {0: [1]}}, {0: {0: [1]}, 1: {0: [1]}}, {0: {0: [1, 2, 3]}, 1: {0: [1, 9]}}]
    alone, agreed, contradicted = (world.choose(0, proposals=proposals)[0] for proposals in apart)
    assert alone[0].item() == pytest.approx(LEVEL_PRIORS[0], rel=0.2), "nothing like it was seen"
    assert agreed[0] > 0.9 and contradicted[0] > 0.9
    rates_E = world.board.evidence_DE2[..., 0] / world.board.evidence_DE2[..., 1]
    assert rates_E[0, 2 * NUM_LEVELS] < 0.1 and world.board.chosen_S[0] == 1


@pytest.mark.parametrize(
    ("text", "other", "witness", "expected"),
    [
        ([1, 2, 3], [], [], [[0, 0, 0], [], []]),
        ([1, 2, 3], [], [1], [[1, 3, 3], [], [1]]),
        ([1, 2, 3], [4], [1, 7, 3], [[1, 2, 3], [2], [1, 2, 3]]),
        ([1], [1, 2], [1, 2, 3], [[1], [1, 1], [1, 1, 3]]),
        ([], [], [1, 2], [[], [], [0, 0]]),
    ],
)
def test_a_token_s_evidence_says_what_the_other_side_proposes_after_the_same_tokens(
    text: list[int], other: list[int], witness: list[int], expected: list[list[int]]
) -> None:
    world = World(num_drafters=3, model=2)
    world.choose(0, proposals={0: {0: text}, 1: {0: other}, 2: {0: witness}}, level=3)
    for d, relations in enumerate(expected):
        levels = world.board.evidence_SDK[0, d, : len(relations)].tolist()
        assert levels == [NUM_LEVELS * relation + 3 for relation in relations]


def test_a_proposal_that_is_not_submitted_waits_until_it_is_refuted_or_used_up() -> None:
    world = World(num_drafters=2)
    board, right = world.board, world.next_tokens(0)
    waiting = []
    for proposal in ([right[0], 99, right[2]], [77], [78], [79], world.next_tokens(0, 6)[4:], [80], [81]):
        world.choose(0, proposals={0: {0: world.next_tokens(0)}, 1: {0: proposal}})
        assert board.chosen_S[0] == 0 and board.length_SD[0, 0] == 3, "who is submitted proposes anew"
        waiting.append((board.tokens_SDK[0, 1, 0].item(), board.checked_SD[0, 1].item()))
        world.verify(0, most=0)  # one token is sampled
    fifth = world.text_SL[0, 14].item()
    assert waiting == [(right[0], 0), (right[0], 1), (78, 0), (79, 0), (fifth, 0), (fifth, 1), (81, 0)]
    assert board.position_DK2[1].tolist() == [[2, 5], [1, 2], [0, 0]], "hits and trials"


def test_a_proposal_that_is_submitted_replaces_what_waited() -> None:
    world = World(num_drafters=2)
    world.choose(0, proposals={0: {0: world.next_tokens(0)}, 1: {0: world.next_tokens(0, 2)}})
    world.choose(0, proposals={1: {0: [99]}})
    assert world.drafts(0) == [99] and world.board.tokens_SDK[0, 1, 0] == 99


def test_a_new_request_does_not_inherit_its_slot_s_past() -> None:
    world = World()
    for _ in range(20):
        world.choose(0, proposals={0: {0: [99]}})
        world.verify(0)
    world.choose(0, proposals={0: {0: [99, 99]}})
    world.open(0)
    learned, verified = world.board.evidence_DE2[0, 0].tolist(), int(world.board.verified_DCK2.sum())
    world.board.rates_BK.zero_()
    world.verify(0)
    assert world.board.evidence_DE2[0, 0, 1] <= learned[1] and world.board.verified_DCK2.sum() == verified
    assert world.board.request_S2[0].tolist() == [0, 0]
    rates_BK = world.choose(0, 1, proposals={0: {0: [1], 1: [1]}})
    assert rates_BK[0, 0] == rates_BK[1, 0] < LEVEL_PRIORS[0]


def test_a_drafter_with_new_weights_is_judged_anew() -> None:
    world, never_used = World(num_drafters=2, model=1), World(num_drafters=2, model=1)
    for d in (0, 1) * 20:
        world.choose(0, proposals={d: {0: [99]}})
        world.verify(0)
    other = world.board.evidence_DE2[0].clone()
    world.choose(0, proposals={1: {0: [99]}})
    world.board.forget_drafter(1)
    for name in ("evidence_DE2", "position_DK2"):
        assert torch.equal(getattr(world.board, name)[1], getattr(never_used.board, name)[1])
    assert torch.equal(world.board.evidence_DE2[0], other)
    assert not world.board.factor_SD2[:, 1].any() and not world.board.length_SD[:, 1].any()
    assert world.choose(0, proposals={1: {0: [1]}})[0, 0].item() == pytest.approx(LEVEL_PRIORS[0])


# Who drafts


def test_the_better_drafter_is_chosen_for_each_request() -> None:
    world = World(num_drafters=2)
    board = world.board
    world.choose(1, 0, proposals={0: {1: [1, 2, 3], 0: [4, 5, 6]}, 1: {1: [7, 8, 9], 0: [10, 11]}})
    board.levels_DBK[0, 0], board.levels_DBK[1, 1] = 3, 3  # each has strong evidence for one of the requests
    board.choose(tensor([1, 0]), world.total_len_S)
    assert board.drafts_BK.tolist() == [[1, 2, 3], [10, 11, 0]]
    assert board.chosen_S.tolist() == [1, 0] and board.submitted_S.tolist() == [2, 3]
    assert board.rates_BK.numpy() == pytest.approx(LEVEL_PRIORS[3] * np.array([[1, 1, 1], [1, 1, 0]]))


def test_a_longer_proposal_beats_a_surer_one_if_more_of_it_is_expected() -> None:
    """Rates of 0.3, 0.45, 0.6 and 0.8: three tokens at 0.6 are worth 1.176, one at 0.8 is worth 0.8, three at 0.45 0.74."""
    world = World(num_drafters=2)
    board = world.board
    for level, drafts in ((2, [1, 2, 3]), (1, [7, 0, 0])):
        world.choose(0, proposals={0: {0: [1, 2, 3]}, 1: {0: [7]}}, level=level)
        board.levels_DBK[1] = 3
        board.choose(tensor([0]), world.total_len_S)
        assert board.drafts_BK[0].tolist() == drafts


def test_no_draft_goes_beyond_a_request_s_room() -> None:
    """A request of 10 tokens that may get `limit` long has room for its next token and `limit` - 11 drafts."""
    world = World(num_slots=5)
    for slot, limit in enumerate((0, 11, 12, 13, LONGEST)):
        world.open(slot, limit=limit)
    world.choose(*range(5), proposals={0: {slot: [7, 8, 9] for slot in range(5)}})
    assert [world.drafts(row) for row in range(5)] == [[], [], [7], [7, 8], [7, 8, 9]]
    assert world.board.submitted_S.tolist() == [0, 0, 1, 2, 3]


def test_without_a_proposal_nothing_is_drafted() -> None:
    world = World(num_drafters=2)
    world.choose(0, 1, proposals={0: {0: [1, 2, 3]}})
    world.choose(1, 0)
    assert not world.board.drafts_BK.any() and not world.board.rates_BK.any()
    assert world.board.submitted_S.tolist() == [0, 0]


def test_what_is_expected_of_a_model_that_was_not_asked_yet_is_what_is_usual() -> None:
    """By position, as far as there is room."""
    world = World(num_drafters=2, model=1)
    world.open(1, limit=13)
    world.choose(0, 1)
    survival_K = PRIOR_RATE ** np.array([1, 2, 3])
    assert world.board.outlook_S4K[:, 1].numpy() == pytest.approx(np.stack([survival_K, survival_K * [1, 1, 0]]))
    for _ in range(60):
        right = world.next_tokens(0)
        world.choose(0, proposals={1: {0: [right[0], 99]}})
        world.verify(0)
    world.open(1)
    world.choose(1)
    first, second, third = world.board.outlook_S4K[1, 1].tolist()
    assert first > 0.9 and third <= second < 0.1


def test_a_later_draft_position_is_believed_to_be_like_the_one_before_where_nothing_recent_is_known() -> None:
    """Drafts were good at all positions; since then they are one token deep, and one in four is right."""
    world = World(num_drafters=2, model=1)
    world.board.position_DK2[1] = torch.tensor([0.95, 1.0]) * EVIDENCE_WINDOW
    world.choose(0)
    assert world.board.outlook_S4K[0, 1].numpy() == pytest.approx(0.95 ** np.array([1, 2, 3]), abs=0.01)
    for n in range(12 * int(EVIDENCE_WINDOW)):
        world.choose(0, proposals={1: {0: [99] if n % 4 else world.next_tokens(0, 1)}})
        world.verify(0)
        world.total_len_S[0] = 10
    world.open(0)
    world.choose(0)
    assert world.board.position_DK2[1, 0, 1] <= EVIDENCE_WINDOW + 1
    assert world.board.outlook_S4K[0, 1].numpy() == pytest.approx(0.25 ** np.array([1, 2, 3]), rel=0.25)


def test_what_is_expected_of_a_model_is_what_its_latest_drafts_of_the_request_promised() -> None:
    """One request has sure drafts, another unsure ones. A request that is not asked for drafts returns to what is usual."""
    world = World(num_drafters=2, model=1)
    sure, unsure = 3, 0
    for level in (sure, unsure):
        world.board.evidence_DE2[1, level::NUM_LEVELS, 0] = (0.95 if level == sure else 0.2) * world.board.evidence_DE2[
            1, level, 1
        ]
    for _ in range(60):
        for slot, level in ((0, sure), (1, unsure)):
            world.choose(slot, proposals={1: {slot: [1, 2]}}, level=level)
    usual = PRIOR_RATE
    assert world.board.outlook_S4K[0, 1].numpy() == pytest.approx([0.95, 0.95**2, 0.95**2 * usual], rel=0.02)
    assert world.board.outlook_S4K[1, 1].numpy() == pytest.approx([0.2, 0.2**2, 0.2**2 * usual], rel=0.02)
    assert world.board.outlook_S4K[0, 3].numpy() == pytest.approx([0.95, 0.95**2, 0.0])
    for _ in range(200):
        world.choose(1)
    assert world.board.outlook_S4K[1, 1].numpy() == pytest.approx(usual ** np.array([1, 2, 3]), rel=0.02)
    assert not world.board.outlook_S4K[1, 3].any()


def test_text_drafts_that_bring_less_than_they_promise_while_the_model_is_silent_are_expected_to() -> None:
    """The level promises 2.4 of three tokens; every other proposal is wrong from the first token on."""
    outlooks = []
    for is_asked in (False, True):
        world = World(num_drafters=2, model=1)
        for n in range(100):
            world.board.evidence_DE2[0, :, 0] = 0.9 * world.board.evidence_DE2[0, :, 1]
            right = world.next_tokens(0)
            text = right if n % 2 else [99, 98, 97]
            world.choose(0, proposals={0: {0: text}, **({1: {0: [text[0]]}} if is_asked else {})})
            world.verify(0)
        kept = (world.board.calibration_2[0] + PRIOR_STRENGTH) / (world.board.calibration_2[1] + PRIOR_STRENGTH)
        assert kept == 1.0 if is_asked else 0.5 < kept < 0.85
        outlooks.append(float(world.board.outlook_S4K[0, 2].sum()))
    assert outlooks[0] < 0.8 * outlooks[1]


def test_what_text_drafts_are_expected_to_survive_is_what_they_usually_do() -> None:
    """The best proposal of the text drafters, found in every other step, whatever the model proposes."""
    world = World(num_drafters=3, model=2)
    for n in range(60):
        text = {0: {0: [1, 2]}, 1: {0: [1]}} if n % 2 else {}
        world.choose(0, proposals={**text, 2: {0: [1, 2, 3]}}, level=1)
    usual_K = 0.5 * LEVEL_PRIORS[1] ** np.array([1, 2, np.inf])
    assert world.board.outlook_S4K[0, 0].numpy() == pytest.approx(usual_K, rel=0.1)
    world.open(0)
    assert not world.board.outlook_S4K[0].any(), "another request"


# What is counted


def test_outcomes_are_counted_by_drafter_context_position_request_and_step() -> None:
    world = World(num_drafters=2, edges=(12, 20))
    right = world.next_tokens(0)
    world.choose(0, 1, proposals={0: {0: right}, 1: {1: [*world.next_tokens(1, 2), 99]}})
    world.verify(0, 1)  # at 10 tokens of context: three of three, and two of three
    world.choose(1, 0, proposals={1: {0: [99, 99]}})
    world.verify(1, 0)  # at 14: none of two
    expected_DCK2 = torch.zeros(2, 3, K, 2, dtype=torch.int64)
    expected_DCK2[0, 0] = 1
    expected_DCK2[1, 0] = tensor([[1, 1], [1, 1], [1, 0]])
    expected_DCK2[1, 1] = tensor([[1, 0], [1, 0], [0, 0]])
    assert torch.equal(world.board.verified_DCK2, expected_DCK2)
    assert world.board.request_S2.tolist() == [[5, 3], [3, 2]]
    assert world.board.steps_TD2[:3].tolist() == [[[3, 3], [3, 2]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]]


def test_drafts_that_did_not_fit_into_the_budget_are_not_counted() -> None:
    world = World()
    world.choose(0, proposals={0: {0: world.next_tokens(0)}})
    world.verify(0, most=1)
    assert world.board.request_S2[0].tolist() == [1, 1]
    assert world.board.verified_DCK2[0, 0].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_a_prompt_s_chunk_refutes_nothing() -> None:
    """A step that samples nothing of a request leaves it as it was."""
    world = World()
    world.choose(0, proposals={0: {0: [99]}})
    none = tensor([0], dtype=torch.int32)
    world.board.observe(tensor([0]), none, none, world.total_len_S, world.text_SL, 0)
    assert world.board.submitted_S[0] == 1 and not world.board.request_S2.any()


def test_steps_are_counted_in_a_ring() -> None:
    world = World()
    for world.num_steps in (0, TRACED_STEPS):
        world.choose(0, proposals={0: {0: world.next_tokens(0, world.num_steps % 2 + 1)}})
        world.verify(0)
        assert world.board.steps_TD2[0, 0].tolist() == [1, 1]
    assert not world.board.steps_TD2[1:].any()


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_counts_add_up_whatever_happens(seed: int, num_drafters: int) -> None:
    """Drafters at random, and requests that come and go, for rows in any order, some of nobody."""
    rng, world = np.random.default_rng(seed), World(num_drafters, num_slots=4, edges=(15,))
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
    board = world.board
    assert board.request_S2.tolist() == [[verified[slot], accepted[slot]] for slot in range(4)]
    assert torch.equal(board.verified_DCK2.sum(dim=(1, 2)), board.steps_TD2.sum(dim=0))
    assert (board.verified_DCK2[..., 0] >= board.verified_DCK2[..., 1]).all()


def test_a_row_of_nobody_leaves_no_trace() -> None:
    world = World()
    world.choose(-1, 0, proposals={0: {0: [1]}})
    world.board.found_DB[0] = 1
    before = {name: value.clone() for name, value in vars(world.board).items() if isinstance(value, Tensor)}
    world.choose(-1)
    world.verify(-1)
    changed = {name for name, value in before.items() if not torch.equal(value, getattr(world.board, name))}
    assert not world.board.drafts_BK[0].any() and not world.board.rates_BK[0].any()
    assert changed <= {"found_DB", "levels_DBK", "tokens_DBK", "drafts_BK", "rates_BK"}, changed
