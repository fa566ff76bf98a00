# SPDX-License-Identifier: Apache-2.0
"""A simulation of both sides of the protocol with a network that delays, loses, duplicates and reorders frames.

The clock is simulated, and the engines are small deterministic functions. The protocol and its encoded messages are real.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.remote.protocol.draft_buffers import text_hash
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide, DraftModel
from nemo_specrollout.remote.protocol.messages import DRAFT_ROW, Open, Publish, Published, column, decode, encode
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest, VerifierSide
from nemo_specrollout.remote.verifier.draft_stream import DraftStream
from nemo_specrollout.sampling.seeds import combine

VOCAB, MAX_LEN, NUM_SLOTS, MAX_AHEAD, SHADOWS, MAX_DRAFTS = 41, 96, 4, 6, 16, 4
STOP, ACCEPTANCE = 0, 0.8


def policy_token(seed: int, text: list[int]) -> int:
    """Returns the token that the policy samples after `text`."""
    return combine(seed, len(text), *text[-3:]) % VOCAB


def draft_token(seed: int, text: list[int], version: int, acceptance: float) -> int:
    """Returns the token that a drafter with weights of `version` samples after `text`: the policy's at rate `acceptance`."""
    agrees = combine(seed, version, len(text), 7) % 1000 < 1000 * acceptance
    return policy_token(seed, text) if agrees else combine(seed, version, len(text)) % VOCAB


def plain_text(seed: int, prompt: list[int], limit: int) -> list[int]:
    """Returns the text that plain decoding makes of `prompt`."""
    text = list(prompt)
    while len(text) < limit and (len(text) == len(prompt) or text[-1] != STOP):
        text.append(policy_token(seed, text))
    return text


@dataclass
class Faults:
    """Faults of a network: shares of frames lost and duplicated, longest delay in seconds, whether the order may change."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_s: float = 0.0
    reorders: bool = False


@dataclass
class Request:
    seed: int
    prompt: list[int]
    limit: int
    text: list[int] = field(default_factory=list)


class Network:
    """Frames on their way between named ends."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng, self.faults = rng, faults
        self._under_way: list[tuple[float, int, object, object, bytes]] = []
        self._last: dict[tuple[object, object], float] = {}
        self._count = 0

    def send(self, source: object, target: object, frame: bytes, now_s: float) -> None:
        f = self.faults
        for _ in range(1 + (self.rng.random() < f.duplication)):
            if self.rng.random() < f.loss:
                continue
            due = now_s + self.rng.random() * f.delay_s
            if not f.reorders:
                due = self._last[source, target] = max(due, self._last.get((source, target), 0.0))
            self._count += 1
            self._under_way.append((due, self._count, source, target, frame))

    def arrived(self, target: object, now_s: float) -> list[tuple[object, bytes]]:
        due = sorted(f for f in self._under_way if f[3] == target and f[0] <= now_s)
        self._under_way = [f for f in self._under_way if not (f[3] == target and f[0] <= now_s)]
        return [(f[2], f[4]) for f in due]


class FakeDrafter:
    """A drafter with `draft_token` as its engine, which keeps full texts, as vLLM does."""

    model = DraftModel(VOCAB, "", MAX_LEN)

    def __init__(self, name: object, rng: random.Random, truth: dict[int, list[int]]) -> None:
        """`truth` holds, by seed, the final text of each request."""
        self.name, self.rng, self.truth = name, rng, truth
        self.num_starts = 0
        self.restart()

    def restart(self) -> None:
        self.num_starts += 1
        drafter = combine(hash(self.name) & 0xFFFF, self.num_starts) >> 1
        num_shadows = self.rng.choice([SHADOWS, SHADOWS, 3])  # 3 are too few for all requests
        self.texts: dict[int, tuple[int, list[int]]] = {}
        self.side = DrafterSide(self, drafter, num_shadows, MAX_AHEAD)
        self.version = 0

    def publish(self) -> None:
        """Gives the drafter new weights."""
        self.side.receive("publisher", Publish("/weights", self.version + 1), 0.0)
        assert self.side.draft_version == self.version

    def check(self) -> None:
        """Checks that the protocol knows the engine's texts, and that its committed texts are the verifier's."""
        shadows = self.side.shadows
        for shadow, (seed, text) in self.texts.items():
            end, num_committed = int(shadows.state["end"][shadow]), int(shadows.state["committed"][shadow])
            prefix_hash = shadows.rings["prefix_hash"][shadow, end % shadows.rings.shape[1]]
            assert (end, prefix_hash) == (len(text), text_hash(seed, np.array(text, np.int32)))
            assert text[:num_committed] == self.truth[seed][:num_committed]

    def step(self, network: Network, now_s: float) -> None:
        for peer, frame in network.arrived(self.name, now_s):
            self.side.receive(peer, decode(frame), now_s)
        ready = self.side.shadows.ready_to_draft()[: self.rng.choice([SHADOWS, SHADOWS, 1, 0])]
        if len(ready):
            self.side.drafted(np.array([self._draft(shadow) for shadow in ready.tolist()], DRAFT_ROW), 0.001)
        self.side.forget_silent(now_s)
        for peer, reply in self.side.outgoing():
            if peer == "publisher":
                assert reply == Published(self.version, "")
                continue
            network.send(self.name, peer, encode(reply), now_s)

    # As in `DrafterEngine`

    def open(self, shadow: int, opening: Open) -> None:
        assert shadow not in self.texts
        self.texts[shadow] = (opening.seed, column(opening.tokens, np.int32).tolist())

    def close_shadow(self, shadow: int) -> None:
        del self.texts[shadow]

    def correct(self, shadow: int, num_kept: int, tokens: list[int]) -> None:
        seed, text = self.texts[shadow]
        assert num_kept <= len(text)
        self.texts[shadow] = (seed, text[:num_kept] + tokens)

    def load_weights(self, folder: Path) -> None:
        self.version += 1

    def _draft(self, shadow: int) -> tuple[int, ...]:
        """Returns a new token of a shadow sequence, as `DRAFT_ROW`."""
        seed, text = self.texts[shadow]
        token = draft_token(seed, text, self.version, ACCEPTANCE)
        text.append(token)
        return shadow, len(text) - 1, 0, token, 0


