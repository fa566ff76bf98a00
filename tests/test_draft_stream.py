# SPDX-License-Identifier: Apache-2.0
"""The draft stream: drafts that the host wrote for an older text, aligned with the text on the device."""

import numpy as np
import pytest
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.remote.protocol.draft_buffers import BASE, COUNT, TOKENS, WRONG, DraftBuffers, text_hash
from nemo_specrollout.remote.protocol.messages import DRAFT_ROW
from nemo_specrollout.remote.verifier.draft_stream import DraftStream

pytestmark = pytest.mark.unit

NUM_SLOTS, LONGEST, ROOM, K = 6, 40, 5, 3


class World:
    """A stream, and texts in which each token is its own position."""

    def __init__(self) -> None:
        self.table_SX = np.zeros((NUM_SLOTS, DraftStream.columns(ROOM)), np.int32)
        self.stream = DraftStream(self.table_SX, lambda: torch.from_numpy(self.table_SX))
        self.total_len_S = torch.full((NUM_SLOTS,), 20, dtype=torch.int32)
        self.token_ids_SL = torch.arange(LONGEST, dtype=torch.int32).repeat(NUM_SLOTS, 1)

    def write(self, slot: int, base: int, tokens: list[int]) -> None:
        row = self.table_SX[slot]
        row[BASE], row[COUNT] = base, len(tokens)
        row[TOKENS : TOKENS + len(tokens)] = tokens
        row[TOKENS + ROOM : TOKENS + ROOM + len(tokens)] = [t % 16 for t in tokens]

    def propose(self, *slots: int) -> list[list[int]]:
        """Returns the drafts of each slot, and checks that each token keeps its evidence level."""
        tokens_BK = torch.full((len(slots), K), -7, dtype=torch.int32)
        levels_BK, found_B = torch.full((len(slots), K), -7, dtype=torch.int8), torch.full((len(slots),), -7).int()
        texts = Texts(torch.tensor(slots), self.total_len_S, self.token_ids_SL)
        self.stream.propose(texts, Proposals(tokens_BK, levels_BK, found_B))
        drafts = [row[:n] for row, n in zip(tokens_BK.tolist(), found_B.tolist(), strict=True)]
        levels = [row[:n] for row, n in zip(levels_BK.tolist(), found_B.tolist(), strict=True)]
        assert levels == [[t % 16 for t in row] for row in drafts]
        assert (tokens_BK.numpy()[np.arange(K) >= found_B.numpy()[:, None]] == -7).all()
        return drafts


def test_drafts_continue_the_text_on_the_device() -> None:
    world = World()
    world.write(0, 20, [20, 21, 22, 23, 24])  # The host knows the whole text.
    world.write(1, 18, [18, 19, 30, 31])  # The host is two tokens late, and both are as drafted.
    world.write(2, 16, [16, 17, 18, 19])  # All drafts are used.
    world.write(3, 18, [18, 9, 20, 21])  # The policy sampled another token.
    world.write(4, 21, [21, 22])  # The row is of a longer text than the device's.
    assert world.propose(0, 1, 2, 3, 4, 5) == [[20, 21, 22], [30, 31], [], [], [], []]
    assert world.stream.counts_3.tolist() == [6, 2, 5]
    assert world.propose(4, 1, -1) == [[], [30, 31], []]
    assert world.stream.counts_3.tolist() == [8, 3, 7]


def test_an_invalid_row_yields_no_draft() -> None:
    world = World()
    for base, count in ((-1, 3), (0, 1 << 30), (20, -5), (1 << 30, 3), (-(1 << 31), 1 << 30)):
        world.table_SX[0, BASE], world.table_SX[0, COUNT] = base, count
        assert world.propose(0) == [[]]
    world.table_SX[0, BASE], world.table_SX[0, COUNT] = 18, 99  # more tokens than a row holds
    world.table_SX[0, TOKENS:] = [18, 19, 1, 2, 3, *[t % 16 for t in (18, 19, 1, 2, 3)]]
    assert world.propose(0) == [[1, 2, 3]]


def test_wrong_drafts_shorten_the_window_of_their_request() -> None:
    buffers, slots = DraftBuffers(2, 24, vocab_size=50), np.array([0, 1])
    for slot in (0, 1):
        buffers.open(slot, slot, 7, np.zeros(1, np.int32))
    assert buffers.windows(slots).tolist() == [24, 24]
    token_ids_SL = np.zeros((2, 200), np.int32)
    for position in range(1, 60):
        buffers.commit(slots, token_ids_SL, np.array([position, position]))
        drafts = (0, position % 2)  # every other draft of the second request is wrong
        prefix = text_hash(7, token_ids_SL[0, :position])
        buffers.add(np.array([(slot, position, prefix, drafts[slot], 0) for slot in (0, 1)], DRAFT_ROW))
    assert buffers.windows(slots).tolist() == [24, 8]
    assert buffers.counts[WRONG] == 29
