# SPDX-License-Identifier: Apache-2.0
"""A drafter process: an engine, a socket, and the loop between them. `python -m ...drafter_service SPEC` runs one."""

import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError

from nemo_specrollout.config.addresses import shared_secret
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.remote.protocol.drafter_side import DrafterSide
from nemo_specrollout.remote.protocol.orders import Order, Publication, ShadowClosing, ShadowOpening
from nemo_specrollout.remote.protocol.shadow_sequences import Correction
from nemo_specrollout.remote.protocol.transport import DrafterSocket
from nemo_specrollout.remote.verifier.drafter_process import DrafterSpec, Status
from nemo_specrollout.remote.verifier.json_child import end_with_parent

if TYPE_CHECKING:
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

IDLE_WAIT_S, STATUS_PERIOD_S = 0.05, 1.0


class DrafterService:
    """Owns engine, socket and protocol of one process. `run` until interrupted."""

    def __init__(self, spec: DrafterSpec, on_bound: Callable[[Status], object] = lambda status: None) -> None:
        """Binds, tells `on_bound` where, then starts the engine. Raises ConfigError."""
        self._socket = DrafterSocket(spec.address, shared_secret([spec.address]), spec.allowed_hosts)
        self.status = Status(self._socket.address)
        on_bound(self.status)
        self._engine = _build_engine(spec)
        drafter = secrets.randbits(62)
        self._side = DrafterSide(self._engine.model, drafter, spec.max_requests, spec.most_ahead)
        self._refused: set[int] = set()  # shadows that the engine did not take, among the orders at hand
        self._started = time.monotonic()
        self.status.is_up = True

    def run(self, on_status: Callable[[Status], object]) -> None:
        """Drafts until it is interrupted; calls `on_status` about once a second."""
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
        """Hears what came, carries it out, drafts for each shadow that wants it, and tells; whether any did."""
        side, status = self._side, self.status
        for peer, message in self._socket.receive():
            side.receive(peer, message, time.monotonic())
        self._refused = set()
        for order in side.take_orders():
            self._carry_out(order)
        shadows_M = side.wanting()
        if len(shadows_M):
            self._draft(shadows_M)
        for verifier, reply in side.outgoing(time.monotonic()):
            self._socket.send(verifier, reply)
        status.num_open, status.num_refused_frames = side.num_open, self._socket.num_refused
        status.draft_version = side.draft_version
        return len(shadows_M) > 0

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Correction):
            if order.shadow not in self._refused:
                self._engine.correct(order)
                self.status.num_corrections += 1
        elif isinstance(order, ShadowOpening):
            self._open(order)
        elif isinstance(order, ShadowClosing):
            self._engine.close_shadow(order.shadow)
        else:
            self._publish(order)

    def _open(self, opening: ShadowOpening) -> None:
        try:
            self._engine.open(opening)
            self._refused.discard(opening.shadow)
        except ValueError:  # what vLLM does not take: such a request is decoded plainly
            self._refused.add(opening.shadow)
            self._side.refused(opening.shadow)

    def _publish(self, publication: Publication) -> None:
        error = ""
        try:
            self._engine.load_weights(Path(publication.folder))
        except (ValueError, OSError, SafetensorError) as refusal:
            error = str(refusal)
        self._side.published(publication, error)

    def close(self) -> None:
        """Stops the engine and frees the address."""
        self._socket.close()
        self._engine.close()

    def _draft(self, shadows_M: np.ndarray) -> None:
        started = time.perf_counter()
        new = self._engine.draft(shadows_M)
        seconds = time.perf_counter() - started
        self._side.drafted(new, seconds)
        self.status.num_steps += 1
        self.status.num_drafted += len(new.shadows_M)
        self.status.busy_s += seconds


def _build_engine(spec: DrafterSpec) -> "DrafterEngine":
    from nemo_specrollout.remote.drafter.drafter_engine import DrafterEngine

    return DrafterEngine(
        Path(spec.model),
        spec.max_requests,
        spec.max_model_len,
        dtype=spec.precision,
        **spec.vllm_kwargs,
    )


def main(text: str) -> int:
    """Serves by the spec in `text` as long as its parent lives; a line of JSON on stdout a second. Returns the exit code."""
    end_with_parent()

    def report(status: Status) -> None:
        print(json.dumps(asdict(status)), flush=True)

    try:
        service = DrafterService(DrafterSpec.from_wire(text), report)
    except ConfigError as error:
        print(str(error), file=sys.stderr)
        return 2
    try:
        service.run(report)
    except KeyboardInterrupt:
        return 130
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
