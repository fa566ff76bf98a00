# SPDX-License-Identifier: Apache-2.0
"""A drafter with weights: vLLM's own proposer (EAGLE-3, draft model, MTP), under the requests' own noise.

The networks, their weights and their KV cache are vLLM's; ours are what they sample, for whom and how much they draft, and
that they need not run while nobody asks them. Shapes: B requests of the batch, b of them asked, K draft tokens, R rows of a
step, N rows of some requests.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nemo_specrollout.generation import compat
from nemo_specrollout.generation.compat import StepOutput
from nemo_specrollout.generation.row_buffer import RowBuffer, Rows, StepRows
from nemo_specrollout.generation.sampler import BatchKeys, evidence_levels
from nemo_specrollout.sampling.sampler import sample_tokens_with_margin
from nemo_specrollout.scheduling.draft_time import DraftTimes

UNREAD_BYTES = 64 << 20
"""Room for what a drafter has not read: tokens beyond are read without being asked."""


class CoupledDraftSampling:
    """Stands in for the sampling step of vLLM's proposer: each draft token with the noise of its request and position.

    Bound to one proposer. `begin` before each drafting; margins of the tokens are there after it.
    """

    def __init__(self, proposer: Any, greedy: bool) -> None:
        self._proposer = proposer
        self._always_greedy = greedy
        self._keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        self.margins: list[torch.Tensor] = []

    def begin(self, keys: BatchKeys, rows_b: torch.Tensor, positions_b: torch.Tensor) -> None:
        """The next drafting is for the batch's requests `rows_b`; `positions_b` are those of the first draft tokens."""
        greedy_b = keys.greedy_B[rows_b]
        temperature_b = None if keys.temperature_B is None else keys.temperature_B[rows_b]
        self._keys = (
            keys.seeds_B[rows_b],
            torch.ones_like(greedy_b) if self._always_greedy else greedy_b,
            temperature_b,
            positions_b,
        )
        self.margins = []

    def __call__(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """vLLM's hook: called once for each draft position in turn."""
        assert self._keys is not None
        seeds_b, greedy_b, temperature_b, positions_b = self._keys
        logits_bV = self._proposer.model.compute_logits(hidden_states).to(torch.float32)
        if temperature_b is not None:
            logits_bV = logits_bV / temperature_b.unsqueeze(1)
        tokens_b, margins_b = sample_tokens_with_margin(logits_bV, seeds_b, positions_b + len(self.margins), greedy_b)
        self.margins.append(margins_b)
        return tokens_b, None


class ModelDrafter:
    """Drafts with vLLM's proposer for those who are asked; owns what it has not read, and what its drafting costs.

    Invariant: whatever it skipped, its drafts are those of a drafter that read each token in its step. Where vLLM caches
    prefixes, the full KV blocks of a prompt are read in the step that computes them: requests that share them come and go.
    A request is followed from its first step, or never: what is decoded of others is not kept, and it cannot draft for them.
    """

    def __init__(self, runner: Any, proposer: Any, num_lanes: int, *, greedy: bool) -> None:
        self._runner, self._proposer = runner, proposer
        self._sampling = CoupledDraftSampling(proposer, greedy)
        proposer._sample_draft_tokens = self._sampling
        self._most_rows = proposer.max_num_tokens - num_lanes * proposer.net_num_new_slots_per_request
        row_bytes = proposer.hidden_size * proposer.dtype.itemsize * (3 if runner.use_aux_hidden_state_outputs else 1)
        self.unread = RowBuffer(max(2 * self._most_rows, UNREAD_BYTES // row_bytes), num_lanes)
        self._shares_blocks = bool(runner.cache_config.enable_prefix_caching)
        self.times = DraftTimes()
        self._seconds = 0.0
        self._step: StepOutput | None = None
        self._follows = True
        self._is_followed = np.zeros(num_lanes, np.bool_)
        self._kept_B = np.zeros(0, np.bool_)
        # Of requests that were put aside: what was unread; None where it has missed some.
        self._parked: dict[str, Rows | None] = {}

    def take_seconds(self) -> float:
        """Seconds of drafting and reading since last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def follows_any(self) -> bool:
        """Whether there is a request that it could draft for."""
        return bool(self._is_followed.any())

    def unread_counts(self, lanes_B: np.ndarray) -> np.ndarray:
        """Tokens that it would have to read before it drafts, int64 [B]; 0 of requests that it does not follow."""
        return self.unread.counts(lanes_B) * self._is_followed[lanes_B]

    def follow(self, follows: bool) -> None:
        """Whether it follows the requests that come from now on; if not, it also leaves those that it followed. What it kept
        of them stays until they end: a prompt that is half computed may have to be read."""
        if self._follows and not follows:
            self._is_followed[:] = False
            self._parked = dict.fromkeys(self._parked)
        self._follows = follows

    def open(self, lane: int, req_id: str, num_computed: int) -> None:
        """A request takes `lane`, of which the target has computed so many tokens already; what was unread of them when it
        was put aside still is."""
        is_back, rows = req_id in self._parked, self._parked.pop(req_id, None)
        has_missed = is_back and rows is None and num_computed > 0
        self._is_followed[lane] = self._follows and not has_missed
        if rows is not None and (count := int((rows.positions_N < num_computed).sum())) <= self.unread.room:
            parked = StepRows(np.full(count, lane), rows.positions_N[:count], rows.token_ids_N[:count])
            self.unread.append([rows.hidden_NF], parked)

    def close(self, lane: int, req_id: str, *, is_parked: bool) -> bool:
        """The request of `lane` is gone, or put aside: its KV blocks may be found again when it comes back. Returns whether
        it was followed to its end."""
        was_followed = bool(self._is_followed[lane])
        if is_parked and was_followed:
            rows = self.unread.take(np.array([lane]))
            self._parked[req_id] = replace(rows, hidden_NF=rows.hidden_NF.clone())
        elif is_parked:
            self._parked[req_id] = None
        self.unread.forget([lane])
        self._is_followed[lane] = False
        return was_followed and not is_parked

    def forget_parked(self, is_parked: Callable[[str], bool]) -> None:
        """Of those that were put aside some are gone for good."""
        self._parked = {req_id: parked for req_id, parked in self._parked.items() if is_parked(req_id)}

    def skip(self) -> None:
        """The target's next step has nothing for it: nobody is followed, and no prompt was computed."""
        self._step = None

    def begin(self, step: StepOutput, lanes_B: np.ndarray) -> bool:
        """The target's next step; returns whether any of it is to be kept."""
        self._step = step
        self._kept_B = self._is_followed[lanes_B]
        if self._shares_blocks:
            self._kept_B |= step.is_prompt_B
        return bool(self._kept_B.any())

    def keep(self, new: StepRows, lanes_B: np.ndarray, token_ids_BL: np.ndarray) -> None:
        """Keeps the step's accepted tokens until they are read; reads what is there first, if they would not fit or one
        request's could not be read in one pass."""
        step = self._step
        assert step is not None
        if not self._kept_B.all():
            new = new.masked(np.repeat(self._kept_B, step.num_rows_B))
        unread_B = self.unread.counts(lanes_B)
        if len(new.lanes_R) > self.unread.room:
            self._read(np.flatnonzero(unread_B), lanes_B, token_ids_BL)
        elif int(unread_B.max()) + int(step.num_rows_B.max()) > self._most_rows:
            self._read(np.flatnonzero(unread_B + step.num_rows_B > self._most_rows), lanes_B, token_ids_BL)
        self.unread.append(step.hidden_parts, new)

    def read_prompts(self, lanes_B: np.ndarray, token_ids_BL: np.ndarray) -> None:
        """Reads the prompts of this step that filled a KV block, unless drafts were asked for; of requests that are not
        followed nothing else is wanted."""
        step, block_size = self._step, self._proposer.block_size
        if step is None or not self._shares_blocks or not step.is_prompt_B.any():
            return
        ends_B = step.first_positions_B + step.num_rows_B
        fills_block_B = step.is_prompt_B & (ends_B // block_size > step.first_positions_B // block_size)
        self._read(np.flatnonzero(fills_block_B & (self.unread.counts(lanes_B) > 0)), lanes_B, token_ids_BL)
        self.unread.forget(lanes_B[step.has_prompt_B & ~self._is_followed[lanes_B]].tolist())

    def draft(
        self, rows_b: np.ndarray, lanes_B: np.ndarray, token_ids_BL: np.ndarray, keys: BatchKeys, depth: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`depth` draft tokens for the batch's requests `rows_b`: token ids and evidence levels, [b, depth]."""
        parts = [self._draft(rows, lanes_B, token_ids_BL, keys, depth) for rows in self._groups(rows_b, lanes_B)]
        tokens, levels = zip(*parts, strict=True)
        return np.concatenate(tokens), np.concatenate(levels)

    def _draft(
        self, rows_b: np.ndarray, lanes_B: np.ndarray, token_ids_BL: np.ndarray, keys: BatchKeys, depth: int
    ) -> tuple[np.ndarray, np.ndarray]:
        num_unread = int(self.unread.counts(lanes_B[rows_b]).sum())
        started = time.perf_counter()
        tokens_bK = self._run(rows_b, lanes_B, token_ids_BL, depth, keys)
        margins_bK = torch.stack(self._sampling.margins, dim=1).cpu().numpy()
        levels_bK = evidence_levels(margins_bK)
        self.times.observe(num_unread, len(rows_b), depth, time.perf_counter() - started)
        return tokens_bK, levels_bK

    def _read(self, rows_b: np.ndarray, lanes_B: np.ndarray, token_ids_BL: np.ndarray) -> None:
        for rows in self._groups(rows_b, lanes_B):
            self._run(rows, lanes_B, token_ids_BL, 0, None)

    def _groups(self, rows_b: np.ndarray, lanes_B: np.ndarray) -> list[np.ndarray]:
        """The requests, parted so that what is unread of each group fits into one pass: usually all in one."""
        if len(rows_b) == 0:
            return []
        ends_b = np.cumsum(self.unread.counts(lanes_B[rows_b]))
        if ends_b[-1] <= self._most_rows:
            return [rows_b]
        groups, start, done = [], 0, 0
        for i, end in enumerate(ends_b.tolist()):
            if end - done > self._most_rows:
                groups.append(rows_b[start:i])
                start, done = i, int(ends_b[i - 1])
        return [*groups, rows_b[start:]]

    def _run(
        self, rows_b: np.ndarray, lanes_B: np.ndarray, token_ids_BL: np.ndarray, depth: int, keys: BatchKeys | None
    ) -> np.ndarray:
        """The proposer's passes: one over all unread tokens of the requests, one more for each draft token but the first.
        Returns the draft tokens, [b, depth]."""
        assert self._step is not None
        started = time.perf_counter()
        rows = self.unread.take(lanes_B[rows_b])
        ends_b = rows.positions_N[np.cumsum(rows.counts_B) - 1] + 1
        device = rows.hidden_NF.device
        positions_N = torch.from_numpy(rows.positions_N).to(device)
        if keys is not None:
            self._sampling.begin(keys, torch.from_numpy(rows_b).to(device), torch.from_numpy(ends_b + 1).to(device))
        tokens_bK = self._proposer.propose(
            num_speculative_tokens=depth,
            target_token_ids=torch.from_numpy(rows.token_ids_N).to(device),
            target_positions=positions_N,
            target_hidden_states=rows.hidden_NF,
            next_token_ids=torch.from_numpy(token_ids_BL[rows_b, ends_b]).to(device),
            token_indices_to_sample=None,
            common_attn_metadata=compat.attention_of_rows(
                self._step.attention, rows_b, rows.counts_B, ends_b, positions_N, self._proposer.block_size
            ),
            sampling_metadata=self._runner.input_batch.sampling_metadata,
        )
        result = tokens_bK.cpu().numpy()
        self._seconds += time.perf_counter() - started
        return result
