# SPDX-License-Identifier: Apache-2.0
"""The remote drafters of an engine as a single drafter, which proposes the tokens that have arrived and never waits.

The draft stream is a table of draft buffers, with a row for each request slot. The host writes it and the device reads it,
without waiting for each other. A row has draft tokens, and its base, which is the length of the text for which they were
drafted. When the device reads a row, the text has usually grown beyond the base. So a kernel compares the first draft tokens
with the tokens that the device has sampled since the base. If they are equal, the rest of the draft tokens is the proposal. If
the device reads a row that is written in part, the worst outcome is a wrong draft token.

Shapes: S request slots, B requests of the batch, K draft positions, L longest sequence, W tokens for which a row has room,
X = 2 + 2 W columns of the table (base, count, tokens, evidence levels).
"""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

import numpy as np
import torch

from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.remote.protocol.draft_buffers import KEPT, LATE, STALE, TOKENS, WRONG
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.remote.protocol.messages import FrameError, Message
from nemo_specrollout.remote.protocol.peer import PeerState
from nemo_specrollout.remote.protocol.transport import VerifierSocket
from nemo_specrollout.remote.protocol.verifier_side import PolicyModel, StreamRequest, VerifierSide
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

NOWHERE = ""
"""Address of a drafter that has not been placed yet. Nothing is sent to it."""


class DraftStream:
    """Owns the table of draft tokens. The host writes `table_SX` at any time, and `propose` reads it on the device."""

    def __init__(self, table_SX: np.ndarray, on_device: Callable[[], torch.Tensor]) -> None:
        """Clears the table. `on_device` returns it as an int32 tensor on the device.

        This tensor shares the memory of `table_SX`, or the call of `on_device` starts to copy the table to it.
        """
        self.table_SX = table_SX
        self._on_device = on_device
        table_SX[:] = 0
        self.counts_3 = torch.zeros(3, dtype=torch.int64, device=on_device().device)
        """Number of request steps, of request steps with draft tokens, and of draft tokens in all of them, int64 [3] on the
        device. A request step is one request in one engine step."""

    @staticmethod
    def columns(most_ahead: int) -> int:
        """Returns the number of columns of a table with room for `most_ahead` draft tokens in a row."""
        return TOKENS + 2 * most_ahead

    @property
    def most_ahead(self) -> int:
        return (self.table_SX.shape[1] - TOKENS) // 2

    def propose(self, texts: Texts, proposals: Proposals) -> None:
        """Writes up to K draft tokens of each request of the batch to `proposals`, or none for a row without a request."""
        kernels = kernels_for(texts.slots_B.device.type, KernelModule.DRAFT_STREAM)
        kernels.align(*texts, self._on_device(), *proposals, self.counts_3)


