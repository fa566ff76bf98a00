# SPDX-License-Identifier: Apache-2.0
"""`RemoteDrafter` as an engine uses it: tokens reach the host late and in another thread, and slots are reused."""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import Thread

import numpy as np
import pytest
import torch
from decoupled_world import MAX_AHEAD, MAX_LEN, VOCAB, FakeDrafter, policy_token

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.remote.protocol import peer as peers
from nemo_specrollout.remote.protocol.draft_buffers import COUNT
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide, DraftModel
from nemo_specrollout.remote.protocol.messages import MAX_FRAME_BYTES, decode, encode
from nemo_specrollout.remote.protocol.peer import PeerState
from nemo_specrollout.remote.protocol.transport import DrafterSocket
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest
from nemo_specrollout.remote.verifier.draft_stream import DraftStream, RemoteDrafter

pytestmark = pytest.mark.unit

NUM_SLOTS, K, PROMPT = 3, 3, [1, 2, 3]


class Wire:
    """A drafter's socket with the interface of `Network`."""

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        self.socket = DrafterSocket(address, b"")

    def arrived(self, target: object, now_s: float) -> list[tuple[object, bytes]]:
        return [(peer, encode(message)) for peer, message in self.socket.receive()]

    def send(self, source: object, target: object, frame: bytes, now_s: float) -> None:
        self.socket.send(target, decode(frame))  # type: ignore[arg-type]


class Engine:
    """A policy with a remote drafter. Its texts are on the "device", and reach the host `lag` steps later."""

    def __init__(self, lag: int) -> None:
        self.wire, self.lag = Wire(), lag
        self.drafter = FakeDrafter("d", random.Random(0), {})
        table_SX = np.zeros((NUM_SLOTS, DraftStream.columns(MAX_AHEAD)), np.int32)
        stream = DraftStream(table_SX, lambda: torch.from_numpy(table_SX))
        address = self.wire.socket.address
        self.remote = RemoteDrafter([address], b"", MAX_LEN, PolicyModel(VOCAB), stream)
        self.texts: dict[int, tuple[int, list[int]]] = {}
        self.under_way: deque[tuple[Callable[..., None], list[list[int]]]] = deque()
        self.num_accepted = self.num_proposed = 0

    def open(self, slot: int, seed: int, text: list[int]) -> None:
        self.texts[slot] = (seed, list(text))
        self.remote.open([StreamRequest(slot, seed, 1.0, 0, 1.0, MAX_LEN, text)])

    def step(self) -> None:
        """Verifies the proposals, as the vLLM worker does, and gives the drafter some time."""
        slots = list(self.texts)
        tokens_BK = torch.zeros(len(slots), K, dtype=torch.int32)
        found_B, total_len_S = torch.zeros(len(slots)).int(), torch.zeros(NUM_SLOTS).int()
        token_ids_SL = torch.zeros(NUM_SLOTS, MAX_LEN, dtype=torch.int32)
        for slot, (_, text) in self.texts.items():
            token_ids_SL[slot, : len(text)] = torch.tensor(text)
            total_len_S[slot] = len(text)
        texts = Texts(torch.tensor(slots), total_len_S, token_ids_SL)
        self.remote.propose(texts, Proposals(tokens_BK, tokens_BK.char(), found_B))
        sampled = []
        for row, slot in enumerate(slots):
            seed, text = self.texts[slot]
            drafts, new = tokens_BK[row, : int(found_B[row])].tolist(), []
            while not new or (len(new) <= len(drafts) and drafts[len(new) - 1] == new[-1]):
                new.append(policy_token(seed, text))
                text.append(new[-1])
            sampled.append(new)
            self.num_accepted += len(new) - 1
            self.num_proposed += len(drafts)
        self.under_way.append((self.remote.token_callback(np.array(slots)), sampled))
        while len(self.under_way) > self.lag:
            tell, tokens = self.under_way.popleft()
            thread = Thread(target=tell, args=(tokens,))
            thread.start()
            thread.join()
        for _ in range(4):
            self.drafter.step(self.wire, time.monotonic())  # type: ignore[arg-type]
            time.sleep(0.001)

    def drafter_text(self, seed: int) -> list[int]:
        """Returns the drafter's text of the request with that seed."""
        return next((text for known, text in self.drafter.texts.values() if known == seed), [])


