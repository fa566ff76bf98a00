# SPDX-License-Identifier: Apache-2.0
"""Ray for one module of tests whose actors are classes of that module."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lab.local.own_ray import OwnRay, ray


@contextmanager
def ray_for_actors_of(module: str) -> Iterator[None]:
    """Runs a Ray cluster. Its processes get the classes of the module by value, because they do not find the tests' folder."""
    cluster = OwnRay()
    ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[module])
        cluster.stop()
