# SPDX-License-Identifier: Apache-2.0
"""A remote drafter, which consists of an engine, a socket, and the loop that passes messages between them."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from nemo_specrollout.config.drafter_configs import shared_secret
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec
from nemo_specrollout.remote.drafter.weights_watch import WeightsWatch
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide
from nemo_specrollout.remote.protocol.messages import as_line
from nemo_specrollout.remote.protocol.transport import DrafterSocket

IDLE_WAIT_S = 0.05
"""Longest wait for a message, in seconds, while no shadow sequence may draft."""
LONGEST_READING_S = 0.25
"""Maximum time in seconds for which `DrafterService.turn` reads messages before it answers. Verifiers drop a drafter that does
not answer."""
STATUS_PERIOD_S = 1.0
"""Seconds between two status reports."""


class DrafterService:
    """Owns the drafter's engine, its socket and its side of the protocol. `run` serves until it is interrupted."""

    def __init__(self, spec: DrafterSpec, on_bound: Callable[[DrafterReport], object] = lambda status: None) -> None:
        """Binds the socket, passes its address to `on_bound`, and then starts the engine.

        Raises ConfigError if the socket cannot be bound or the engine cannot be started.
        """
        self._socket = DrafterSocket(spec.address, shared_secret([spec.address]), spec.allowed_hosts)
        self.status = DrafterReport(self._socket.address)
        on_bound(self.status)
        from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

        kwargs = {"dtype": spec.precision, **spec.vllm_kwargs}
        self._engine = DrafterEngine(Path(spec.model), spec.max_requests, spec.max_model_len, **kwargs)
        self._side = DrafterSide(self._engine, secrets.randbits(62), spec.max_requests, spec.most_ahead)
        self._watch = WeightsWatch(Path(spec.weights_from), self._engine.read_weights) if spec.weights_from else None
        if self._watch is not None:
            self._watch.look()
            self._use_new_weights(self._watch)
            self._watch.start()
        self._started = time.monotonic()
        self.status.is_up = True

    def run(self, on_status: Callable[[DrafterReport], object]) -> None:
        """Serves until it is interrupted, and calls `on_status` every `STATUS_PERIOD_S`."""
        due = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= due:
                due = now_s + STATUS_PERIOD_S
                self._side.forget_silent(now_s)
                self.status.up_s = now_s - self._started
                on_status(self.status)
            if not self.turn():
                self._socket.wait(IDLE_WAIT_S)

    def turn(self) -> bool:
        """Reads messages, drafts a token for each shadow sequence that may draft, and sends answers.

        Returns whether it has drafted.
        """
        side = self._side
        status = self.status
        if self._watch is not None:
            self._use_new_weights(self._watch)
        read_until_s = time.monotonic() + LONGEST_READING_S
        for peer, message in self._socket.receive():
            side.receive(peer, message, time.monotonic())
            if time.monotonic() > read_until_s:
                break  # the rest is read in the next turn, after these messages are answered
        shadows_M = side.shadows.ready_to_draft()
        if len(shadows_M):
            started = time.perf_counter()
            rows = self._engine.draft(shadows_M)
            seconds = time.perf_counter() - started
            side.drafted(rows, seconds)
            status.num_steps += 1
            status.num_drafted += len(rows)
            status.busy_s += seconds
        for verifier, reply in side.outgoing():
            self._socket.send(verifier, reply)
        status.num_open = side.num_open
        status.num_refused_frames = self._socket.num_refused
        status.refusal = self._socket.refusal
        status.num_corrections = side.num_corrections
        status.draft_version = side.draft_version
        return len(shadows_M) > 0

    def _use_new_weights(self, watch: WeightsWatch) -> None:
        """Loads the weights that `watch` has read since the last call into the engine, if there are any."""
        new = watch.take()
        if new is not None:
            try:
                self._engine.use_weights(new.tensors)
                self._side.draft_version = new.publication.number
            except (ValueError, OSError, RuntimeError) as error:
                watch.refuse(new, f"{new.publication.path}: {as_line(error) or type(error).__name__}")
        self.status.draft_version = self._side.draft_version
        self.status.weights_problem = watch.problem

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._socket.close()
        self._engine.close()