@pytest.fixture(params=[0, 1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param)
    yield made
    made.remote.set_addresses([""], b"")
    made.wire.socket.close()


def test_drafts_are_used_however_late_tokens_reach_the_host(engine: Engine) -> None:
    for seed in itertools.count():
        engine.open(seed % NUM_SLOTS, seed, PROMPT)
        for _ in range(8):
            engine.step()
        if engine.num_accepted > 100:
            break
    assert engine.remote.side.peers[0].state is PeerState.READY
    assert engine.num_accepted > 0.6 * engine.num_proposed
    stats = engine.remote.stats()
    assert stats.num_at_hand == engine.num_proposed and stats.num_ready == 1


def test_late_tokens_of_a_freed_slot_are_dropped(engine: Engine) -> None:
    engine.open(0, 7, PROMPT)
    while not engine.drafter_text(7):
        engine.step()
    engine.remote.close([0])
    engine.open(0, 8, [4, 5, 6, 7])
    for _ in range(6):
        engine.step()
    seed, text = engine.texts[0]
    known = len(text)
    while engine.drafter_text(seed)[:known] != text[:known]:
        engine.step()
    while engine.drafter_text(7):
        engine.step()


def test_a_plain_request_is_sent_to_no_drafter(engine: Engine) -> None:
    engine.open(1, 9, PROMPT)
    engine.texts[0] = (10, list(PROMPT))
    engine.remote.open([StreamRequest(0, 10, 1.0, 0, 1.0, 0, PROMPT)])
    while len(engine.drafter_text(9)) < 8:
        engine.step()
    assert engine.drafter_text(9)[:5] == engine.texts[1][1][:5]
    assert engine.drafter_text(10) == []


NUM_LONG, LONG_TEXT = 512, 32768


class DrafterOfLongTexts(FakeDrafter):
    """A drafter that has room for `NUM_LONG` requests of `LONG_TEXT` tokens."""

    model = DraftModel(VOCAB, "", LONG_TEXT + 64)

    def restart(self) -> None:
        super().restart()
        self.side = DrafterSide(self, self.num_starts, NUM_LONG, MAX_AHEAD)


def requests_with_drafts(remote: RemoteDrafter, drafter: FakeDrafter, wire: Wire) -> int:
    """Lets both sides take a step; returns for how many requests the verifier has drafts at hand."""
    drafter.step(wire, time.monotonic())  # type: ignore[arg-type]
    remote.token_callback(np.arange(NUM_LONG))([[] for _ in range(NUM_LONG)])
    return int((remote.stream.table_SX[:, COUNT] > 0).sum())


def test_a_restarted_drafter_gets_more_text_than_a_frame_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts are told again after a restart, 67 MB here."""
    assert NUM_LONG * LONG_TEXT * 4 >= MAX_FRAME_BYTES
    monkeypatch.setattr(peers, "ANSWER_DEADLINE_S", 600.0)  # a busy machine may be slow
    wire = Wire()
    drafter = DrafterOfLongTexts("d", random.Random(0), {})
    table_SX = np.zeros((NUM_LONG, DraftStream.columns(MAX_AHEAD)), np.int32)
    stream = DraftStream(table_SX, lambda: torch.from_numpy(table_SX))
    remote = RemoteDrafter([wire.socket.address], b"", LONG_TEXT + 64, PolicyModel(VOCAB), stream)
    text = [1] * LONG_TEXT
    remote.open([StreamRequest(slot, slot, 1.0, 0, 1.0, LONG_TEXT + 64, text) for slot in range(NUM_LONG)])
    while requests_with_drafts(remote, drafter, wire) < NUM_LONG:
        pass
    address = wire.socket.address
    wire.socket.close()
    drafter.restart()
    wire = Wire(address)
    peer = remote.side.peers[0]
    while peer.drafter != drafter.num_starts or requests_with_drafts(remote, drafter, wire) < NUM_LONG:
        requests_with_drafts(remote, drafter, wire)
    assert drafter.side.num_open == NUM_LONG
    assert wire.socket.num_refused == 0
    remote.set_addresses([""], b"")
    wire.socket.close()
