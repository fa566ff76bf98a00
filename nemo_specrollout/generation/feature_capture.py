# SPDX-License-Identifier: Apache-2.0
"""Features for a draft head's training, from the rollout itself: the target has computed them anyway.

A sample of the requests is captured, so that it costs a bounded share of the engine's time and memory.
A lane is a request's own small number.
"""

import time
from collections import deque

import numpy as np
import torch

from nemo_specrollout.generation.compat import StepOutput
from nemo_specrollout.generation.row_buffer import RowBuffer, StepRows
from nemo_specrollout.sampling.seeds import combine
from nemo_specrollout.training.features import SequenceFeatures

SHORTEST = 8
"""Tokens of a sequence below which nothing is learned from it."""


class FeatureCapture:
    """Collects `SequenceFeatures` of a share of the requests; owns them until they are taken.

    `share` of the requests are captured, chosen by their seeds, fewer as soon as that takes more than `max_time_share` of
    the time. What nobody takes is forgotten beyond `max_bytes`, oldest first. `version` is that of the weights; a sequence
    across an update of them is cut there, so that each has one version.
    """

    def __init__(self, num_lanes: int, capacity: int, share: float, max_time_share: float, max_bytes: int) -> None:
        self._share, self._max_time_share, self._max_bytes = share, max_time_share, max_bytes
        self._buffer = RowBuffer(capacity, num_lanes)
        self._is_captured = np.zeros(num_lanes, np.bool_)
        self._prompt_lengths = np.zeros(num_lanes, np.int64)
        self._done: deque[SequenceFeatures] = deque()
        self._done_bytes = 0
        self._num_aux = 0
        self._started = time.perf_counter()
        self.version = 0
        self.seconds = 0.0

    def open(self, lane: int, seed: int, prompt_length: int) -> None:
        """A request takes `lane`."""
        is_in_time = self.seconds <= self._max_time_share * (time.perf_counter() - self._started)
        self._is_captured[lane] = is_in_time and combine(seed, 1) < self._share * 2.0**64
        self._prompt_lengths[lane] = prompt_length

    def observe(self, step: StepOutput, new: StepRows) -> None:
        """Keeps what a step computed of the captured requests."""
        started = time.perf_counter()
        rows = new.of_lanes(self._is_captured)
        if len(rows) == 0:
            return
        if len(rows) > self._buffer.room:
            self._finish(np.unique(new.lanes_R[rows]))
        if len(rows) <= self._buffer.room:
            index = torch.from_numpy(rows).to(step.final_hidden.device, non_blocking=True)
            self._num_aux = sum(p.shape[1] for p in step.hidden_parts)
            self._buffer.append([p[index] for p in (*step.hidden_parts, step.final_hidden)], new.only(rows))
        self.seconds += time.perf_counter() - started

    def close(self, lanes: list[int]) -> None:
        """The requests of `lanes` are gone."""
        captured = [lane for lane in lanes if self._is_captured[lane]]
        if captured:
            started = time.perf_counter()
            self._finish(np.array(captured))
            self._is_captured[captured] = False
            self.seconds += time.perf_counter() - started

    def weights_updated(self, version: int) -> None:
        """What comes from now on was computed by weights of that version."""
        self._finish(np.flatnonzero(self._is_captured))
        self.version = version

    def take(self) -> list[SequenceFeatures]:
        """All sequences that are complete, or cut; the caller owns them."""
        done, self._done, self._done_bytes = list(self._done), deque(), 0
        return done

    def _finish(self, lanes: np.ndarray) -> None:
        lanes = lanes[self._buffer.counts(lanes) > 0]
        if len(lanes) == 0:
            return
        rows = self._buffer.take(lanes)
        hidden_NF = rows.hidden_NF.cpu()
        ends = np.cumsum(rows.counts_B)
        for lane, start, end in zip(lanes.tolist(), (ends - rows.counts_B).tolist(), ends.tolist(), strict=True):
            if end - start >= SHORTEST:
                self._add(lane, rows.token_ids_N[start:end], int(rows.positions_N[start]), hidden_NF[start:end])

    def _add(self, lane: int, token_ids_T: np.ndarray, first_position: int, hidden_TF: torch.Tensor) -> None:
        """Copies: the rows are the buffer's, which is written again."""
        features = SequenceFeatures(
            torch.from_numpy(token_ids_T.copy()),
            hidden_TF[:, : self._num_aux].clone(),
            hidden_TF[:, self._num_aux :].clone(),
            int(self._prompt_lengths[lane]),
            self.version,
            first_position,
        )
        self._done.append(features)
        self._done_bytes += features.num_bytes
        while self._done_bytes > self._max_bytes and len(self._done) > 1:
            self._done_bytes -= self._done.popleft().num_bytes
