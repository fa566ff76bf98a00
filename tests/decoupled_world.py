# SPDX-License-Identifier: Apache-2.0
"""A world in which both sides of the protocol run against a network that delays, loses, doubles and reorders, on a clock of
its own. The engines are small deterministic functions; the protocol, its messages and their bytes are the real ones."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from nemo_specrollout.remote.protocol.drafter_side import DrafterSide
from nemo_specrollout.remote.protocol.messages import decode, encode
from nemo_specrollout.remote.protocol.orders import DraftModel, Publication, ShadowClosing, ShadowOpening
from nemo_specrollout.remote.protocol.peers import PolicyModel, Sampling
from nemo_specrollout.remote.protocol.prefix_hash import of_text
from nemo_specrollout.remote.protocol.shadow_sequences import Drafted
from nemo_specrollout.remote.protocol.verifier_side import VerifierSide
from nemo_specrollout.remote.verifier.stream import DraftStream
from nemo_specrollout.sampling.seeds import combine

VOCAB, MAX_LEN, LANES, MOST_AHEAD, SHADOWS, MOST_DRAFTS = 41, 96, 4, 6, 16, 4
STOP, ACCEPTANCE = 0, 0.8


def policy_token(seed: int, text: list[int]) -> int:
    """What the policy samples after `text`."""
    return combine(seed, len(text), *text[-3:]) % VOCAB


def draft_token(seed: int, text: list[int], version: int, acceptance: float) -> int:
    """What a drafter of some version samples after `text`: often the same."""
    agrees = combine(seed, version, len(text), 7) % 1000 < 1000 * acceptance
    return policy_token(seed, text) if agrees else combine(seed, version, len(text)) % VOCAB


def plain_text(seed: int, prompt: list[int], limit: int) -> list[int]:
    """What plain decoding makes of `prompt`."""
    text = list(prompt)
    while len(text) < limit and (len(text) == len(prompt) or text[-1] != STOP):
        text.append(policy_token(seed, text))
    return text


@dataclass
class Faults:
    """How bad the network is: shares of frames lost and doubled, longest delay in seconds, whether order may change."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_s: float = 0.0
    reorders: bool = False


@dataclass
class Request:
    seed: int
    prompt: list[int]
    limit: int
    text: list[int] = field(default_factory=list)


