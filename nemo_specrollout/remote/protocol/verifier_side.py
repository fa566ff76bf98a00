# SPDX-License-Identifier: Apache-2.0
"""The verifier's side of the protocol, which assigns requests to drafters, sends them texts and takes their drafts.

Shapes: S request slots, b and t some of them, L longest sequence.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import NO_REQUEST, SLOT_BITS, SLOT_MASK, DraftBuffers
from nemo_specrollout.remote.protocol.messages import (
    DRAFT_ROW,
    LONGEST_TEXT_BYTES,
    MAX_OPENS,
    MAX_STOP_TOKENS,
    NO_SESSION,
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
from nemo_specrollout.remote.protocol.peer import FIRST_PAUSE_S, Peer, PeerState

HEARTBEAT_S = 0.2
"""Maximum seconds between two messages to a drafter, even if it has no request of this verifier. From the answers the verifier
knows that the drafter is alive, and how many requests it has."""
NO_DRAFTER = -1
TOKEN_BYTES = np.dtype(np.int32).itemsize

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyModel:
    """Properties of the policy that a draft model must match (see `Hello`)."""

    vocab_size: int
    tokenizer: str = ""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamRequest:
    """A request of the verifier's engine, with its slot in the engine."""

    slot: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    limit: int
    """Maximum number of tokens of the text. A request whose text has reached this length gets no remote drafts."""
    token_ids: Sequence[int] = ()


