# SPDX-License-Identifier: Apache-2.0
"""Drafters that live elsewhere, as one drafter of the router: gives what has come from them by now, and waits for nothing."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.decoupled.messages import FrameError
from nemo_specrollout.decoupled.transport import VerifierSocket
from nemo_specrollout.decoupled.verifier_side import PeerState, PolicyModel, Sampling, VerifierSide
from nemo_specrollout.drafters.base import NUM_LEVELS, Batch, Demand, Drafter, DraftRequest, Proposal


@dataclass
class SupplyCounts:
    """How well drafters keep up, as sums over steps."""

    num_request_steps: int = 0
    """Requests, summed over steps that drafts were wanted in."""
    num_supplied: int = 0
    """Those of them that had a draft at hand."""
    num_drafts: int = 0
    """Draft tokens at hand, up to as many as one step may take."""
    host_s: float = 0.0
    """Time that it took the verifier."""


class RemoteDrafter(Drafter):
    """Owns the sockets, one to each drafter; the protocol is `VerifierSide`'s. Nothing is connected before the first step."""

    name = "remote"

    def __init__(
        self, addresses: Sequence[str], secret: bytes, num_lanes: int, most_ahead: int, model: PolicyModel
    ) -> None:
        self._addresses, self._secret = list(addresses), secret
        self._sockets: list[VerifierSocket | None] = [None] * len(addresses)
        self.side = VerifierSide(secrets.randbits(62), num_lanes, len(addresses), most_ahead, model, NUM_LEVELS)
        self.supply = SupplyCounts()

    def open(self, lane: int, request: DraftRequest) -> None:
        self.side.open(lane, request.key, Sampling(request.temperature, request.top_k, request.top_p), request.limit)

    def close(self, lane: int) -> None:
        self.side.close(lane)

    def follow(self, batch: Batch) -> None:
        started = time.perf_counter()
        self._exchange(batch)
        self.supply.host_s += time.perf_counter() - started

    def propose(self, batch: Batch, demand: Demand, out: Proposal) -> None:
        started = time.perf_counter()
        self._exchange(batch)
        self.side.tails.read(batch.lanes_B, out.tokens_BK, out.levels_BK, out.lengths_B)
        supply, num_requests = self.supply, len(batch.lanes_B)
        supply.num_request_steps += num_requests
        supply.num_supplied += int(np.count_nonzero(out.lengths_B[:num_requests]))
        supply.num_drafts += int(out.lengths_B[:num_requests].sum())
        supply.host_s += time.perf_counter() - started

    def shut(self) -> None:
        """Closes the sockets."""
        for drafter in range(len(self._sockets)):
            self._hang_up(drafter)

    def _exchange(self, batch: Batch) -> None:
        """Hears what came, says what is new, and hears again: an answer may be there already."""
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
