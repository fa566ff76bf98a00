# SPDX-License-Identifier: Apache-2.0
"""Drafters that live elsewhere, as one drafter of the router: gives what has come from them by now, and waits for nothing."""

import secrets
import time
from collections.abc import Sequence

import numpy as np

from nemo_specrollout.decoupled.messages import FrameError
from nemo_specrollout.decoupled.supply import DraftSupply
from nemo_specrollout.decoupled.transport import VerifierSocket
from nemo_specrollout.decoupled.verifier_side import PeerState, PolicyModel, Sampling, VerifierSide
from nemo_specrollout.drafters.base import NUM_LEVELS, Batch, Demand, Drafter, DraftRequest, Proposal

NOWHERE = ""
"""The address of a drafter that is not placed yet."""


class RemoteDrafter(Drafter):
    """Owns the sockets, one to each drafter; the protocol is `VerifierSide`'s. Nothing is connected before the first step.

    A drafter has one address at a time, or is `NOWHERE`: then nothing is sent to it.
    """

    name = "remote"

    def __init__(
        self, addresses: Sequence[str], secret: bytes, num_lanes: int, most_ahead: int, model: PolicyModel
    ) -> None:
        self._addresses, self._secret = [NOWHERE] * len(addresses), secret
        self._sockets: list[VerifierSocket | None] = [None] * len(addresses)
        self.side = VerifierSide(secrets.randbits(62), num_lanes, len(addresses), most_ahead, model, NUM_LEVELS)
        self._num_request_steps = self._num_supplied = self._num_at_hand = 0
        self._host_s = 0.0
        for drafter in range(len(addresses)):
            self.side.moved(drafter, nowhere="not placed yet")
        self.listen_to(addresses, secret)

    def listen_to(self, addresses: Sequence[str], secret: bytes) -> None:
        """Where the drafters are from now on, in their order, and what they and we prove to know."""
        self._secret = secret
        for drafter, address in enumerate(addresses):
            if address != self._addresses[drafter]:
                self._hang_up(drafter)
                self._addresses[drafter] = address
                self.side.moved(drafter, nowhere="" if address else "not placed yet")

    def open(self, lane: int, request: DraftRequest) -> None:
        if request.limit > len(request.prompt):  # else it is not to be drafted for
            top_k = max(0, request.top_k)  # NeMo-RL writes -1 for none
            self.side.open(lane, request.key, Sampling(request.temperature, top_k, request.top_p), request.limit)

    def close(self, lane: int) -> None:
        self.side.close(lane)

    def propose(self, batch: Batch, demand: Demand, out: Proposal) -> None:
        started = time.perf_counter()
        self._exchange(batch)
        self.side.tails.read(batch.lanes_B, out.tokens_BK, out.levels_BK, out.lengths_B)
        lengths_B = out.lengths_B[: len(batch.lanes_B)]
        self._num_request_steps += len(lengths_B)
        self._num_supplied += int(np.count_nonzero(lengths_B))
        self._num_at_hand += int(lengths_B.sum())
        self._host_s += time.perf_counter() - started

    def supply(self) -> DraftSupply:
        """How well the drafters keep up."""
        peers, counts = self.side.peers, self.side.tails.counts
        ready = [p for p in peers if p.state is PeerState.READY]
        return DraftSupply(
            num_request_steps=self._num_request_steps,
            num_supplied=self._num_supplied,
            num_at_hand=self._num_at_hand,
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

    def _exchange(self, batch: Batch) -> None:
        """Hears what came, and says what is new."""
        now_s = time.monotonic()
        self._receive(now_s)
        self.side.follow(batch.lanes_B, batch.token_ids_BL, batch.lengths_B, now_s)
        for drafter, message in self.side.outgoing():
            socket = self._sockets[drafter]
            if socket is None:
                socket = self._sockets[drafter] = VerifierSocket(self._addresses[drafter], self._secret)
            if not socket.send(message):
                self.side.failed(drafter, "takes no messages", now_s)
        for drafter, peer in enumerate(self.side.peers):
            if peer.state is PeerState.AWAY:
                self._hang_up(drafter)

    def _receive(self, now_s: float) -> None:
        for drafter, socket in enumerate(self._sockets):
            try:
                for message in socket.receive() if socket is not None else ():
                    self.side.receive(drafter, message, now_s)
            except FrameError as error:
                self.side.failed(drafter, str(error), now_s)

    def _hang_up(self, drafter: int) -> None:
        """Drops what is still under way."""
        socket, self._sockets[drafter] = self._sockets[drafter], None
        if socket is not None:
            socket.close()
