# SPDX-License-Identifier: Apache-2.0
"""The drafter `history`, which drafts from earlier responses to the same prompt, by any engine and from any start of the run.

The responses are kept in files (`history/service.py`), which a thread reads and writes while engine steps go on. This module
only moves texts between that thread and the device. It passes the texts of ended requests to the thread, and feeds the texts
that the thread has read to a context index on the device.

Shapes: S request slots, L longest text, N requests that have ended, H pieces of text that are fed at a time.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.config.drafter_configs import HistoryDrafterConfig
from nemo_specrollout.drafters.base import Texts
from nemo_specrollout.drafters.device_index import NO_SALT, ContextIndex, Lookup, context_orders, slots_for
from nemo_specrollout.drafters.participant import Drafter, Put
from nemo_specrollout.generation.engine.requests import NewRequest
from nemo_specrollout.generation.engine.tokenizer_fingerprint import tokenizer_fingerprint
from nemo_specrollout.generation.engine.transfers import StageTimer, copy_to_device, to_device, to_host
from nemo_specrollout.history.feeding import PIECE, Feeding, tokens_of_index
from nemo_specrollout.history.segments import Text
from nemo_specrollout.history.service import HistoryFacts, HistoryService, Piece
from nemo_specrollout.history.store import HistoryStore

FOLDER = "history"
"""Name of the folder with the history's files. It lies in the folder for everything that a run learns."""
PIECES = 16
"""Largest number of pieces of text that are fed to the context index at a time."""
COPIED = 32
"""Largest number of requests whose texts are copied from the device together."""
FEED_SHARE = 0.01
"""Largest share of the engine's time that feeding the context index may take."""
LEAST_FED = 256
"""Fewest tokens that are fed to the context index at a time, because feeding fewer takes hardly less time."""
_SHORTEST = 4
"""Responses with fewer tokens are not kept."""


class _Open(NamedTuple):
    """Facts about a running request that are needed to keep its response."""

    group: int
    first: int
    """Index in the request's text of the first token to keep. It is one of the prompt's last tokens."""
    num_context: int
    """How many of the prompt's last tokens are kept. They are the context of the response's first tokens."""
    limit: int
    stop_token_ids: frozenset[int]

    def text(self, tokens: np.ndarray) -> tuple[Text | None, bool]:
        """Returns the text to keep, and whether the response has ended. The text is None if the response is too short.

        `tokens` are the request's tokens from index `first` on.
        """
        response = tokens[self.num_context : self.limit - self.first]
        # An asynchronous engine may have sampled tokens after the response's last one, before it knew that it was the last.
        stops = [places[0] for stop in self.stop_token_ids if len(places := np.flatnonzero(response == stop))]
        num_tokens = int(min(stops)) + 1 if stops else len(response)
        has_ended = bool(stops) or self.first + self.num_context + num_tokens >= self.limit
        if num_tokens < _SHORTEST:
            return None, has_ended
        return Text(self.group, self.num_context, tokens[: self.num_context + num_tokens].copy()), has_ended


