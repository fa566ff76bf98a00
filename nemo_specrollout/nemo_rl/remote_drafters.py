# SPDX-License-Identifier: Apache-2.0
"""Remote drafters that Ray places: their actors, and the driver's part, which tells the engines where drafters listen.

The driver never waits for a drafter, and no failure here ends the run: without drafters the engines decode plainly.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from nemo_specrollout.config.drafter_configs import SECRET_VARIABLE, RemoteDrafterConfig, any_port, secret_of_run
from nemo_specrollout.nemo_rl.logger import StepLog
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, WorkerClient, failure_text
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.remote.verifier.drafter_pool import DrafterPool, DrafterSpec, drafter_spec, shared_vllm_config
from nemo_specrollout.reports.records import PREFIX

_LOGGED = {
    "draft_occupancy": "occupancy",
    "draft_run_ahead": "run_ahead",
    "draft_waste": "waste",
    "draft_host_s": "host_s",
    "draft_token_s": "draft_token_s",
    "draft_answer_s": "answer_s",
    "drafters": "num_drafters",
    "drafters_ready": "num_ready",
    "drafter_failures": "num_failures",
}
"""Metrics of docs/reference/metrics.md, with their names in `DrafterStats.figures`."""


@dataclass(frozen=True)
class DrafterStatus:
    """State of a drafter."""

    address: str = ""
    """Address at which the drafter listens; empty if it does not."""
    actor: int = 0
    """Random number of the actor that runs the drafter; 0 if no actor runs it."""
    num_restarts: int = 0
    """Restarts of the drafter's process by that actor."""
    last_output: str = ""
    """Last output of the process or actor that ended most recently; empty before the first end."""


@ray.remote(max_restarts=-1, num_cpus=1)
class SpecrolloutDrafter:
    """Actor that owns one drafter process and its successors, which all have the same address.

    If the actor dies, Ray starts it again, maybe on another node, where its drafter has another address. The drafter's
    process ends with the actor, because it checks once a second that its parent lives.
    """

    def __init__(self, spec: DrafterSpec, host: str, secret: str) -> None:
        """Returns when the drafter has bound its address, before it has loaded its model.

        `host` is the interface on which it listens; empty for the address of its node. `secret` is the run's. It is an
        argument because Ray writes the environments of actors into its logs. Raises ConfigError if the drafter cannot bind.
        """
        os.environ[SECRET_VARIABLE] = secret  # the drafter inherits it
        self._pool = DrafterPool([replace(spec, address=any_port(host or ray.util.get_node_ip_address()))])
        self._actor = secrets.randbits(62)
        self._address = self._pool.addresses()[0]
        self._pool.start_watching()

    def status(self) -> DrafterStatus:
        """Returns the state of the drafter."""
        (process,) = self._pool.processes
        return DrafterStatus(
            self._address, self._actor, process.num_restarts, process.deaths[-1] if process.deaths else ""
        )


@dataclass
class _Drafter:
    """One drafter as the driver knows it."""

    link: ActorLink
    status: DrafterStatus = field(default_factory=DrafterStatus)
    num_earlier_restarts: int = 0
    """Restarts that belong to earlier actors, each of which counts as one restart itself."""

    def poll(self) -> str | None:
        """Reads the latest status, if there is a new one. Returns a sentence if a process or an actor has ended."""
        try:
            new: DrafterStatus | None = self.link.answer()
        except ActorFailed as error:
            new = DrafterStatus(last_output=str(error))
        if new is None:
            return None
        self.link.call("status")
        old = self.status
        if new.actor and old.actor and new.actor != old.actor:
            self.num_earlier_restarts += old.num_restarts + 1
        # The count and the actor's number are kept while no actor runs the drafter.
        self.status = new if new.actor else replace(new, actor=old.actor, num_restarts=old.num_restarts)
        if not new.last_output or new.last_output == old.last_output:
            return None
        where = f" at {old.address}" if old.address else ""
        restart = "it is started again" if new.actor else "Ray starts it again if it can"
        return f"{where} ended ({new.last_output}); the rollout goes on, and {restart}"


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
        addresses = [drafter.status.address for drafter in self._drafters]
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
        return sum(drafter.num_earlier_restarts + drafter.status.num_restarts for drafter in self._drafters or ())

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
        spec = drafter_spec(drafter, shared_vllm_config(vllm_cfg), on_cpu=not drafter.gpus)
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


def drafter_metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics for NeMo-RL's logger from the figures of `stats_between`. Figures without a value are left out."""
    known = {name: figures[key] for name, key in _LOGGED.items() if figures[key] is not None}
    return {PREFIX + name: float(value) for name, value in known.items()}