class RemoteDrafter:
    """Proposes what the remote drafters of an engine have sent. Owns a socket to each drafter, and the draft stream.

    It also owns the requests' texts as the host knows them. Tokens may reach the host in another thread than the engine's, so
    a lock guards all of the host's work, which is short.
    """

    name = "remote"

    def __init__(
        self, addresses: Sequence[str], secret: bytes, max_model_len: int, model: PolicyModel, stream: DraftStream
    ) -> None:
        """Prepares to talk to the drafters at `addresses`. No connection is opened before the first request.

        The shape of `stream` determines the number of slots and the number of draft tokens.
        """
        self.stream = stream
        num_slots = len(stream.table_SX)
        num_drafters = len(addresses)
        self._addresses = ["not set yet"] * num_drafters  # so that each of `addresses` is a change
        self._secret = secret
        self._sockets: list[VerifierSocket | None] = [None] * num_drafters
        self.side = VerifierSide(1 + secrets.randbits(61), num_slots, num_drafters, stream.most_ahead, model)
        self._token_ids_SL = np.zeros((num_slots, max_model_len), np.int32)
        self._lengths_S = np.zeros(num_slots, np.int64)
        # How often each slot was taken or freed. The number is odd while a request has the slot.
        self._tenures_S = np.zeros(num_slots, np.int64)
        self._lock = Lock()
        self._host_s = 0.0
        self.set_addresses(addresses, secret)

    def set_addresses(self, addresses: Sequence[str], secret: bytes) -> None:
        """Sets the address of each drafter, and the secret that both ends share."""
        with self._lock:
            has_new_secret = secret != self._secret
            self._secret = secret
            for drafter, address in enumerate(addresses):
                if has_new_secret or address != self._addresses[drafter]:
                    self._hang_up(drafter)
                    self._addresses[drafter] = address
                    self.side.move(drafter, "" if address else "not placed yet")

    def open(self, requests: Sequence[StreamRequest]) -> None:
        """Adds requests that have just taken slots, and sends them to the drafters.

        So the drafters read the prompts while the engine does the same.
        """
        with self._lock:
            for r in requests:
                self._vacate(r.slot)
                if r.limit > len(r.token_ids):
                    self._tenures_S[r.slot] += 1
                    self._token_ids_SL[r.slot, : len(r.token_ids)] = r.token_ids
                    self._lengths_S[r.slot] = len(r.token_ids)
                    self.side.open(r)
            self._exchange()

    def close(self, slots: Sequence[int]) -> None:
        """Removes the requests in `slots`, because they have ended or were preempted."""
        with self._lock:
            for slot in slots:
                self._vacate(slot)

    def token_callback(self, slots_B: np.ndarray) -> Callable[[Sequence[Sequence[int]]], None]:
        """Returns a function to call with the tokens of this engine step once they are on the host. Any thread may call it."""
        return partial(self._committed, slots_B.tolist(), self._tenures_S[slots_B].tolist())

    def propose(self, texts: Texts, proposals: Proposals) -> None:
        """Reads the messages that have arrived, and then writes the proposals (see `DraftStream.propose`)."""
        with self._lock:
            self._receive()
            self.side.buffers.write(self.stream.table_SX)
        self.stream.propose(texts, proposals)

    def stats(self) -> DrafterStats:
        """Returns the statistics of the remote drafters since the engine's start. The call waits for the device."""
        num_request_steps, num_supplied, num_at_hand = self.stream.counts_3.tolist()
        with self._lock:
            peers = self.side.peers
            counts = self.side.buffers.counts.tolist()
            ready = [peer for peer in peers if peer.state is PeerState.READY]
            return DrafterStats(
                num_request_steps=num_request_steps,
                num_supplied=num_supplied,
                num_at_hand=num_at_hand,
                num_kept=counts[KEPT],
                num_wrong=counts[WRONG],
                num_late=counts[LATE],
                num_stale=counts[STALE],
                host_s=self._host_s,
                num_drafters=len(peers),
                num_ready=len(ready),
                num_failures=sum(peer.num_failures for peer in peers),
                draft_token_s=max((peer.token_s for peer in ready), default=0.0),
                num_refused=self.side.num_refused,
                problem=next((peer.reason for peer in peers if peer.reason), ""),
                last_problem=next((peer.last_problem for peer in peers if peer.last_problem), self.side.refusal),
            )

    def _vacate(self, slot: int) -> None:
        if self._tenures_S[slot] % 2:
            self._tenures_S[slot] += 1
            self.side.close(slot)

    def _committed(self, slots: list[int], tenures: list[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Appends the tokens of an engine step to the requests' texts on the host, and exchanges messages with the drafters.

        `tenures` has the values of `_tenures_S` in that engine step, and `token_ids` has the new tokens of each slot. Tokens
        are ignored if their request has left its slot meanwhile, or if it gets no remote drafts.
        """
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
        """Reads messages that have arrived, sends new tokens and requests to the drafters, and updates the draft stream."""
        now_s = self._receive()
        for drafter, message in self.side.follow(self._token_ids_SL, self._lengths_S, now_s):
            reason = self._send(drafter, message)
            if reason:
                self.side.fail(drafter, reason, now_s)
        for drafter, peer in enumerate(self.side.peers):
            if peer.state in (PeerState.AWAY, PeerState.REFUSED):
                self._hang_up(drafter)
        self.side.buffers.write(self.stream.table_SX)
        self._host_s += time.monotonic() - now_s

    def _send(self, drafter: int, message: Message) -> str:
        """Sends a message, and connects to the drafter first if necessary. Returns why it was dropped, or "" if it was not."""
        socket = self._sockets[drafter]
        if socket is None:
            try:
                socket = self._sockets[drafter] = VerifierSocket(self._addresses[drafter], self._secret)
            except ValueError as error:  # no socket takes the address
                return str(error)
        return socket.send(message)

    def _receive(self) -> float:
        """Reads the messages that have arrived, and returns the time at which reading began."""
        now_s = time.monotonic()
        for drafter, socket in enumerate(self._sockets):
            try:
                for message in socket.receive() if socket is not None else ():
                    self.side.receive(drafter, message, now_s)
            except FrameError as error:
                self.side.fail(drafter, str(error), now_s)
        return now_s

    def _hang_up(self, drafter: int) -> None:
        """Closes the socket to a drafter, and drops the frames in it."""
        socket = self._sockets[drafter]
        self._sockets[drafter] = None
        if socket is not None:
            socket.close()
