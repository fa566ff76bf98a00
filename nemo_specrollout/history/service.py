# SPDX-License-Identifier: Apache-2.0
"""Runs a thread that reads and writes an engine's history files, so that no engine step waits for a file.

The history has earlier responses by prompt. The engine's own thread tells the history thread which requests have begun and
ended. The history thread hands back pieces of earlier responses, which the engine feeds to its context index. Each direction
is a queue, so neither thread waits for the other.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.history.feeding import PIECE, Feeding
from nemo_specrollout.history.segments import Place, Text
from nemo_specrollout.history.store import HistoryStore

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Shortest time in seconds between two checks for texts that other engines have written."""
LOOK_SHARE = 0.02
"""Largest share of the history thread's time that is spent on checking for texts of other engines. If the checks are slow,
they become rarer."""
MOST_READY = 64
"""Number of pieces that may wait for the engine. While so many wait, no further piece is prepared."""


class Piece(NamedTuple):
    """A part of an earlier response, ready to be fed to a context index."""

    group: int
    """Hash of the text's prompt, which is the same for all samples of the prompt."""
    num_context: int
    """Number of tokens at the beginning that only serve as contexts. They belong to the prompt or to the previous piece."""
    tokens: np.ndarray
    """Token ids, int32. A piece without tokens tells the drafter that the index already knows texts of the group."""


@dataclass(frozen=True)
class HistoryFacts:
    """Figures about an engine's history, which are written to the record of the run."""

    num_read: int
    """Number of texts that were in the history when the engine started."""
    bytes_read: int
    """Size of the history's files in bytes when the engine started."""
    num_written: int
    """Number of texts that this engine has written to the history."""
    num_fed: int
    """Number of texts that were fed to this engine's context index."""
    num_from_others: int
    """How many of the fed texts were written by another engine or by an earlier start of the run."""


