# SPDX-License-Identifier: Apache-2.0
"""The drafter's half of the protocol: messages and drafted tokens in, corrections and messages out. No socket, no engine, no
clock of its own.

A peer is whatever key the transport knows a verifier by.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import LANE_MASK
from nemo_specrollout.remote.protocol.messages import (
    PROTOCOL,
    Drafts,
    Hello,
    Message,
    Open,
    Publish,
    Published,
    Refuse,
    Step,
    Welcome,
    column,
)
from nemo_specrollout.remote.protocol.orders import DraftModel, Order, Publication, ShadowClosing, ShadowOpening
from nemo_specrollout.remote.protocol.shadow_sequences import Drafted, DraftRows, ShadowSequences

SESSION_TIMEOUT_S = 120.0
"""A verifier that says nothing for so long is forgotten; if it comes back it tells everything again."""
MOST_SESSIONS = 1024


@dataclass
class _Session:
    peer: Hashable
    number: int
    stop_token_ids: np.ndarray
    shadow_of_lane: np.ndarray
    heard_s: float
    last_step: int = -1
    num_sent: int = 0
    echo_ns: int = 0
    echo_since_s: float = 0.0
    owes_answer: bool = False
    lacking: list[int] = field(default_factory=list)
    rows: list[DraftRows] = field(default_factory=list)


class DrafterSide:
    """Owns sessions and shadows. A loop calls `receive` for all that came, lets the engine carry out `take_orders`, drafts for
    some of `wanting`, tells `drafted`, and sends `outgoing`.

    Invariant: a shadow belongs to one request of one session until that closes it, opens it again, or is forgotten.
    """

    def __init__(self, model: DraftModel, drafter: int, num_shadows: int, most_ahead: int) -> None:
        self.model = model
        self.draft_version = 0
        self._drafter = drafter
        self._num_shadows = num_shadows
        self.shadows = ShadowSequences(num_shadows, most_ahead)
        self._free = deque(range(num_shadows))
        self._requests = np.full(num_shadows, -1, np.int64)
        self._session_of = np.full(num_shadows, -1, np.int64)
        self._sessions: dict[Hashable, _Session] = {}
        self._by_number: dict[int, _Session] = {}
        self._orders: list[Order] = []
        self._replies: list[tuple[Hashable, Message]] = []
        self._token_s = 0.0

    @property
    def num_open(self) -> int:
        """ShadowSequences in use."""
        return self._num_shadows - len(self._free)

    def receive(self, peer: Hashable, message: Message, now_s: float) -> None:
        """A message of a verifier. What no verifier says is dropped."""
        if isinstance(message, Hello):
            self._greet(peer, message, now_s)
        elif isinstance(message, Publish):
            self._orders.append(Publication(message.folder, message.draft_version, peer))
        elif isinstance(message, Step):
            session = self._sessions.get(peer)
            if session is None or session.number != message.session:
                self._replies.append((peer, Refuse(message.session, "unknown session: say hello")))
            else:
                self._follow(session, message, now_s)

    def wanting(self) -> np.ndarray:
        """The shadows that may draft, most urgent first, int64 [M]."""
        return self.shadows.wanting()

    def take_orders(self) -> list[Order]:
        """What the engine is to do before its next step, one after the other; since last asked."""
        orders, self._orders = self._orders, []
        return orders

    def drafted(self, new: Drafted, token_s: float) -> None:
        """The engine drafted for some shadows, at `token_s` seconds for a token of each."""
        self._token_s = token_s
        sessions_M = self._session_of[new.shadows_M]
        for number in np.unique(sessions_M[sessions_M >= 0]).tolist():
            session = self._by_number[number]
            its = new.select(sessions_M == number)
            session.rows.append(self.shadows.drafted(its, session.stop_token_ids))

    def refused(self, shadow: int) -> None:
        """The engine does not take the request of `shadow`, e.g. for a temperature that is none: nothing is drafted for it."""
        if self._requests[shadow] >= 0:
            self._close(shadow)

    def published(self, publication: Publication, error: str = "") -> None:
        """The engine drafts with new weights, or could not load them. What was drafted ahead with the old ones stays: it is as
        good a guess as it was."""
        if not error:
            self.draft_version = publication.draft_version
        self._replies.append((publication.peer, Published(publication.draft_version, error)))

    def outgoing(self, now_s: float) -> list[tuple[Hashable, Message]]:
        """What is to be said, and to whom."""
        replies, self._replies = self._replies, []
        for session in self._sessions.values():
            if session.rows or session.lacking or session.owes_answer:
                replies.append((session.peer, self._drafts(session, now_s)))
        return replies

    def forget_silent(self, now_s: float) -> None:
        """Frees the shadows of verifiers that have said nothing for long."""
        for session in list(self._sessions.values()):
            if now_s - session.heard_s > SESSION_TIMEOUT_S:
                self._forget(session)

    def _greet(self, peer: Hashable, hello: Hello, now_s: float) -> None:
        reason = self._mismatch(hello)
        if reason is not None:
            self._replies.append((peer, Refuse(hello.session, reason)))
            return
        for known in (self._sessions.get(peer), self._by_number.get(hello.session)):
            if known is not None and known.peer in self._sessions:
                self._forget(known)
        session = _Session(
            peer,
            hello.session,
            np.array(hello.stop_token_ids, np.int32),
            np.full(LANE_MASK + 1, -1, np.int32),
            now_s,
        )
        self._sessions[peer] = self._by_number[hello.session] = session
        welcome = Welcome(hello.session, self._drafter, self.draft_version, self.model.max_model_len, self._num_shadows)
        self._replies.append((peer, welcome))

    def _mismatch(self, hello: Hello) -> str | None:
        """Why this drafter cannot draft for that verifier."""
        if hello.protocol != PROTOCOL:
            return f"the verifier speaks version {hello.protocol} of the protocol, the drafter {PROTOCOL}: install the same"
        if hello.tokenizer and self.model.tokenizer and hello.tokenizer != self.model.tokenizer:
            return "the draft model's tokenizer is not the policy's: name a draft model of the same family"
        if hello.vocab_size != self.model.vocab_size and not (hello.tokenizer and self.model.tokenizer):
            return f"the draft model's vocabulary has {self.model.vocab_size} ids, the policy's {hello.vocab_size}"
        if len(self._sessions) >= MOST_SESSIONS:
            return f"{MOST_SESSIONS} verifiers are being drafted for already"
        return None

    def _forget(self, session: _Session) -> None:
        for shadow in np.flatnonzero(self._session_of == session.number).tolist():
            self._close(shadow)
        del self._sessions[session.peer], self._by_number[session.number]

    def _close(self, shadow: int) -> None:
        self.shadows.close(shadow)
        self._requests[shadow] = self._session_of[shadow] = -1
        self._free.append(shadow)
        self._orders.append(ShadowClosing(shadow))

    def _close_all(self, session: _Session, requests: np.ndarray) -> None:
        """Closes the shadows of those of a session's requests that have one; a request named twice is closed once."""
        shadows = self._shadows_of(session, requests)
        for shadow in dict.fromkeys(shadows[shadows >= 0].tolist()):
            self._close(shadow)

    def _follow(self, session: _Session, step: Step, now_s: float) -> None:
        """What a verifier tells after a step of its."""
        session.heard_s, session.owes_answer = now_s, True
        if step.number > session.last_step:
            session.last_step, session.echo_ns, session.echo_since_s = step.number, step.sent_ns, now_s
        self._close_all(session, column(step.closes, np.int64))
        for opening in step.opens:
            self._open(session, opening)
        self._commit(session, step)

    def _shadows_of(self, session: _Session, requests_N: np.ndarray) -> np.ndarray:
        """The shadows of a session's requests, int64 [N]; -1 of those that it has none for."""
        shadows_N = session.shadow_of_lane[requests_N & LANE_MASK].astype(np.int64)
        is_its_N = (self._requests[shadows_N] == requests_N) & (self._session_of[shadows_N] == session.number)
        return np.where((shadows_N >= 0) & is_its_N, shadows_N, -1)

    def _open(self, session: _Session, opening: Open) -> None:
        text = column(opening.tokens, np.int32)
        if not self._is_sane(text) or len(text) == 0 or len(text) >= self.model.max_model_len:
            return
        self._close_all(session, np.array([opening.request]))
        if not self._free:
            return
        shadow = self._free.popleft()
        self._requests[shadow], self._session_of[shadow] = opening.request, session.number
        session.shadow_of_lane[opening.request & LANE_MASK] = shadow
        self.shadows.open(shadow, opening.seed, text, min(opening.limit, self.model.max_model_len), opening.window)
        self._orders.append(
            ShadowOpening(shadow, opening.seed, opening.temperature, opening.top_k, opening.top_p, text)
        )

    def _commit(self, session: _Session, step: Step) -> None:
        requests_N, tokens = column(step.requests, np.int64), column(step.tokens, np.int32)
        if len(requests_N) == 0 or not self._is_sane(tokens):
            return
        shadows_N = self._shadows_of(session, requests_N)
        corrections, is_lacking_N = self.shadows.commit(
            shadows_N,
            column(step.bases, np.int64),
            column(step.hashes, np.uint64),
            column(step.counts, np.int64),
            column(step.windows, np.uint8),
            tokens,
        )
        self._orders += corrections
        session.lacking += requests_N[is_lacking_N].tolist()
        for n in np.flatnonzero((column(step.resends, np.uint8) > 0) & ~is_lacking_N).tolist():
            session.rows.append(self.shadows.ahead_of(int(shadows_N[n])))

    def _is_sane(self, tokens: np.ndarray) -> bool:
        return len(tokens) == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < self.model.vocab_size)

    def _drafts(self, session: _Session, now_s: float) -> Drafts:
        rows, session.rows = session.rows, []
        lacking, session.lacking = session.lacking, []
        session.owes_answer = False
        session.num_sent += 1
        parts = [[getattr(r, name) for r in rows] for name in ("shadows", "positions", "hashes", "tokens", "levels")]
        shadows, positions, hashes, tokens, levels = (np.concatenate(p) if p else np.zeros(0) for p in parts)
        return Drafts(
            session.number,
            self._drafter,
            session.num_sent,
            session.last_step,
            session.echo_ns,
            int((now_s - session.echo_since_s) * 1e9),
            self.draft_version,
            self._token_s,
            self.num_open,
            self._requests[shadows.astype(np.int64)].tobytes(),
            positions.astype(np.int64).tobytes(),
            hashes.astype(np.uint64).tobytes(),
            tokens.astype(np.int32).tobytes(),
            levels.astype(np.int8).tobytes(),
            np.array(lacking, np.int64).tobytes(),
        )
