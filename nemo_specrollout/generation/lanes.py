# SPDX-License-Identifier: Apache-2.0
"""Lanes: vLLM moves requests about in its batch; what is remembered of one lives in a lane that it keeps.

Shapes: B requests of the batch in vLLM's order.
"""

from collections.abc import Container

import numpy as np
from numba import njit

from nemo_specrollout.drafters.base import Batch


class Lanes:
    """Maps the batch's requests to lanes; owns what is counted per request: tokens shown, length limit, submitted drafts.

    States of a request: absent, in a lane, or parked (preempted: it left the batch but lives; what was shown is kept).
    """

    def __init__(self, num_lanes: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._free = list(range(num_lanes - 1, -1, -1))
        self._lane_of: dict[str, int] = {}
        self._parked: dict[str, int] = {}
        self._order: list[str] = []
        self._lanes_B = np.zeros(0, np.int64)
        self._seen = np.zeros(num_lanes, np.int64)
        self._limit = np.zeros(num_lanes, np.int64)
        self._submitted: tuple[list[str], np.ndarray, np.ndarray] | None = None

    def matches(self, req_ids: list[str]) -> bool:
        """Whether the batch is the one that `reorder` was last told of."""
        return req_ids == self._order

    @property
    def lanes_B(self) -> np.ndarray:
        """The lanes of the batch's requests, int64 [B]; to be read only."""
        return self._lanes_B

    def has(self, req_id: str) -> bool:
        return req_id in self._lane_of

    def release_absent(self, req_ids: list[str], alive: Container[str]) -> dict[str, int]:
        """Frees the lanes of requests that left the batch, and returns them by request; parks those still `alive`."""
        present = set(req_ids)
        gone = [r for r in self._lane_of if r not in present]
        for req_id in gone:
            lane = self._lane_of[req_id]
            if req_id in alive:
                self._parked[req_id] = int(self._seen[lane])
        self._parked = {r: n for r, n in self._parked.items() if r in alive}
        lanes = {r: self._lane_of.pop(r) for r in gone}
        self._free.extend(lanes.values())
        return lanes

    def is_parked(self, req_id: str) -> bool:
        """Whether the request is out of the batch, but will be back."""
        return req_id in self._parked

    def assign(self, req_id: str, prompt_length: int, max_tokens: int | None, speculate: bool) -> int:
        """A free lane for a request; one that must not speculate gets a length limit that leaves no room for drafts."""
        lane = self._free.pop()
        self._lane_of[req_id] = lane
        self._seen[lane] = self._parked.pop(req_id, prompt_length)
        room = self._max_model_len if max_tokens is None else min(self._max_model_len, prompt_length + max_tokens)
        self._limit[lane] = room if speculate else 0
        return lane

    def limit(self, lane: int) -> int:
        """How long the request of `lane` may get and still be drafted for."""
        return int(self._limit[lane])

    def reorder(self, req_ids: list[str]) -> None:
        """The batch is now `req_ids`, all of which have lanes."""
        self._order = list(req_ids)
        self._lanes_B = np.array([self._lane_of[r] for r in req_ids], np.int64)

    def batch(
        self, token_ids_BL: np.ndarray, num_tokens_B: np.ndarray, emitted_B: np.ndarray
    ) -> tuple[Batch, np.ndarray]:
        """The batch as drafters see it, which counts as seen from now on, and the most drafts each request may have.

        One token is always sampled after the drafts; a request that emitted nothing is in prefill and may have none.
        """
        lengths_B, seen_B, caps_B = (np.empty(len(self._lanes_B), np.int64) for _ in range(3))
        _read_lanes(self._lanes_B, num_tokens_B, emitted_B, self._seen, self._limit, lengths_B, seen_B, caps_B)
        return Batch(self._lanes_B, token_ids_BL, lengths_B, seen_B), caps_B

    def submit(self, drafters_B: np.ndarray, counts_B: np.ndarray) -> None:
        """Remembers whose drafts, and how many, the next step verifies."""
        self._submitted = (self._order, drafters_B, counts_B) if counts_B.any() else None

    @property
    def has_submitted(self) -> bool:
        """Whether the last step's drafts are still to be accounted for."""
        return self._submitted is not None

    def take_submitted(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Whose drafts, and how many, this step verified for each request of the batch; forgets them."""
        if self._submitted is None:
            return None
        order, drafters_B, counts_B = self._submitted
        self._submitted = None
        if order is self._order:
            return drafters_B, counts_B
        by_request = {r: (d, c) for r, d, c in zip(order, drafters_B.tolist(), counts_B.tolist(), strict=True)}
        pairs = [by_request.get(r, (0, 0)) for r in self._order]
        return np.array([d for d, _ in pairs]), np.array([c for _, c in pairs])


@njit("void(int64[:], int32[:], int64[:], int64[:], int64[:], int64[:], int64[:], int64[:])", cache=True)
def _read_lanes(lanes_B, num_tokens_B, emitted_B, seen, limit, lengths_B, seen_B, caps_B):  # type: ignore[no-untyped-def]
    for b in range(len(lanes_B)):
        lane = lanes_B[b]
        lengths_B[b] = num_tokens_B[b]
        seen_B[b] = seen[lane]
        seen[lane] = lengths_B[b]
        caps_B[b] = max(limit[lane] - lengths_B[b] - 1, 0) if emitted_B[b] > 0 else 0