class FakeVerifier:
    """An engine that samples `policy_token`s and verifies the drafts of its stream. `done` holds the finished requests.

    The protocol gets tokens up to two steps after the engine has them, as with asynchronous scheduling.
    """

    def __init__(self, name: object, rng: random.Random, num_drafters: int, requests: list[Request]) -> None:
        self.name, self.rng, self.num_drafters = name, rng, num_drafters
        self.waiting = list(requests)
        self.done: list[Request] = []
        self.num_accepted = 0
        self.running: dict[int, Request] = {}
        self.num_starts = 0
        self.restart()

    def restart(self) -> None:
        """Replaces the process by a new one, which starts all unfinished requests again."""
        self.num_starts += 1
        self.waiting = [Request(r.seed, r.prompt, r.limit) for r in self.running.values()] + self.waiting
        self.running = {}
        model = PolicyModel(VOCAB, "", (STOP,))
        session = combine(hash(self.name) & 0xFFFF, self.num_starts) >> 1
        self.side = VerifierSide(session, NUM_SLOTS, self.num_drafters, MAX_AHEAD, model)
        table_SX = np.zeros((NUM_SLOTS, DraftStream.columns(MAX_AHEAD)), np.int32)
        self.stream = DraftStream(table_SX, lambda: torch.from_numpy(table_SX))
        self.token_ids_SL, self.known_SL = np.zeros((2, NUM_SLOTS, MAX_LEN), np.int32)
        self.known_S = np.zeros(NUM_SLOTS, np.int64)

    @property
    def is_done(self) -> bool:
        return not self.running and not self.waiting

    def step(self, network: Network, now_s: float) -> None:
        """Takes a step of the engine: receives drafts, sends new tokens, verifies the drafts at hand."""
        self._admit()
        for drafter, frame in network.arrived((self.name, self.num_starts), now_s):
            self.side.receive(drafter, decode(frame), now_s)
        if self.rng.random() < 0.8:
            for drafter, message in self.side.follow(self.known_SL, self.known_S, now_s):
                network.send((self.name, self.num_starts), drafter, encode(message), now_s)
        self.side.buffers.write(self.stream.table_SX)
        if self.rng.random() < 0.7:
            self._learn()
        self._decode(np.array(sorted(self.running, key=lambda slot: self.rng.random()), np.int64))
        if self.rng.random() < 0.3:
            self._learn()

    def _learn(self) -> None:
        """Gives the texts to the protocol's host."""
        for slot, request in self.running.items():
            self.known_SL[slot, : len(request.text)] = request.text
            self.known_S[slot] = len(request.text)

    def _admit(self) -> None:
        for slot in range(NUM_SLOTS):
            if slot not in self.running and self.waiting:
                request = self.waiting.pop(0)
                request.text = list(request.prompt)
                self.running[slot] = request
                self._learn()
                self.side.open(StreamRequest(slot, request.seed, 1.0, 0, 1.0, request.limit))

    def _decode(self, slots_B: np.ndarray) -> None:
        tokens_BK = torch.zeros(NUM_SLOTS, MAX_DRAFTS, dtype=torch.int32)
        found_B, total_len_S = torch.zeros(2, NUM_SLOTS, dtype=torch.int32)
        for slot, request in self.running.items():
            self.token_ids_SL[slot, : len(request.text)] = request.text
            total_len_S[slot] = len(request.text)
        texts = Texts(torch.from_numpy(slots_B), total_len_S, torch.from_numpy(self.token_ids_SL))
        self.stream.propose(texts, Proposals(tokens_BK, tokens_BK.char(), found_B))
        for row, slot in enumerate(slots_B.tolist()):
            request = self.running[slot]
            drafts = tokens_BK[row, : found_B[row]].tolist()
            self._check(request, drafts)
            for draft in [*drafts, None]:
                token = policy_token(request.seed, request.text)
                request.text.append(token)
                if token == STOP or len(request.text) >= request.limit:
                    self.side.close(slot)
                    self.done.append(self.running.pop(slot))
                    break
                if draft != token:
                    break
                self.num_accepted += 1

    def _check(self, request: Request, drafts: list[int]) -> None:
        """Checks that each draft was made for exactly the text before it, by weights of some version."""
        text = list(request.text)
        for draft in drafts:
            assert any(draft == draft_token(request.seed, text, version, ACCEPTANCE) for version in range(40))
            text.append(draft)
