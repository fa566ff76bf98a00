# SPDX-License-Identifier: Apache-2.0
"""Features captured from the rollout itself: complete sequences, in order, without rows of rejected drafts.

Shapes: S request slots, B requests of the batch, R rows of a forward pass, H hidden size.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from nemo_specrollout.drafters.participant import DraftStep
from nemo_specrollout.generation.engine.requests import NewRequest, RequestIdentity
from nemo_specrollout.generation.engine.transfers import to_device
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.serving import feature_capture
from nemo_specrollout.heads.serving.feature_capture import SHORTEST, FeatureCapture

pytestmark = pytest.mark.unit

NUM_SLOTS, HIDDEN, NUM_AUX, STOP = 4, 2, 3, 5
RUNNER = SimpleNamespace(
    device=torch.device("cpu"), req_states=None, dtype=torch.float32, max_num_reqs=NUM_SLOTS,
    model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN),
    get_model=lambda: SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layers=range(NUM_AUX))),
)  # fmt: skip
Pass = tuple[int, int, int, int]
"""A request in a step: slot, first position, rows, and number of rejected drafts among them."""


@pytest.fixture(autouse=True, scope="module")
def limits() -> Iterator[None]:
    """Sets the smallest buffer, and no limit on the time of capturing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_capture, "CAPTURE_BYTES", 0)
        patch.setattr(feature_capture, "CAPTURE_TIME_SHARE", 1e9)
        yield


class World:
    """A capture, and an engine's steps.

    The token at position p of slot s is 100 * (s + 1) + p, unless `others` has another. Its hidden state encodes slot and
    position. A rejected draft is token 999.
    """

    def __init__(self, capacity: int = 64, share: float = 1.0) -> None:
        self.capture = FeatureCapture(SimpleNamespace(**vars(RUNNER), max_num_tokens=capacity), share)
        self.others: dict[tuple[int, int], int] = {}

    def open(self, *slots: int, prompt_length: int = 4, limit: int = 99, seed: int = 7) -> None:
        rest = prompt_length, range(prompt_length), limit, frozenset({STOP})
        new = [NewRequest(slot, RequestIdentity(seed + slot, 0), *rest) for slot in slots]
        self.capture.open(tensor(slots), new, partial(to_device, device=torch.device("cpu")))

    def token(self, slot: int, position: int) -> int:
        return self.others.get((slot, position), 100 * (slot + 1) + position)

    def step(self, *passes: Pass) -> None:
        """Runs a forward pass, padded by three rows."""
        slots_B, counts_B = np.array([p[0] for p in passes]), np.array([p[2] for p in passes])
        rejected_B = tensor([p[3] for p in passes], dtype=torch.int32)
        rows = [(slot, first + i, i >= count - refused) for slot, first, count, refused in passes for i in range(count)]
        rows += [(9, 9, True)] * 3
        where_R3 = tensor(rows, dtype=torch.float32)
        tokens = [999 if is_refused else self.token(slot, position) for slot, position, is_refused in rows]
        batch = SimpleNamespace(
            num_reqs=len(passes), num_tokens=len(rows) - 3, idx_mapping_np=slots_B, idx_mapping=torch.from_numpy(slots_B),
            num_scheduled_tokens=counts_B, positions=where_R3[:, 1].long(), input_ids=tensor(tokens),
            query_start_loc=torch.from_numpy(np.concatenate([[0], counts_B.cumsum()])).int(),
        )  # fmt: skip
        layers = [hidden_of(where_R3[:, 0], where_R3[:, 1], layer) for layer in range(NUM_AUX + 1)]
        self.capture.observe(DraftStep((batch, None, None, layers[-1], layers[:-1], None, rejected_B), {}))

    def decode(self, slot: int, positions: range) -> None:
        """Runs a step for each position."""
        for position in positions:
            self.step((slot, position, 1, 0))

    def take(self) -> dict[int, tuple[int, int]]:
        """Returns (first position, tokens) of each slot's only sequence, and checks the features."""
        return {
            self.check(features): (features.first_position, features.num_tokens) for features in self.capture.take()
        }

    def check(self, features: SequenceFeatures) -> int:
        """Checks the features, and returns their slot."""
        slot = int(features.final_TH[0, 0])
        positions_T = torch.arange(features.num_tokens) + features.first_position
        assert features.token_ids_T.tolist() == [self.token(slot, int(p)) for p in positions_T]
        layers = [hidden_of(torch.full_like(positions_T, slot), positions_T, layer) for layer in range(NUM_AUX + 1)]
        assert torch.equal(features.aux_TF, torch.cat(layers[:-1], dim=1))
        assert torch.equal(features.final_TH, layers[-1])
        return slot


