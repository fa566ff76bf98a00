# SPDX-License-Identifier: Apache-2.0
"""Hidden states of accepted tokens, kept by request until somebody wants them: a drafter that missed them, a trainer.

Shapes: R rows of a forward pass, N rows of some requests, F features of a row, B requests of the batch; a lane is a request's
own small number. All that is done in every step is one copy and one kernel.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

_GAP = -1


@dataclass(frozen=True)
class StepRows:
    """Whose tokens the rows of a forward pass are: lanes int64 [R], positions int64 [R], ids int32 [R], one request after the
    other. Rows of rejected drafts are nobody's: lane -1."""

    lanes_R: np.ndarray
    positions_R: np.ndarray
    token_ids_R: np.ndarray

    @classmethod
    def of(
        cls,
        num_rows_B: np.ndarray,
        num_drafts_B: np.ndarray,
        num_sampled_B: np.ndarray,
        first_positions_B: np.ndarray,
        token_ids_BL: np.ndarray,
        lanes_B: np.ndarray,
    ) -> "StepRows":
        """From each request's rows in the pass, how many of them are drafts, the position of the first, and the tokens it
        sampled: s tokens mean that s - 1 drafts were accepted, none that its prompt is not done."""
        num_rows = int(num_rows_B.sum())
        rows = cls(np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), np.empty(num_rows, np.int32))
        _name_rows(
            num_rows_B, num_drafts_B, num_sampled_B, first_positions_B, token_ids_BL, lanes_B,
            rows.lanes_R, rows.positions_R, rows.token_ids_R,
        )  # fmt: skip
        return rows

    def of_lanes(self, is_wanted: np.ndarray) -> np.ndarray:
        """The rows, int64, whose lane bool `is_wanted`, by lane, marks."""
        return np.flatnonzero(is_wanted[self.lanes_R] & (self.lanes_R != _GAP))

    def masked(self, is_wanted_R: np.ndarray) -> "StepRows":
        """The same rows, of which those that are not wanted are nobody's."""
        return StepRows(np.where(is_wanted_R, self.lanes_R, _GAP), self.positions_R, self.token_ids_R)

    def only(self, rows: np.ndarray) -> "StepRows":
        return StepRows(self.lanes_R[rows], self.positions_R[rows], self.token_ids_R[rows])


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

    Nobody's rows, and those that were taken or forgotten, are gaps, which are closed when room is needed. Invariant: a lane's
    rows are of consecutive positions, oldest first. Example: `append([h1, h2], step_rows)`, later `take(lanes_B).hidden_NF`.
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

    def append(self, parts: list[torch.Tensor], new: StepRows) -> None:
        """Adds rows whose hidden states come in parts, [at least R, F_i] each; they must fit, nobody's included."""
        num_rows = len(new.lanes_R)
        if self._end + num_rows > self.capacity:
            self._close_gaps()
        if self._hidden is None:
            width = sum(p.shape[1] for p in parts)
            self._hidden = torch.empty(self.capacity, width, dtype=parts[0].dtype, device=parts[0].device)
        torch.cat([p[:num_rows] for p in parts], dim=1, out=self._hidden[self._end : self._end + num_rows])
        _append(
            new.lanes_R, new.positions_R, new.token_ids_R, self._end, self._lanes, self._positions, self._token_ids,
            self._count_of_lane,
        )  # fmt: skip
        self._end += num_rows

    def take(self, lanes_B: np.ndarray) -> Rows:
        """Removes all rows of `lanes_B` and returns them, in the order of `lanes_B`. Copy them before the next `append`."""
        assert self._hidden is not None
        counts_B = self.counts(lanes_B)
        taken = np.empty(int(counts_B.sum()), np.int64)
        _take(lanes_B, counts_B, self._lanes[: self._end], len(self._count_of_lane), taken)
        is_all_in_order = len(taken) == self._end and bool((np.diff(taken) == 1).all())
        hidden_NF = self._hidden[: self._end] if is_all_in_order else self._hidden[self._index(taken)]
        rows = Rows(counts_B, self._positions[taken], self._token_ids[taken], hidden_NF)
        self._emptied(lanes_B)
        return rows

    def forget(self, lanes: list[int]) -> None:
        """Nobody wants the rows of `lanes` any more."""
        for lane in lanes:
            if self._count_of_lane[lane]:
                _forget(lane, self._lanes[: self._end])
                self._emptied([lane])

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


@njit("void(int64[:], int64[:], int64[:], int64[:], int32[:,:], int64[:], int64[:], int64[:], int32[:])", cache=True)
def _name_rows(  # type: ignore[no-untyped-def]
    num_rows_B, num_drafts_B, num_sampled_B, first_positions_B, token_ids_BL, lanes_B, lanes_R, positions_R, token_ids_R
):  # fmt: skip
    r = 0
    for b in range(len(num_rows_B)):
        num_rejected = num_drafts_B[b] + 1 - num_sampled_B[b] if num_sampled_B[b] > 0 else 0
        num_accepted = num_rows_B[b] - num_rejected
        for i in range(num_rows_B[b]):
            lanes_R[r] = lanes_B[b] if i < num_accepted else _GAP
            positions_R[r] = first_positions_B[b] + i
            token_ids_R[r] = token_ids_BL[b, positions_R[r]] if i < num_accepted else 0
            r += 1


@njit("void(int64[:], int64[:], int32[:], int64, int64[:], int64[:], int32[:], int64[:])", cache=True)
def _append(new_lanes, new_positions, new_token_ids, end, lanes, positions, token_ids, count_of_lane):  # type: ignore[no-untyped-def]
    for r in range(len(new_lanes)):
        lanes[end + r] = new_lanes[r]
        positions[end + r] = new_positions[r]
        token_ids[end + r] = new_token_ids[r]
        if new_lanes[r] != _GAP:
            count_of_lane[new_lanes[r]] += 1


@njit("void(int64[:], int64[:], int64[:], int64, int64[:])", cache=True)
def _take(lanes_B, counts_B, lanes, num_lanes, taken):  # type: ignore[no-untyped-def]
    """Writes the rows of `lanes_B`, lane by lane, into `taken`, and leaves gaps."""
    next_of_lane = np.full(num_lanes, -1)
    start = 0
    for b in range(len(lanes_B)):
        next_of_lane[lanes_B[b]] = start
        start += counts_B[b]
    for n in range(len(lanes)):
        if lanes[n] != _GAP and next_of_lane[lanes[n]] >= 0:
            taken[next_of_lane[lanes[n]]] = n
            next_of_lane[lanes[n]] += 1
            lanes[n] = _GAP


@njit("void(int64, int64[:])", cache=True)
def _forget(lane, lanes):  # type: ignore[no-untyped-def]
    for n in range(len(lanes)):
        if lanes[n] == lane:
            lanes[n] = _GAP
