# SPDX-License-Identifier: Apache-2.0
"""Captures features for the training of a draft head during the rollout, where the policy computes them anyway.

Only a sample of the requests is captured, so that capturing takes a bounded share of the engine's time and memory. Each engine
step copies the rows of captured requests to a buffer on the device, without a sync. When the buffer is full, it is copied to
the host.

Shapes: B requests of the batch, S request slots, R rows of a forward pass, M of them kept, N rows of the buffer, F features of
a row.
"""

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from nemo_specrollout.drafters.participant import DraftStep, Participant, Put
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.transfers import StageTimer
from nemo_specrollout.heads.features.feature_store import FeatureSource, FeatureStore
from nemo_specrollout.heads.features.features import SequenceFeatures
from nemo_specrollout.heads.serving.head_loading import aux_layer_ids
from nemo_specrollout.sampling.seeds import combine

SHORTEST = 8
"""Minimum length of a captured sequence in tokens. Shorter ones are not worth training on."""
CAPTURE_BYTES = 64 << 20
"""Size of the buffer on the device that holds captured features, in bytes. It is larger if one engine step needs more."""
CAPTURE_TIME_SHARE = 0.02
"""Maximum share of the engine's time that capturing may take."""
OUTBOX_BYTES = 512 << 20
"""Maximum number of bytes of captured sequences that the host keeps until `FeatureCapture.take` returns them."""