@dataclass(frozen=True)
class _Copied:
    """Texts that are being copied from the device to the host."""

    opened: list[_Open]
    base: int
    """Index of the first token that was copied of each text."""
    tokens_NL: torch.Tensor
    lengths_N: torch.Tensor
    """Number of tokens of each whole text, including the tokens before index `base`, which were not copied."""
    arrived: Any
    """CUDA event that is recorded after the copies, or None on a CPU."""

    def texts(self) -> list[tuple[Text | None, bool]]:
        """Waits for the copies. Returns for each request the text to keep (or None), and whether its response has ended."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = zip(self.opened, self.tokens_NL.numpy(), self.lengths_N.tolist(), strict=True)
        return [one.text(row[one.first - self.base : max(length - self.base, 0)]) for one, row, length in rows]

    def whole(self) -> list[Text]:
        """Waits for the copies. Returns the texts that are long enough to keep. All of their requests must have ended."""
        return [text for text, _ in self.texts() if text is not None]


class HistoryDrafter(Drafter):
    """Finds a request's last tokens in earlier responses to the same prompt, and proposes the tokens that followed them there.

    Owns a context index, which is fed only with earlier responses from the history's files, and the service that reads and
    writes these files. Because this drafter has an index of its own, the draft board learns and counts separately how good its
    drafts are.
    """

    name = "history"

    def __init__(self, config: HistoryDrafterConfig, learned: LearnedConfig, runner: Any) -> None:
        """Allocates the context index for vLLM's model runner `runner`, and starts to read the history in `learned.folder`."""
        assert learned.folder is not None
        self._states = runner.req_states
        self._device = runner.device
        orders = context_orders(1, config.max_order)
        slots = config.num_slots or max(slots_for(runner.max_num_reqs, runner.max_model_len, orders) // 2, 1 << 10)
        self.index = ContextIndex(slots, orders, self._device)
        self._num_context = orders[-1]
        self._salts_S = torch.full((runner.max_num_reqs,), NO_SALT, dtype=torch.int64, device=self._device)
        self._learned_S = torch.zeros_like(self._salts_S, dtype=torch.int32)
        # Buffers of what is fed, with one row for each piece.
        shape = (PIECES, PIECE + self._num_context)
        self._tokens_HL = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._numbers_3H = torch.zeros(3, PIECES, dtype=torch.int32, device=self._device)
        """Three numbers for each piece of text: its row in `_tokens_HL`, its number of tokens, and how many tokens at its
        beginning are only contexts. The row is -1 where there is no piece."""
        self._groups_H = torch.zeros(PIECES, dtype=torch.int64, device=self._device)
        self._open: dict[int, _Open] = {}
        self._kept: set[int] = set()
        """Slots of requests whose responses are kept already, or must not be kept."""
        self._slots_of: dict[int, set[int]] = {}
        """Slots of the running requests, by group (the hash of their prompt)."""
        self._allowed: set[int] = set()
        """Groups (hashes of prompts) that have running requests and for which the index has texts."""
        self._timer = StageTimer(self._device)
        self._token_s = 0.0
        """Seconds that it takes to feed one token to the index, or 0 while this is unknown."""
        self._fed_at = time.perf_counter()
        store = HistoryStore(
            Path(learned.folder) / FOLDER, learned.history_bytes, tokenizer_fingerprint(runner.vllm_config.model_config)
        )
        feeding = Feeding(tokens_of_index(slots, orders))
        self.service = HistoryService(store, feeding, self._num_context, runner.vocab_size)

    def lookup(self, drafter: int) -> Lookup:
        return Lookup(self.index, self._salts_S, self._learned_S, drafter, learns=False)

    def open(self, slots: torch.Tensor, requests: Sequence[NewRequest], put: Put) -> None:
        groups = [request.identity.group for request in requests]
        self._salts_S[slots] = put([group if group in self._allowed else NO_SALT for group in groups], np.int64)
        for request in requests:
            who = request.identity
            self._slots_of.setdefault(who.group, set()).add(request.slot)
            num_context = min(request.prompt_length, self._num_context)
            first = request.prompt_length - num_context
            kept = _Open(who.group, first, num_context, request.limit, request.stop_token_ids)
            self._open[request.slot] = kept
            if who.is_early or not who.speculate:  # early requests are decoded again when their step comes
                self._kept.add(request.slot)
        self.service.opened(groups)

    def ended(self, slots: Sequence[int]) -> None:
        """Starts to keep the responses of the requests in `slots`, which have ended but still have their slots."""
        self._keep([slot for slot in slots if slot in self._open and slot not in self._kept])

    def close(self, slots: Sequence[int]) -> None:
        groups = []
        for slot in slots:
            if (request := self._open.pop(slot, None)) is not None:
                self._kept.discard(slot)
                groups.append(request.group)
                of_group = self._slots_of[request.group]
                of_group.discard(slot)
                if not of_group:
                    del self._slots_of[request.group]
                    self._allowed.discard(request.group)
        self.service.closed(groups)

    def end_rollout(self) -> None:
        """Keeps the responses of requests that have ended, but whose slots vLLM has not freed yet.

        The last requests of a rollout keep their slots until the next engine step, which may never come. The call waits for
        the device, which is idle at the end of a rollout, but not for the disk.
        """
        with gpu_sync_allowed():
            self._keep_ended([slot for slot in self._open if slot not in self._kept])

    def feed(self) -> None:
        """Feeds texts that are ready to the context index, as far as the share `FEED_SHARE` of the engine's time allows."""
        if not self.service.has_pieces:
            return
        for num_tokens, seconds in self._timer.finished():
            self._token_s = seconds / num_tokens if num_tokens else self._token_s
        now = time.perf_counter()
        most_tokens = int(FEED_SHARE * (now - self._fed_at) / self._token_s) if self._token_s else LEAST_FED
        if most_tokens < LEAST_FED:
            return
        self._fed_at = now
        pieces = self.service.take(most_tokens, PIECES)
        texts = [piece for piece in pieces if len(piece.tokens)]
        if texts:
            self._timer.start()
            self._learn(texts)
            self._timer.stop(sum(len(piece.tokens) for piece in texts))
        self._allow({piece.group for piece in pieces})

    def warm_up(self) -> None:
        """Calls the kernels of the context index without any text, so that they are compiled before the engine serves."""
        self._learn([])

    def facts(self) -> HistoryFacts:
        return self.service.facts()

    def _learn(self, pieces: Sequence[Piece]) -> None:
        tokens_HL = np.zeros(self._tokens_HL.shape, np.int32)
        numbers_3H = np.zeros(self._numbers_3H.shape, np.int32)
        numbers_3H[0] = -1
        groups_H = np.zeros(PIECES, np.int64)
        for h, piece in enumerate(pieces):
            tokens_HL[h, : len(piece.tokens)] = piece.tokens
            numbers_3H[:, h] = (h, len(piece.tokens), piece.num_context)
            groups_H[h] = piece.group
        copy_to_device(tokens_HL, self._tokens_HL)
        copy_to_device(numbers_3H, self._numbers_3H)
        copy_to_device(groups_H, self._groups_H)
        rows_H, lengths_H, learned_H = self._numbers_3H
        self.index.learn(Texts(rows_H, lengths_H, self._tokens_HL), self._groups_H, learned_H, PIECE)

    def _allow(self, groups: set[int]) -> None:
        """Lets the drafter propose for the running requests of these groups, because the index now has texts for them."""
        at_work = groups & self._slots_of.keys()
        self._allowed |= at_work
        slots = [slot for group in at_work for slot in self._slots_of[group]]
        if not slots:
            return
        salts = [self._open[slot].group for slot in slots]
        slots_N = to_device(slots, np.int64, self._device)
        self._salts_S[slots_N] = to_device(salts, np.int64, self._device)

    def _keep(self, slots: Sequence[int]) -> None:
        """Starts to copy the texts in `slots` to the host. The history thread waits for the copies and writes the texts."""
        for copied, some in self._copies(slots):
            self._kept.update(some)
            self.service.ended(copied.whole)

    def _keep_ended(self, slots: Sequence[int]) -> None:
        """Keeps the responses in `slots` whose tokens show that they have ended. The other requests may still go on."""
        for copied, some in self._copies(slots):
            found = [(slot, text) for slot, (text, has_ended) in zip(some, copied.texts(), strict=True) if has_ended]
            self._kept.update(slot for slot, _ in found)
            texts = [text for _, text in found if text is not None]
            self.service.ended(partial(list, texts))

    def _copies(self, slots: Sequence[int]) -> Iterator[tuple[_Copied, Sequence[int]]]:
        """Starts to copy the texts in `slots` to the host, at most `COPIED` at a time. Yields each copy and the slots in it.

        All texts of a copy begin at the same index, so that for each of its requests all tokens to keep are copied.
        """
        states = self._states
        is_cuda = self._device.type == "cuda"
        for begin in range(0, len(slots), COPIED):
            some = slots[begin : begin + COPIED]
            opened = [self._open[slot] for slot in some]
            base = min(one.first for one in opened)
            slots_N = to_device(some, np.int64, self._device)
            lengths_N = states.total_len.gpu.index_select(0, slots_N)
            end = max(one.limit for one in opened) if is_cuda else max(int(lengths_N.max()), base)
            tokens_NL = states.all_token_ids.gpu[:, base:end].index_select(0, slots_N)
            arrived = None
            if is_cuda:
                tokens_NL, lengths_N = map(to_host, (tokens_NL, lengths_N))
                arrived = torch.cuda.Event(blocking=True)
                arrived.record()
            yield _Copied(opened, base, tokens_NL, lengths_N, arrived), some
