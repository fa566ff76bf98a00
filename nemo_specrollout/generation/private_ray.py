# SPDX-License-Identifier: Apache-2.0
"""Ray for this run alone. Ray listens on all of the machine's addresses whatever it is told, but hears only who has the token
that is made here and that its processes inherit. It looks for one when it is loaded, so load it from here."""

import logging
import os
import secrets
import sys

_OBJECT_STORE_BYTES = 512 << 20

if "ray" not in sys.modules:  # who has loaded it has decided already
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402

__all__ = ["ray", "start_ray"]


def start_ray() -> bool:
    """Starts Ray; whether none ran."""
    if ray.is_initialized():
        return False
    ray.init(
        address="local",
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    return True
