# SPDX-License-Identifier: Apache-2.0
"""Runs remote drafters as Ray actors. The driver supervises them, and tells the engines their addresses.

The driver never waits for a drafter. No failure of a drafter ends the run, because engines decode without drafts if they have
no drafter.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from nemo_specrollout.config.addresses import any_port
from nemo_specrollout.config.drafter_configs import SECRET_VARIABLE, RemoteDrafterConfig, secret_of_run
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, EngineClient, failure_text
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport, DrafterSpec, drafter_spec
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats

HANG_S = 30.0
"""A drafter is restarted after this number of seconds without a sign of life."""
START_S = 600.0
"""Largest number of seconds that a drafter may take to load its model."""


@ray.remote(max_restarts=-1, num_cpus=1)
class SpecrolloutDrafter:
    """Actor that runs a drafter in a thread. If its process dies, Ray starts another one, which has another address."""

    def __init__(self, spec: DrafterSpec, host: str, secret: str) -> None:
        """Starts the drafter and returns at once.

        `host` is the interface on which the drafter listens, or empty for the address of its node. `secret` is the secret of
        the run. It is an argument and not an environment variable, because Ray writes the environment variables of actors into
        its logs.
        """
        os.environ |= {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._process = secrets.randbits(62)
        self._report = DrafterReport("")
        self._heard_s = time.monotonic()
        self._failure = ""
        spec = replace(spec, address=any_port(host or ray.util.get_node_ip_address()))
        threading.Thread(target=self._serve, args=(spec,), daemon=True).start()

    def status(self) -> DrafterReport:
        """Returns the latest report of the drafter. Raises RuntimeError if the drafter cannot start or has failed."""
        if self._failure:
            raise RuntimeError(self._failure)
        return replace(self._report, process=self._process, silence_s=time.monotonic() - self._heard_s)

    def _serve(self, spec: DrafterSpec) -> None:
        from nemo_specrollout.remote.drafter.drafter_service import DrafterService

        try:
            DrafterService(spec, self._note).run(self._note)
        except Exception as error:
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())

    def _note(self, report: DrafterReport) -> None:
        self._report = replace(report)
        self._heard_s = time.monotonic()


@dataclass
class _Drafter:
    """What the driver knows about a drafter."""

    link: ActorLink
    status: DrafterReport | None = None
    """Latest report of the drafter, or None before the first report and after a failure."""
    last_process: int = 0
    num_restarts: int = 0
    is_told: bool = False
    """Whether the driver has reported the latest failure to the user."""
    told_problem: str = ""
    """The latest problem with new weights that the driver has reported to the user."""

    @property
    def address(self) -> str:
        return "" if self.status is None else self.status.address

    @property
    def _where(self) -> str:
        return f" at {self.address}" if self.address else ""

    def poll(self) -> str | None:
        """Reads a new report, and restarts a drafter that has failed. Returns a sentence for the user after a failure.

        If a process dies and Ray restarts it between two polls, only the report of the new process shows this.
        """
        try:
            status: DrafterReport | None = self.link.answer()
            if status is None:
                return self._failed("it does not answer") if self._is_silent(self.link.waited_s) else None
        except ActorFailed as error:
            return self._failed(str(error), is_alive=error.is_alive)
        is_another = self.last_process not in (0, status.process)
        if is_another:
            self.num_restarts += 1
        ended = f"{self._where} ended; the rollout goes on, and Ray has started it again"
        sentence = ended if is_another and not self.is_told else None
        self.status = status
        self.last_process = status.process
        self.is_told = False
        if self._is_silent(status.silence_s):
            return self._failed("its loop stands still")
        self.link.call("status")
        return sentence

    def new_problem(self) -> str | None:
        """Returns a sentence for the user if the drafter cannot use newer weights, but only once for each reason."""
        problem = "" if self.status is None else self.status.weights_problem
        if problem in ("", self.told_problem):
            return None
        self.told_problem = problem
        return f"{self._where} goes on with the weights that it has: {problem}"

    def _is_silent(self, silence_s: float) -> bool:
        return self.status is not None and silence_s > (HANG_S if self.status.is_up else START_S)

    def _failed(self, reason: str, *, is_alive: bool = True) -> str | None:
        """Notes a failure of the drafter. Restarts the actor's process if `is_alive` says that this still runs.

        Returns a sentence about the failure, or None if a sentence about it was returned before.
        """
        where = self._where
        was_told = self.is_told
        self.status = None
        self.is_told = True
        if is_alive:
            self.link.restart()
        self.link.call("status")
        return None if was_told else f"{where} ended ({reason}); the rollout goes on, and Ray starts it again if it can"


class RemoteDrafters:
    """Owns the run's remote drafters, and tells the engines their addresses.

    Drafters on GPUs start at the first `update`, when all processes of NeMo-RL have their GPUs. Other drafters start at once.
    """

    def __init__(
        self, start: Callable[[], Sequence[ActorLink]], secret: str, log: StepLog, *, starts_later: bool
    ) -> None:
        self._start = start
        self._secret = secret
        self._log = log
        self._drafters = None if starts_later else [_Drafter(link) for link in start()]
        self._sent: list[str] = []

    def update(self, engines: EngineClient) -> None:
        """Reads the drafters' reports, and sends their addresses to the engines if they have changed.

        Safe during a rollout.
        """
        if self._drafters is None:
            self._drafters = [_Drafter(link) for link in self._start()]
        for number, drafter in enumerate(self._drafters):
            ended = drafter.poll()
            for sentence in (ended, drafter.new_problem()):
                if sentence is not None:
                    self._log.alarms.append(f"drafter {number}{sentence}")
        addresses = [drafter.address for drafter in self._drafters]
        if addresses == (self._sent or [""] * len(addresses)):
            return
        try:
            engines.call(WorkerCalls.specrollout_drafters_at, addresses, self._secret)
            self._sent = addresses
            known = [address or "not placed yet" for address in addresses]
            print(f"  • specrollout drafters listen at {', '.join(known)}", flush=True)
        except Exception as error:
            self._log.alarms.append(f"an engine did not get the addresses of the drafters: {failure_text(error)}")

    @property
    def num_restarts(self) -> int:
        """Number of restarts of drafters since the start of the run."""
        return sum(drafter.num_restarts for drafter in self._drafters or ())

    def close(self) -> None:
        drafters = self._drafters or []
        self._drafters = []
        for drafter in drafters:
            drafter.link.close()


def start_drafters(drafter: RemoteDrafterConfig, vllm_cfg: Mapping[str, Any], log: StepLog) -> RemoteDrafters:
    """Starts `drafter.workers` remote drafters for a policy that is served with `vllm_cfg`.

    Raises ConfigError if they cannot run.
    """
    secret = secret_of_run()

    def start() -> list[ActorLink]:
        spec = drafter_spec(drafter, vllm_cfg, on_cpu=not drafter.gpus)
        host = "127.0.0.1" if sum(node["Alive"] for node in ray.nodes()) == 1 else ""
        # Drafters are spread over the nodes, because each one shares its node's cores and network with engines.
        options = {"num_gpus": drafter.gpus, "scheduling_strategy": "SPREAD"}
        return [
            ActorLink(SpecrolloutDrafter, spec, host, secret, first_call="status", **options)
            for _ in range(drafter.workers)
        ]

    return RemoteDrafters(start, secret, log, starts_later=bool(drafter.gpus))


def stats_between(before: Sequence[DrafterStats], after: Sequence[DrafterStats]) -> dict[str, Any]:
    """Returns the drafter statistics for the time between two readings, over all engines together, by name.

    `before` and `after` are results of `EngineClient.drafter_stats`.
    """
    pairs = zip(before, after, strict=True)
    return DrafterStats.together([now.since(earlier) for earlier, now in pairs]).figures()
