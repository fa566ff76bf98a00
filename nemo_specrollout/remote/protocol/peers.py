# SPDX-License-Identifier: Apache-2.0
"""What verifier and drafter know of each other, on the verifier's side."""

from dataclasses import dataclass
from enum import Enum

FIRST_PAUSE_S = 0.5
"""Before a drafter that failed is greeted again, for the first time."""


class PeerState(Enum):
    """Where a verifier stands with a drafter."""

    AWAY = "away"  # to be greeted when the pause is over
    GREETED = "greeted"  # said hello, no answer yet
    READY = "ready"
    REFUSED = "refused"  # it said that it does not fit: never asked again


@dataclass(frozen=True)
class PolicyModel:
    """What a drafter must know of the policy: its ids, a fingerprint of its tokenizer (empty: not known), what ends a text."""

    vocab_size: int
    tokenizer: str = ""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How a request is sampled."""

    temperature: float
    top_k: int
    top_p: float


@dataclass
class Peer:
    """What a verifier knows of one drafter. States: see `PeerState`."""

    state: PeerState = PeerState.AWAY
    reason: str = ""
    drafter: int = 0
    draft_version: int = 0
    max_model_len: int = 0
    num_shadows: int = 0
    num_open_there: int = 0
    num_own: int = 0
    token_s: float = 0.0
    answer_s: float = 0.0
    resume_at_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    ready_s: float = 0.0
    """When it was last found to be ready."""
    waiting_since_s: float | None = None
    told_s: float = 0.0
    last_number: int = -1
    last_answered: int = -1
    num_rows: int = 0
    num_asked: int = 0
    num_failures: int = 0

    @property
    def load(self) -> int:
        """Requests that it drafts for, ours and, as far as it told, those of others."""
        return max(self.num_own, self.num_open_there)
