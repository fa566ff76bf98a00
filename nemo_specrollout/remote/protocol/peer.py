# SPDX-License-Identifier: Apache-2.0
"""What a verifier knows about one drafter. It says when to greet the drafter, and how long the drafter may be silent.

To greet a drafter means to send it a `Hello`. A drafter that failed, does not answer or does not fit is greeted again after a
pause, so no state lasts forever.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from nemo_specrollout.remote.protocol.messages import Drafts, Welcome

ANSWER_DEADLINE_S = 2.0
"""Maximum time in seconds for which a drafter may leave a message unanswered. After failures it may take longer
(`Peer.patience_s`)."""
FLOOD_FACTOR = 4
"""Limit on the draft tokens that a drafter may send, as a multiple of those that it was asked for. `FLOOD_ALLOWANCE` is added
to the limit. A drafter that exceeds it is dropped."""
FLOOD_ALLOWANCE = 4096
"""Number of draft tokens that a drafter may send beyond `FLOOD_FACTOR` times those that it was asked for."""
FIRST_PAUSE_S = 0.5
"""Seconds before a drafter that failed is greeted again. The pause doubles with each failure."""
LONGEST_PAUSE_S = 30.0
"""Maximum pause in seconds before a drafter that failed is greeted again. A drafter that does not fit always gets this pause.
If a drafter was ready for longer than this before it failed, its pauses begin with `FIRST_PAUSE_S` again."""


class PeerState(Enum):
    """State of a drafter from the verifier's point of view."""

    AWAY = "away"  # It is greeted when its pause is over.
    GREETED = "greeted"  # It has not answered yet.
    READY = "ready"
    REFUSED = "refused"  # It does not fit the policy. It is greeted again later, as another may listen then.


@dataclass
class Peer:
    """The verifier's view of one drafter. All times are seconds of the verifier's clock."""

    state: PeerState = PeerState.AWAY
    reason: str = ""
    """Reason why the drafter is not ready. Empty if it is ready, or was not tried yet."""
    last_problem: str = ""
    """Reason of the drafter's latest failure or refusal, even if it is ready again."""
    # Its latest answers (see `Welcome` and `Drafts`).
    drafter: int = 0
    max_model_len: int = 0
    num_shadows: int = 0
    token_s: float = 0.0
    num_open_there: int = 0
    """Number of requests of all verifiers that the drafter had when it answered last."""
    resume_at_s: float = 0.0
    """Time at which the drafter is greeted next, or at which the last greeting counts as unanswered."""
    pause_s: float = FIRST_PAUSE_S
    ready_s: float = 0.0  # Time at which it became ready.
    waiting_since_s: float | None = None  # Time of the first `Step` that it has not answered.
    told_s: float = 0.0  # Time of the latest `Step` that it was sent.
    last_number: int = -1  # Number of its latest `Drafts`.
    num_steps: int = 0  # Number of `Step` messages that it was sent since its `Welcome`.
    unread: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and bytes of text of each `Step` that opened requests and that the drafter has not answered yet."""
    num_rows: int = 0  # Number of draft tokens that it has sent.
    num_asked: int = 0  # Number of requests that it was asked to draft for, summed over `Step` messages.
    num_failures: int = 0

    @property
    def patience_s(self) -> float:
        """Maximum time in seconds for which the drafter may leave a message unanswered.

        It grows with failures, because a drafter that seems to fail may just be slow.
        """
        return max(ANSWER_DEADLINE_S, self.pause_s)

    @property
    def num_unread_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.unread)

    def greets(self, now_s: float) -> bool:
        """Returns whether to greet the drafter now, and if so, notes the greeting."""
        if self.state is PeerState.READY or now_s < self.resume_at_s:
            return False
        if self.state is PeerState.GREETED:
            self.reason = self.last_problem = "does not answer"
        self.state = PeerState.GREETED
        self.resume_at_s = now_s + ANSWER_DEADLINE_S
        return True

    def welcome(self, message: Welcome, now_s: float) -> None:
        self.state = PeerState.READY
        self.reason = ""
        self.ready_s = now_s
        self.drafter = message.drafter
        self.last_number = 0
        self.num_steps = 0
        self.unread.clear()
        self.max_model_len = message.max_model_len
        self.num_shadows = message.num_shadows

    def fail(self, reason: str, now_s: float) -> None:
        """Marks the drafter as failed, so that it is greeted again after a pause."""
        if self.state is PeerState.READY and now_s - self.ready_s > LONGEST_PAUSE_S:
            self.pause_s = FIRST_PAUSE_S  # a few good frames before the next bad one are not enough
        self.state = PeerState.AWAY
        self.reason = self.last_problem = reason
        self.resume_at_s = now_s + self.pause_s
        self.num_failures += 1
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def refuse(self, reason: str, now_s: float) -> None:
        """Marks the drafter as one that does not fit, so that it is greeted again after the longest pause."""
        self.state = PeerState.REFUSED
        self.reason = self.last_problem = reason
        self.resume_at_s = now_s + LONGEST_PAUSE_S

    def note_step(self, num_requests: int, now_s: float) -> bool:
        """Notes that a `Step` is sent to the drafter, which has `num_requests` requests of this verifier.

        Returns whether the answer to an earlier `Step` is overdue.
        """
        self.told_s = now_s
        self.num_asked += num_requests
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return now_s - self.waiting_since_s > self.patience_s

    def is_flooding(self, num_rows: int, most_ahead: int) -> bool:
        """Counts `num_rows` more draft tokens, and returns whether the drafter has sent far more than it was asked for.

        `most_ahead` is the maximum number of tokens that it may draft beyond a request's text.
        """
        self.num_rows += num_rows
        return self.num_rows > FLOOD_FACTOR * most_ahead * self.num_asked + FLOOD_ALLOWANCE

    def note_answer(self, drafts: Drafts) -> bool:
        """Notes what `drafts` says about the drafter, and returns whether an earlier message of the drafter was lost."""
        self.waiting_since_s = None
        has_lost = drafts.number > self.last_number + 1
        self.last_number = max(self.last_number, drafts.number)
        while self.unread and self.unread[0][0] <= drafts.step:
            self.unread.popleft()
        self.token_s = drafts.token_s
        self.num_open_there = drafts.num_shadows
        return has_lost
