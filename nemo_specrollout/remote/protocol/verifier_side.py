# SPDX-License-Identifier: Apache-2.0
"""The verifier's side of the protocol: assigns requests to drafters, and exchanges texts for drafts.

Shapes: S request slots, b and t some of them, L longest sequence.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import NO_REQUEST, SLOT_BITS, SLOT_MASK, DraftBuffers
from nemo_specrollout.remote.protocol.messages import (
    DRAFT_COLUMNS,
    PROTOCOL,
    Drafts,
    Hello,
    Message,
    Open,
    Refuse,
    Step,
    Welcome,
    column,
    columns,
)
from nemo_specrollout.remote.protocol.peers import Peer, PeerState, PolicyModel, Sampling

NO_DRAFTER = -1
"""Drafter of a request slot that is free or waits for one."""
HEARTBEAT_S = 0.2
"""Seconds between messages to a drafter without requests of ours. Its answers say that it lives, and how full it is."""


@dataclass(frozen=True)
class _SlotRequest:
    seed: int
    sampling: Sampling
    limit: int


class VerifierSide:
    """Owns the request slots, their draft buffers, and the state of each drafter.

    Call `follow` with the texts whenever they have grown, and send what `outgoing` returns. Pass all that arrives to
    `receive`: `buffers` then holds the draft tokens at hand.
    """

    def __init__(self, session: int, num_slots: int, num_drafters: int, most_ahead: int, model: PolicyModel) -> None:
        self.session = session
        self.most_ahead = most_ahead
        self.peers = [Peer() for _ in range(num_drafters)]
        self.buffers = DraftBuffers(num_slots, most_ahead, model.vocab_size)
        self._hello = Hello(PROTOCOL, session, model.vocab_size, model.tokenizer, list(model.stop_token_ids))
        self._slots: dict[int, _SlotRequest] = {}
        self._drafter_of = np.full(num_slots, NO_DRAFTER, np.int64)
        self._is_told = np.zeros(num_slots, np.bool_)
        self._requests = np.full(num_slots, NO_REQUEST, np.int64)
        self._num_requests = 0
        self._num_steps = 0
        self._closes: list[list[int]] = [[] for _ in range(num_drafters)]
        self._outbox: list[tuple[int, Message]] = []

    def open(self, slot: int, seed: int, sampling: Sampling, limit: int) -> None:
        """Assigns `slot` to a new request, which never grows beyond `limit` tokens."""
        self._num_requests += 1
        self._slots[slot] = _SlotRequest(seed, sampling, limit)
        self._requests[slot] = (self._num_requests << SLOT_BITS) | slot
        self._drafter_of[slot], self._is_told[slot] = NO_DRAFTER, False

    def close(self, slot: int) -> None:
        """Frees `slot`, whose request ended or was preempted."""
        drafter = int(self._drafter_of[slot])
        if drafter != NO_DRAFTER:
            self._closes[drafter].append(int(self._requests[slot]))
            self._unassign(slot)
        self._requests[slot] = NO_REQUEST

    def follow(self, token_ids_SL: np.ndarray, lengths_S: np.ndarray, now_s: float) -> None:
        """Queues a step for each drafter with the texts as they are now, int32 and int64, and greetings that are due."""
        self._outbox += [(drafter, self._hello) for drafter, peer in enumerate(self.peers) if peer.greets(now_s)]
        self._assign(lengths_S)
        self._num_steps += 1
        for drafter, peer in enumerate(self.peers):
            slots_b = np.flatnonzero(self._drafter_of == drafter)
            is_due = len(slots_b) > 0 or bool(self._closes[drafter]) or now_s - peer.told_s > HEARTBEAT_S
            if peer.state is PeerState.READY and is_due:
                self._outbox.append((drafter, self._step(drafter, slots_b, token_ids_SL, lengths_S[slots_b], now_s)))
                peer.note_step(len(slots_b), now_s)
                if peer.is_overdue(now_s):
                    self._drop(drafter, "left a step unanswered", now_s)

    def receive(self, drafter: int, message: Message, now_s: float) -> None:
        """Takes a message of a drafter. Messages that a drafter does not send, or not now, are ignored."""
        peer = self.peers[drafter]
        if isinstance(message, Welcome | Refuse | Drafts) and message.session != self.session:
            return
        if isinstance(message, Welcome) and peer.state is PeerState.GREETED:
            self._disown(drafter)
            peer.welcome(message, now_s)
        elif isinstance(message, Refuse) and peer.state is PeerState.GREETED:
            peer.state, peer.reason = PeerState.REFUSED, message.reason
        elif isinstance(message, Refuse) and peer.state is PeerState.READY:
            self._drop(drafter, message.reason, now_s)
        elif isinstance(message, Drafts) and peer.state is PeerState.READY and message.drafter == peer.drafter:
            self._take_drafts(drafter, message, now_s)

    def outgoing(self) -> list[tuple[int, Message]]:
        """Returns the messages to send, each with the index of its drafter, and clears the queue."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def failed(self, drafter: int, reason: str, now_s: float) -> None:
        """Drops a drafter that the transport cannot reach, or that sent an invalid frame."""
        if self.peers[drafter].state in (PeerState.READY, PeerState.GREETED):
            self._drop(drafter, reason, now_s)

    def moved(self, drafter: int, why_unreachable: str = "") -> None:
        """Notes that a drafter has a new address, where it counts as one that never failed.

        With a reason in `why_unreachable` it has no address, and is left alone until it moves again.
        """
        self._disown(drafter)
        self.peers[drafter].move(why_unreachable)

    def _drop(self, drafter: int, reason: str, now_s: float) -> None:
        self._disown(drafter)
        self.peers[drafter].fail(reason, now_s)

    def _disown(self, drafter: int) -> None:
        """Takes all requests away from a drafter."""
        slots = np.flatnonzero(self._drafter_of == drafter)
        self._drafter_of[slots], self._is_told[slots] = NO_DRAFTER, False
        self.buffers.close(slots)
        self._closes[drafter] = []
        self.peers[drafter].forget_requests()

    def _unassign(self, slot: int) -> None:
        """Takes one request away from its drafter."""
        self.peers[self._drafter_of[slot]].num_own -= 1
        self._drafter_of[slot] = NO_DRAFTER
        self.buffers.close(np.array([slot]))

    def _assign(self, lengths_S: np.ndarray) -> None:
        """Assigns each request without a drafter to the least loaded one that is ready and has room for it."""
        for slot in np.flatnonzero((self._drafter_of == NO_DRAFTER) & (self._requests != NO_REQUEST)).tolist():
            loads = {
                drafter: peer.load
                for drafter, peer in enumerate(self.peers)
                if peer.state is PeerState.READY
                and peer.load < peer.num_shadows
                and lengths_S[slot] < peer.max_model_len
            }
            if not loads:
                return
            drafter = min(loads, key=loads.__getitem__)
            self._drafter_of[slot] = drafter
            self.peers[drafter].num_own += 1

    def _step(
        self, drafter: int, slots_b: np.ndarray, token_ids_SL: np.ndarray, lengths_b: np.ndarray, now_s: float
    ) -> Step:
        is_told_b = self._is_told[slots_b]
        opens = [
            self._open_message(int(slots_b[i]), token_ids_SL[slots_b[i], : lengths_b[i]])
            for i in np.flatnonzero(~is_told_b)
        ]
        slots_t = slots_b[is_told_b]
        new = self.buffers.commit(slots_t, token_ids_SL, lengths_b[is_told_b])
        closes, self._closes[drafter] = self._closes[drafter], []
        return Step(
            self.session,
            self._num_steps,
            int(now_s * 1e9),
            opens,
            closes=np.array(closes, np.int64).tobytes(),
            requests=self._requests[slots_t].tobytes(),
            bases=new.bases_b.tobytes(),
            hashes=new.hashes_b.tobytes(),
            counts=new.counts_b.tobytes(),
            windows=self.buffers.windows(slots_t).tobytes(),
            resends=self.buffers.take_losses(slots_t).tobytes(),
            tokens=new.tokens.tobytes(),
        )

    def _open_message(self, slot: int, text: np.ndarray) -> Open:
        entry, request = self._slots[slot], int(self._requests[slot])
        self.buffers.open(slot, request, entry.seed, text)
        self._is_told[slot] = True
        s = entry.sampling
        return Open(
            request, entry.seed, s.temperature, s.top_k, s.top_p, entry.limit, self.most_ahead, text.tobytes()
        )  # fmt: skip

    def _take_drafts(self, drafter: int, drafts: Drafts, now_s: float) -> None:
        peer, rows = self.peers[drafter], tuple(columns(drafts, DRAFT_COLUMNS))
        if peer.is_flooding(len(rows[0]), self.most_ahead):
            self._drop(drafter, "sends far more drafts than it was asked for", now_s)
            return
        if peer.note_answer(drafts, now_s):
            self.buffers.note_loss(np.flatnonzero(self._drafter_of == drafter))
        self.buffers.add(*rows)
        for request in column(drafts.lacking, np.int64).tolist():
            slot = request & SLOT_MASK
            if slot in self._slots and self._requests[slot] == request and self._drafter_of[slot] == drafter:
                self._open_again(slot)

    def _open_again(self, slot: int) -> None:
        """Opens a request again that its drafter lacks. If the drafter is full, the request waits for another one."""
        self._is_told[slot] = False
        peer = self.peers[self._drafter_of[slot]]
        if peer.num_open_there >= peer.num_shadows:
            self._unassign(slot)