class HistoryService:
    """Reads and writes the history for one engine, in a thread of its own.

    Owns the engine's `HistoryStore`, the thread, and the pieces of texts that wait for the engine.
    """

    def __init__(self, store: HistoryStore, feeding: Feeding, num_context: int, vocab_size: int) -> None:
        """Starts the history thread. `feeding` chooses the texts that are fed to the context index.

        Each piece of a text begins with up to `num_context` tokens from before it, as context for its first new tokens. A text
        is cut off before its first token id that is negative or not below `vocab_size`, because the policy's embedding has no
        row for it.
        """
        self._store = store
        self._feeding = feeding
        self._num_context = num_context
        self._vocab_size = vocab_size
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: deque[Piece] = deque()
        self._at_work: Counter[int] = Counter()
        """Number of running requests of each group. A group is the hash of a prompt."""
        self._waiting: dict[int, deque[Place]] = {}
        """Places of the texts that wait to be fed, by group (the hash of a prompt). The groups take turns, so that each of
        them soon has a text in the index."""
        self._pieces: Iterator[Piece] = iter(())
        """Pieces that are left of the text that is being read."""
        self._num_written = 0
        self._num_fed = 0
        self._num_from_others = 0
        self._thread = threading.Thread(target=self._run, name="specrollout-history", daemon=True)
        self._thread.start()

    # Calls from the engine's thread. None of them waits except `settle` and `close`.

    def opened(self, groups: Sequence[int]) -> None:
        """Notes that requests have begun. `groups` has the hash of each request's prompt.

        The history thread then reads the earlier responses to these prompts that the context index does not know yet.
        """
        self._events.put(lambda: self._begin(groups))

    def closed(self, groups: Sequence[int]) -> None:
        """Notes that requests have left the engine. `groups` has the hash of each request's prompt."""
        self._events.put(lambda: self._end(groups))

    def ended(self, texts: Callable[[], list[Text]]) -> None:
        """Queues the responses of ended requests for writing.

        The history thread calls `texts` to get the responses. That call may wait for the device.
        """
        self._events.put(lambda: self._write(texts()))

    def take(self, most_tokens: int, most_pieces: int) -> list[Piece]:
        """Returns up to `most_pieces` pieces that are ready to be fed, with at most `most_tokens` tokens in total.

        If the first piece alone has more tokens than that, it is returned alone.
        """
        pieces = list[Piece]()
        num_tokens = 0
        while self._ready and len(pieces) < most_pieces:
            num_tokens += len(self._ready[0].tokens)
            if pieces and num_tokens > most_tokens:
                break
            pieces.append(self._ready.popleft())
        return pieces

    @property
    def has_pieces(self) -> bool:
        return bool(self._ready)

    def settle(self, timeout_s: float) -> bool:
        """Waits until the history thread has done all queued work. Returns False if `timeout_s` seconds do not suffice."""
        done = threading.Event()
        self._events.put(done.set)
        return done.wait(timeout_s)

    def facts(self) -> HistoryFacts:
        store = self._store
        return HistoryFacts(store.num_read, store.bytes_read, self._num_written, self._num_fed, self._num_from_others)

    def take_problems(self) -> list[str]:
        """Returns a sentence for each problem with the history's files that has appeared since the last call."""
        return self._store.take_problems()

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes all responses that are still queued and ends the thread. Waits for that up to `timeout_s` seconds."""
        self._events.put(None)
        self._thread.join(timeout_s)

    # What the thread does.

    def _run(self) -> None:
        self._safely(self._store.open)
        next_look = time.monotonic() + LOOK_S
        while True:
            num_ready = len(self._ready)
            if num_ready < MOST_READY:
                self._safely(self._prepare)
            waits_s = 0.0 if len(self._ready) > num_ready else max(next_look - time.monotonic(), 0.0)
            with suppress(queue.Empty):
                event = self._events.get(timeout=waits_s) if waits_s else self._events.get_nowait()
                if event is None:
                    break
                self._safely(event)
            if time.monotonic() >= next_look:
                started = time.monotonic()
                self._safely(self._look)
                took = time.monotonic() - started
                next_look = time.monotonic() + max(LOOK_S, took / LOOK_SHARE)
        self._safely(self._store.close)

    def _safely(self, work: Callable[[], Any]) -> None:
        """Calls `work` and logs its errors instead of raising them.

        An error must not end the thread, because an engine must keep running even if its history fails.
        """
        try:
            work()
        except Exception:
            logger.exception("specrollout: the history of responses failed, and goes on")

    def _prepare(self) -> None:
        """Reads the next piece of a waiting text, if there is one, and makes it ready for the engine."""
        if (piece := self._next_piece()) is not None:
            self._ready.append(piece)

    def _begin(self, groups: Sequence[int]) -> None:
        new = {group for group in groups if not self._at_work[group]}
        self._at_work.update(groups)
        for group in sorted(new):
            self._choose(group)

    def _choose(self, group: int) -> None:
        places, is_known = self._feeding.chosen(self._store.find(group), len(self._at_work))
        self._wait(group, places)
        if is_known:
            self._ready.append(Piece(group, 0, np.zeros(0, np.int32)))

    def _wait(self, group: int, places: Sequence[Place]) -> None:
        if places:
            self._waiting.setdefault(group, deque()).extend(places)

    def _end(self, groups: Sequence[int]) -> None:
        self._at_work.subtract(groups)
        for group in set(groups):
            if self._at_work[group] <= 0:
                del self._at_work[group]

    def _write(self, texts: list[Text]) -> None:
        self._num_written += len(self._store.append(texts))

    def _look(self) -> None:
        """Finds other engines' responses to the prompts of running requests, and queues them for the context index."""
        for name, first, groups_R in self._store.refresh():
            at_work_R = np.isin(groups_R, np.fromiter(self._at_work, np.int64, len(self._at_work)))
            for i in np.flatnonzero(at_work_R).tolist():
                self._wait(int(groups_R[i]), [Place(name, first + i)])

    def _next_piece(self) -> Piece | None:
        piece = next(self._pieces, None)
        while piece is None and self._waiting:
            group = next(iter(self._waiting))
            places = self._waiting.pop(group)
            place = places.popleft()
            if not self._at_work[group]:
                continue
            if places:
                self._waiting[group] = places  # at the end, so that the other groups come first
            if (text := self._store.read(place)) is None:
                continue
            self._feeding.fed(place, len(text.tokens))
            self._num_fed += 1
            self._num_from_others += not self._store.is_own(place)
            self._pieces = self._parts(text)
            piece = next(self._pieces, None)
        return piece

    def _parts(self, text: Text) -> Iterator[Piece]:
        """Yields a text in pieces, each of which begins with the last tokens before it as context."""
        unknown = np.flatnonzero((text.tokens < 0) | (text.tokens >= self._vocab_size))
        tokens = text.tokens[: unknown[0] if len(unknown) else None]
        for begin in range(text.num_context, len(tokens), PIECE):
            num_before = min(begin, self._num_context)
            yield Piece(text.group, num_before, tokens[begin - num_before : begin + PIECE])