class VerifierSide:
    """The verifier's part of the protocol. Owns the request slots, their draft buffers, and the state of each drafter.

    Call `follow` with the texts of all requests whenever they have grown, and send the messages that it returns. Pass all
    messages that arrive to `receive`. The draft tokens that have arrived are then in `buffers`.
    """

    def __init__(self, session: int, num_slots: int, num_drafters: int, most_ahead: int, model: PolicyModel) -> None:
        self.session = session
        self.most_ahead = most_ahead
        self.peers = [Peer() for _ in range(num_drafters)]
        self.buffers = DraftBuffers(num_slots, most_ahead, model.vocab_size)
        self.num_refused = 0
        """Number of requests for which a drafter refused to draft."""
        self.refusal = ""
        """Why a drafter refused to draft for a request. It is the reason of the latest refusal."""
        stop_token_ids = [token for token in model.stop_token_ids if 0 <= token < model.vocab_size]
        self._hello = Hello(PROTOCOL, session, model.vocab_size, model.tokenizer, stop_token_ids[:MAX_STOP_TOKENS])
        self._opened: dict[int, StreamRequest] = {}
        self._drafter_of = np.full(num_slots, NO_DRAFTER, np.int64)
        self._is_told = np.zeros(num_slots, np.bool_)
        self._told_in_step = np.zeros(num_slots, np.int64)  # number of the `Step` that opened the request last
        self._is_refused_SD = np.zeros((num_slots, num_drafters), np.bool_)
        self._requests = np.full(num_slots, NO_REQUEST, np.int64)
        self._num_requests = 0
        self._closes: list[list[int]] = [[] for _ in range(num_drafters)]
        self._first = 0  # The drafter that is told first in the next exchange.
        self._has_told_of_a_long_text = False

    def open(self, request: StreamRequest) -> None:
        slot = request.slot
        self._num_requests += 1
        self._opened[slot] = request
        self._requests[slot] = (self._num_requests << SLOT_BITS) | slot
        self._drafter_of[slot] = NO_DRAFTER
        self._is_told[slot] = False
        self._is_refused_SD[slot] = False

    def close(self, slot: int) -> None:
        """Frees `slot`, because its request has ended or was preempted."""
        drafter = int(self._drafter_of[slot])
        if drafter != NO_DRAFTER:
            self._closes[drafter].append(int(self._requests[slot]))
            self._take_back(np.array([slot]))
        self._requests[slot] = NO_REQUEST

    def follow(self, token_ids_SL: np.ndarray, lengths_S: np.ndarray, now_s: float) -> list[tuple[int, Message]]:
        """Reads the current texts, and returns the messages to send, each with the number of its drafter.

        Args:
            token_ids_SL: Text of the request in each slot, int32.
            lengths_S: Length of each text in tokens, int64.
            now_s: Time of the verifier's clock, in seconds.

        A drafter that is not ready gets a `Hello`, once its pause is over. A ready drafter gets a `Step` if it has requests of
        this verifier, if one of them has just ended, or if it has got no message for `HEARTBEAT_S`. All messages together open
        requests with at most `OPENED_BYTES` of text, or one request with a longer text.
        """
        messages: list[tuple[int, Message]] = [
            (d, self._hello) for d, peer in enumerate(self.peers) if peer.greets(now_s)
        ]
        self._assign(lengths_S)
        room = OPENED_BYTES
        for drafter in self._in_turn():
            peer = self.peers[drafter]
            slots_b = self.slots_of(drafter)
            is_due = len(slots_b) > 0 or bool(self._closes[drafter]) or now_s - peer.told_s > HEARTBEAT_S
            if peer.state is PeerState.READY and is_due:
                step = self._step(drafter, slots_b, token_ids_SL, lengths_S, room)
                room -= step.num_text_bytes
                messages.append((drafter, step))
                if peer.note_step(len(slots_b), now_s):
                    self.fail(drafter, f"left a step unanswered for {peer.patience_s:.0f} s", now_s)
        return messages

    def receive(self, drafter: int, message: Message, now_s: float) -> None:
        """Handles a message from the drafter with number `drafter`.

        A message is ignored if drafters never send it, or if it does not fit the drafter's current state.
        """
        peer = self.peers[drafter]
        if isinstance(message, Welcome | Drafts) and message.session != self.session:
            return
        if isinstance(message, Refuse) and message.session not in (self.session, NO_SESSION):
            return
        if isinstance(message, Welcome) and peer.state is PeerState.GREETED:
            self._take_welcome(drafter, message, now_s)
        elif isinstance(message, Refuse) and peer.state is PeerState.GREETED:
            peer.refuse(message.reason, now_s)
        elif isinstance(message, Refuse) and peer.state is PeerState.READY:
            self.fail(drafter, message.reason, now_s)
        elif isinstance(message, Drafts) and peer.state is PeerState.READY and message.drafter == peer.drafter:
            self._take_drafts(drafter, message, now_s)

    def fail(self, drafter: int, reason: str, now_s: float) -> None:
        """Marks a drafter as failed, because it cannot be reached or violates the protocol.

        Its requests wait for another drafter.
        """
        if self.peers[drafter].state in (PeerState.READY, PeerState.GREETED):
            self._take_all_back(drafter)
            self.peers[drafter].fail(reason, now_s)

    def move(self, drafter: int, why_unreachable: str = "") -> None:
        """Notes that a drafter has a new address. Failures at the old address no longer delay the next `Hello`.

        If `why_unreachable` is not empty, it says why the drafter has no address. The drafter is then left alone until the
        next `move`.
        """
        self._take_all_back(drafter)
        peer = self.peers[drafter]
        peer.state = PeerState.AWAY
        peer.reason = why_unreachable
        peer.pause_s = FIRST_PAUSE_S
        peer.resume_at_s = math.inf if why_unreachable else 0.0

    def slots_of(self, drafter: int) -> np.ndarray:
        return np.flatnonzero(self._drafter_of == drafter)

    def _in_turn(self) -> list[int]:
        """Returns the numbers of all drafters in the order in which they get messages.

        Each call begins with the next drafter, so that none is always the last.
        """
        first = self._first
        self._first = (first + 1) % max(1, len(self.peers))
        return [*range(first, len(self.peers)), *range(first)]

    def _take_welcome(self, drafter: int, message: Welcome, now_s: float) -> None:
        """Marks a drafter as ready after its `Welcome`, unless another address already leads to the same process."""
        for other, peer in enumerate(self.peers):
            if other != drafter and peer.state is PeerState.READY and peer.drafter == message.drafter:
                self.peers[drafter].refuse(f"is the same process as drafter {other}; write its address once", now_s)
                return
        self._take_all_back(drafter)
        self._is_refused_SD[:, drafter] = False
        self.peers[drafter].welcome(message, now_s)

    def _take_back(self, slots: np.ndarray) -> None:
        """Takes the requests in `slots` away from their drafters. The next drafter of each request gets its whole text."""
        self._drafter_of[slots] = NO_DRAFTER
        self._is_told[slots] = False
        self.buffers.close(slots)

    def _take_all_back(self, drafter: int) -> None:
        """Takes all requests away from a drafter, and no longer expects an answer from it."""
        self._take_back(self.slots_of(drafter))
        self._closes[drafter] = []
        peer = self.peers[drafter]
        peer.num_rows = peer.num_asked = 0
        peer.waiting_since_s = None

    def _assign(self, lengths_S: np.ndarray) -> None:
        """Assigns each request without a drafter to the ready drafter that has the smallest load and enough room for it.

        The load of a drafter is the number of requests that it has from this verifier. If the drafter has reported a larger
        number for all verifiers together, that number is used instead.
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
            fitting = [
                drafter
                for drafter in with_room
                if not self._is_refused_SD[slot, drafter] and self._fits(drafter, int(lengths_S[slot]))
            ]
            if not fitting:
                continue  # a later request may be shorter
            drafter = min(fitting, key=with_room.__getitem__)
            self._drafter_of[slot] = drafter
            num_ours[drafter] += 1
            with_room[drafter] = max(with_room[drafter], num_ours[drafter])
            if with_room[drafter] >= self.peers[drafter].num_shadows:
                del with_room[drafter]

    def _fits(self, drafter: int, length: int) -> bool:
        """Returns whether a drafter can draft for a request whose text has `length` tokens.

        The first time that a text is too long for any message, it logs a warning.
        """
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

    def _step(
        self, drafter: int, slots_b: np.ndarray, token_ids_SL: np.ndarray, lengths_S: np.ndarray, room: int
    ) -> Step:
        """Returns the next `Step` for a drafter, with the new tokens of its requests and with requests that are new to it.

        `slots_b` are the slots of all requests that are assigned to the drafter. The opened texts take at most `room` bytes.
        Together with opened texts that the drafter has not read yet, they take at most `OPENED_BYTES`. The oldest requests are
        opened first, because they are the most likely to end last.
        """
        peer = self.peers[drafter]
        peer.num_steps += 1
        is_told_b = self._is_told[slots_b]
        slots_t = slots_b[is_told_b]
        rows_t, tokens = self.buffers.commit(slots_t, token_ids_SL, lengths_S[slots_t])
        waiting = slots_b[~is_told_b]
        waiting = waiting[np.argsort(self._requests[waiting])]
        opens = self._openings(drafter, waiting.tolist(), token_ids_SL, lengths_S, room)
        closes = np.array(self._closes[drafter], np.int64).tobytes()
        self._closes[drafter] = []
        step = Step(self.session, peer.num_steps, opens, closes, rows_t.tobytes(), tokens.tobytes())
        if opens:
            peer.unread.append((step.number, step.num_text_bytes))
        return step

    def _openings(
        self, drafter: int, slots: Sequence[int], token_ids_SL: np.ndarray, lengths_S: np.ndarray, room: int
    ) -> list[Open]:
        """Returns messages that open as many of the requests in `slots` as there is room for. A later `Step` opens the others.

        A text that is longer than `OPENED_BYTES` is opened alone. If a text has become too long for the drafter since its
        request was assigned, the request is taken away from the drafter.
        """
        opens: list[Open] = []
        room = min(room, OPENED_BYTES - self.peers[drafter].num_unread_bytes)
        is_alone = room == OPENED_BYTES
        for slot in slots:
            length = int(lengths_S[slot])
            if not self._fits(drafter, length):
                self._closes[drafter].append(int(self._requests[slot]))
                self._take_back(np.array([slot]))
                continue
            room -= length * TOKEN_BYTES
            if (room < 0 and not is_alone) or len(opens) == MAX_OPENS:
                break
            is_alone = False
            self._told_in_step[slot] = self.peers[drafter].num_steps
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
            self._is_told[self.slots_of(drafter)] = False  # it gets all texts again, and drafts anew for all of them
        self.buffers.add(rows)
        for slot in self._slots_named(drafter, drafts, drafts.lacking):
            self._is_told[slot] = False  # it is opened again, at another drafter if this one is full
            if peer.num_open_there >= peer.num_shadows:
                self._take_back(np.array([slot]))
        for slot in self._slots_named(drafter, drafts, drafts.refused):
            self._is_refused_SD[slot, drafter] = True
            self._take_back(np.array([slot]))
            self.num_refused += 1
            self.refusal = drafts.reason

    def _slots_named(self, drafter: int, drafts: Drafts, requests: bytes) -> list[int]:
        """Returns the slots of those requests in `requests` that the drafter has. `requests` are int64 numbers as bytes.

        A request is left out if it was opened by a `Step` that the drafter had not yet read when it sent `drafts`.
        """
        slots = []
        for request in column(requests, np.int64).tolist():
            slot = request & SLOT_MASK
            is_known = slot in self._opened and self._requests[slot] == request and self._drafter_of[slot] == drafter
            if is_known and self._told_in_step[slot] <= drafts.step:
                slots.append(slot)
        return slots
