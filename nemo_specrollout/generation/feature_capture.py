# SPDX-License-Identifier: Apache-2.0
"""Features for a draft head's training, from the rollout itself: the target has computed them anyway.

A sample of the requests is captured, so that it costs a bounded share of the engine's time and memory. Rows of captured
requests are gathered on the device, without a word to the host, and brought there when the buffer is full.

Shapes: S request slots, B requests of the batch, R rows of a forward pass, M rows kept of them, N rows of the buffer, F
features of a row.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nemo_specrollout.generation.compat import to_device
from nemo_specrollout.generation.speculator import NewRequest
from nemo_specrollout.sampling.seeds import combine
from nemo_specrollout.training.features.features import SequenceFeatures

SHORTEST = 8
"""Tokens of a sequence below which nothing is learned from it."""


@dataclass
class _Sequence:
    """A captured request: rows that have come to the host. `version`: of the weights that computed them."""

    request: NewRequest
    version: int
    first_position: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def num_before_end(self, tokens: np.ndarray) -> int:
        """How many of the sequence's tokens come before its last: an engine that schedules asynchronously may compute a step
        more, before it learns that a request has ended."""
        start = max(self.request.prompt_length - self.first_position, 0)
        stops = np.isin(tokens[start:], list(self.request.stop_token_ids))
        last = start + int(stops.argmax()) if stops.any() else len(tokens)
        return min(last, self.request.limit - 1 - self.first_position)


class FeatureCapture:
    """Collects `SequenceFeatures` of a share of the requests; owns the buffer on the device, and what was collected until it
    is taken.

    `share` of the requests are captured, chosen by their seeds, fewer as soon as that takes more than `max_time_share` of
    the time. What is not taken is forgotten beyond `max_bytes`, oldest first. `version` is that of the weights; a sequence
    across an update of them is cut there, so that each has one version.
    """

    def __init__(
        self, runner: Any, capacity: int, num_features: int, share: float, max_time_share: float, max_bytes: int
    ) -> None:
        """Room for `capacity` rows of `num_features` each is taken now, so that vLLM's memory profile sees it."""
        self._share, self._max_time_share, self._max_bytes = share, max_time_share, max_bytes
        self._capacity, self._device, self._states = capacity, runner.device, runner.req_states
        self._shape, self._dtype = (capacity, num_features), runner.dtype
        self._num_hidden = runner.model_config.get_hidden_size()
        self._ids_S = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=self._device)
        self._id_of_slot = np.zeros(runner.max_num_reqs, np.int32)
        self._num_opened = self._num_rows = 0
        self._under_way: dict[int, _Sequence] = {}
        self._ended: set[int] = set()
        self._done: deque[SequenceFeatures] = deque()
        self._done_bytes = 0
        self._started = time.perf_counter()
        self.version, self.seconds = 0, 0.0
        self._allocate()

    def _allocate(self) -> None:
        self._hidden_NF = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._rows_N3 = torch.zeros(self._capacity, 3, dtype=torch.int32, device=self._device)

    def release(self) -> None:
        """Gives the device's memory back, while the engine sleeps."""
        self._flush()
        del self._hidden_NF, self._rows_N3

    def resume(self) -> None:
        """The engine is awake."""
        self._allocate()

    def open(self, requests: Sequence[NewRequest]) -> None:
        """Requests take their slots."""
        is_in_time = self.seconds <= self._max_time_share * (time.perf_counter() - self._started)
        for request in requests:
            is_captured = is_in_time and combine(request.identity.seed, 1) < self._share * 2.0**64
            self._num_opened += is_captured
            self._id_of_slot[request.slot] = self._num_opened if is_captured else 0
            if is_captured:
                self._under_way[self._num_opened] = _Sequence(request, self.version)
        slots = [r.slot for r in requests]
        index = to_device(slots, np.int64, self._device)
        self._ids_S[index] = to_device(self._id_of_slot[slots].tolist(), np.int32, self._device)

    def close(self, slots: list[int]) -> None:
        """The requests of `slots` are gone."""
        self._ended |= {int(self._id_of_slot[slot]) for slot in slots} - {0}
        self._id_of_slot[slots] = 0

    def observe(
        self, batch: Any, final_hidden_RH: torch.Tensor, aux_hidden: list[torch.Tensor] | None, num_rejected_B: Any
    ) -> None:
        """Keeps what a step computed of the captured requests; drafts that were rejected are marked as no request's."""
        captured_B = self._id_of_slot[batch.idx_mapping_np] > 0
        most = int(batch.num_scheduled_tokens[captured_B].sum())
        if most == 0 or most > self._capacity:
            return
        started = time.perf_counter()
        if self._num_rows + most > self._capacity:
            self._flush()
        ids_R = self._owners(batch, num_rejected_B)
        place_R = torch.where(ids_R > 0, (ids_R > 0).cumsum(0) - 1, most)
        rows_R = torch.arange(len(ids_R), device=self._device)
        kept_M, ids_M = (v_R.new_zeros(most + 1).scatter_(0, place_R, v_R)[:most] for v_R in (rows_R, ids_R))
        new = slice(self._num_rows, self._num_rows + most)
        columns = (ids_M, batch.positions[kept_M].int(), batch.input_ids[kept_M].int())
        self._rows_N3[new] = torch.stack(columns, dim=1)
        parts = [*(aux_hidden or []), final_hidden_RH]
        torch.cat([part[kept_M] for part in parts], dim=1, out=self._hidden_NF[new])
        self._num_rows += most
        self.seconds += time.perf_counter() - started

    def _owners(self, batch: Any, num_rejected_B: torch.Tensor) -> torch.Tensor:
        """The captured request that each row of the forward pass belongs to, int32 [R]; 0: none."""
        ends_B = batch.query_start_loc[1 : batch.num_reqs + 1]
        rows_R = torch.arange(batch.num_tokens, dtype=ends_B.dtype, device=self._device)
        request_R = torch.searchsorted(ends_B, rows_R, right=True).clamp_(max=batch.num_reqs - 1)
        is_kept_R = rows_R < (ends_B - num_rejected_B)[request_R]
        return self._ids_S[batch.idx_mapping][request_R] * is_kept_R

    def weights_updated(self, version: int) -> None:
        """What comes from now on was computed by weights of that version."""
        self._flush()
        for key in list(self._under_way):
            sequence = self._under_way[key]
            self._finish(sequence)
            self._under_way[key] = _Sequence(sequence.request, version)
        self.version = version

    def take(self) -> list[SequenceFeatures]:
        """All sequences that are complete, or cut; the caller owns them."""
        self._flush()
        for key in self._ended:
            self._finish(self._under_way.pop(key))
        self._ended.clear()
        done, self._done, self._done_bytes = list(self._done), deque(), 0
        return done

    def _flush(self) -> None:
        """Brings the buffer's rows to the host, and parts them by sequence."""
        if self._num_rows == 0:  # as while the engine sleeps: there is no buffer
            return
        rows_N3, hidden_NF = self._rows_N3[: self._num_rows].cpu().numpy(), self._hidden_NF[: self._num_rows].cpu()
        places: dict[int, list[int]] = defaultdict(list)
        for place, key in enumerate(rows_N3[:, 0].tolist()):
            if key:
                places[key].append(place)
        for key, where in places.items():
            self._append(key, rows_N3[where, 1], rows_N3[where, 2], hidden_NF[where])
        self._num_rows = 0

    def _append(self, key: int, positions: np.ndarray, tokens: np.ndarray, hidden: torch.Tensor) -> None:
        """Adds rows to a sequence, which is cut where rows before them are missing."""
        cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
        for start, end in itertools.pairwise(cuts):
            sequence = self._under_way[key]
            if sequence.tokens and positions[start] != sequence.first_position + sequence.num_tokens:
                self._finish(sequence)
                sequence = self._under_way[key] = _Sequence(sequence.request, sequence.version)
            if not sequence.tokens:
                sequence.first_position = int(positions[start])
            sequence.tokens.append(tokens[start:end])
            sequence.hidden.append(hidden[start:end])

    def _finish(self, sequence: _Sequence) -> None:
        tokens = np.concatenate(sequence.tokens) if sequence.tokens else np.zeros(0, np.int32)
        length = sequence.num_before_end(tokens)
        if length < SHORTEST:
            return
        hidden_TF = torch.cat(sequence.hidden)[:length]
        prompt_ids = sequence.request.token_ids[: sequence.request.prompt_length]
        features = SequenceFeatures(
            torch.from_numpy(tokens[:length]),
            hidden_TF[:, : -self._num_hidden].clone(),
            hidden_TF[:, -self._num_hidden :].clone(),
            sequence.request.prompt_length,
            sequence.version,
            sequence.first_position,
            torch.tensor(prompt_ids, dtype=torch.int32) if sequence.first_position else None,
        )
        self._done.append(features)
        self._done_bytes += features.num_bytes
        while self._done_bytes > self._max_bytes and len(self._done) > 1:
            self._done_bytes -= self._done.popleft().num_bytes