@dataclass
class _Sequence:
    """A captured request, with those of its tokens and hidden states that have reached the host."""

    request: NewRequest
    version: int
    """Policy version of the weights that computed the hidden states."""
    first_position: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class FeatureCapture(Participant):
    """Captures the features of a sample of the requests, and hands them out as `SequenceFeatures`.

    It owns the buffer on the device, and the captured sequences until `take` returns them. If they exceed `OUTBOX_BYTES`, the
    oldest are dropped. When the weights change, a running sequence is cut in two, so that each part has one policy version.

    The seed of a request decides whether it is captured. Requests of coming steps are never captured, because they are decoded
    again in their own step. While capturing has taken more than its share of the engine's time, no new request is captured. On
    a GPU, this time is measured on the device, because the host only launches the work.
    """

    def __init__(self, runner: Any, share: float) -> None:
        """Allocates the buffer for features on the device now, so that vLLM's memory profile includes it.

        `runner` is the engine's vLLM model runner. `share` is the share of its requests that is captured.
        """
        num_features = (len(aux_layer_ids(runner) or ()) + 1) * runner.model_config.get_hidden_size()
        self._capacity = max(runner.max_num_tokens, CAPTURE_BYTES // (num_features * runner.dtype.itemsize))
        self._shape = (self._capacity, num_features)
        self._dtype = runner.dtype
        self._share = share
        self._device = runner.device
        self._num_hidden = runner.model_config.get_hidden_size()
        self._ids_S = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=self._device)
        self._id_of_slot = np.zeros(runner.max_num_reqs, np.int32)
        self._num_opened = 0
        """Number of requests that were chosen so far. It is also the number by which rows in the buffer name the latest of
        them."""
        self._num_rows = 0
        """Number of rows of the buffer that are in use."""
        self._under_way: dict[int, _Sequence] = {}
        self._ended: set[int] = set()
        self._done: deque[SequenceFeatures] = deque()
        self._done_bytes = 0
        self._started = time.perf_counter()
        self._timer = StageTimer(self._device)
        self._store: FeatureStore | None = None
        self.version = 0
        """Version of the engine's weights."""
        self.seconds = 0.0
        """Seconds that captures have taken on the device, without those that are still running."""
        self.woke_up()

    def woke_up(self) -> None:
        """Allocates the buffer on the device. Called at the start and when the engine wakes up from sleep."""
        self._hidden_NF = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._rows_N3 = torch.zeros(self._capacity, 3, dtype=torch.int32, device=self._device)

    def release(self) -> None:
        """Copies the rows of the buffer to the host and frees the buffer. Called before the engine goes to sleep."""
        self._flush()
        del self._hidden_NF, self._rows_N3

    def open(self, slots: torch.Tensor, requests: Sequence[NewRequest], put: Put) -> None:
        """Decides which of the requests that have just taken `slots` are captured."""
        self._count_seconds()
        is_in_time = self.seconds <= CAPTURE_TIME_SHARE * (time.perf_counter() - self._started)
        for request in requests:
            is_chosen = combine(request.identity.seed, 1) < self._share * 2.0**64
            is_captured = is_in_time and is_chosen and not request.identity.is_early
            self._num_opened += is_captured
            self._id_of_slot[request.slot] = self._num_opened if is_captured else 0
            if is_captured:
                self._under_way[self._num_opened] = _Sequence(request, self.version)
        self._ids_S[slots] = put(self._id_of_slot[[r.slot for r in requests]].tolist(), np.int32)

    def close(self, slots: Sequence[int]) -> None:
        """Ends the capture of the requests in `slots`."""
        self._ended |= {int(self._id_of_slot[slot]) for slot in slots} - {0}
        self._id_of_slot[list(slots)] = 0

    def observe(self, step: DraftStep) -> None:
        """Copies the rows of captured requests in an engine step to the buffer, without the rows of rejected draft tokens."""
        batch, _, _, final_hidden_RH, aux_hidden, _, num_rejected_B, *_ = step.inputs
        captured_B = self._id_of_slot[batch.idx_mapping_np] > 0
        num_most = int(batch.num_scheduled_tokens[captured_B].sum())
        if num_most == 0:
            return
        self._count_seconds()
        self._timer.start()
        if self._num_rows + num_most > self._capacity:
            with gpu_sync_allowed():
                self._flush()
        ids_R = self._owners(batch, num_rejected_B)
        place_R = torch.where(ids_R > 0, (ids_R > 0).cumsum(0) - 1, num_most)
        rows_R = torch.arange(len(ids_R), device=self._device)
        kept_M, ids_M = (v_R.new_zeros(num_most + 1).scatter_(0, place_R, v_R)[:num_most] for v_R in (rows_R, ids_R))
        new = slice(self._num_rows, self._num_rows + num_most)
        columns = (ids_M, batch.positions[kept_M].int(), batch.input_ids[kept_M].int())
        self._rows_N3[new] = torch.stack(columns, dim=1)
        parts = [*(aux_hidden or []), final_hidden_RH]
        torch.cat([part[kept_M] for part in parts], dim=1, out=self._hidden_NF[new])
        self._num_rows += num_most
        self._timer.stop(None)

    def _count_seconds(self) -> None:
        """Adds the time of captures that have ended on the device to `seconds`, without waiting for those that still run."""
        self.seconds += sum(seconds for _, seconds in self._timer.finished())

    def _owners(self, batch: Any, num_rejected_B: torch.Tensor) -> torch.Tensor:
        """Returns for each row of the forward pass the number of its captured request, int32 [R].

        The number is 0 for the rows of other requests and for rows of rejected draft tokens.
        """
        ends_B = batch.query_start_loc[1 : batch.num_reqs + 1]
        rows_R = torch.arange(batch.num_tokens, dtype=ends_B.dtype, device=self._device)
        request_R = torch.searchsorted(ends_B, rows_R, right=True).clamp_(max=batch.num_reqs - 1)
        is_kept_R = rows_R < (ends_B - num_rejected_B)[request_R]
        return self._ids_S[batch.idx_mapping][request_R] * is_kept_R

    def weights_updated(self, version: int) -> None:
        """Ends the captured part of each running sequence and begins another, because policy version `version` is used now."""
        self._flush()
        for key in list(self._under_way):
            sequence = self._under_way[key]
            self._finish(sequence)
            self._under_way[key] = _Sequence(sequence.request, version)
        self.version = version

    def take(self) -> list[SequenceFeatures]:
        """Returns the captured features that are complete, and forgets them.

        The features of a request are complete when it has ended. For a running request, the features up to a change of the
        weights or up to a missing row are complete.
        """
        self._flush()
        for key in self._ended:
            self._finish(self._under_way.pop(key))
        self._ended.clear()
        done = list(self._done)
        self._done = deque()
        self._done_bytes = 0
        return done

    def store(self, folder: str, max_bytes: int, held_out_share: float, source: Mapping[str, Any]) -> None:
        """Writes the features that `take` returns to the feature store in `folder`.

        `source` has the fields of a `FeatureSource`, and the other arguments are those of `FeatureStore`. Raises OSError or
        ValueError if the store cannot be written.
        """
        if self._store is None:
            fields = {**source, "layer_ids": tuple(source["layer_ids"])}
            self._store = FeatureStore(Path(folder), max_bytes, FeatureSource(**fields), held_out_share)
            self._store.forget_after(self.version)
        self._store.keep(self.take())

    def _flush(self) -> None:
        """Copies the rows of the buffer to the host, appends each to its sequence, and empties the buffer."""
        if self._num_rows == 0:  # while the engine sleeps there is no buffer
            return
        rows_N3 = self._rows_N3[: self._num_rows].cpu().numpy()
        hidden_NF = self._hidden_NF[: self._num_rows].cpu()
        by_owner = np.argsort(rows_N3[:, 0], kind="stable")
        owners, starts = np.unique(rows_N3[by_owner, 0], return_index=True)
        for owner, places in zip(owners.tolist(), np.split(by_owner, starts[1:]), strict=True):
            if owner:
                self._append(owner, rows_N3[places, 1], rows_N3[places, 2], hidden_NF[places])
        self._num_rows = 0

    def _append(self, key: int, positions: np.ndarray, tokens: np.ndarray, hidden: torch.Tensor) -> None:
        """Appends rows to the captured sequence with number `key`. Where positions are missing, it begins a new part."""
        cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
        for start, end in itertools.pairwise(cuts):
            sequence = self._under_way[key]
            if sequence.tokens and positions[start] != sequence.first_position + sum(map(len, sequence.tokens)):
                self._finish(sequence)
                sequence = self._under_way[key] = _Sequence(sequence.request, sequence.version)
            if not sequence.tokens:
                sequence.first_position = int(positions[start])
            sequence.tokens.append(tokens[start:end])
            sequence.hidden.append(hidden[start:end])

    def _finish(self, sequence: _Sequence) -> None:
        """Adds a captured sequence to those that `take` returns, unless it has fewer than `SHORTEST` tokens.

        The last token of the response is left out, and so are any rows after it. Such rows occur because with asynchronous
        scheduling an engine may compute one more engine step before it learns that a request has ended.
        """
        request = sequence.request
        first = sequence.first_position
        tokens = np.concatenate(sequence.tokens) if sequence.tokens else np.zeros(0, np.int32)
        num_prompt = max(request.prompt_length - first, 0)
        stops = num_prompt + np.flatnonzero(np.isin(tokens[num_prompt:], list(request.stop_token_ids)))
        length = min(*stops[:1].tolist(), len(tokens), request.limit - 1 - first)
        if length < SHORTEST:
            return
        hidden_TF = torch.cat(sequence.hidden)[:length]
        prompt_ids = request.token_ids[: request.prompt_length]
        features = SequenceFeatures(
            torch.from_numpy(tokens[:length]),
            hidden_TF[:, : -self._num_hidden].clone(),
            hidden_TF[:, -self._num_hidden :].clone(),
            request.prompt_length,
            sequence.version,
            first,
            torch.tensor(prompt_ids, dtype=torch.int32) if first else None,
        )
        self._done.append(features)
        self._done_bytes += features.num_bytes
        while self._done_bytes > OUTBOX_BYTES and len(self._done) > 1:
            self._done_bytes -= self._done.popleft().num_bytes
