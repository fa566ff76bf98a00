# SPDX-License-Identifier: Apache-2.0
"""The verifier's half of the protocol: its requests and what drafters say in, messages and draft tokens out. No socket, no
engine, no clock of its own.

Shapes: S lanes, B those with a request, b and t some of these, L longest sequence.
"""

import math
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import LANE_BITS, LANE_MASK, NO_REQUEST, TailBuffers, gather
from nemo_specrollout.remote.protocol.messages import (
    PROTOCOL,
    Drafts,
    Hello,
    Message,
    Open,
    Refuse,
    Step,
    Welcome,
    column,
)
from nemo_specrollout.remote.protocol.peers import FIRST_PAUSE_S, Peer, PeerState, PolicyModel, Sampling

NO_DRAFTER = -1
# A drafter is dropped if it does not answer for this time, or sends this many times what it was asked for. It is greeted again
# after a pause, which doubles each time it fails, unless it did well for longer than the longest pause.
ANSWER_DEADLINE_S, FLOOD_FACTOR, FLOOD_ALLOWANCE = 2.0, 4, 4096
LONGEST_PAUSE_S = 30.0
HEARTBEAT_S = 0.2
"""A drafter without requests of ours is told so as often: its answer says that it lives, and how much room it has."""


@dataclass
class _Lane:
    seed: int
    sampling: Sampling
    limit: int


