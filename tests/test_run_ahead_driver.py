# SPDX-License-Identifier: Apache-2.0
"""Changes of weights as the driver tells them to engines in Ray actors, also such that fail."""

from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from own_ray import ray_for_actors_of

from lab.local.rollout_pool import ray
from nemo_specrollout.nemo_rl.ray_calls import EngineClient
from nemo_specrollout.run_ahead.one_policy import OnePolicyStream

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_for_actors_of(__name__):
        yield


class Engine:
    """An asynchronous engine's actor. Its texts name the weights that they are from."""

    def __init__(self) -> None:
        self._one_policy = OnePolicyStream(self._decode)
        self._weights = 1
        self._num_begun = 0

    async def _decode(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self._num_begun += 1
        yield SimpleNamespace(weights=self._weights)

    async def generate(self) -> list[int]:
        return [output.weights async for output in self._one_policy.generate(None, None, "r")]

    async def specrollout_weights_change_begins(self) -> None:
        self._one_policy.change_begins()

    async def specrollout_weights_change_ends(self) -> None:
        self._one_policy.change_ends()

    async def load(self, weights: int) -> None:
        self._weights = weights

    async def num_begun(self) -> int:
        return self._num_begun


class Engines:
    """NeMo-RL's group of the engine actors, of one GPU each."""

    def __init__(self, num_engines: int) -> None:
        self.dp_size = num_engines
        self.actors = [ray.remote(Engine).options(num_cpus=0).remote() for _ in range(num_engines)]

    def get_dp_leader_worker_idx(self, engine: int) -> int:
        return engine

    def run_single_worker_single_data(self, method: str, worker: int, **arguments: Any) -> Any:
        return getattr(self.actors[worker], method).remote(**arguments)


@pytest.fixture
def engines(cluster: None) -> Iterator[Engines]:
    engines = Engines(3)
    yield engines
    for actor in engines.actors:
        ray.kill(actor)


def test_requests_of_all_engines_wait_for_the_end_of_a_change(engines: Engines) -> None:
    with EngineClient(engines).weights_change():
        asked = [actor.generate.remote() for actor in engines.actors]
        ray.get([actor.load.remote(2) for actor in engines.actors])
        assert ray.get([actor.num_begun.remote() for actor in engines.actors]) == [0, 0, 0]
    assert ray.get(asked, timeout=60) == [[2]] * 3


def test_a_refit_that_fails_leaves_no_request_waiting(engines: Engines) -> None:
    with pytest.raises(ZeroDivisionError), EngineClient(engines).weights_change():
        raise ZeroDivisionError
    assert ray.get([actor.generate.remote() for actor in engines.actors], timeout=60) == [[1]] * 3


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_an_engine_that_dies_leaves_no_request_of_others_waiting(engines: Engines, dead: int) -> None:
    ray.kill(engines.actors[dead])
    has_refitted = False
    with pytest.raises(ray.exceptions.RayActorError), EngineClient(engines).weights_change():
        has_refitted = True
    assert not has_refitted
    others = [actor for engine, actor in enumerate(engines.actors) if engine != dead]
    assert ray.get([actor.generate.remote() for actor in others], timeout=60) == [[1]] * 2