def hidden_of(slots_R: Tensor, positions_R: Tensor, layer: int) -> Tensor:
    return torch.stack([slots_R, positions_R + layer / 8], dim=1).float()


def test_a_sequence_is_the_whole_text_without_its_last_token() -> None:
    world = World()
    world.open(0, prompt_length=6, limit=20)
    world.step((0, 0, 6, 0))
    world.decode(0, range(6, 19))  # the token at position 19 is the last, and is never read
    assert world.take() == {}, "it is running"
    world.capture.close([0])
    (features,) = world.capture.take()
    assert world.check(features) == 0 and features.num_tokens == 19
    assert (features.prompt_length, features.policy_version, features.first_position) == (6, 0, 0)
    assert features.prompt_ids_P is None and world.take() == {}, "it was taken"


def test_a_sequence_with_a_cached_prefix_knows_the_whole_prompt() -> None:
    world = World()
    world.open(0, prompt_length=6, limit=20)
    world.step((0, 4, 2, 0))  # positions 0 to 3 are a sibling's
    world.decode(0, range(6, 19))
    world.capture.close([0])
    (features,) = world.capture.take()
    assert world.check(features) == 0 and (features.first_position, features.num_tokens) == (4, 15)
    assert features.whole_prompt_P.tolist() == list(range(6))


def test_rows_of_refused_drafts_are_left_out() -> None:
    world = World()
    world.open(0, 1, 2)
    world.step((0, 0, 4, 0), (2, 0, 5, 0), (1, 0, 1, 0))
    world.step((1, 1, 4, 3), (0, 4, 4, 2), (2, 5, 3, 0))
    world.step((0, 6, 4, 0), (2, 8, 4, 4 - 1), (1, 2, 8, 1))
    world.capture.close([0, 1, 2])
    assert world.take() == {0: (0, 10), 1: (0, 9), 2: (0, 9)}


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """Draws the buffer's capacity, and the steps: rows and rejected rows of each slot."""
    passes = st.integers(0, 5).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, max(rows - 1, 0))))
    steps = draw(st.lists(st.lists(passes, min_size=NUM_SLOTS, max_size=NUM_SLOTS), min_size=8, max_size=24))
    return draw(st.integers(20, 60)), steps


@given(rollouts(), st.randoms(use_true_random=False))
def test_a_sequence_is_the_text_that_the_policy_read(rollout: tuple, random: Any) -> None:
    """Requests come in any order, some are not captured, and the buffer is flushed many times."""
    capacity, steps = rollout
    world, lengths = World(capacity), [0] * NUM_SLOTS
    world.open(0, 1, 3)
    for step in steps:
        passes = [(slot, lengths[slot], rows, refused) for slot, (rows, refused) in enumerate(step) if rows]
        random.shuffle(passes)
        if passes:
            world.step(*passes)
        for slot, _, rows, refused in passes:
            lengths[slot] += rows - refused
    world.capture.close([0, 1, 2, 3])
    lengths = [min(length, 98) for length in lengths]
    assert world.take() == {slot: (0, lengths[slot]) for slot in (0, 1, 3) if lengths[slot] >= SHORTEST}


def test_a_gap_cuts_a_sequence() -> None:
    """A cached prefix is never computed. Rows before and after a gap belong to two sequences."""
    world = World()
    world.open(0, prompt_length=16)
    world.step((0, 12, 10, 0))
    world.step((0, 30, 9, 0))
    world.step((0, 39, 3, 0))
    world.capture.close([0])
    found = world.capture.take()
    assert [(world.check(f), f.first_position, f.num_tokens) for f in found] == [(0, 12, 10), (0, 30, 12)]


@pytest.mark.parametrize("prompt_length", [4, 12])
def test_a_stop_token_ends_a_sequence_unless_in_the_prompt(prompt_length: int) -> None:
    """Asynchronous scheduling computes one or two more steps before it learns that a request has ended."""
    world = World()
    world.others = {(0, 10): STOP, (0, 14): STOP}
    world.open(0, prompt_length=prompt_length)
    world.step((0, 0, 17, 0))
    world.capture.close([0])
    assert world.take() == {0: (0, 10 if prompt_length == 4 else 14)}


