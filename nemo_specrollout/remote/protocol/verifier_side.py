# SPDX-License-Identifier: Apache-2.0
"""The verifier's side of the protocol: assigns requests to drafters, and exchanges texts for drafts.

Shapes: S request slots, b and t some of them, L longest sequence.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import NO_REQUEST, SLOT_BITS, SLOT_MASK, DraftBuffers
from nemo_specrollout.remote.protocol.messages import (
    DRAFT_ROW,
    LONGEST_TEXT_BYTES,
    MAX_OPENS,
    OPENED_BYTES,
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

ANSWER_DEADLINE_S = 2.0
"""Longest silence of a drafter that owes an answer."""
FLOOD_FACTOR = 4
"""A drafter is dropped if it sends this many times the draft tokens that it was asked for."""
FLOOD_ALLOWANCE = 4096
"""Draft tokens beyond that number which are still accepted."""
FIRST_PAUSE_S = 0.5
"""Pause before a drafter that failed is greeted again, in seconds. It doubles with each failure."""
LONGEST_PAUSE_S = 30.0
"""Longest such pause. A drafter that was ready for longer starts at the first pause again."""
HEARTBEAT_S = 0.2
"""Seconds between messages to a drafter without requests of ours. Its answers say that it lives, and how full it is."""
NO_DRAFTER = -1
TOKEN_BYTES = np.dtype(np.int32).itemsize

logger = logging.getLogger(__name__)


class PeerState(Enum):
    """State of a drafter, as a verifier sees it."""

    AWAY = "away"  # It is greeted when its pause is over.
    GREETED = "greeted"  # It has not answered yet.
    READY = "ready"
    REFUSED = "refused"  # It does not fit the policy, and is never greeted again.


@dataclass(frozen=True)
class PolicyModel:
    """Properties of the policy that a draft model has to fit (see `Hello`)."""

    vocab_size: int
    tokenizer: str = ""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamRequest:
    """A request that takes a request slot."""

    slot: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    limit: int
    """Longest text, in tokens. A request whose text is that long already gets no remote drafts."""
    token_ids: Sequence[int] = ()


@dataclass
class Peer:
    """One drafter, as a verifier sees it. All times are seconds of the verifier's clock."""

    state: PeerState = PeerState.AWAY
    reason: str = ""
    """Reason why the drafter is not ready; empty if it is, or if it was not tried yet."""
    # What it said last (see `Welcome` and `Drafts`).
    drafter: int = 0
    max_model_len: int = 0
    num_shadows: int = 0
    token_s: float = 0.0
    num_open_there: int = 0
    """Requests that it held when it answered last, of all verifiers."""
    resume_at_s: float = 0.0
    """Time at which it is greeted next, or at which a greeting counts as unanswered."""
    pause_s: float = FIRST_PAUSE_S
    ready_s: float = 0.0  # Time at which it became ready.
    waiting_since_s: float | None = None  # Time of the first step that it has not answered.
    told_s: float = 0.0  # Time of the latest step that it was sent.
    last_number: int = -1  # Number of its latest `Drafts`.
    num_rows: int = 0  # Draft tokens that it sent.
    num_asked: int = 0  # Requests that it was asked to draft for, summed over steps.
    num_failures: int = 0

    def greets(self, now_s: float) -> bool:
        """Returns whether to greet the drafter now, and notes the greeting."""
        if self.state not in (PeerState.AWAY, PeerState.GREETED) or now_s < self.resume_at_s:
            return False
        if self.state is PeerState.GREETED:
            self.reason = self.reason or "does not answer"
        self.state = PeerState.GREETED
        self.resume_at_s = now_s + ANSWER_DEADLINE_S
        return True

    def welcome(self, message: Welcome, now_s: float) -> None:
        self.state = PeerState.READY
        self.reason = ""
        self.ready_s = now_s
        self.drafter = message.drafter
        self.last_number = 0
        self.max_model_len = message.max_model_len
        self.num_shadows = message.num_shadows

    def fail(self, reason: str, now_s: float) -> None:
        """Marks the drafter as failed, to be greeted again after a pause."""
        if self.state is PeerState.READY and now_s - self.ready_s > LONGEST_PAUSE_S:
            self.pause_s = FIRST_PAUSE_S  # a few good frames before the next bad one are not enough
        self.state = PeerState.AWAY
        self.reason = reason
        self.resume_at_s = now_s + self.pause_s
        self.num_failures += 1
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def note_step(self, num_requests: int, now_s: float) -> bool:
        """Notes that the drafter is sent a step, while it has `num_requests` of our requests.

        Returns whether an answer to an earlier step is overdue.
        """
        self.told_s = now_s
        self.num_asked += num_requests
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return now_s - self.waiting_since_s > ANSWER_DEADLINE_S

    def is_flooding(self, num_rows: int, most_ahead: int) -> bool:
        """Counts `num_rows` more draft tokens; returns whether the drafter sent far more than it was asked for."""
        self.num_rows += num_rows
        return self.num_rows > FLOOD_FACTOR * most_ahead * self.num_asked + FLOOD_ALLOWANCE

    def note_answer(self, drafts: Drafts) -> bool:
        """Notes the figures of an answer; returns whether an earlier message of the drafter was lost."""
        self.waiting_since_s = None
        has_lost = drafts.number > self.last_number + 1
        self.last_number = max(self.last_number, drafts.number)
        self.token_s = drafts.token_s
        self.num_open_there = drafts.num_shadows
        return has_lost


