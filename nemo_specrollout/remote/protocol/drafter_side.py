# SPDX-License-Identifier: Apache-2.0
"""The drafter's side of the protocol, which keeps a shadow sequence of each request and answers with draft tokens.

A peer is the key by which the transport identifies a verifier.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.remote.protocol.draft_buffers import SLOT_MASK
from nemo_specrollout.remote.protocol.messages import (
    COMMIT_ROW,
    DRAFT_ROW,
    LONGEST_TOKEN_S,
    MAX_ROWS,
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
    as_line,
    column,
)
from nemo_specrollout.remote.protocol.shadow_sequences import ShadowSequences

SESSION_TIMEOUT_S = 120.0
"""Seconds of silence after which a verifier is forgotten. If it comes back, it opens all of its requests again."""
MAX_SESSIONS = 1024
"""Maximum number of verifiers at a time."""
NO_SHADOW = -1


@dataclass(frozen=True)
class DraftModel:
    """Properties of a draft model that must fit the policy (see `Hello`)."""

    vocab_size: int
    tokenizer: str
    max_model_len: int
    """Longest shadow sequence, in tokens."""


@dataclass
class _Session:
    """State of one session. A session lasts as long as one process of a verifier."""

    peer: Hashable
    number: int
    stop_token_ids: np.ndarray
    heard_s: float
    shadow_of_slot: np.ndarray = field(default_factory=lambda: np.full(SLOT_MASK + 1, NO_SHADOW, np.int32))
    num_sent: int = 0
    last_step: int = 0
    """Number of the latest `Step`."""
    owes_answer: bool = False
    lacking: set[int] = field(default_factory=set)
    """Numbers of the requests that the verifier has to open again."""
    refused: set[int] = field(default_factory=set)
    """Numbers of the requests for which this drafter will not draft, and about which the verifier has not been told yet."""
    reason: str = ""
    """Reason of the latest refusal of a request."""
    rows: list[np.ndarray] = field(default_factory=list)
    """Draft tokens to send, as `DRAFT_ROW`."""

    def refuse(self, request: int, reason: str) -> None:
        self.lacking.discard(request)
        self.refused.add(request)
        self.reason = reason


class DrafterSide:
    """The drafter's part of the protocol. Owns the sessions of verifiers and the state of their shadow sequences.

    A shadow sequence is a drafter's copy of a verifier's request. The engine has its full text and its KV cache. A *shadow* is
    the number of a shadow sequence, below `num_shadows`. It belongs to one request of one session until the session closes the
    request, opens it again, or is forgotten. Then it is free for another request.
    """

    def __init__(self, engine: Any, drafter: int, num_shadows: int, most_ahead: int) -> None:
        """Starts without sessions, for an engine with room for `num_shadows` shadow sequences.

        `engine` is a `DrafterEngine` or has the same interface. `drafter` is a random number that identifies this process.
        `most_ahead` is the maximum number of draft tokens beyond the committed text of a request.
        """
        self.engine: Any = engine
        self.model: DraftModel = engine.model
        self.num_corrections = 0
        self.num_refused = 0
        """Number of requests for which this drafter cannot draft."""
        self.draft_version = 0
        """Version of the weights that were published last, or 0 for those of the model that the config names."""
        self.shadows = ShadowSequences(num_shadows, most_ahead)
        self._drafter = drafter
        self._num_shadows = num_shadows
        self._free = deque(range(num_shadows))
        self._requests = np.full(num_shadows, -1, np.int64)
        self._session_of = np.full(num_shadows, -1, np.int64)
        self._sessions: dict[int, _Session] = {}
        self._replies: list[tuple[Hashable, Message]] = []
        self._token_s = 0.0

    @property
    def num_open(self) -> int:
        return self._num_shadows - len(self._free)

    def receive(self, peer: Hashable, message: Message, now_s: float) -> None:
        """Handles a message of a verifier or a publisher. Messages that only drafters send are ignored."""
        if isinstance(message, Hello):
            self._replies.append((peer, self._greet(peer, message, now_s)))
        elif isinstance(message, Publish):
            self._replies.append((peer, self._load_weights(message)))
        elif isinstance(message, Step):
            session = self._sessions.get(message.session)
            if session is None:
                reason = f"it was started again, or heard nothing of this engine for {SESSION_TIMEOUT_S:.0f} s"
                self._replies.append((peer, Refuse(message.session, f"unknown session: {reason}")))
            elif session.peer != peer:
                reason = "the connection was interrupted, so messages may be lost"
                self._replies.append((peer, Refuse(message.session, f"unknown session: {reason}")))
            else:
                self._follow(session, message, now_s)

    def drafted(self, rows_M: np.ndarray, token_s: float) -> None:
        """Appends the tokens of one engine step to their shadow sequences, and keeps them for the next answers to verifiers.

        `rows_M` has the tokens as `DRAFT_ROW` [M]. The engine step took `token_s` seconds.
        """
        self._token_s = min(token_s, LONGEST_TOKEN_S)
        sessions_M = self._session_of[rows_M["owner"]]
        for number in np.unique(sessions_M[sessions_M >= 0]).tolist():
            session = self._sessions[number]
            rows = rows_M[sessions_M == number]
            self.shadows.append(rows, session.stop_token_ids)
            session.rows.append(rows)

    def outgoing(self) -> list[tuple[Hashable, Message]]:
        """Returns the messages that have to be sent, each with its receiver. Each message is returned once."""
        replies = self._replies
        self._replies = []
        for session in self._sessions.values():
            while session.rows or session.lacking or session.refused or session.owes_answer:
                replies.append((session.peer, self._drafts(session)))
        return replies

    def forget_silent(self, now_s: float) -> None:
        """Forgets verifiers that have been silent for `SESSION_TIMEOUT_S`, and frees their shadow sequences."""
        for session in list(self._sessions.values()):
            if now_s - session.heard_s > SESSION_TIMEOUT_S:
                self._forget(session)

    def _greet(self, peer: Hashable, hello: Hello, now_s: float) -> Welcome | Refuse:
        reason = self._mismatch(hello)
        if reason is not None:
            return Refuse(hello.session, reason)
        for known in list(self._sessions.values()):
            if known.peer == peer or known.number == hello.session:
                self._forget(known)
        self._sessions[hello.session] = _Session(peer, hello.session, np.array(hello.stop_token_ids, np.int32), now_s)
        return Welcome(hello.session, self._drafter, self.model.max_model_len, self._num_shadows)

    def _mismatch(self, hello: Hello) -> str | None:
        """Returns why this drafter cannot draft for a verifier, or None if it can."""
        if hello.protocol != PROTOCOL:
            return (
                f"the verifier has version {hello.protocol} of the protocol, the drafter version {PROTOCOL}: install the "
                "same release on both"
            )
        if hello.tokenizer and self.model.tokenizer and hello.tokenizer != self.model.tokenizer:
            return "the draft model's tokenizer is not the policy's: name a draft model of the same family"
        if hello.vocab_size != self.model.vocab_size and not (hello.tokenizer and self.model.tokenizer):
            return f"the draft model's vocabulary has {self.model.vocab_size} ids, the policy's {hello.vocab_size}"
        if len(self._sessions) >= MAX_SESSIONS:
            return f"the drafter serves {MAX_SESSIONS} verifiers already, which is the limit"
        return None

    def _load_weights(self, message: Publish) -> Published:
        """Loads the weights in the folder that `message` names, and returns the answer, with the reason if that failed.

        Tokens that the old weights have drafted may stay in the shadow sequences, because a verifier compares every draft
        token with the token that the policy samples.
        """
        try:
            self.engine.load_weights(Path(message.folder))
        except (ValueError, OSError, RuntimeError) as error:
            return Published(message.version, as_line(error) or type(error).__name__)
        self.draft_version = message.version
        return Published(message.version, "")

    def _forget(self, session: _Session) -> None:
        for shadow in np.flatnonzero(self._session_of == session.number).tolist():
            self._close(shadow)
        del self._sessions[session.number]

    def _close(self, shadow: int) -> None:
        self.engine.close_shadow(shadow)
        self.shadows.close(shadow)
        self._requests[shadow] = self._session_of[shadow] = -1
        self._free.append(shadow)

    def _close_requests(self, session: _Session, requests_N: np.ndarray) -> None:
        """Closes the shadow sequences of a session's requests. Requests that are unknown or named twice are ignored."""
        shadows_N = self._shadows_of(session, requests_N)
        for shadow in dict.fromkeys(shadows_N[shadows_N >= 0].tolist()):
            self._close(shadow)

    def _follow(self, session: _Session, step: Step, now_s: float) -> None:
        session.heard_s = now_s
        session.owes_answer = True
        session.last_step = max(session.last_step, step.number)
        self._close_requests(session, column(step.closes, np.int64))
        for opening in step.opens:
            self._open(session, opening)
        self._commit(session, step)

    def _shadows_of(self, session: _Session, requests_N: np.ndarray) -> np.ndarray:
        """Returns the id of each request's shadow sequence, int64 [N].

        The id is `NO_SHADOW` if the session has no such request.
        """
        shadows_N = session.shadow_of_slot[requests_N & SLOT_MASK].astype(np.int64)
        is_its_N = (self._requests[shadows_N] == requests_N) & (self._session_of[shadows_N] == session.number)
        return np.where((shadows_N >= 0) & is_its_N, shadows_N, NO_SHADOW)

    def _open(self, session: _Session, opening: Open) -> None:
        """Opens a shadow sequence for a request.

        If there is no room for it, or if this drafter can never draft for the request, the next answer tells the verifier so.
        """
        request = opening.request
        text = column(opening.tokens, np.int32)
        self._close_requests(session, np.array([request]))
        if not 0 < len(text) < self.model.max_model_len:
            reason = f"a text of {len(text)} tokens, where the draft model takes 1 to {self.model.max_model_len - 1}"
            self._refuse(session, request, reason)
            return
        if len(strange := text[self._are_strange(text)]):
            self._refuse(session, request, self._why_strange(strange))
            return
        if not self._free:
            session.lacking.add(request)
            return
        shadow = self._free[0]
        try:
            self.engine.open(shadow, opening)
        except ValueError as error:
            self._refuse(session, request, as_line(error) or type(error).__name__)
            return
        self._free.popleft()
        self._requests[shadow] = request
        self._session_of[shadow] = session.number
        session.shadow_of_slot[request & SLOT_MASK] = shadow
        session.lacking.discard(request)
        self.shadows.open(shadow, opening.seed, text, min(opening.limit, self.model.max_model_len), opening.window)

    def _refuse(self, session: _Session, request: int, reason: str) -> None:
        self.num_refused += 1
        session.refuse(request, reason)

    def _commit(self, session: _Session, step: Step) -> None:
        rows_N = column(step.commits, COMMIT_ROW)
        tokens = column(step.tokens, np.int32)
        if len(rows_N) == 0:
            return
        is_strange_N = self._refuse_strange(session, rows_N, tokens)
        shadows_N = self._shadows_of(session, rows_N["request"])
        corrections, is_lacking_N = self.shadows.commit(shadows_N, rows_N, tokens)
        for correction in corrections:
            self.engine.correct(*correction)
        self.num_corrections += len(corrections)
        session.lacking.update(rows_N["request"][is_lacking_N & ~is_strange_N].tolist())

    def _refuse_strange(self, session: _Session, rows_N: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Refuses requests that have a new token that the draft model does not know.

        `rows_N` are the commits of a `Step`, `COMMIT_ROW` [N], and `tokens` are the new tokens of all rows. Returns which rows
        belong to refused requests, bool [N].
        """
        is_strange_N = np.zeros(len(rows_N), np.bool_)
        stops_N = np.cumsum(rows_N["count"])
        for place in np.flatnonzero(self._are_strange(tokens)).tolist():
            row = int(np.searchsorted(stops_N, place, side="right"))
            if not is_strange_N[row]:
                is_strange_N[row] = True
                request = int(rows_N["request"][row])
                self._close_requests(session, np.array([request]))
                self._refuse(session, request, self._why_strange(tokens[place : place + 1]))
        return is_strange_N

    def _are_strange(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which of `tokens` the draft model does not know, bool."""
        return (tokens < 0) | (tokens >= self.model.vocab_size)

    def _why_strange(self, tokens: np.ndarray) -> str:
        return f"token {tokens[0]} is not among the {self.model.vocab_size} of the draft model"

    def _drafts(self, session: _Session) -> Drafts:
        """Returns the next `Drafts` for a verifier, with as many draft tokens and request numbers as a message can hold."""
        rows = np.concatenate([np.zeros(0, DRAFT_ROW), *session.rows], dtype=DRAFT_ROW)
        session.rows = [rows[MAX_ROWS:]] if len(rows) > MAX_ROWS else []
        rows = rows[:MAX_ROWS]
        rows["owner"] = self._requests[rows["owner"]]
        lacking, refused = _take(session.lacking), _take(session.refused)
        session.owes_answer = False
        session.num_sent += 1
        return Drafts(
            session=session.number,
            drafter=self._drafter,
            number=session.num_sent,
            step=session.last_step,
            token_s=self._token_s,
            num_shadows=self.num_open,
            drafts=rows.tobytes(),
            lacking=lacking,
            refused=refused,
            reason=session.reason if refused else "",
        )


def _take(requests: set[int]) -> bytes:
    """Removes up to `MAX_ROWS` numbers from `requests`, and returns them in ascending order as int64 bytes."""
    taken = sorted(requests)[:MAX_ROWS]
    requests.difference_update(taken)
    return np.array(taken, np.int64).tobytes()