def test_a_stop_token_ends_a_sequence_with_a_cached_prefix() -> None:
    world = World()
    world.others = {(0, 15): STOP, (0, 24): STOP}
    world.open(0, prompt_length=16)
    world.step((0, 14, 15, 0))
    world.capture.close([0])
    assert world.take() == {0: (14, 10)}


@pytest.mark.parametrize("first", [0, 5])
def test_a_request_s_limit_ends_a_sequence(first: int) -> None:
    world = World()
    world.open(0, limit=20)
    world.step((0, first, 24 - first, 0))
    world.capture.close([0])
    assert world.take() == {0: (first, 19 - first)}


def test_short_sequences_are_dropped() -> None:
    world = World()
    world.open(0, 1)
    world.step((0, 0, SHORTEST - 1, 0), (1, 0, SHORTEST, 0))
    world.capture.close([0, 1])
    assert world.take() == {1: (0, SHORTEST)}


def test_new_weights_cut_a_sequence() -> None:
    world = World()
    world.open(0)
    world.step((0, 0, 10, 0))
    world.capture.weights_updated(3)
    world.decode(0, range(10, 22))
    world.capture.close([0])
    world.open(0)
    world.step((0, 0, 9, 0))
    world.capture.close([0])
    found = world.capture.take()
    assert [(f.policy_version, f.first_position, f.num_tokens) for f in found] == [(0, 0, 10), (3, 10, 12), (3, 0, 9)]
    assert [f.prompt_length for f in found] == [4, 4, 4] and [world.check(f) for f in found] == [0, 0, 0]
    assert world.capture.version == 3


def test_sleep_frees_device_memory_and_keeps_captured_rows() -> None:
    world = World()
    world.open(0, 1)
    world.step((0, 0, 10, 0), (1, 0, 12, 0))
    world.capture.close([0])
    world.capture.release()
    assert not any(isinstance(value, Tensor) and len(value) == 64 for value in vars(world.capture).values())
    assert world.take() == {0: (0, 10)}, "an engine may be asked while it sleeps"
    world.capture.weights_updated(1)
    world.capture.woke_up()
    world.decode(1, range(12, 24))
    world.capture.close([1])
    assert [(f.policy_version, f.first_position, f.num_tokens) for f in world.capture.take()] == [
        (0, 0, 12),
        (1, 12, 12),
    ]


def test_a_step_with_more_rows_than_the_buffer_is_left_out() -> None:
    world = World(capacity=16)
    world.open(0, 1)
    world.step((0, 0, 9, 0))
    world.step((0, 26, 16, 0))
    world.step((1, 0, 8, 0), (2, 0, 30, 0))  # a request that is not captured takes no room
    world.capture.close([0, 1])
    found = [(world.check(f), f.first_position, f.num_tokens) for f in world.capture.take()]
    assert found == [(0, 0, 9), (0, 26, 16), (1, 0, 8)]


def test_a_slot_s_next_request_is_another_sequence() -> None:
    world = World()
    for seed in (7, 8):
        world.open(2, seed=seed)
        world.step((2, 0, 10 + seed, 0))
        world.capture.close([2])
    world.step((2, 0, 30, 0))  # no request's
    assert [f.num_tokens for f in world.capture.take()] == [17, 18]


def test_a_share_of_the_requests_is_captured_by_their_seeds() -> None:
    def captured(share: float) -> set[int]:
        world, found = World(share=share), set()
        for seed in range(300):
            world.open(0, seed=seed)
            world.step((0, 0, SHORTEST, 0))
            world.capture.close([0])
            found |= {seed} if world.take() else set()
        return found

    few, half = captured(0.1), captured(0.5)
    assert few < half and not captured(0.0)
    assert 15 < len(few) < 45 and 120 < len(half) < 180


def test_nothing_is_captured_beyond_the_time_share() -> None:
    world = World()
    world.capture.seconds = 1e20
    world.open(0)
    world.step((0, 0, 10, 0))
    world.capture.close([0])
    assert world.take() == {}


def test_untaken_sequences_are_dropped_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_capture, "OUTBOX_BYTES", 30 * 4 * (1 + (NUM_AUX + 1) * HIDDEN))  # of 30 tokens
    world = World()
    for length in (10, 11, 12, 13):
        world.open(0)
        world.step((0, 0, length, 0))
        world.capture.close([0])
    assert [f.num_tokens for f in world.capture.take()] == [12, 13]
