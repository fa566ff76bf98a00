# SPDX-License-Identifier: Apache-2.0
"""Network addresses of drafters, and the secret that verifiers and drafters share."""

import os
import re
import secrets
from collections.abc import Iterable

from nemo_specrollout.config.strict import ConfigError

SECRET_VARIABLE = "NEMO_SPECROLLOUT_SECRET"
"""Environment variable with the shared secret."""
SHORTEST_SECRET = 16
"""Characters that a secret must have."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def check_address(path: str, address: str, *, any_port: bool = True) -> None:
    """Raises ConfigError unless `address` is tcp://HOST:PORT. Port 0, any free port, is valid only with `any_port`."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535 or (int(match[2]) == 0 and not any_port):
        raise ConfigError(f"{path}: {address!r} is not an address; write tcp://HOST:PORT, e.g. tcp://127.0.0.1:5570")


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach `address`."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match[1] in _LOOPBACK


def shared_secret(addresses: Iterable[str]) -> bytes:
    """Returns the key from the environment for drafters at `addresses`; it may be empty if all are on the loopback.

    Raises ConfigError if other machines can reach an address, and the secret is missing or short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SHORTEST_SECRET and not all(map(is_loopback, addresses)):
        raise ConfigError(
            f"{SECRET_VARIABLE}: drafters that other machines can reach need a shared secret of at least {SHORTEST_SECRET} "
            "characters in the environment of both ends"
        )
    return as_key(secret)


def as_key(secret: str) -> bytes:
    """Returns a secret as a key of the transport, at most 64 bytes."""
    return secret.encode()[:64]


def secret_of_run() -> str:
    """Returns the secret of drafters that a run starts itself: from the environment, else a new random one.

    Raises ConfigError if the secret in the environment is too short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"{SECRET_VARIABLE}: too short; give it at least {SHORTEST_SECRET} characters, or remove it: drafters that "
            "the run starts then get a secret of their own"
        )
    return secret or secrets.token_hex(32)


def any_port(host: str) -> str:
    """Returns the address by which a socket takes any free port of `host`, an IP address of this machine."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
