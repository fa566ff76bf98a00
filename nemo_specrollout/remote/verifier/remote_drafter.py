# SPDX-License-Identifier: Apache-2.0
"""Drafters that live elsewhere, as one drafter of an engine: proposes what has come from them by now, and never waits."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.remote.protocol.messages import FrameError
from nemo_specrollout.remote.protocol.peers import PeerState, PolicyModel, Sampling
from nemo_specrollout.remote.protocol.transport import VerifierSocket
from nemo_specrollout.remote.protocol.verifier_side import VerifierSide
from nemo_specrollout.remote.verifier.stream import DraftStream

NOWHERE = ""
"""The address of a drafter that is not placed yet."""


@dataclass(frozen=True)
class StreamRequest:
    """A request that takes a slot: the seed of its noise, how it is sampled, how long it may get, and its text so far."""

    slot: int
    seed: int
    sampling: Sampling
    limit: int
    token_ids: Sequence[int]


class RemoteDrafter:
    """Owns the sockets, one to each drafter, the requests' texts as the host knows them, and the draft stream; the protocol is
    `VerifierSide`'s. Nothing is connected before the first request.

    A drafter has one address at a time, or is `NOWHERE`: then nothing is sent to it. Tokens may reach the host in another
    thread than that of the steps: a lock stands around all that the host does, which is short.

    Example: `open(...)` when requests take slots; in each step `propose(...)` on the device and `tell = awaits(slots)`;
    `tell(token_ids)` when the step's tokens are on the host, be it steps later; `close(...)` at the end.
    """

    name = "remote"

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        num_slots: int,
        max_model_len: int,
        most_ahead: int,
        model: PolicyModel,
        stream: DraftStream,
    ) -> None:
        self.stream = stream
        self._addresses, self._secret = [NOWHERE] * len(addresses), secret
        self._sockets: list[VerifierSocket | None] = [None] * len(addresses)
        self.side = VerifierSide(secrets.randbits(62), num_slots, len(addresses), most_ahead, model, NUM_LEVELS)
        self._token_ids_SL = np.zeros((num_slots, max_model_len), np.int32)
        self._lengths_S = np.zeros(num_slots, np.int64)
        self._tenures_S = np.zeros(num_slots, np.int64)  # odd while a request has the slot
        self._lock = Lock()
        self._host_s = 0.0
        for drafter in range(len(addresses)):
            self.side.moved(drafter, nowhere="not placed yet")
        self.listen_to(addresses, secret)

    def listen_to(self, addresses: Sequence[str], secret: bytes) -> None:
        """Where the drafters are from now on, in their order, and what they and we prove to know."""
        with self._lock:
            self._secret = secret
            for drafter, address in enumerate(addresses):
                if address != self._addresses[drafter]:
                    self._hang_up(drafter)
                    self._addresses[drafter] = address
                    self.side.moved(drafter, nowhere="" if address else "not placed yet")

    def open(self, requests: Sequence[StreamRequest]) -> None:
        """Requests take their slots; drafters read their texts while the engine does."""
        with self._lock:
            for r in requests:
                self._vacate(r.slot)
                if r.limit > len(r.token_ids):  # else it is not to be drafted for
                    self._tenures_S[r.slot] += 1
                    self._token_ids_SL[r.slot, : len(r.token_ids)] = r.token_ids
                    self._lengths_S[r.slot] = len(r.token_ids)
                    self.side.open(r.slot, r.seed, r.sampling, r.limit)
            self._exchange()

    def close(self, slots: Sequence[int]) -> None:
        """The requests of `slots` are done, or put aside."""
        with self._lock:
            for slot in slots:
                self._vacate(slot)

    def awaits(self, slots_B: np.ndarray) -> Callable[[Sequence[Sequence[int]]], None]:
        """What is to be told the tokens of a step's requests, as soon as they are on the host, in whichever thread."""
        return partial(self._committed, slots_B.tolist(), self._tenures_S[slots_B].tolist())

    def propose(
        self,
        slots_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        """Hears what came; then `DraftStream.propose`."""
        with self._lock:
            self._receive()
            self.side.tails.write(self.stream.table_SX)
        self.stream.propose(slots_B, total_len_S, token_ids_SL, tokens_BK, levels_BK, found_B)

    def stats(self) -> DrafterStats:
        """How well the drafters keep up."""
        num_request_steps, num_supplied, num_at_hand = self.stream.counts_3.tolist()
        with self._lock:
            peers, counts = self.side.peers, self.side.tails.counts
            ready = [p for p in peers if p.state is PeerState.READY]
            return DrafterStats(
                num_request_steps=num_request_steps,
                num_supplied=num_supplied,
                num_at_hand=num_at_hand,
                num_kept=counts.kept,
                num_wrong=counts.wrong,
                num_late=counts.late,
                num_stale=counts.stale + counts.beyond,
                host_s=self._host_s,
                num_drafters=len(peers),
                num_ready=len(ready),
                num_failures=sum(p.num_failures for p in peers),
                draft_token_s=max((p.token_s for p in ready), default=0.0),
                answer_s=max((p.answer_s for p in ready), default=0.0),
                draft_version=min((p.draft_version for p in ready), default=0),
                problem=next((p.reason for p in peers if p.reason), ""),
            )

    def _vacate(self, slot: int) -> None:
        if self._tenures_S[slot] % 2:
            self._tenures_S[slot] += 1
            self.side.close(slot)

    def _committed(self, slots: list[int], tenures: list[int], token_ids: Sequence[Sequence[int]]) -> None:
        """The step's tokens; not those of requests that left their slots since then, or were never drafted for."""
        longest = self._token_ids_SL.shape[1]
        with self._lock:
            for slot, tenure, new in zip(slots, tenures, token_ids, strict=True):
                if tenure % 2 and tenure == self._tenures_S[slot]:
                    start = int(self._lengths_S[slot])
                    end = min(start + len(new), longest)
                    self._token_ids_SL[slot, start:end] = new[: end - start]
                    self._lengths_S[slot] = end
            self._exchange()

    def _exchange(self) -> None:
        """Hears what came, and says what is new."""
        now_s = self._receive()
        self.side.follow(self._token_ids_SL, self._lengths_S, now_s)
        for drafter, message in self.side.outgoing():
            socket = self._sockets[drafter]
            if socket is None:
                socket = self._sockets[drafter] = VerifierSocket(self._addresses[drafter], self._secret)
            if not socket.send(message):
                self.side.failed(drafter, "takes no messages", now_s)
        for drafter, peer in enumerate(self.side.peers):
            if peer.state is PeerState.AWAY:
                self._hang_up(drafter)
        self.side.tails.write(self.stream.table_SX)
        self._host_s += time.monotonic() - now_s

    def _receive(self) -> float:
        """Takes what came; returns when it began."""
        now_s = time.monotonic()
        for drafter, socket in enumerate(self._sockets):
            try:
                for message in socket.receive() if socket is not None else ():
                    self.side.receive(drafter, message, now_s)
            except FrameError as error:
                self.side.failed(drafter, str(error), now_s)
        return now_s

    def _hang_up(self, drafter: int) -> None:
        """Drops what is still under way."""
        socket, self._sockets[drafter] = self._sockets[drafter], None
        if socket is not None:
            socket.close()
