# SPDX-License-Identifier: Apache-2.0
"""Remote drafters that Ray places and supervises: their actors, and the driver's part, which tells engines their addresses.

The driver never waits for a drafter, and no failure here ends the run: without drafters the engines decode plainly.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from nemo_specrollout.config.drafter_configs import SECRET_VARIABLE, RemoteDrafterConfig, any_port, secret_of_run
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, WorkerClient, failure_text
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec, drafter_spec
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats

HANG_S = 30.0
"""Silence after which a drafter is ended and started again, in seconds."""
START_S = 600.0
"""Longest time that a drafter may take to load its model, in seconds."""


@dataclass(frozen=True)
class DrafterStatus:
    """State of a drafter, as its actor reports it."""

    actor: int
    """Random number of the actor's process."""
    address: str = ""
    """Address at which the drafter listens; empty until it does."""
    is_up: bool = False
    """Whether the draft model is loaded."""
    silence_s: float = 0.0
    """Seconds since the drafter's loop last took a turn, or since the actor began."""


@ray.remote(max_restarts=-1, num_cpus=1)
class SpecrolloutDrafter:
    """Actor that is a drafter, which runs in a thread of it.

    If its process dies, Ray starts another one, maybe on another node, whose drafter has another address.
    """

    def __init__(self, spec: DrafterSpec, host: str, secret: str) -> None:
        """Returns at once. `host` is the interface on which the drafter listens; empty for the address of its node.

        `secret` is the run's. It is an argument because Ray writes the environments of actors into its logs.
        """
        os.environ |= {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._status = DrafterStatus(secrets.randbits(62))
        self._heard_s, self._failure = time.monotonic(), ""
        spec = replace(spec, address=any_port(host or ray.util.get_node_ip_address()))
        threading.Thread(target=self._serve, args=(spec,), daemon=True).start()

    def status(self) -> DrafterStatus:
        """Returns the state of the drafter. Raises RuntimeError if it cannot start, or has failed."""
        if self._failure:
            raise RuntimeError(self._failure)
        return replace(self._status, silence_s=time.monotonic() - self._heard_s)

    def _serve(self, spec: DrafterSpec) -> None:
        from nemo_specrollout.remote.drafter.drafter_service import DrafterService

        try:
            DrafterService(spec, self._note).run(self._note)
        except Exception as error:
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())

    def _note(self, report: DrafterReport) -> None:
        self._status = replace(self._status, address=report.address, is_up=report.is_up)
        self._heard_s = time.monotonic()


@dataclass
class _Drafter:
    """A drafter as the driver knows it."""

    link: ActorLink
    status: DrafterStatus | None = None
    """Latest state; None before the first one, and after a failure."""
    last_actor: int = 0
    num_restarts: int = 0
    is_told: bool = False
    """Whether the driver has told of the latest failure."""

    @property
    def address(self) -> str:
        return "" if self.status is None else self.status.address

    def poll(self) -> str | None:
        """Reads a new state, and has a failed drafter started again. Returns a sentence after a failure."""
        try:
            status: DrafterStatus | None = self.link.answer()
            if status is None:
                return self._failed("it does not answer") if self._is_silent(self.link.waited_s) else None
        except ActorFailed as error:
            return self._failed(str(error), is_alive=error.is_alive)
        if self.last_actor not in (0, status.actor):
            self.num_restarts += 1
        self.status, self.last_actor, self.is_told = status, status.actor, False
        if self._is_silent(status.silence_s):
            return self._failed("its loop stands still")
        self.link.call("status")
        return None

    def _is_silent(self, silence_s: float) -> bool:
        return self.status is not None and silence_s > (HANG_S if self.status.is_up else START_S)

    def _failed(self, reason: str, *, is_alive: bool = True) -> str | None:
        """Ends the actor's process if it `is_alive`, so that Ray starts another one.

        Returns a sentence, or None if the driver has told of the failure.
        """
        where, was_told = f" at {self.address}" if self.address else "", self.is_told
        self.status, self.is_told = None, True
        if is_alive:
            self.link.restart()
        self.link.call("status")
        return None if was_told else f"{where} ended ({reason}); the rollout goes on, and Ray starts it again if it can"


class RemoteDrafters:
    """Owns the run's drafters and the addresses that the engines have.

    Drafters on GPUs are started by the first `update`, when all of NeMo-RL's workers have taken their GPUs; other drafters
    are started at once.
    """

    def __init__(
        self, start: Callable[[], Sequence[ActorLink]], secret: str, log: StepLog, *, starts_later: bool
    ) -> None:
        """`start` starts all drafters."""
        self._start, self._secret, self._log = start, secret, log
        self._drafters = None if starts_later else [_Drafter(link) for link in start()]
        self._sent: list[str] = []

    def update(self, workers: WorkerClient) -> None:
        """Sends the drafters' addresses to the engines if they have changed. Safe during a rollout."""
        if self._drafters is None:
            self._drafters = [_Drafter(link) for link in self._start()]
        for number, drafter in enumerate(self._drafters):
            ended = drafter.poll()
            if ended is not None:
                self._log.alarms.append(f"drafter {number}{ended}")
        addresses = [drafter.address for drafter in self._drafters]
        if addresses == (self._sent or [""] * len(addresses)):
            return
        try:
            workers.call("drafters_at", addresses, self._secret)
            self._sent = addresses
        except Exception as error:
            self._log.alarms.append(f"an engine did not get the addresses of the drafters: {failure_text(error)}")

    @property
    def num_restarts(self) -> int:
        """Restarts of drafters since the start of the run."""
        return sum(drafter.num_restarts for drafter in self._drafters or ())

    def close(self) -> None:
        """Ends all drafters."""
        drafters, self._drafters = self._drafters or [], []
        for drafter in drafters:
            drafter.link.close()


def start_drafters(drafter: RemoteDrafterConfig, vllm_cfg: Mapping[str, Any], log: StepLog) -> RemoteDrafters:
    """Starts `drafter.workers` drafters for policies that are served with `vllm_cfg`. Raises ConfigError.

    On a cluster of one node the drafters listen on the loopback interface.
    """
    secret = secret_of_run()

    def start() -> list[ActorLink]:
        spec = drafter_spec(drafter, vllm_cfg, on_cpu=not drafter.gpus)
        host = "127.0.0.1" if sum(node["Alive"] for node in ray.nodes()) == 1 else ""
        # Spread over the nodes: a drafter is small and shares a node's cores and network with engines.
        options = {"num_gpus": drafter.gpus, "scheduling_strategy": "SPREAD"}
        return [
            ActorLink(SpecrolloutDrafter, spec, host, secret, first_call="status", **options)
            for _ in range(drafter.workers)
        ]

    return RemoteDrafters(start, secret, log, starts_later=bool(drafter.gpus))


def stats_between(before: Sequence[DrafterStats], after: Sequence[DrafterStats]) -> dict[str, Any]:
    """Returns the figures of `DrafterStats` between two readings of `WorkerClient.drafter_stats`, over all engines."""
    pairs = zip(before, after, strict=True)
    return DrafterStats.together([now.since(earlier) for earlier, now in pairs]).figures()