class Network:
    """Frames under way between named ends."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng, self.faults = rng, faults
        self._under_way: list[tuple[float, int, object, object, bytes]] = []
        self._last: dict[tuple[object, object], float] = {}
        self._count = 0

    def send(self, source: object, target: object, frame: bytes, now_s: float) -> None:
        f = self.faults
        for _ in range(1 + (self.rng.random() < f.doubling)):
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
    """A drafter whose engine is `draft_token`; it keeps full texts, as vLLM does, and obeys corrections."""

    def __init__(self, name: object, rng: random.Random, truth: dict[int, list[int]]) -> None:
        self.name, self.rng, self.truth = name, rng, truth
        self.runs = 0
        self.restart()

    def restart(self) -> None:
        self.runs += 1
        drafter = combine(hash(self.name) & 0xFFFF, self.runs) >> 1
        num_shadows = self.rng.choice([SHADOWS, SHADOWS, 3])  # of 3, many are wanting
        self.side = DrafterSide(DraftModel(VOCAB, "", MAX_LEN), drafter, num_shadows, MOST_AHEAD)
        self.texts: dict[int, tuple[int, list[int]]] = {}
        self.version = 0

    def publish(self) -> None:
        """New weights."""
        self.version += 1
        self.side.published(Publication("", self.version, None))

    def check(self) -> None:
        """What the protocol believes of its shadows is what the engine holds, and what it takes to be committed is."""
        for shadow, (seed, text) in self.texts.items():
            assert self.side.shadows.text_hash(shadow) == (len(text), of_text(seed, np.array(text, np.int32)))
            num_committed = self.side.shadows.num_committed(shadow)
            assert text[:num_committed] == self.truth[seed][:num_committed]

    def step(self, network: Network, now_s: float) -> None:
        for peer, frame in network.arrived(self.name, now_s):
            self.side.receive(peer, decode(frame), now_s)
        self._obey()
        wanting = self.side.wanting()[: self.rng.choice([SHADOWS, SHADOWS, 1, 0])]
        rows = [self._draft(int(m)) for m in wanting]
        if rows:
            positions, tokens = (np.array(c) for c in zip(*rows, strict=True))
            new = (wanting, positions.astype(np.int64), tokens.astype(np.int32))
            self.side.drafted(Drafted(*new, np.zeros(len(rows), np.int8)), 0.001)
        self.side.forget_silent(now_s)
        for peer, reply in self.side.outgoing(now_s):
            if peer is not None:
                network.send(self.name, peer, encode(reply), now_s)

    def _obey(self) -> None:
        for order in self.side.take_orders():
            if isinstance(order, ShadowClosing):
                del self.texts[order.shadow]
            elif isinstance(order, ShadowOpening):
                assert order.shadow not in self.texts
                self.texts[order.shadow] = (order.seed, order.text.tolist())
            else:
                seed, text = self.texts[order.shadow]
                assert order.num_kept <= len(text)
                self.texts[order.shadow] = (seed, text[: order.num_kept] + order.tokens)

    def _draft(self, shadow: int) -> tuple[int, int]:
        seed, text = self.texts[shadow]
        token = draft_token(seed, text, self.version, ACCEPTANCE)
        text.append(token)
        return len(text) - 1, token


class FakeVerifier:
    """An engine that decodes `policy_token`s, with the drafts of its stream. `done` holds what it made of its requests.

    The protocol learns of tokens up to two steps after the engine has them, as with asynchronous scheduling.
    """

    def __init__(self, name: object, rng: random.Random, num_drafters: int, requests: list[Request]) -> None:
        self.name, self.rng, self.num_drafters = name, rng, num_drafters
        self.waiting = list(requests)
        self.done: list[Request] = []
        self.num_accepted = 0
        self.running: dict[int, Request] = {}
        self.runs = 0
        self.restart()

    def restart(self) -> None:
        """The process is another one: it starts over what it had not done."""
        self.runs += 1
        self.waiting = [Request(r.seed, r.prompt, r.limit) for r in self.running.values()] + self.waiting
        self.running = {}
        model = PolicyModel(VOCAB, "", (STOP,))
        self.side = VerifierSide(
            combine(hash(self.name) & 0xFFFF, self.runs) >> 1, LANES, self.num_drafters, MOST_AHEAD, model, 1
        )
        table_SX = np.zeros((LANES, DraftStream.columns(MOST_AHEAD)), np.int32)
        self.stream = DraftStream(table_SX, lambda: torch.from_numpy(table_SX))
        self.token_ids_SL, self.known_SL = np.zeros((2, LANES, MAX_LEN), np.int32)
        self.known_S = np.zeros(LANES, np.int64)

    @property
    def is_done(self) -> bool:
        return not self.running and not self.waiting

    def step(self, network: Network, now_s: float) -> None:
        """One engine step: take what came, say what is new, verify the drafts at hand."""
        self._admit()
        for drafter, frame in network.arrived((self.name, self.runs), now_s):
            self.side.receive(drafter, decode(frame), now_s)
        if self.rng.random() < 0.8:
            self.side.follow(self.known_SL, self.known_S, now_s)
        for drafter, message in self.side.outgoing():
            network.send((self.name, self.runs), drafter, encode(message), now_s)
        self.side.tails.write(self.stream.table_SX)
        if self.rng.random() < 0.7:
            self._learn()
        self._decode(np.array(sorted(self.running, key=lambda lane: self.rng.random()), np.int64))
        if self.rng.random() < 0.3:
            self._learn()

    def _learn(self) -> None:
        """The host gets to know the texts."""
        for lane, request in self.running.items():
            self.known_SL[lane, : len(request.text)] = request.text
            self.known_S[lane] = len(request.text)

    def _admit(self) -> None:
        for lane in range(LANES):
            if lane not in self.running and self.waiting:
                request = self.waiting.pop(0)
                request.text = list(request.prompt)
                self.running[lane] = request
                self._learn()
                self.side.open(lane, request.seed, Sampling(1.0, 0, 1.0), request.limit)

    def _decode(self, lanes_B: np.ndarray) -> None:
        tokens_BK = torch.zeros(LANES, MOST_DRAFTS, dtype=torch.int32)
        found_B, total_len_S = torch.zeros(2, LANES, dtype=torch.int32)
        for lane, request in self.running.items():
            self.token_ids_SL[lane, : len(request.text)] = request.text
            total_len_S[lane] = len(request.text)
        self.stream.propose(
            torch.from_numpy(lanes_B),
            total_len_S,
            torch.from_numpy(self.token_ids_SL),
            tokens_BK,
            tokens_BK.char(),
            found_B,
        )
        for row, lane in enumerate(lanes_B.tolist()):
            request = self.running[lane]
            drafts = tokens_BK[row, : found_B[row]].tolist()
            self._check(request, drafts)
            for draft in [*drafts, None]:
                token = policy_token(request.seed, request.text)
                request.text.append(token)
                if token == STOP or len(request.text) >= request.limit:
                    self.side.close(lane)
                    self.done.append(self.running.pop(lane))
                    break
                if draft != token:
                    break
                self.num_accepted += 1

    def _check(self, request: Request, drafts: list[int]) -> None:
        """Each draft was made for just the text that it stands behind, by a drafter of some version."""
        text = list(request.text)
        for draft in drafts:
            assert draft in {draft_token(request.seed, text, v, ACCEPTANCE) for v in range(20)}
            text.append(draft)
