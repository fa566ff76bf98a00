# SPDX-License-Identifier: Apache-2.0
"""What every drafter is: something that reads the batch's text and proposes how each request goes on.

Shapes: B requests of the batch, K draft positions, L longest sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

# A proposal grades each token's evidence: four grades of the candidate's share within four of the context's length.
# The router learns what share of each level comes true, and starts from what is written here.
LEVEL_PRIORS = np.tile(np.array([0.3, 0.45, 0.6, 0.8]), 4)
NUM_LEVELS = len(LEVEL_PRIORS)


@dataclass(frozen=True)
class DraftRequest:
    """A request that is to be drafted for: the key of its noise, that of its group of siblings, its prompt (int32), how it is
    sampled, and how long it may get, prompt included."""

    key: int
    group: int
    prompt: np.ndarray
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    limit: int = 1 << 30


@dataclass(frozen=True)
class Batch:
    """The running requests as a drafter sees them; arrays are views of the engine's, to be read only.

    `lanes_B` names each request by a small integer that stays its own from `open` to `close`.
    `lengths_B` counts its tokens, prompt included; `seen_B` of them were shown before.
    """

    lanes_B: np.ndarray
    token_ids_BL: np.ndarray
    lengths_B: np.ndarray
    seen_B: np.ndarray


@dataclass(frozen=True)
class Proposal:
    """Where a drafter writes what it proposes: draft tokens int32 [B, K], their evidence levels int8 [B, K], and how
    many tokens there are int64 [B]. Views of the router's buffers, so that nothing is copied or allocated in a step."""

    tokens_BK: np.ndarray
    levels_BK: np.ndarray
    lengths_B: np.ndarray


@dataclass(frozen=True)
class Demand:
    """What the router has use for: draft tokens while the product of their evidence levels' acceptance rates, float64
    [NUM_LEVELS], is at least `floor`. To propose more is no error, only wasted time."""

    level_rates: np.ndarray
    floor: float


class Drafter(ABC):
    """Proposes continuations; owns whatever it remembers of the texts that it was shown.

    Invariant: nothing that a drafter does can change a request's output, only when it arrives.
    Example: `open(3, request)`, then each step `propose(batch, demand, out)`, at the end `close(3)`.
    """

    name: str

    @abstractmethod
    def open(self, lane: int, request: DraftRequest) -> None:
        """A request takes `lane`."""

    def close(self, lane: int) -> None:  # noqa: B027 - most drafters keep nothing per lane
        """The request of `lane` ended or was put aside."""

    @abstractmethod
    def propose(self, batch: Batch, demand: Demand, out: Proposal) -> None:
        """Learns the tokens of each request from `seen_B` to `lengths_B`, then writes up to K draft tokens to `out`."""
