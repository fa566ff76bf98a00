# SPDX-License-Identifier: Apache-2.0
"""The verifier's view of each drafter: its state, its load, and when it is greeted again after a failure."""

import math
from dataclasses import dataclass
from enum import Enum

from nemo_specrollout.remote.protocol.messages import Drafts, Welcome

ANSWER_DEADLINE_S = 2.0
"""Longest silence of a drafter that owes an answer, in seconds."""
FLOOD_FACTOR = 4
"""A drafter is dropped if it sends this many times the draft tokens that it was asked for."""
FLOOD_ALLOWANCE = 4096
"""Draft tokens beyond that number which are still accepted."""
FIRST_PAUSE_S = 0.5
"""Pause before a drafter that failed is greeted again, in seconds. It doubles with each failure."""
LONGEST_PAUSE_S = 30.0
"""Longest such pause. A drafter that was ready for longer starts at the first pause again."""


class PeerState(Enum):
    """State of a drafter, as a verifier sees it."""

    AWAY = "away"  # greeted when its pause is over
    GREETED = "greeted"  # has not answered yet
    READY = "ready"
    REFUSED = "refused"  # does not fit the policy: never greeted again


@dataclass(frozen=True)
class PolicyModel:
    """Properties of the policy that a draft model has to fit."""

    vocab_size: int
    tokenizer: str = ""
    """Fingerprint of the tokenizer; empty if unknown."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a text."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request."""

    temperature: float
    top_k: int
    top_p: float


@dataclass
class Peer:
    """One drafter, as a verifier sees it. All times are seconds of the verifier's clock."""

    state: PeerState = PeerState.AWAY
    reason: str = ""
    """Reason why the drafter is not ready; empty if it is, or if it was not tried yet."""
    drafter: int = 0
    """Random number of the drafter process."""
    draft_version: int = 0
    max_model_len: int = 0
    num_shadows: int = 0
    """Requests that the drafter can hold."""
    num_open_there: int = 0
    """Requests that it held when it answered last, of all verifiers."""
    num_own: int = 0
    """Our requests that are assigned to it."""
    token_s: float = 0.0
    """Seconds that it takes to draft one token for each of its requests."""
    answer_s: float = 0.0
    """Seconds from a step to its answer, without the time that the drafter held it."""
    resume_at_s: float = 0.0
    """Time at which it is greeted next, or at which a greeting counts as unanswered."""
    pause_s: float = FIRST_PAUSE_S
    ready_s: float = 0.0
    """Time at which it became ready."""
    waiting_since_s: float | None = None
    """Time of the first step that it has not answered."""
    told_s: float = 0.0
    """Time of the latest step that it was sent."""
    last_number: int = -1
    """Number of its latest `Drafts`."""
    last_answered: int = -1
    """Number of the latest step that it answered."""
    num_rows: int = 0
    """Draft tokens that it sent."""
    num_asked: int = 0
    """Requests that it was asked to draft for, summed over steps."""
    num_failures: int = 0

    @property
    def load(self) -> int:
        """Requests that it drafts for: ours and, as far as it reported them, other verifiers'."""
        return max(self.num_own, self.num_open_there)

    def greets(self, now_s: float) -> bool:
        """Returns whether the drafter is to be greeted now, and notes the greeting."""
        if self.state not in (PeerState.AWAY, PeerState.GREETED) or now_s < self.resume_at_s:
            return False
        if self.state is PeerState.GREETED:
            self.reason = self.reason or "does not answer"
        self.state, self.resume_at_s = PeerState.GREETED, now_s + ANSWER_DEADLINE_S
        return True

    def welcome(self, message: Welcome, now_s: float) -> None:
        """Marks the drafter as ready."""
        self.state, self.reason, self.ready_s = PeerState.READY, "", now_s
        self.drafter, self.draft_version = message.drafter, message.draft_version
        self.max_model_len, self.num_shadows = message.max_model_len, message.num_shadows
        self.last_number = 0

    def fail(self, reason: str, now_s: float) -> None:
        """Marks the drafter as failed, to be greeted again after a pause."""
        if self.state is PeerState.READY and now_s - self.ready_s > LONGEST_PAUSE_S:
            self.pause_s = FIRST_PAUSE_S  # a few good frames before the next bad one are not enough
        self.state, self.reason, self.resume_at_s = PeerState.AWAY, reason, now_s + self.pause_s
        self.num_failures += 1
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def move(self, why_unreachable: str) -> None:
        """Marks the drafter as never tried; with a reason, it is not greeted until it moves again."""
        self.state, self.reason, self.pause_s = PeerState.AWAY, why_unreachable, FIRST_PAUSE_S
        self.resume_at_s = math.inf if why_unreachable else 0.0

    def forget_requests(self) -> None:
        """Notes that the drafter has none of our requests and owes no answer."""
        self.num_own = self.num_rows = self.num_asked = 0
        self.waiting_since_s = None

    def note_step(self, num_requests: int, now_s: float) -> None:
        """Notes a step that was sent to the drafter with `num_requests` requests of ours."""
        self.told_s = now_s
        self.num_asked += num_requests
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Returns whether a step has been unanswered for too long."""
        return self.waiting_since_s is not None and now_s - self.waiting_since_s > ANSWER_DEADLINE_S

    def is_flooding(self, num_rows: int, most_ahead: int) -> bool:
        """Counts `num_rows` more draft tokens; returns whether the drafter sent far more than it was asked for."""
        self.num_rows += num_rows
        return self.num_rows > FLOOD_FACTOR * most_ahead * self.num_asked + FLOOD_ALLOWANCE

    def note_answer(self, drafts: Drafts, now_s: float) -> bool:
        """Notes the figures of an answer; returns whether an earlier message of the drafter was lost."""
        self.waiting_since_s = None
        has_lost = drafts.number > self.last_number + 1
        self.last_number = max(self.last_number, drafts.number)
        if drafts.answers > self.last_answered and drafts.echo_ns:
            answer_s = now_s - (drafts.echo_ns + drafts.held_ns) / 1e9
            if 0.0 <= answer_s <= ANSWER_DEADLINE_S:  # the drafter may echo anything
                self.answer_s = answer_s
        self.last_answered = max(self.last_answered, drafts.answers)
        self.draft_version, self.token_s, self.num_open_there = drafts.draft_version, drafts.token_s, drafts.num_shadows
        return has_lost
