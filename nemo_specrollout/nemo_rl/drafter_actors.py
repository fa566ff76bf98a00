# SPDX-License-Identifier: Apache-2.0
"""The Ray actors that keep a run's remote drafters up, and the driver's links to them."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from nemo_specrollout.config.addresses import SECRET_VARIABLE, any_port
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.nemo_rl.actor_environment import engine_environment
from nemo_specrollout.nemo_rl.remote_drafters import DrafterNews
from nemo_specrollout.remote.verifier.drafter_pool import DrafterPool, drafter_spec, engine_facts
from nemo_specrollout.remote.verifier.drafter_process import DrafterSpec

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class DrafterOrder:
    """What the actor of a drafter is told at its start. `host` is where it listens; empty: at its node's own address.

    The secret travels as an argument: Ray writes the environments that it makes into its logs.
    """

    spec: DrafterSpec
    gpus: float = 0.0
    host: str = LOOPBACK
    secret: str = field(default="", repr=False)


class DrafterActorImpl:
    """Owns one drafter process and its successors, which are at the same address. Ray places it, and starts it again, maybe
    elsewhere, when it dies: then its drafter has a new address.

    Its process ends with it: the drafter looks for its parent once a second.
    """

    def __init__(self, order: DrafterOrder) -> None:
        """Returns when the drafter has bound its address; it is up later. Raises ConfigError if it cannot bind."""
        os.environ[SECRET_VARIABLE] = order.secret  # for the drafter, which inherits it
        host = order.host or ray.util.get_node_ip_address()
        self._pool = DrafterPool([replace(order.spec, address=any_port(host))])
        self._actor = secrets.randbits(62)
        self._address = self._pool.addresses()[0]
        self._pool.keep_up()

    def news(self) -> DrafterNews:
        """How the drafter is."""
        (process,) = self._pool.processes
        return DrafterNews(self._address, self._actor, process.num_restarts, process.last_words)


@ray.remote(max_restarts=-1, num_cpus=1)
class SpecrolloutDrafter(DrafterActorImpl):
    """The actor."""


class DrafterLink:
    """The driver's end of one drafter: owns the actor and the one call that is under way. The actor dies with the driver."""

    def __init__(self, order: DrafterOrder) -> None:
        actor: Any = SpecrolloutDrafter
        # Over the nodes: a drafter is small, and shares a node's cores and links with engines.
        options = {"num_gpus": order.gpus, "scheduling_strategy": "SPREAD", "runtime_env": engine_environment()}
        self._actor = actor.options(**options).remote(order)
        self._call: Any = self._actor.news.remote()

    def news(self) -> DrafterNews | None:
        """How the drafter was when last asked; None where there is no answer yet. Asks again."""
        if not ray.wait([self._call], timeout=0)[0]:
            return None
        call, self._call = self._call, self._actor.news.remote()
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            sentence = str(error).strip().splitlines()[-1]
            return DrafterNews(last_words=sentence.partition(" Worker exit type")[0])

    def close(self) -> None:
        """Ends the actor for good; its drafter ends too."""
        ray.kill(self._actor)


def start_links(drafter: RemoteDrafterConfig, vllm_cfg: Mapping[str, Any], secret: str) -> list[DrafterLink]:
    """As many drafters as `drafter` has workers, for policies served by `vllm_cfg`. Raises ConfigError.

    On a cluster of one node they listen on the loopback.
    """
    spec = drafter_spec(drafter, engine_facts(vllm_cfg), on_cpu=not drafter.gpus)
    is_one_node = sum(node["Alive"] for node in ray.nodes()) == 1
    order = DrafterOrder(spec, drafter.gpus, LOOPBACK if is_one_node else "", secret)
    return [DrafterLink(order) for _ in range(drafter.workers)]
