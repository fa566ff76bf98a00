# SPDX-License-Identifier: Apache-2.0
"""Hidden states of accepted tokens, kept by request until somebody wants them: a drafter that missed them, a trainer.

Shapes: N rows, F features of a row, B requests of the batch; a lane is a request's own small number.
"""

from dataclasses import dataclass

import numpy as np
import torch

_GAP = -1


@dataclass(frozen=True)
class AcceptedRows:
    """The tokens that a step computed and that stand: their requests in the batch int64 [N], one request after the other,
    rows of the forward pass int64 [N] (None: the first N), positions int64 [N] and ids int32 [N]."""

    requests_N: np.ndarray
    rows_N: np.ndarray | None
    positions_N: np.ndarray
    token_ids_N: np.ndarray

    @classmethod
    def of(
        cls,
        num_rows_B: np.ndarray,
        num_drafts_B: np.ndarray,
        num_sampled_B: np.ndarray,
        first_positions_B: np.ndarray,
        token_ids_BL: np.ndarray,
    ) -> "AcceptedRows":
        """From each request's rows in the pass, how many of them are drafts, the position of the first, and the tokens it
        sampled: s tokens mean that s - 1 drafts were accepted, none that its prompt is not done."""
        rejected_B = np.where(num_sampled_B > 0, num_drafts_B + 1 - num_sampled_B, 0)
        accepted_B = num_rows_B - rejected_B
        requests_N = np.repeat(np.arange(len(accepted_B)), accepted_B)
        positions_N = _ranges(first_positions_B, accepted_B)
        rows_N = _ranges(np.cumsum(num_rows_B) - num_rows_B, accepted_B) if rejected_B.any() else None
        return cls(requests_N, rows_N, positions_N, token_ids_BL[requests_N, positions_N])

    def only(self, chosen_B: np.ndarray) -> "AcceptedRows":
        """Those of the requests that bool `chosen_B` marks."""
        kept = np.flatnonzero(chosen_B[self.requests_N])
        rows_N = kept if self.rows_N is None else self.rows_N[kept]
        return AcceptedRows(self.requests_N[kept], rows_N, self.positions_N[kept], self.token_ids_N[kept])


@dataclass(frozen=True)
class Rows:
    """Rows of some requests, one request after the other: how many of each int64 [B], position and id of each row's token
    int64 and int32 [N], hidden states [N, F]."""

    counts_B: np.ndarray
    positions_N: np.ndarray
    token_ids_N: np.ndarray
    hidden_NF: torch.Tensor


class RowBuffer:
    """At most `capacity` rows in the order in which they came; owns that memory, on the device that they come from.

    Rows that were taken or forgotten leave gaps, which are closed when room is needed. Invariant: a lane's rows are of
    consecutive positions, oldest first. Example: `append([h1, h2], None, lanes_N, positions_N, token_ids_N)`, later
    `take(lanes_B).hidden_NF`.
    """

    def __init__(self, capacity: int, num_lanes: int) -> None:
        self.capacity = capacity
        self._hidden: torch.Tensor | None = None
        self._lanes = np.full(capacity, _GAP, np.int64)
        self._positions = np.zeros(capacity, np.int64)
        self._token_ids = np.zeros(capacity, np.int32)
        self._end = 0
        self._count_of_lane = np.zeros(num_lanes, np.int64)

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return self.capacity - int(self._count_of_lane.sum())

    def counts(self, lanes_B: np.ndarray) -> np.ndarray:
        """Rows of each lane, int64 [B]."""
        return self._count_of_lane[lanes_B]

    def append(
        self,
        parts: list[torch.Tensor],
        rows_N: np.ndarray | None,
        lanes_N: np.ndarray,
        positions_N: np.ndarray,
        token_ids_N: np.ndarray,
    ) -> None:
        """Adds rows `rows_N` (None: the first N) of hidden states that come in parts, [rows, F_i] each, and must fit."""
        if self._end + len(lanes_N) > self.capacity:
            self._close_gaps()
        new = slice(self._end, self._end + len(lanes_N))
        if self._hidden is None:
            width = sum(p.shape[1] for p in parts)
            self._hidden = torch.empty(self.capacity, width, dtype=parts[0].dtype, device=parts[0].device)
        if rows_N is None:
            parts = [p[: len(lanes_N)] for p in parts]
        else:
            index = self._index(rows_N)
            parts = [p[index] for p in parts]
        torch.cat(parts, dim=1, out=self._hidden[new])
        self._lanes[new], self._positions[new], self._token_ids[new] = lanes_N, positions_N, token_ids_N
        self._count_of_lane += np.bincount(lanes_N, minlength=len(self._count_of_lane))
        self._end = new.stop

    def take(self, lanes_B: np.ndarray) -> Rows:
        """Removes all rows of `lanes_B` and returns them, in the order of `lanes_B`. Copy them before the next `append`."""
        assert self._hidden is not None
        counts_B = self.counts(lanes_B)
        order_of_lane = np.full(len(self._count_of_lane) + 1, -1, np.int64)  # the last is that of gaps
        order_of_lane[lanes_B] = np.arange(len(lanes_B))
        order_N = order_of_lane[self._lanes[: self._end]]
        taken = np.flatnonzero(order_N >= 0)
        taken = taken[np.argsort(order_N[taken], kind="stable")]
        is_all_in_order = len(taken) == self._end and bool((np.diff(taken) == 1).all())
        hidden_NF = self._hidden[: self._end] if is_all_in_order else self._hidden[self._index(taken)]
        rows = Rows(counts_B, self._positions[taken], self._token_ids[taken], hidden_NF)
        self._lanes[taken] = _GAP
        self._emptied(lanes_B)
        return rows

    def forget(self, lanes: list[int]) -> None:
        """The requests of `lanes` are gone."""
        if lanes and self._count_of_lane[lanes].any():
            self._lanes[: self._end][np.isin(self._lanes[: self._end], lanes)] = _GAP
            self._emptied(lanes)

    def _emptied(self, lanes: np.ndarray | list[int]) -> None:
        self._count_of_lane[lanes] = 0
        if not self._count_of_lane.any():
            self._end = 0

    def _close_gaps(self) -> None:
        kept = np.flatnonzero(self._lanes[: self._end] != _GAP)
        assert self._hidden is not None
        front = slice(0, len(kept))
        self._hidden[front] = self._hidden[self._index(kept)]
        for array in (self._lanes, self._positions, self._token_ids):
            array[front] = array[kept]
        self._end = len(kept)

    def _index(self, rows_N: np.ndarray) -> torch.Tensor:
        assert self._hidden is not None
        return torch.from_numpy(rows_N).to(self._hidden.device, non_blocking=True)


def _ranges(starts_B: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each of the counts, one request after the other, int64."""
    ends_B = np.cumsum(counts_B)
    return np.arange(int(ends_B[-1])) + np.repeat(starts_B - (ends_B - counts_B), counts_B)