class VerifierSide:
    """Owns the request slots, their draft buffers, and the state of each drafter.

    Call `follow` with the texts whenever they have grown, and send what it returns. Pass all that arrives to `receive`:
    `buffers` then holds the draft tokens at hand.
    """

    def __init__(self, session: int, num_slots: int, num_drafters: int, most_ahead: int, model: PolicyModel) -> None:
        self.session = session
        self.most_ahead = most_ahead
        self.peers = [Peer() for _ in range(num_drafters)]
        self.buffers = DraftBuffers(num_slots, most_ahead, model.vocab_size)
        self._hello = Hello(PROTOCOL, session, model.vocab_size, model.tokenizer, list(model.stop_token_ids))
        self._opened: dict[int, StreamRequest] = {}
        self._drafter_of = np.full(num_slots, NO_DRAFTER, np.int64)
        self._is_told = np.zeros(num_slots, np.bool_)
        self._requests = np.full(num_slots, NO_REQUEST, np.int64)
        self._num_requests = 0
        self._closes: list[list[int]] = [[] for _ in range(num_drafters)]
        self._has_told_of_a_long_text = False

    def open(self, request: StreamRequest) -> None:
        slot = request.slot
        self._num_requests += 1
        self._opened[slot] = request
        self._requests[slot] = (self._num_requests << SLOT_BITS) | slot
        self._drafter_of[slot] = NO_DRAFTER
        self._is_told[slot] = False

    def close(self, slot: int) -> None:
        """Frees `slot`, whose request ended or was preempted."""
        drafter = int(self._drafter_of[slot])
        if drafter != NO_DRAFTER:
            self._closes[drafter].append(int(self._requests[slot]))
            self._take_back(np.array([slot]))
        self._requests[slot] = NO_REQUEST

    def follow(self, token_ids_SL: np.ndarray, lengths_S: np.ndarray, now_s: float) -> list[tuple[int, Message]]:
        """Takes the texts as they are now, and returns the messages to send, each with the index of its drafter.

        Args:
            token_ids_SL: Text of the request in each slot, int32.
            lengths_S: Length of each text in tokens, int64.
            now_s: Time of the verifier's clock, in seconds.

        Returns a greeting for each drafter that is away and whose pause is over, and a `Step` for each drafter that is ready
        and either has requests of ours, also ones that have just ended, or was told nothing for `HEARTBEAT_S`.
        """
        messages: list[tuple[int, Message]] = [
            (d, self._hello) for d, peer in enumerate(self.peers) if peer.greets(now_s)
        ]
        self._assign(lengths_S)
        for drafter, peer in enumerate(self.peers):
            slots_b = self.slots_of(drafter)
            is_due = len(slots_b) > 0 or bool(self._closes[drafter]) or now_s - peer.told_s > HEARTBEAT_S
            if peer.state is PeerState.READY and is_due:
                messages.append((drafter, self._step(drafter, slots_b, token_ids_SL, lengths_S)))
                if peer.note_step(len(slots_b), now_s):
                    self.fail(drafter, "left a step unanswered", now_s)
        return messages

    def receive(self, drafter: int, message: Message, now_s: float) -> None:
        """Takes a message of a drafter. Messages that a drafter does not send, or not now, are ignored."""
        peer = self.peers[drafter]
        if isinstance(message, Welcome | Refuse | Drafts) and message.session != self.session:
            return
        if isinstance(message, Welcome) and peer.state is PeerState.GREETED:
            self._take_all_back(drafter)
            peer.welcome(message, now_s)
        elif isinstance(message, Refuse) and peer.state is PeerState.GREETED:
            peer.state = PeerState.REFUSED
            peer.reason = message.reason
        elif isinstance(message, Refuse) and peer.state is PeerState.READY:
            self.fail(drafter, message.reason, now_s)
        elif isinstance(message, Drafts) and peer.state is PeerState.READY and message.drafter == peer.drafter:
            self._take_drafts(drafter, message, now_s)

    def fail(self, drafter: int, reason: str, now_s: float) -> None:
        """Marks a drafter as failed: it cannot be reached, or breaks the protocol. Its requests wait for another one."""
        if self.peers[drafter].state in (PeerState.READY, PeerState.GREETED):
            self._take_all_back(drafter)
            self.peers[drafter].fail(reason, now_s)

    def move(self, drafter: int, why_unreachable: str = "") -> None:
        """Notes that a drafter has a new address, where it counts as one that never failed.

        With a reason in `why_unreachable` it has no address, and is left alone until it moves again.
        """
        self._take_all_back(drafter)
        peer = self.peers[drafter]
        peer.state = PeerState.AWAY
        peer.reason = why_unreachable
        peer.pause_s = FIRST_PAUSE_S
        peer.resume_at_s = math.inf if why_unreachable else 0.0

    def slots_of(self, drafter: int) -> np.ndarray:
        return np.flatnonzero(self._drafter_of == drafter)

    def _take_back(self, slots: np.ndarray) -> None:
        """Takes the requests in `slots` away from their drafters. They wait for others, which have to be told all."""
        self._drafter_of[slots] = NO_DRAFTER
        self._is_told[slots] = False
        self.buffers.close(slots)

    def _take_all_back(self, drafter: int) -> None:
        """Takes all requests away from a drafter. No answer of it is waited for any more."""
        self._take_back(self.slots_of(drafter))
        self._closes[drafter] = []
        peer = self.peers[drafter]
        peer.num_rows = peer.num_asked = 0
        peer.waiting_since_s = None

    def _assign(self, lengths_S: np.ndarray) -> None:
        """Assigns each request without a drafter to the least loaded one that is ready and has room for it.

        The load of a drafter is the number of our requests there, or of all verifiers' requests that it reported last.
        """
        waiting = np.flatnonzero((self._drafter_of == NO_DRAFTER) & (self._requests != NO_REQUEST)).tolist()
        if not waiting:
            return
        num_ours = np.bincount(self._drafter_of[self._drafter_of != NO_DRAFTER], minlength=len(self.peers)).tolist()
        with_room = {
            drafter: load
            for drafter, peer in enumerate(self.peers)
            if peer.state is PeerState.READY
            and (load := max(num_ours[drafter], peer.num_open_there)) < peer.num_shadows
        }
        for slot in waiting:
            if not with_room:
                return
            fitting = [drafter for drafter in with_room if self._fits(drafter, int(lengths_S[slot]))]
            if not fitting:
                continue  # a later request may be shorter
            drafter = min(fitting, key=with_room.__getitem__)
            self._drafter_of[slot] = drafter
            num_ours[drafter] += 1
            with_room[drafter] = max(with_room[drafter], num_ours[drafter])
            if with_room[drafter] >= self.peers[drafter].num_shadows:
                del with_room[drafter]

    def _fits(self, drafter: int, length: int) -> bool:
        """Returns whether a text of `length` tokens can be opened at a drafter. Says once that no message holds a text."""
        if length * TOKEN_BYTES <= LONGEST_TEXT_BYTES:
            return length < self.peers[drafter].max_model_len
        if not self._has_told_of_a_long_text:
            self._has_told_of_a_long_text = True
            logger.warning(
                "A request of %d tokens gets no remote drafts, because a text of more than %d tokens does not fit into a "
                "message to a drafter. The same holds for later requests of that length, of which nothing is said.",
                length,
                LONGEST_TEXT_BYTES // TOKEN_BYTES,
            )
        return False

    def _step(self, drafter: int, slots_b: np.ndarray, token_ids_SL: np.ndarray, lengths_S: np.ndarray) -> Step:
        """Returns the next step for a drafter: commits of the requests that it was told, and openings of some others."""
        is_told_b = self._is_told[slots_b]
        slots_t = slots_b[is_told_b]
        rows_t, tokens = self.buffers.commit(slots_t, token_ids_SL, lengths_S[slots_t])
        opens = self._openings(drafter, slots_b[~is_told_b].tolist(), token_ids_SL, lengths_S)
        closes = np.array(self._closes[drafter], np.int64).tobytes()
        self._closes[drafter] = []
        return Step(self.session, opens, closes, rows_t.tobytes(), tokens.tobytes())

    def _openings(
        self, drafter: int, slots: Sequence[int], token_ids_SL: np.ndarray, lengths_S: np.ndarray
    ) -> list[Open]:
        """Returns openings of the first of these slots, as many as one step holds. The others wait for the next step.

        A request whose text has become too long for the drafter since it was assigned is taken away from it.
        """
        opens: list[Open] = []
        num_bytes = 0
        for slot in slots:
            length = int(lengths_S[slot])
            if not self._fits(drafter, length):
                self._closes[drafter].append(int(self._requests[slot]))
                self._take_back(np.array([slot]))
                continue
            num_bytes += length * TOKEN_BYTES
            if opens and (num_bytes > OPENED_BYTES or len(opens) == MAX_OPENS):
                break
            opens.append(self._open_message(slot, token_ids_SL[slot, :length]))
        return opens

    def _open_message(self, slot: int, text: np.ndarray) -> Open:
        r = self._opened[slot]
        number = int(self._requests[slot])
        self.buffers.open(slot, number, r.seed, text)
        self._is_told[slot] = True
        return Open(number, r.seed, r.temperature, r.top_k, r.top_p, r.limit, self.most_ahead, text.tobytes())

    def _take_drafts(self, drafter: int, drafts: Drafts, now_s: float) -> None:
        peer = self.peers[drafter]
        rows = column(drafts.drafts, DRAFT_ROW)
        if peer.is_flooding(len(rows), self.most_ahead):
            self.fail(drafter, "sends far more drafts than it was asked for", now_s)
            return
        if peer.note_answer(drafts):
            self._is_told[self.slots_of(drafter)] = False  # it is told all again, and drafts all again
        self.buffers.add(rows)
        for request in column(drafts.lacking, np.int64).tolist():
            slot = request & SLOT_MASK
            if slot in self._opened and self._requests[slot] == request and self._drafter_of[slot] == drafter:
                self._is_told[slot] = False  # it is opened again, by another drafter if this one is full
                if peer.num_open_there >= peer.num_shadows:
                    self._take_back(np.array([slot]))