class VerifierSide:
    """Owns lanes, their tails, and where we stand with each drafter. `follow` takes the texts whenever they have grown; then
    `outgoing` is sent; whatever comes goes to `receive`; `tails` are the draft tokens at hand.

    Invariants: nothing here ever waits. A lane has one drafter or none; what any other says of it is dropped. A drafter that
    failed is told everything again if it comes back.
    """

    def __init__(
        self,
        session: int,
        num_lanes: int,
        num_drafters: int,
        most_ahead: int,
        model: PolicyModel,
        num_levels: int,
    ) -> None:
        self.session = session
        self.most_ahead = most_ahead
        self.peers = [Peer() for _ in range(num_drafters)]
        self.tails = TailBuffers(num_lanes, most_ahead, model.vocab_size, num_levels)
        self._hello = Hello(PROTOCOL, session, model.vocab_size, model.tokenizer, list(model.stop_token_ids))
        self._lanes: dict[int, _Lane] = {}
        self._drafter_of = np.full(num_lanes, NO_DRAFTER, np.int64)
        self._is_told = np.zeros(num_lanes, np.bool_)
        self._requests = np.full(num_lanes, NO_REQUEST, np.int64)
        self._num_requests = 0
        self._num_steps = 0
        self._closes: list[list[int]] = [[] for _ in range(num_drafters)]
        self._outbox: list[tuple[int, Message]] = []

    def open(self, lane: int, seed: int, sampling: Sampling, limit: int) -> None:
        """A request takes `lane`; it never grows beyond `limit` tokens."""
        self._num_requests += 1
        self._lanes[lane] = _Lane(seed, sampling, limit)
        self._requests[lane] = (self._num_requests << LANE_BITS) | lane
        self._drafter_of[lane], self._is_told[lane] = NO_DRAFTER, False

    def close(self, lane: int) -> None:
        """The request of `lane`, if there is one, ended or was put aside."""
        if self._lanes.pop(lane, None) is None:
            return
        drafter = int(self._drafter_of[lane])
        if drafter != NO_DRAFTER:
            self._closes[drafter].append(int(self._requests[lane]))
            self.peers[drafter].num_own -= 1
        self.tails.close(np.array([lane]))
        self._requests[lane] = NO_REQUEST
        self._drafter_of[lane] = NO_DRAFTER

    def follow(self, token_ids_SL: np.ndarray, lengths_S: np.ndarray, now_s: float) -> None:
        """The lanes' texts as they are now, int32 and int64. Says what is new to each drafter, and greets those that are to
        be greeted."""
        self._greet(now_s)
        self._place(lengths_S)
        self._num_steps += 1
        for drafter, peer in enumerate(self.peers):
            lanes_b = np.flatnonzero(self._drafter_of == drafter)
            is_due = len(lanes_b) > 0 or bool(self._closes[drafter]) or now_s - peer.told_s > HEARTBEAT_S
            if peer.state is PeerState.READY and is_due:
                peer.told_s = now_s
                self._outbox.append((drafter, self._step(drafter, lanes_b, token_ids_SL, lengths_S[lanes_b], now_s)))
                peer.num_asked += len(lanes_b)
                if peer.waiting_since_s is None:
                    peer.waiting_since_s = now_s
                elif now_s - peer.waiting_since_s > ANSWER_DEADLINE_S:
                    self._drop(drafter, "left a step unanswered", now_s)

    def receive(self, drafter: int, message: Message, now_s: float) -> None:
        """A message of a drafter. What no drafter says is dropped."""
        peer = self.peers[drafter]
        if isinstance(message, Welcome | Refuse | Drafts) and message.session != self.session:
            return
        if isinstance(message, Welcome):
            self._welcomed(drafter, message, now_s)
        elif isinstance(message, Refuse):
            if peer.state is PeerState.GREETED:
                peer.state, peer.reason = PeerState.REFUSED, message.reason
            elif peer.state is PeerState.READY:
                self._drop(drafter, message.reason, now_s)
        elif isinstance(message, Drafts) and peer.state is PeerState.READY and message.drafter == peer.drafter:
            self._listen(drafter, message, now_s)

    def outgoing(self) -> list[tuple[int, Message]]:
        """What is to be sent, and to which drafter."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def failed(self, drafter: int, reason: str, now_s: float) -> None:
        """The transport cannot reach a drafter, or it sends a message that is not valid."""
        if self.peers[drafter].state in (PeerState.READY, PeerState.GREETED):
            self._drop(drafter, reason, now_s)

    def moved(self, drafter: int, nowhere: str = "") -> None:
        """A drafter listens elsewhere: it is greeted there as one that never failed. With a reason in `nowhere` it listens
        nowhere, and is left alone until it moves again."""
        self._disown(drafter)
        peer = self.peers[drafter]
        peer.state, peer.reason, peer.pause_s = PeerState.AWAY, nowhere, FIRST_PAUSE_S
        peer.resume_at_s = math.inf if nowhere else 0.0

    def _greet(self, now_s: float) -> None:
        for drafter, peer in enumerate(self.peers):
            if peer.state is PeerState.GREETED and now_s >= peer.resume_at_s:
                peer.state, peer.reason = PeerState.AWAY, peer.reason or "does not answer"
            if peer.state is PeerState.AWAY and now_s >= peer.resume_at_s:
                peer.state, peer.resume_at_s = PeerState.GREETED, now_s + ANSWER_DEADLINE_S
                self._outbox.append((drafter, self._hello))

    def _welcomed(self, drafter: int, welcome: Welcome, now_s: float) -> None:
        peer = self.peers[drafter]
        if peer.state is not PeerState.GREETED:
            return
        self._disown(drafter)
        peer.state, peer.reason, peer.drafter, peer.ready_s = PeerState.READY, "", welcome.drafter, now_s
        peer.draft_version, peer.max_model_len, peer.num_shadows = (
            welcome.draft_version,
            welcome.max_model_len,
            welcome.num_shadows,
        )
        peer.waiting_since_s, peer.last_number = None, 0

    def _retell(self, drafter: int, lane: int) -> None:
        """A drafter lacks a request: it is told again. If it has no room, another drafter is told, once there is one."""
        self._is_told[lane] = False
        peer = self.peers[drafter]
        if peer.num_open_there >= peer.num_shadows:
            self._drafter_of[lane] = NO_DRAFTER
            self.tails.close(np.array([lane]))
            peer.num_own -= 1

    def _drop(self, drafter: int, reason: str, now_s: float) -> None:
        """A drafter failed: its requests are others', and it is greeted again after a pause."""
        peer = self.peers[drafter]
        if peer.state is PeerState.READY and now_s - peer.ready_s > LONGEST_PAUSE_S:
            peer.pause_s = FIRST_PAUSE_S  # it did well for long; a few good frames before the next bad one do not count
        self._disown(drafter)
        peer.state, peer.reason = PeerState.AWAY, reason
        peer.num_failures += 1
        peer.resume_at_s = now_s + peer.pause_s
        peer.pause_s = min(2 * peer.pause_s, LONGEST_PAUSE_S)

    def _disown(self, drafter: int) -> None:
        lanes = np.flatnonzero(self._drafter_of == drafter)
        self._drafter_of[lanes], self._is_told[lanes] = NO_DRAFTER, False
        self.tails.close(lanes)
        self._closes[drafter] = []
        peer = self.peers[drafter]
        peer.num_own = peer.num_rows = peer.num_asked = 0
        peer.waiting_since_s = None

    def _place(self, lengths_S: np.ndarray) -> None:
        """Gives lanes without a drafter to the least loaded that is ready."""
        for lane in np.flatnonzero((self._drafter_of == NO_DRAFTER) & (self._requests != NO_REQUEST)).tolist():
            ready = [
                d
                for d, peer in enumerate(self.peers)
                if peer.state is PeerState.READY
                and peer.load < peer.num_shadows
                and lengths_S[lane] < peer.max_model_len
            ]
            if not ready:
                return
            drafter = min(ready, key=lambda d: self.peers[d].load)
            self._drafter_of[lane] = drafter
            self.peers[drafter].num_own += 1

    def _step(
        self, drafter: int, lanes_b: np.ndarray, token_ids_SL: np.ndarray, lengths_b: np.ndarray, now_s: float
    ) -> Step:
        is_told_b = self._is_told[lanes_b]
        new = [
            self._open_message(int(lanes_b[i]), token_ids_SL[lanes_b[i], : lengths_b[i]])
            for i in np.flatnonzero(~is_told_b)
        ]
        lanes_t, lengths_t = lanes_b[is_told_b], lengths_b[is_told_b]
        bases_t, hashes_t = self.tails.commit(lanes_t, token_ids_SL, lengths_t)
        counts_t = lengths_t - bases_t
        tokens = gather(token_ids_SL, lanes_t, bases_t, counts_t)
        closes, self._closes[drafter] = self._closes[drafter], []
        return Step(
            self.session,
            self._num_steps,
            int(now_s * 1e9),
            new,
            np.array(closes, np.int64).tobytes(),
            self._requests[lanes_t].tobytes(),
            bases_t.tobytes(),
            hashes_t.tobytes(),
            counts_t.tobytes(),
            self.tails.windows(lanes_t).tobytes(),
            self.tails.take_lost(lanes_t).tobytes(),
            tokens.tobytes(),
        )

    def _open_message(self, lane: int, text: np.ndarray) -> Open:
        entry, request = self._lanes[lane], int(self._requests[lane])
        self.tails.open(lane, request, entry.seed, text)
        self._is_told[lane] = True
        s = entry.sampling
        return Open(
            request,
            entry.seed,
            s.temperature,
            s.top_k,
            s.top_p,
            entry.limit,
            self.most_ahead,
            text.tobytes(),
        )

    def _listen(self, drafter: int, drafts: Drafts, now_s: float) -> None:
        peer = self.peers[drafter]
        requests_N = column(drafts.requests, np.int64)
        peer.num_rows += len(requests_N)
        if peer.num_rows > FLOOD_FACTOR * self.most_ahead * peer.num_asked + FLOOD_ALLOWANCE:
            self._drop(drafter, "sends far more drafts than it was asked for", now_s)
            return
        peer.waiting_since_s = None
        if drafts.number > peer.last_number + 1:
            self.tails.lose(np.flatnonzero(self._drafter_of == drafter))
        peer.last_number = max(peer.last_number, drafts.number)
        if drafts.answers > peer.last_answered and drafts.echo_ns:
            answer_s = now_s - (drafts.echo_ns + drafts.held_ns) / 1e9
            if 0.0 <= answer_s <= ANSWER_DEADLINE_S:  # what it echoes is its own word
                peer.answer_s = answer_s
        peer.last_answered = max(peer.last_answered, drafts.answers)
        peer.draft_version, peer.token_s, peer.num_open_there = drafts.draft_version, drafts.token_s, drafts.num_shadows
        self.tails.add(
            requests_N,
            column(drafts.positions, np.int64),
            column(drafts.hashes, np.uint64),
            column(drafts.tokens, np.int32),
            column(drafts.levels, np.int8),
        )
        for request in column(drafts.lacking, np.int64).tolist():
            lane = request & LANE_MASK
            if lane in self._lanes and self._requests[lane] == request and self._drafter_of[lane] == drafter:
                self._retell(drafter, lane)
